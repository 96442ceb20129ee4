"""Requests for batched libraries: every row gets its visible tokens, once, whatever the cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from baselines.requests import Requests, stacked, tree_levels, whole_trees
from deft.reference import visible_tokens
from deft.topologies import few_shot, layered
from deft.tree import DecodeTree
from tests.trees import NAMED, random_forests


def check_levels(tree: DecodeTree, levels: list[Requests]) -> None:
    seen: list[list[int]] = [[] for _ in range(tree.num_qo)]
    for req in levels:
        assert req.row_indptr[0] == 0 and req.row_indptr[-1] == tree.num_qo
        assert (req.rows > 0).all() and req.kv_indptr[-1] == len(req.tokens)
        for i, rows in enumerate(req.rows):
            tokens = req.tokens[req.kv_indptr[i] : req.kv_indptr[i + 1]]
            for row in range(req.row_indptr[i], req.row_indptr[i] + rows):
                seen[row] += tokens.tolist()
    for row, query in enumerate(tree.query_order):
        assert seen[row] == visible_tokens(tree, int(query)).tolist()


@pytest.mark.parametrize("min_share", [0, 1, 2, 3, 1000])
@pytest.mark.parametrize("tree", NAMED.values(), ids=NAMED)
def test_levels_cover_every_path_once(tree: DecodeTree, min_share: int) -> None:
    check_levels(tree, tree_levels(tree, min_share))


@settings(max_examples=100, deadline=None)
@given(random_forests())
def test_levels_of_random_forests(tree: DecodeTree) -> None:
    for min_share in (0, 1, 3):
        check_levels(tree, tree_levels(tree, min_share))


def test_levels_are_those_of_the_tree_and_fewer_where_nothing_is_shared() -> None:
    tree = layered([1, 1, 2, 4], [7, 5, 3, 2])
    plain = tree_levels(tree)
    assert [req.rows.tolist() for req in plain] == [[4], [4], [2, 2], [1, 1, 1, 1]]
    assert [req.kv_len.tolist() for req in plain] == [[7], [5], [3, 3], [2, 2, 2, 2]]
    # The two roots have the same queries: one request.
    assert [req.kv_len.tolist() for req in tree_levels(tree, 1)] == [[12], [3, 3], [2] * 4]
    # Pairs are not worth a level: every query reads 3 + 2 tokens of its own.
    assert [req.kv_len.tolist() for req in tree_levels(tree, 3)] == [[12], [5] * 4]
    assert [req.kv_len.tolist() for req in tree_levels(tree, 5)] == [[17] * 4]


def test_stacked_levels_are_one_batch() -> None:
    req = stacked(tree_levels(few_shot(10, 3, 2)))
    assert req.row_indptr.tolist() == [0, 3, 4, 5, 6]
    assert req.kv_indptr.tolist() == [0, 10, 12, 14, 16]


@pytest.mark.parametrize("tree", NAMED.values(), ids=NAMED)
def test_whole_trees_hold_what_their_queries_see(tree: DecodeTree) -> None:
    req = whole_trees(tree)
    of_row = np.repeat(np.arange(len(req.rows)), req.rows)
    for row, query in enumerate(tree.query_order):
        i = of_row[row]
        tokens = req.tokens[req.kv_indptr[i] : req.kv_indptr[i + 1]]
        assert set(visible_tokens(tree, int(query))) <= set(tokens.tolist())
    assert len(np.unique(req.tokens)) == len(req.tokens) == tree.attended_tokens
