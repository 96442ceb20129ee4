"""PagedKVCache, case by case: where tokens lie, who owns pages, and at what cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from deft.kv_cache import PagedKVCache
from deft.testing import make_cache, make_inputs
from deft.tree import DecodeTree
from tests.small_forest import SHAPE, forest, rows, tokens_of

PAGE_SIZES = (1, 3, 16, 64, 128)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("scatter_seed", [None, 5])
def test_a_tree_is_stored_and_read_back(page_size: int, scatter_seed: int | None) -> None:
    tree = forest()
    inputs = make_inputs(tree, SHAPE)
    cache = make_cache(
        tree, SHAPE, inputs, page_size, 2, poison=True, spare_pages=90, scatter_seed=scatter_seed
    )
    for layer in (0, 1):
        k, v = cache.gather(np.arange(tree.num_nodes), layer)
        assert torch.equal(k, inputs.k) and torch.equal(v, inputs.v)
    assert cache.k_cache[1].shape == (cache.num_pages, page_size, 2, 4)
    assert int(torch.isfinite(cache.k_cache[0][..., 0, 0]).sum()) == tree.num_tokens
    # Slots by node are the runs by node, and index the flattened pages.
    indptr, slots = cache.slots([3, 0])
    run_indptr, base, length = cache.runs([3, 0])
    assert indptr.tolist() == [0, 130, 178] and slots.dtype == np.int64
    assert np.array_equal(
        np.concatenate([np.arange(b, b + n) for b, n in zip(base, length, strict=True)]), slots
    )
    assert (base[1:] != base[:-1] + length[:-1])[np.arange(1, len(base)) != run_indptr[1]].all()
    flat = cache.v_cache[0].view(-1, 2, 4)[torch.from_numpy(slots)]
    assert torch.equal(flat, cache.gather([3, 0])[1])


def test_fresh_pool_gives_ascending_handles_and_one_run_a_node() -> None:
    cache = PagedKVCache(SHAPE, 100, 4)
    assert cache.insert_tree(forest()).tolist() == [0, 1, 2, 3, 4, 5]
    assert np.diff(cache.runs(np.arange(6))[0]).tolist() == [1, 0, 1, 1, 1, 1]
    assert cache.node_len(3) == 130 and cache.node_lens([5, 0]).tolist() == [1, 48]
    assert cache.num_free_pages == 100 - (12 + 2 + 33 + 4 + 1)
    assert cache.fragmentation == pytest.approx(1 - 202 / 208)
    assert cache.path(3).tolist() == [0, 1, 3]


def test_shuffled_pool_scatters_nodes_the_same_way_for_the_same_seed() -> None:
    def pages(seed: int) -> list[int]:
        cache = PagedKVCache(SHAPE, 64, 2)
        cache.shuffle_free_pages(seed)
        return (cache.slots([cache.insert(-1, 128)])[1][::2] // 2).tolist()

    assert pages(1) == pages(1) != pages(2)
    assert sorted(pages(1)) == list(range(64)) != pages(1)


def test_append_fills_the_last_page_before_it_takes_another() -> None:
    cache = PagedKVCache(SHAPE, 10, 4, poison=True)
    a, b = cache.insert(-1, 3), cache.insert(-1, 4)
    slots = cache.append([b, a], [2, 2])
    assert slots.tolist() == [8, 9, 3, 12] and cache.num_free_pages == 6
    assert cache.node_lens([a, b]).tolist() == [5, 6]
    cache.write_slots(slots, rows([1, 2, 3, 4]), rows([1, 2, 3, 4]))
    assert tokens_of(cache, [a])[3:] == [3, 4] and tokens_of(cache, [b])[4:] == [1, 2]


def test_forked_children_grow_on_pages_of_their_own() -> None:
    cache = PagedKVCache(SHAPE, 10, 4)
    root = cache.insert(-1, 3)
    children = cache.fork(root, 3)
    assert cache.num_free_pages == 9 and cache.node_lens(children).tolist() == [0, 0, 0]
    assert (cache.append(children) // 4).tolist() == [1, 2, 3]
    assert cache.path(int(children[1])).tolist() == [root, children[1]]


def test_speculative_tokens_of_one_request_share_pages() -> None:
    cache = PagedKVCache(SHAPE, 10, 4)
    a, b = cache.insert(-1, 4), cache.insert(-1, 4)
    nodes = cache.insert_tokens([a, b, a], [-1, 0, -1, -1, 1, 0])
    assert cache.num_free_pages == 10 - 2 - 3
    pages = cache.slots(nodes)[1] // 4
    assert cache._pool.owners(pages).tolist() == [4, 4, 1, 4, 4, 1]
    assert cache.prune(nodes[4]) == 0 and cache.prune(nodes[2]) == 1
    assert cache.prune(nodes[[1, 0]]) == 1 and cache.prune(nodes[3]) == 1
    assert cache.num_nodes == 2 and cache.num_free_pages == 8


def test_new_roots_share_no_page_with_each_other() -> None:
    cache = PagedKVCache(SHAPE, 10, 4)
    tree = DecodeTree([-1, -1, 0, 1], [1, 1, 1, 4], [])  # type: ignore[arg-type]
    nodes = cache.insert_tree(tree, share_pages=True)
    assert (cache.slots(nodes)[1] // 4).tolist() == [0, 1, 0, 1, 1, 1, 2]
    assert cache.num_free_pages == 7


def test_an_accepted_chain_of_consecutive_slots_becomes_one_run() -> None:
    cache = PagedKVCache(SHAPE, 10, 1)
    a = cache.insert(-1, 3)
    b = cache.insert(-1, 1)
    cache.accept(a, cache.insert_tokens(a, [-1, 0, 1]))
    assert [table.tolist() for table in cache.runs([a, b])] == [[0, 2, 3], [0, 4, 3], [3, 3, 1]]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_accept_moves_tokens_to_the_parent_and_prunes_the_rest(page_size: int) -> None:
    cache = PagedKVCache(SHAPE, 40, page_size, num_layers=2, poison=True)
    a, b = cache.insert(-1, 5), cache.insert(-1, 3)
    spec = cache.insert_tokens([a, a, b], [-1, 0, -1, 1, -1])
    for layer in (0, 1):
        cache.write([a, b], rows(range(8)), rows(range(8)), layer)
        cache.write(spec, rows(range(10, 15)), rows(range(10, 15)), layer)
    before = set(cache.slots(spec[[0, 1]])[1].tolist())
    copied = cache.accept([a, b], spec[[0, 1]], np.array([0, 2, 2]))
    assert copied == (0 if page_size == 1 else 2 * SHAPE.kv_token_bytes * 2)
    if page_size == 1:
        assert before < set(cache.slots(a)[1].tolist())
    for layer in (0, 1):
        assert tokens_of(cache, [a], layer) == [0, 1, 2, 3, 4, 10, 11]
        assert tokens_of(cache, [b], layer) == [5, 6, 7]
    assert cache.num_nodes == 2 and cache.num_tokens == 10
    assert cache.num_free_pages == 40 - -(-7 // page_size) - -(-3 // page_size)
    with pytest.raises(ValueError, match="does not live"):
        cache.node_len(int(spec[0]))


def test_accept_works_in_a_pool_without_a_free_page() -> None:
    cache = PagedKVCache(SHAPE, 3, 4)
    a = cache.insert(-1, 4)
    spec = cache.insert_tokens(a, [-1, 0, 1, 2, 3])
    assert cache.num_free_pages == 0
    cache.write(spec, rows(range(5)), rows(range(5)))
    assert cache.accept(a, spec) == 5 * SHAPE.kv_token_bytes
    assert tokens_of(cache, a)[4:] == [0, 1, 2, 3, 4] and cache.num_free_pages == 0


def test_handles_of_the_dead_never_name_their_rows_next_tenant() -> None:
    cache = PagedKVCache(SHAPE, 10, 1)
    old = cache.insert(-1, 2)
    cache.prune(old)
    new = cache.insert(-1, 3)
    assert new != old and cache.node_len(new) == 3
    with pytest.raises(ValueError, match=f"node {old} does not live"):
        cache.gather(old)


def test_prune_takes_nested_handles_and_leaves_the_others_in_place() -> None:
    cache = PagedKVCache(SHAPE, 60, 4)
    cache.insert_tree(forest())
    kept = cache.slots([0, 2, 4])[1]
    assert cache.prune([3, 1, 5]) == 33 + 0 + 1
    assert np.array_equal(cache.slots([0, 2, 4])[1], kept)
    assert cache.snapshot().parent.tolist() == [-1, 0, -1]


def test_prune_finds_exactly_the_subtrees_in_wide_and_deep_forests() -> None:
    random = np.random.default_rng(0)
    wide = [(i - 1) // 12 for i in range(1500)]
    deep = [-1, *(int(random.integers(max(0, i - 3), i)) for i in range(1, 1500))]
    for parent, tops in ((wide, range(2, 13)), (deep, [9, 12, 700])):
        tree = DecodeTree(parent, [1] * len(parent), [])  # type: ignore[arg-type]
        cache = PagedKVCache(SHAPE, len(parent), 1)
        cache.insert_tree(tree)
        place = tree.dfs_rank - tree.dfs_rank[tops, None]
        is_below = ((place >= 0) & (place < tree.subtree_size[tops, None])).any(0)
        assert cache.prune(tops) == is_below.sum() > 100
        assert np.array_equal(cache.snapshot().handles, np.flatnonzero(~is_below))


def test_tables_stay_as_large_as_the_forest_that_lives() -> None:
    cache = PagedKVCache(SHAPE, 64, 2)
    cache.shuffle_free_pages(0)
    cache.insert(-1, 20)
    sizes = []
    for _ in range(400):
        node = cache.insert(0, 30)
        cache.append(node, 10)
        cache.prune(node)
        sizes.append((len(cache._extents._base), cache._nodes.capacity))
    assert max(sizes[200:]) <= max(sizes[:20]) <= (256, 64)


class CountingArray(np.ndarray):
    """Adds up how many elements are read or written through it."""

    touched = 0

    def __getitem__(self, key: Any) -> Any:
        out = np.asarray(super().__getitem__(key))
        CountingArray.touched += out.size
        return out

    def __setitem__(self, key: Any, value: Any) -> None:
        CountingArray.touched += np.size(np.empty(self.shape, bool)[key])
        super().__setitem__(key, value)


@pytest.mark.parametrize("num_pages", [200, 50_000])
def test_prune_touches_only_what_it_frees(num_pages: int) -> None:
    cache = PagedKVCache(SHAPE, num_pages, 1)
    root = cache.insert(-1, num_pages - 40)
    child = cache.insert(root, 10)
    cache.insert_tree(DecodeTree([-1, 0], [15, 15], []), child)
    tables = {cache._pool: ("_owners", "_returned"), cache._extents: ("_base", "_length")}
    for owner, names in tables.items():
        for name in names:
            setattr(owner, name, getattr(owner, name).view(CountingArray))
    CountingArray.touched = 0
    assert cache.prune(child) == 40
    assert 40 <= CountingArray.touched <= 5 * 40


@pytest.mark.parametrize("query_len", [None, [7, 100, 16, 0, 130]])
@pytest.mark.parametrize("page_size", [1, 16])
def test_page_table_lists_the_pages_of_each_path(page_size: int, query_len: Any) -> None:
    tree = forest(query_len)
    cache = PagedKVCache(SHAPE, 300, page_size)
    cache.insert(-1, 5)
    cache.shuffle_free_pages(0)
    nodes = cache.insert_tree(tree)
    table = cache.page_table(tree, nodes)
    assert all(array.dtype == np.int32 for array in table)
    indptr, path = tree.path
    for query in range(tree.num_qo):
        pages = table.kv_indices[table.kv_indptr[query] : table.kv_indptr[query + 1]]
        slots = (pages[:, None] * page_size + np.arange(page_size)).ravel()
        seen = (len(pages) - 1) * page_size + table.kv_last_page_len[query]
        assert seen == tree.query_kv_len[query]
        want = cache.slots(nodes[path[indptr[query] : indptr[query + 1]]])[1]
        assert np.array_equal(slots[:seen], want[:seen])
    if query_len is None:
        by_handle = cache.page_table([cache.path(h) for h in nodes[tree.query_node].tolist()])
        assert all(np.array_equal(a, b) for a, b in zip(table, by_handle, strict=True))


def test_page_table_refuses_paths_that_are_not_whole_pages() -> None:
    cache = PagedKVCache(SHAPE, 40, 4)
    cache.insert_tree(DecodeTree([-1, 0, 0], [6, 3, 0], []))
    with pytest.raises(ValueError, match=r"path 1 is not made of whole pages of 4 .* ends inside"):
        cache.page_table([[0], [0, 1]])
    assert cache.page_table([[0, 2], [2]]).kv_last_page_len.tolist() == [2, 0]
    spec = cache.insert_tokens(2, [-1, 0])
    with pytest.raises(ValueError, match="starts inside a page; use page_size 1"):
        cache.page_table([[spec[1]]])


def test_snapshot_makes_a_tree_of_the_live_forest() -> None:
    cache = PagedKVCache(SHAPE, 300, 4)
    cache.insert_tree(forest())
    cache.prune([2])
    young = cache.insert(3, 9)
    snapshot = cache.snapshot()
    tree = snapshot.tree([young, 5, young])
    assert snapshot.handles.tolist() == [0, 1, 3, 4, 5, young]
    assert tree.parent.tolist() == [-1, 0, 1, -1, 3, 2]
    assert tree.node_len.tolist() == cache.node_lens(snapshot.handles).tolist()
    assert tree.query_node.tolist() == [5, 4, 5]
    with pytest.raises(ValueError, match="node 2 is not in this snapshot"):
        snapshot.tree(2)


def test_slots_beyond_int32() -> None:
    cache = PagedKVCache(SHAPE, 2**24 + 8, 128, device="meta")
    cache._pool.take(2**24)
    root = cache.insert(-1, 130)
    assert cache.slots(root)[1][[0, -1]].tolist() == [2**31, 2**31 + 129]
    assert cache.append(root)[0] == 2**31 + 130
    spec = cache.insert_tokens(root, [-1, 0])
    assert cache.accept(root, spec[:1]) == SHAPE.kv_token_bytes
    assert cache.slots(root)[1][-1] == 2**31 + 131
