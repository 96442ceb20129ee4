"""The published grouping rules, decided by hand on small trees."""

from __future__ import annotations

import numpy as np
import pytest

from deft.planners import plan_tree
from deft.planners.fasttree import fasttree_rule
from deft.planners.hydragen import shared_levels
from deft.planners.merge_or_split import segment_parents
from deft.planners.pat import pat_rule
from deft.shape import HeadShape
from deft.topologies import few_shot, forest, layered
from deft.tree import DecodeTree
from tests.trees import CAUSAL

ONE_HEAD = HeadShape(1, 1, 64)


def items(plan):
    """Of each item: its queries, and its runs as (node, start, end)."""
    queries = np.split(plan.item_query, plan.item_query_indptr[1:-1])
    runs = np.stack([plan.run_node, plan.run_start, plan.run_end], 1)
    chains = np.split(runs, plan.item_run_indptr[1:-1])
    pairs = zip(queries, chains, strict=True)
    return sorted((q.tolist(), [tuple(run) for run in r.tolist()]) for q, r in pairs)


def test_pat_merges_an_only_child_and_splits_where_a_merge_adds_a_tile():
    # Root of 100 tokens with one child; below it 65 leaves of 8 tokens, tiles of 64 rows.
    tree = layered([1, 1, 65], [100, 50, 8])
    plan = plan_tree(tree, ONE_HEAD, "pat", tile={"block_m": 64})
    got = items(plan)
    # The child takes the root along (all queries in common): a stream of 150 tokens. 65 queries
    # are two tiles; without the first leaf they are one, and that leaf's own reading is another:
    # 2 - 1 - 1 = 0 tiles more, so it merges. A second would add one: -150 + 4 < 0.
    assert got[0] == ([0], [(0, 0, 100), (1, 0, 50), (2, 0, 8)])
    assert ([*range(1, 65)], [(0, 0, 100), (1, 0, 50)]) in got
    assert ([1], [(3, 0, 8)]) in got
    assert plan.num_partials == 2 * 64  # the first leaf's query writes its output itself


def test_pat_rule_counts_tiles():
    merges = pat_rule(64)
    assert merges(10, 500, 10, 3)  # all queries of the group
    assert not merges(64, 500, 1, 3)  # 1 tile now, 1 + 1 after
    assert merges(64, 4, 1, 3)  # 4 tokens read again are worth a partial
    assert merges(65, 500, 1, 3)  # 2 tiles either way


def test_fasttree_rule_weighs_padding_against_a_partial():
    merges = fasttree_rule(HeadShape(1, 1, 64), large=64, small=16, turn=32)
    # 64 queries on 100 tokens, a child of 1 query and 8 tokens.
    # Split: 0 + 0.66 * 15 * 8 + 0.33 * 24 * 1 + 0.1 = 87.2
    # Merge: 0.66 * 1 * 100 (63 of 64 rows) + 0.66 * 15 * 108 = 1135.2
    assert not merges(64, 100, 1, 8)
    # A single query's chain: split pads 15 rows on 100 tokens and on 8, and 24 tokens:
    # 0.66 * 15 * 108 + 0.33 * 24 + 0.1 = 1077.2; merge: 0.66 * 15 * 108 = 1069.2.
    assert merges(1, 100, 1, 8)


def test_fasttree_cuts_short_grids_in_128_tokens():
    # One KV head, 4 queries: 3 items of 1,024 tokens are fewer than 528.
    plan = plan_tree(layered([1, 4], [3000, 64]), HeadShape(1, 1, 64), "fasttree")
    assert plan.item_tokens.max() == 128
    # 64 KV heads and 40 chains of 2,048 tokens: 2 * 40 * 64 thread blocks are enough.
    wide = plan_tree(layered([40], [2048]), HeadShape(64, 64, 64), "fasttree")
    assert wide.item_tokens.max() == 1024


def test_pat_cuts_the_longest_stream_until_the_grid_is_wide_enough():
    plan = plan_tree(few_shot(4096, 2, 16), HeadShape(8, 8, 64), "pat")
    # Two queries share one stream; 8 KV heads want 27 items.
    assert plan.num_items >= 27
    assert plan.item_tokens.max() < 4096


def test_segments_nest_as_query_ranges_do():
    tree = forest([layered([1, 2], [5, 3]), layered([1], [4])])
    assert segment_parents(tree).tolist() == [-1, 0, 0, -1]
    # CAUSAL cuts nodes at query_len: who sees a segment sees the one above it.
    seg, parents = CAUSAL.segments, segment_parents(CAUSAL)
    below = np.flatnonzero(parents >= 0)
    assert (seg.query_begin[parents[below]] <= seg.query_begin[below]).all()
    assert (seg.query_end[parents[below]] >= seg.query_end[below]).all()


@pytest.mark.parametrize(
    "tree,levels",
    [
        (layered([1, 4, 8], [100, 10, 5]), 2),
        (few_shot(100, 8, 5), 1),
        (forest([few_shot(100, 8, 5)] * 3), 1),
        (forest([few_shot(100, 8, 5), few_shot(90, 8, 5)]), 0),
        (DecodeTree([-1, 0, 0], [100, 10, 10], [0, 1, 1, 2, 2]), 2),
        (DecodeTree([-1, 0, 0], [100, 10, 10], [1, 1, 2]), 1),
        (DecodeTree([-1, 0], [0, 9], [1, 1]), 2),
    ],
    ids=["three", "two", "batch", "unequal roots", "inner query", "unequal counts", "empty root"],
)
def test_hydragen_batches_equal_levels(tree, levels):
    assert shared_levels(tree) == levels
    plan_tree(tree, ONE_HEAD, "hydragen").validate()


def test_hydragen_reads_shared_levels_once_and_the_rest_per_query():
    tree = layered([1, 4, 8], [100, 10, 5])
    kv = plan_tree(tree, ONE_HEAD, "hydragen").io().kv
    assert kv == (100 + 4 * 10 + 8 * 5) * ONE_HEAD.kv_token_bytes
    lopsided = DecodeTree([-1, 0, 0, 1, 1], [100, 10, 10, 5, 5], [2, 3, 4])
    kv = plan_tree(lopsided, ONE_HEAD, "hydragen").io().kv
    assert kv == (100 + 10 + 2 * (10 + 5)) * ONE_HEAD.kv_token_bytes
