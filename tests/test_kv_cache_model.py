"""PagedKVCache against a plain model (dicts and lists) under long random histories."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import pytest
import torch

from deft.kv_cache import PagedKVCache, PoolFull
from deft.tree import DecodeTree
from tests.small_forest import SHAPE, rows


@dataclass
class Node:
    """tokens: their numbers; room: free slots behind the last one; is_whole: shares no page."""

    parent: int
    tokens: list[int] = field(default_factory=list)
    room: int = 0
    is_whole: bool = True


class History:
    """Does every operation to a cache and to the model, and compares the two."""

    def __init__(self, page_size: int, num_pages: int, seed: int) -> None:
        self.cache = PagedKVCache(SHAPE, num_pages, page_size, num_layers=2, poison=True)
        self.nodes: dict[int, Node] = {}
        self.random = np.random.default_rng(seed)
        self.seen: Counter[str] = Counter()
        self.next_token = 1

    # ---- the model -----------------------------------------------------------------------
    def pick(self, count: int = 1, roots: bool = False) -> list[int]:
        """Distinct live handles (and -1 with roots), at most count."""
        pool = [*self.nodes, -1] if roots else [*self.nodes]
        count = min(count, len(pool))
        return [int(h) for h in self.random.choice(pool, count, replace=False)] if pool else []

    def subtree(self, tops: list[int]) -> set[int]:
        found = set(tops)
        for handle, node in self.nodes.items():  # parents were added first
            if node.parent in found:
                found.add(handle)
        return found

    def path(self, handle: int) -> list[int]:
        above = self.nodes[handle].parent
        return [*(self.path(above) if above >= 0 else []), handle]

    def new_tokens(self, handles: list[int], counts: list[int]) -> torch.Tensor:
        """Number new tokens, give them to the nodes and return their K rows."""
        first = self.next_token
        for handle, count in zip(handles, counts, strict=True):
            self.nodes[handle].tokens += range(self.next_token, self.next_token + count)
            self.next_token += count
        return rows(np.arange(first, self.next_token))

    def takes(self, needed: int, name: str) -> bool:
        """Whether the pool has the pages; if not, the cache must have said so."""
        if needed > self.cache.num_free_pages:
            self.seen["PoolFull"] += 1
            return False
        self.seen[name] += 1
        return True

    def grow(self, node: Node, count: int) -> int:
        """Room and pages needed for count more tokens."""
        size = self.cache.page_size
        pages = -(-max(count - node.room, 0) // size)
        node.room += pages * size - count
        return pages

    # ---- operations ----------------------------------------------------------------------
    def insert_tree(self) -> None:
        size, count = self.cache.page_size, int(self.random.integers(1, 7))
        parent = [int(self.random.integers(-1, i)) for i in range(count)]
        lens = self.random.choice([0, 1, 2, size, size + 1, 3 * size - 1], count).tolist()
        under = (self.pick(1, roots=True) * count)[: parent.count(-1)]
        tree = DecodeTree(parent, lens, [])  # type: ignore[arg-type]
        if not self.takes(sum(-(-n // size) for n in lens), "insert_tree"):
            with pytest.raises(PoolFull):
                self.cache.insert_tree(tree, under)
            return
        handles = self.cache.insert_tree(tree, under).tolist()
        above = iter(under)
        for handle, local, length in zip(handles, parent, lens, strict=True):
            top = handles[local] if local >= 0 else next(above)
            self.nodes[handle] = Node(top, room=-length % size)
        self.store(handles, self.new_tokens(handles, lens))

    def insert_tokens(self) -> None:
        size, count = self.cache.page_size, int(self.random.integers(1, 9))
        parent = [int(self.random.integers(-1, i)) for i in range(count)]
        pool = self.pick(2)
        if not pool:
            return
        under = [pool[i % len(pool)] for i in range(parent.count(-1))]
        tops, above = [], iter(under)
        for local in parent:
            tops.append(tops[local] if local >= 0 else next(above))
        if not self.takes(sum(-(-n // size) for n in Counter(tops).values()), "insert_tokens"):
            with pytest.raises(PoolFull):
                self.cache.insert_tokens(under, parent)
            return
        handles = self.cache.insert_tokens(under, parent).tolist()
        for handle, local, top in zip(handles, parent, tops, strict=True):
            self.nodes[handle] = Node(handles[local] if local >= 0 else top, is_whole=False)
        self.store(handles, self.new_tokens(handles, [1] * count))

    def fork(self) -> None:
        for top in self.pick():
            for handle in self.cache.fork(top, 2).tolist():
                self.nodes[handle] = Node(top)
            self.seen["fork"] += 1

    def append(self) -> None:
        handles = self.pick(4)
        counts = self.random.integers(0, 2 * self.cache.page_size + 1, len(handles))
        old = [self.nodes[h].room for h in handles]
        pages = [self.grow(self.nodes[h], n) for h, n in zip(handles, counts.tolist(), strict=True)]
        if not self.takes(sum(pages), "append"):
            for handle, room in zip(handles, old, strict=True):
                self.nodes[handle].room = room
            with pytest.raises(PoolFull):
                self.cache.append(handles, counts)
            return
        slots = self.cache.append(handles, counts)
        k = self.new_tokens(handles, counts.tolist())
        for layer in (0, 1):
            self.cache.write_slots(slots, k + 0.5 * layer, -k, layer)

    def accept(self) -> None:
        """Up to two parents, each with a random way down."""
        tops = self.pick(2)
        if len(tops) == 2 and any(a in self.path(b) for a, b in (tops, tops[::-1])):
            tops = tops[:1]
        paths = []
        for top in tops:
            way = [top]
            while below := [h for h, node in self.nodes.items() if node.parent == way[-1]]:
                if self.random.random() < 0.2:
                    break
                way.append(int(self.random.choice(below)))
            paths.append(way[1:])
        indptr = np.cumsum([0, *(len(way) for way in paths)])
        if self.has_no_room(tops, paths):
            self.seen["PoolFull"] += 1
            with pytest.raises(PoolFull):
                self.cache.accept(tops, [*chain.from_iterable(paths)], indptr)
            return
        copied = self.cache.accept(tops, [*chain.from_iterable(paths)], indptr)
        moved = 0
        for top, way in zip(tops, paths, strict=True):
            tokens = [token for h in way for token in self.nodes[h].tokens]
            if self.cache.page_size > 1:
                moved += len(tokens)
                self.grow(self.nodes[top], len(tokens))
            self.nodes[top].tokens += tokens
            for gone in self.subtree([top]) - {top}:
                del self.nodes[gone]
        assert copied == moved * SHAPE.kv_token_bytes * 2
        self.seen["accept"] += 1

    def has_no_room(self, tops: list[int], paths: list[list[int]]) -> bool:
        """Whether the accepted tokens lack pages even when all below tops has given up its own."""
        cache, size = self.cache, self.cache.page_size
        needed = 0
        for top, way in zip(tops, paths, strict=True):
            count = sum(len(self.nodes[h].tokens) for h in way)
            needed += -(-max(count - self.nodes[top].room, 0) // size)
        below = self.subtree(tops) - set(tops)
        kept = [h for h in self.nodes if h not in below]
        held = len(np.unique(cache.slots(kept)[1] // size))
        return size > 1 and needed > cache.num_pages - held

    def prune(self) -> None:
        tops, before = self.pick(2), self.cache.num_free_pages
        freed = self.cache.prune(tops)
        for gone in self.subtree(tops):
            del self.nodes[gone]
        assert self.cache.num_free_pages == before + freed
        self.seen["prune"] += 1

    def store(self, handles: list[int], k: torch.Tensor) -> None:
        for layer in (0, 1):
            self.cache.write(handles, k + 0.5 * layer, -k, layer)

    # ---- comparison ----------------------------------------------------------------------
    def check(self) -> None:
        cache, handles = self.cache, list(self.nodes)
        tokens = [token for node in self.nodes.values() for token in node.tokens]
        want = rows(tokens)
        for layer in (0, 1):
            k, v = cache.gather(handles, layer)
            assert torch.equal(k, want + 0.5 * layer) and torch.equal(v, -want)
        assert cache.num_nodes == len(handles) and cache.num_tokens == len(tokens)
        snapshot = cache.snapshot()
        names = [-1, *snapshot.handles.tolist()]
        parents = {h: names[p + 1] for h, p in zip(names[1:], snapshot.parent, strict=True)}
        assert parents == {h: node.parent for h, node in self.nodes.items()}
        indptr, slots = cache.slots(handles)
        live = np.zeros(cache.num_pages * cache.page_size, bool)
        live[slots] = True
        assert live.sum() == len(slots) == len(tokens)  # no slot has two tokens
        owner = np.repeat(np.arange(len(handles)), np.diff(indptr))
        held = np.unique(owner * cache.num_pages + slots // cache.page_size) % cache.num_pages
        owners = np.bincount(held, minlength=cache.num_pages)
        assert np.array_equal(owners, cache._pool.owners(np.arange(cache.num_pages)))
        assert cache.num_free_pages == (owners == 0).sum()
        poisoned = torch.isnan(cache.k_cache[1][..., 0, 0]).view(-1).numpy()
        assert np.array_equal(poisoned, ~live)
        self.check_runs()

    def check_runs(self) -> None:
        """Runs are maximal and say what slots says; a page table says what its path's slots say."""
        cache, size = self.cache, self.cache.page_size
        for handle in self.pick(8):
            _, base, length = cache.runs(handle)
            assert (base[1:] != base[:-1] + length[:-1]).all()
            path = self.path(handle)
            assert cache.path(handle).tolist() == path
            filled = [self.nodes[h] for h in path if self.nodes[h].tokens]
            try:
                table = cache.page_table([path])
            except ValueError:
                inner = [node for node in filled[:-1] if node.room]
                assert inner or not all(node.is_whole for node in filled)
                continue
            slots = (table.kv_indices[:, None].astype(np.int64) * size + np.arange(size)).ravel()
            seen = len(slots) - (size - table.kv_last_page_len[0] if len(slots) else 0)
            assert np.array_equal(slots[:seen], cache.slots(path)[1])


OPERATIONS = ("insert_tree", "insert_tokens", "fork", "append", "append", "accept", "prune")


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 128])
def test_a_random_history_agrees_with_the_model(page_size: int) -> None:
    num_pages = 40 if page_size < 16 else 24
    history = History(page_size, num_pages, seed=page_size)
    for step in range(600):
        getattr(history, str(history.random.choice(OPERATIONS)))()
        if step == 300:
            history.cache.shuffle_free_pages(page_size)
        if step % 4 == 0:
            history.check()
    history.check()
    assert min(history.seen[name] for name in (*OPERATIONS, "PoolFull")) >= 10
    history.cache.prune(history.cache.snapshot().handles)
    assert history.cache.num_free_pages == num_pages and history.cache.num_tokens == 0
    assert bool(history.cache.k_cache[0].isnan().all())
