"""DecodeTree: what it refuses, what it derives (against a brute force), and its files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from deft.shape import HeadShape
from deft.topologies import chain, few_shot
from deft.tree import DecodeTree
from tests.trees import CAUSAL, NAMED, ODD, random_forests

SHAPE = HeadShape(num_qo_heads=8, num_kv_heads=2, head_dim=64)

BAD_ARRAYS = {
    "parent after child": (([-1, 2, 0], [1, 1, 1], [2]), "node 1 has parent 2: parents must come"),
    "own parent": (([-1, 1], [1, 1], [1]), "a cycle"),
    "parent missing": (([-1, 5], [1, 1], [1]), "node 1 has parent 5, want -1..1"),
    "parent below -1": (([-2], [1], [0]), "node 0 has parent -2"),
    "negative length": (([-1, 0], [3, -4], [1]), "node_len of node 1 is negative: -4"),
    "lengths missing": (([-1, 0], [3], [1]), "parent has 2 nodes but node_len has 1"),
    "query on a missing node": (([-1], [3], [0, 1]), "query 1 sits on node 1, want 0..0"),
    "query on node -1": (([-1], [3], [-1]), "query 0 sits on node -1"),
    "query without nodes": (([], [], [0]), "a tree without nodes cannot have queries"),
    "query_len too long": (([-1], [3], [0], [4]), "query_len of query 0 is 4, want 0..3"),
    "query_len negative": (([-1], [3], [0], [-1]), "query_len of query 0 is -1"),
    "query_len missing": (([-1], [3], [0, 0], [1]), "query_len has 1 entries for 2 queries"),
    "length beyond int32": (([-1], [2**31], [0]), "node_len holds a value beyond int32"),
    "tokens beyond int32": (([-1, 0], [2**30, 2**30], [1]), "2147483648 tokens, beyond int32"),
    "fractions": (([-1], [1.5], [0]), "node_len must hold integers, got dtype float64"),
    "two dimensions": (([[-1]], [1], [0]), "parent must be one-dimensional, got shape"),
    "ragged": (([-1, [0]], [1, 1], [0]), "parent must be one-dimensional, got lists"),
    "text": ((["root"], [1], [0]), "parent must hold integers"),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_bad_arrays_are_refused(name: str) -> None:
    arrays, message = BAD_ARRAYS[name]
    with pytest.raises(ValueError) as caught:
        DecodeTree(*arrays)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def visible_tokens(tree: DecodeTree) -> list[set[tuple[int, int]]]:
    """(node, position) pairs that each query sees, by walking up from its node."""
    seen = []
    for query in range(tree.num_qo):
        node = own = int(tree.query_node[query])
        tokens: set[tuple[int, int]] = set()
        while node >= 0:
            length = int(tree.node_len[node])
            if node == own and tree.query_len is not None:
                length = int(tree.query_len[query])
            tokens |= {(node, at) for at in range(length)}
            node = int(tree.parent[node])
        seen.append(tokens)
    return seen


def preorder(tree: DecodeTree) -> list[int]:
    order: list[int] = []
    stack = [int(node) for node in reversed(tree.roots)]
    while stack:
        order.append(stack.pop())
        stack += [int(n) for n in np.flatnonzero(tree.parent == order[-1])[::-1]]
    return order


def check_against_brute_force(tree: DecodeTree) -> None:
    seen = visible_tokens(tree)
    everything = set().union(*seen) if seen else set()
    assert tree.query_kv_len.tolist() == [len(tokens) for tokens in seen]
    assert tree.attended_tokens == len(everything)
    assert tree.num_tokens == sum(tree.node_len.tolist())
    path_tokens = sum(len(tokens) for tokens in seen)
    assert tree.sharing_factor == (path_tokens / len(everything) if everything else 1.0)
    assert tree.flops(SHAPE) == path_tokens * 8 * 64 * 4
    # A segment's queries are exactly those that see each of its tokens; segments are disjoint.
    covered: set[tuple[int, int]] = set()
    for node, start, end, begin, stop, _ in zip(*tree.segments, strict=True):
        viewers = set(tree.query_order[begin:stop].tolist())
        for at in range(start, end):
            assert viewers == {q for q, tokens in enumerate(seen) if (int(node), at) in tokens}
            assert (int(node), at) not in covered
            covered.add((int(node), at))
    assert covered == everything
    assert np.argsort(tree.dfs_rank).tolist() == preorder(tree)
    check_topology(tree)


def check_topology(tree: DecodeTree) -> None:
    indptr, nodes = tree.path
    child_indptr, children = tree.children
    for query, node in enumerate(tree.query_node.tolist()):
        path = [node]
        while tree.parent[path[0]] >= 0:
            path.insert(0, int(tree.parent[path[0]]))
        assert nodes[indptr[query] : indptr[query + 1]].tolist() == path
        assert tree.depth[node] == len(path) - 1
        assert tree.root[node] == path[0]
    for node in range(tree.num_nodes):
        below = children[child_indptr[node] : child_indptr[node + 1]].tolist()
        assert below == np.flatnonzero(tree.parent == node).tolist()
        assert (node in tree.leaves) == (not below)
        assert tree.subtree_size[node] == 1 + sum(tree.subtree_size[below])


@pytest.mark.parametrize("name", NAMED)
def test_named_trees_against_brute_force(name: str) -> None:
    check_against_brute_force(NAMED[name])


@settings(max_examples=60, deadline=None)
@given(random_forests(max_nodes=16, max_len=12))
def test_random_forests_against_brute_force(tree: DecodeTree) -> None:
    check_against_brute_force(tree)


@settings(max_examples=30, deadline=None)
@given(random_forests(max_nodes=16, max_len=12))
def test_text_and_file_form_survive_any_forest(tree: DecodeTree) -> None:
    assert DecodeTree(**tree.to_dict()) == tree
    assert len(tree.to_text(max_lines=1000).splitlines()) == tree.num_nodes


def test_an_open_segment_ends_at_its_nodes_end() -> None:
    runs = ODD.segments
    assert runs.is_open.all()
    assert (runs.end == ODD.node_len[runs.node]).all()
    causal = CAUSAL.segments
    assert not causal.is_open[np.isin(causal.node, CAUSAL.query_node)].any()


def test_a_long_chain_is_no_recursion() -> None:
    tree = chain([1] * 5000)
    assert tree.depth.tolist() == list(range(5000))
    assert tree.query_kv_len.tolist() == [5000]


def test_the_arrays_are_copied_and_frozen() -> None:
    lengths = np.array([4, 2], np.int32)
    tree = DecodeTree(np.array([-1, 0]), lengths, np.array([1]))
    lengths[0] = 99
    assert tree.node_len.tolist() == [4, 2]
    with pytest.raises(ValueError, match="read-only"):
        tree.node_len[0] = 5
    assert lengths.flags.writeable


def test_a_tree_without_anything() -> None:
    tree = DecodeTree([], [], [])
    assert (tree.num_nodes, tree.num_tokens, tree.num_qo, tree.attended_tokens) == (0, 0, 0, 0)
    assert tree.sharing_factor == 1.0
    assert "num_nodes=0" in repr(tree)


def test_with_lengths_keeps_the_topology_and_recounts_the_tokens() -> None:
    tree = few_shot(100, 4, 10)
    before = (tree.sharing_factor, tree.path, tree.dfs_rank)
    longer = tree.with_lengths([100, 11, 11, 11, 11])
    assert longer.num_tokens == 144
    assert longer.sharing_factor == 444 / 144
    assert longer.dfs_rank is before[2]
    assert tree.sharing_factor == before[0]
    with pytest.raises(ValueError, match="query_len of query"):
        CAUSAL.with_lengths([0] * CAUSAL.num_nodes)


def test_equality_looks_at_all_four_arrays() -> None:
    assert DecodeTree(**CAUSAL.to_dict()) == CAUSAL
    assert hash(CAUSAL) == hash(DecodeTree(**CAUSAL.to_dict()))
    without = DecodeTree(CAUSAL.parent, CAUSAL.node_len, CAUSAL.query_node)
    assert without != CAUSAL
    assert without != "a tree"


@pytest.mark.parametrize("suffix", [".json", ".npz"])
@pytest.mark.parametrize("tree", [ODD, CAUSAL, DecodeTree([], [], [])], ids=["odd", "causal", "no"])
def test_save_and_load(tree: DecodeTree, suffix: str, tmp_path: Path) -> None:
    path = tree.save(tmp_path / f"tree{suffix}")
    assert DecodeTree.load(path) == tree


def test_an_unknown_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.json or \.npz, got 'tree\.csv'"):
        ODD.save(tmp_path / "tree.csv")
    (tmp_path / "tree.csv").write_text("1,2")
    with pytest.raises(ValueError, match=r"\.json or \.npz"):
        DecodeTree.load(tmp_path / "tree.csv")


BAD_FILES = {
    "not JSON": ("{", "not a readable tree file"),
    "a list": ("[1, 2]", "want an object with parent, node_len, query_node, got list"),
    "a key too few": ('{"parent": [-1], "node_len": [1]}', "missing keys ['query_node']"),
    "a key too many": (
        '{"parent": [-1], "node_len": [1], "query_node": [0], "color": 1}',
        "unknown keys ['color']",
    ),
    "a bad tree": ('{"parent": [0], "node_len": [1], "query_node": [0]}', "a cycle"),
    "null": ('{"parent": null, "node_len": [1], "query_node": [0]}', "parent must be"),
    "objects": ('{"parent": [{}], "node_len": [1], "query_node": [0]}', "must hold integers"),
    "bytes": ("\x00\x01\x02", "not a readable tree file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_json_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    content, message = BAD_FILES[name]
    path = tmp_path / "tree.json"
    path.write_text(content)
    with pytest.raises(ValueError) as caught:
        DecodeTree.load(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_corrupt_or_foreign_npz_file_is_refused(tmp_path: Path) -> None:
    path = ODD.save(tmp_path / "tree.npz")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="not a readable tree file"):
        DecodeTree.load(path)
    np.savez(path, weights=np.ones(3))
    with pytest.raises(ValueError, match=r"unknown keys \['weights'\]"):
        DecodeTree.load(path)
    np.savez(path, parent=np.array([{}], object), node_len=[1], query_node=[0])
    with pytest.raises(ValueError, match="not a readable tree file"):
        DecodeTree.load(path)  # pickles are not opened


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tree file at"):
        DecodeTree.load(tmp_path / "none.json")


def test_a_file_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"parent": [-1, 0], "node_len": [9, 2], "query_node": [1, 1]}))
    assert DecodeTree.load(path) == DecodeTree([-1, 0], [9, 2], [1, 1])


def test_the_text_says_tokens_and_queries_and_stops_at_max_lines() -> None:
    text = DecodeTree([-1, 0, 1], [7, 3, 2], [1, 2, 2]).to_text()
    assert text.splitlines() == [
        "node 0: 7 tokens",
        "  node 1: 3 tokens, 1 query",
        "    node 2: 2 tokens, 2 queries",
    ]
    assert few_shot(1, 100, 1).to_text(max_lines=3).endswith("... 98 more nodes")
