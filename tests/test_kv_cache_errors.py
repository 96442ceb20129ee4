"""PagedKVCache: a full pool and bad input are refused in one line, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from deft.kv_cache import PagedKVCache, PoolFull
from deft.shape import HeadShape
from deft.tree import DecodeTree
from tests.small_forest import SHAPE, forest, rows, state_of


def test_an_accept_that_lacks_pages_changes_nothing() -> None:
    cache = PagedKVCache(SHAPE, 2, 4)
    root = cache.insert(-1, 4)
    spec = cache.insert_tokens(root, [-1, 0, 1])
    before = state_of(cache)
    with pytest.raises(PoolFull, match="needed 1 pages, 0 of 2 are free"):
        cache.accept(spec[0], spec[1:])  # spec[0] has no room: its page holds the others too
    assert state_of(cache) == before
    assert cache.accept(root, spec) == 3 * SHAPE.kv_token_bytes


FULL: dict[str, Callable[[PagedKVCache], object]] = {
    "insert_tree": lambda cache: cache.insert_tree(forest()),
    "insert": lambda cache: cache.insert(0, 200),
    "insert_tokens": lambda cache: cache.insert_tokens([0] * 50, [-1] * 50),
    "append": lambda cache: cache.append([0, 1], [2, 60]),
}


@pytest.mark.parametrize("name", FULL)
def test_a_full_pool_says_so_and_changes_nothing(name: str) -> None:
    cache = PagedKVCache(SHAPE, 12, 4)
    cache.insert_tree(DecodeTree([-1, 0], [9, 17], []))
    before = state_of(cache)
    with pytest.raises(PoolFull, match=r"needed \d+ pages, 4 of 12 are free; prune") as caught:
        FULL[name](cache)
    assert caught.value.num_needed > caught.value.num_free == 4
    assert state_of(cache) == before
    assert cache.insert(-1, 16) == 2


K = rows(range(202))
REFUSED: dict[str, tuple[str, Callable[[PagedKVCache], object]]] = {
    "page_size 0": ("1..128, got 0", lambda c: PagedKVCache(SHAPE, 4, 0)),
    "page_size 129": ("1..128, got 129", lambda c: PagedKVCache(SHAPE, 4, 129)),
    "no pages": ("num_pages must be", lambda c: PagedKVCache(SHAPE, 0, 1)),
    "half a page": ("num_pages must be", lambda c: PagedKVCache(SHAPE, 1.5, 1)),  # type: ignore[arg-type]
    "no layers": ("num_layers must be", lambda c: PagedKVCache(SHAPE, 4, 1, num_layers=0)),
    "fp8": ("no fp8 cache", lambda c: PagedKVCache(HeadShape(1, 1, 8, "float8_e4m3fn"), 4, 1)),
    "unknown node": ("node 6 does not live", lambda c: c.gather([0, 6])),
    "no node": ("node -1 does not live", lambda c: c.append(-1)),
    "float handles": ("must be integers", lambda c: c.slots(np.array([0.0]))),
    "under a dead node": ("node 9 does not live", lambda c: c.insert(9, 1)),
    "negative length": ("is negative: -1", lambda c: c.insert(0, -1)),
    "negative append": (r"0\.\.2\*\*31 - 1, got -2", lambda c: c.append(0, -2)),
    "endless append": ("num_tokens must be in", lambda c: c.append([0, 1], 2**62)),
    "unsigned append": ("num_tokens must be in", lambda c: c.append(0, np.uint64(2**63))),  # type: ignore[arg-type]
    "append twice": ("listed twice", lambda c: c.append([1, 1])),
    "negative fork": ("num_children must be an integer >= 0, got -1", lambda c: c.fork(0, -1)),
    "fork of no node": ("node -1 does not live", lambda c: c.fork(-1, 2)),
    "tokens under no node": ("node -1 does not live", lambda c: c.insert_tokens(-1, [-1])),
    "too few parents": ("one for each of 3 roots", lambda c: c.insert_tokens([0, 1], [-1] * 3)),
    "prune twice": ("listed twice", lambda c: c.prune([1, 1])),
    "k too short": (r"k must have shape \[202, 2, 4\]", lambda c: c.write(range(6), K[1:], K)),
    "v in half": ("v must be torch.float32 on cpu", lambda c: c.write(range(6), K, K.half())),
    "v elsewhere": ("got torch.float32 on meta", lambda c: c.write(range(6), K, K.to("meta"))),
    "float queries": ("must be integers", lambda c: c.snapshot().tree(np.array([0.5]))),
    "layer 1 of 1": ("layer must be in 0..0, got 1", lambda c: c.write(range(6), K, K, 1)),
    "layer half": ("layer must be in 0..0, got 0.5", lambda c: c.gather(0, 0.5)),  # type: ignore[arg-type]
    "k as a list": ("k must be a tensor, got list", lambda c: c.write(0, [1], K)),  # type: ignore[arg-type]
    "half an offset": ("must be integers", lambda c: c.accept([0, 4], [], [0.5, 0, 0])),  # type: ignore[arg-type]
    "slot outside": (r"0..1199, got 1200..1200", lambda c: c.write_slots([1200], K[:1], K[:1])),  # type: ignore[arg-type]
    "accept a grandchild": ("node 3 is not a child of 0", lambda c: c.accept(0, [3])),
    "accept without indptr": ("needs path_indptr", lambda c: c.accept([0, 4], [1, 5])),
    "bad path_indptr": ("ascending offsets", lambda c: c.accept([0, 4], [1, 5], [0, 1])),  # type: ignore[arg-type]
    "nested accept": ("below another parent", lambda c: c.accept([0, 1], [], [0, 0, 0])),  # type: ignore[arg-type]
    "table of another tree": (
        "node 0 holds 48 tokens in the cache and 1 in the tree",
        lambda c: c.page_table(DecodeTree([-1], [1], [0])),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_one_line_and_changes_nothing(name: str) -> None:
    wanted, call = REFUSED[name]
    cache = PagedKVCache(SHAPE, 300, 4, poison=True)
    cache.insert_tree(forest())
    before = state_of(cache)
    with pytest.raises(ValueError, match=wanted) as caught:
        call(cache)
    assert "\n" not in str(caught.value)
    assert state_of(cache) == before and bool(cache.k_cache[0].isnan().all())


def test_rows_that_require_grad_are_stored_as_values() -> None:
    cache = PagedKVCache(SHAPE, 300, 4)
    cache.insert_tree(forest())
    cache.write(range(6), K.clone().requires_grad_(), K)
    assert not cache.k_cache[0].requires_grad
    assert bool((cache.gather(range(6))[0] == K).all())
