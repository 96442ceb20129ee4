"""Generators: the shapes they promise, seeds, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deft.topologies import (
    beam,
    chain,
    few_shot,
    forest,
    from_choices,
    kary,
    layered,
    random_tree,
    replicate,
    skewed,
    thought,
)
from deft.tree import DecodeTree
from tests.trees import CAUSAL, ODD


def has_one_query_per_leaf(tree: DecodeTree) -> bool:
    return tree.query_node.tolist() == tree.leaves.tolist()


def test_few_shot() -> None:
    tree = few_shot(100, 3, 7)
    assert tree == DecodeTree([-1, 0, 0, 0], [100, 7, 7, 7], [1, 2, 3])
    assert tree.sharing_factor == 321 / 121


def test_layered_hangs_child_j_under_floor_j_m_over_n() -> None:
    tree = layered([2, 3, 5], [10, 4, 1])
    assert tree.parent.tolist() == [-1, -1, 0, 0, 1, 2, 2, 3, 3, 4]
    assert tree.node_len.tolist() == [10, 10, 4, 4, 4, 1, 1, 1, 1, 1]
    assert has_one_query_per_leaf(tree)


def test_a_level_that_narrows_leaves_leaves_above() -> None:
    tree = layered([1, 4, 2], [10, 4, 1])
    assert tree.parent.tolist() == [-1, 0, 0, 0, 0, 1, 3]
    assert tree.query_node.tolist() == [2, 4, 5, 6]


def test_kary_is_the_complete_tree() -> None:
    tree = kary(3, 2, 5, root_len=20)
    assert tree == layered([1, 3, 9], [20, 5, 5])
    assert kary(2, 0, 8) == DecodeTree([-1], [8], [0])
    assert kary(2, 1, 8).node_len.tolist() == [8, 8, 8]


def test_chain_is_one_path() -> None:
    tree = chain([5, 0, 2])
    assert tree == DecodeTree([-1, 0, 1], [5, 0, 2], [2])
    assert tree.sharing_factor == 1.0


def test_from_choices_orders_paths_by_length_and_makes_each_token_a_query() -> None:
    tree = from_choices([[0], [1, 0], [1], [0, 0], [1, 0, 2]], 50)
    assert tree.parent.tolist() == [-1, 0, 1, 1, 3, 2, 4]
    assert tree.node_len.tolist() == [50, 1, 1, 1, 1, 1, 1]
    assert tree.query_kv_len.tolist() == [51, 52, 52, 53, 53, 54]


def test_from_choices_without_the_root_token() -> None:
    tree = from_choices([[0], [1], [1, 0]], 50, root_token=False)
    assert tree.parent.tolist() == [-1, 0, 0, 2]
    assert tree.query_node.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([[0], []], "empty"),
        ([[0], [0]], r"path \[0\] is repeated"),
        ([[0], [1, 0]], r"path \[1, 0\] has no parent path \[1\]"),
    ],
)
def test_bad_choices_are_refused(choices: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_choices(choices, 1)


def test_thought_has_random_lengths_around_the_mean() -> None:
    tree = thought(1000, [10, 5], 2, thought_len=40, seed=1)
    assert np.bincount(tree.depth).tolist() == [1, 10, 50]
    assert tree.node_len[0] == 1000
    thoughts = tree.node_len[1:]
    assert thoughts.min() >= 1
    assert thoughts.max() <= 79
    assert abs(thoughts.mean() - 40) < 10
    assert has_one_query_per_leaf(tree)


@given(st.integers(1, 40), st.integers(0, 500))
@settings(max_examples=40, deadline=None)
def test_skewed_is_a_binary_tree_below_the_root(num_leaves: int, seed: int) -> None:
    tree = skewed(num_leaves, 64, 10, seed)
    children = np.diff(tree.children[0])
    assert set(children.tolist()) <= {0, 2}
    assert tree.num_qo == len(tree.leaves) == num_leaves
    assert tree.num_nodes == 2 * num_leaves - 1
    assert tree.node_len[0] == 64


@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 500))
@settings(max_examples=40, deadline=None)
def test_beam_paths_have_one_token_a_step(width: int, steps: int, seed: int) -> None:
    tree = beam(100, width, steps, seed)
    assert tree.num_qo == width
    assert tree.query_kv_len.tolist() == [100 + steps] * width
    assert has_one_query_per_leaf(tree)
    inner = np.diff(tree.children[0])[1:]
    assert (inner != 1).all()  # unbranched runs are one node
    assert (tree.node_len[1:] >= 1).all()


def test_beam_before_the_first_step_is_the_prompt_alone() -> None:
    assert beam(10, 3, 0).query_kv_len.tolist() == [10, 10, 10]


def test_random_tree_holds_the_odd_cases() -> None:
    trees = [random_tree(20, seed, num_roots=2, with_query_len=True) for seed in range(20)]
    assert all(tree.roots.tolist()[:2] == [0, 1] for tree in trees)
    assert any((tree.node_len == 0).any() for tree in trees)
    assert any(tree.attended_tokens < tree.num_tokens for tree in trees)
    assert any(len(set(tree.query_node.tolist())) < tree.num_qo for tree in trees)
    assert any(np.diff(tree.query_node).min() < 0 for tree in trees)
    assert any(set(tree.query_node.tolist()) - set(tree.leaves.tolist()) for tree in trees)


SEEDED: dict[str, Callable[[int], DecodeTree]] = {
    "skewed": lambda seed: skewed(20, 50, 10, seed),
    "random_tree": lambda seed: random_tree(20, seed),
    "thought": lambda seed: thought(50, 3, 2, 10, seed),
    "beam": lambda seed: beam(50, 8, 12, seed),
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_seed_names_one_tree(name: str) -> None:
    make = SEEDED[name]
    assert make(7) == make(7)
    assert make(7) != make(8)


def test_forest_puts_trees_side_by_side() -> None:
    both = forest([ODD, CAUSAL, few_shot(5, 2, 1)])
    assert both.num_nodes == ODD.num_nodes + CAUSAL.num_nodes + 3
    parts = [ODD.query_kv_len, CAUSAL.query_kv_len, [6, 6]]
    assert both.query_kv_len.tolist() == np.concatenate(parts).tolist()
    assert len(both.roots) == len(ODD.roots) + len(CAUSAL.roots) + 1
    assert forest([ODD]) == ODD


def test_replicate_shares_nothing_between_requests() -> None:
    tree = few_shot(100, 4, 3)
    batch = replicate(tree, 3)
    assert batch.num_tokens == 3 * tree.num_tokens
    assert batch.sharing_factor == tree.sharing_factor
    assert np.bincount(batch.root[batch.query_node])[batch.roots].tolist() == [4, 4, 4]


BAD_CALLS: dict[str, tuple[Callable[[], DecodeTree], str]] = {
    "few_shot width": (lambda: few_shot(5, 0, 1), "width must be >= 1 and an integer, got 0"),
    "few_shot suffix": (lambda: few_shot(5, 1, -1), "suffix_len must be >= 0 and an integer"),
    "few_shot half a token": (lambda: few_shot(10.5, 2, 3), "prompt_len must be .* got 10.5"),  # type: ignore[arg-type]
    "layered half a token": (lambda: layered([1], [2.5]), "integers, at each level"),  # type: ignore[list-item]
    "kary half a branch": (lambda: kary(2.5, 3, 1), "branching must be .* got 2.5"),  # type: ignore[arg-type]
    "kary half a root": (lambda: kary(2, 3, 1, 0.5), "root_len must be .* got 0.5"),  # type: ignore[arg-type]
    "from_choices half a token": (lambda: from_choices([[0]], 5.5), "prompt_len must be"),  # type: ignore[arg-type]
    "thought half a branch": (lambda: thought(9, 2.5, 3, 5), "integers, at each level"),  # type: ignore[arg-type]
    "beam half a token": (lambda: beam(1.5, 2, 3), "prompt_len must be"),  # type: ignore[arg-type]
    "replicate half": (lambda: replicate(ODD, 1.5), "batch must be"),  # type: ignore[arg-type]
    "kary without end": (lambda: kary(10, 10**7, 1), "beyond this generator"),
    "layered none": (lambda: layered([], []), "non-empty lists"),
    "layered unequal": (lambda: layered([1, 2], [3]), "equally long"),
    "layered no nodes": (lambda: layered([1, 0], [3, 3]), "want >= 1 nodes"),
    "kary branching": (lambda: kary(0, 2, 1), "branching must be >= 1"),
    "kary too big": (lambda: kary(2, 40, 1), "beyond this generator"),
    "chain": (lambda: chain([]), "a chain needs at least one length"),
    "chain negative": (lambda: chain([3, -1]), "node_len of node 1 is negative"),
    "skewed": (lambda: skewed(0, 1, 1), "num_leaves must be >= 1"),
    "random_tree": (lambda: random_tree(3, 0, num_roots=4), "num_roots must be <= num_nodes"),
    "thought": (lambda: thought(9, [2, 2], 3, 5), "branching wants 3 numbers"),
    "beam": (lambda: beam(9, 0, 3), "width must be >= 1"),
    "forest": (lambda: forest([]), "a forest needs at least one tree"),
    "replicate": (lambda: replicate(ODD, 0), "batch must be >= 1"),
}


def test_branching_may_be_a_numpy_number() -> None:
    assert thought(9, np.int64(2), 3, 5) == thought(9, 2, 3, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_numbers_are_refused(name: str) -> None:
    call, message = BAD_CALLS[name]
    with pytest.raises(ValueError, match=message):
        call()
