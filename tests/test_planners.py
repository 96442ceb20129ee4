"""Every strategy on every kind of tree: the plan is proved right, and its IO adds up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from deft.planners import PLANNERS, make_plan, plan_tree
from deft.shape import HeadShape, TileConfig
from deft.topologies import few_shot, layered
from deft.tree import DecodeTree
from tests.layered_suite import LAYERED_SUITE
from tests.trees import NAMED, STRATEGIES, random_forests

SHAPE = HeadShape(8, 2, 64)


@pytest.mark.parametrize("tree", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_named_trees(tree, strategy):
    name, options = strategy
    plan_tree(tree, SHAPE, name, **options).validate()


@settings(max_examples=320, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_forests())
def test_random_forests(tree):
    for name, options in STRATEGIES.values():
        plan = plan_tree(tree, SHAPE, name, **options)
        plan.validate()
        assert plan.item_tokens.sum() >= tree.attended_tokens


@pytest.mark.parametrize("nodes,tokens", LAYERED_SUITE, ids=lambda x: "-".join(map(str, x)))
@pytest.mark.parametrize("heads", [(32, 8), (32, 32), (16, 1)], ids=str)
def test_layered_suite(nodes, tokens, heads):
    tree = layered(nodes, tokens)
    for name in PLANNERS:
        plan = plan_tree(tree, HeadShape(*heads, 128), name)
        plan.validate()
        io = plan.io()
        assert io.kv >= io.kv_unique == tree.num_tokens * plan.shape.kv_token_bytes


def test_a_block_seen_by_more_than_64_queries_takes_several_mask_words():
    tile = TileConfig(128, 32)
    plan = plan_tree(
        layered([1, 100], [5, 3]), HeadShape(4, 4, 64), "flatten", tile=tile, block_kv=64
    )
    plan.validate()
    assert plan.num_mask_words == 2
    assert plan.run_mask[:, 1].any()


def test_sharing_is_what_node_saves_over_sequence():
    tree, heads = few_shot(1000, 8, 10), {"num_qo_heads": 8, "num_kv_heads": 8, "head_dim": 64}
    token = 2 * 64 * 2 * 8
    assert make_plan(tree, "sequence", **heads).io().kv == 8 * 1010 * token
    assert make_plan(tree, "node", **heads).io().kv == (1000 + 80) * token
    assert make_plan(tree, "flatten", block_kv=128, **heads).io().kv == (1000 + 80) * token


def test_query_tiles_reload_the_block_and_are_counted():
    tree, heads = few_shot(128, 64, 1), {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim": 64}
    tile = TileConfig(16, 32)
    plan = make_plan(tree, "node", tile=tile, **heads)
    assert plan.io().kv == (4 * 128 + 64) * 2 * 64 * 2
    paper = make_plan(tree, "deft_paper", num_qo_heads=4, num_kv_heads=1, head_dim=64)
    # Blocks of 128; 64 queries in two items of 32; every query head loads for itself.
    assert paper.io().kv == (2 * 128 + 64) * 4 * 2 * 64 * 2


def test_longest_items_come_first_within_a_launch():
    plan = plan_tree(NAMED["odd"], SHAPE, "node")
    for _, _, first, end in plan.launches:
        assert (np.diff(plan.item_tokens[first:end]) <= 0).all()


def test_cascade_runs_level_by_level():
    plan = plan_tree(layered([1, 2, 4], [9, 9, 9]), SHAPE, "cascade")
    assert sorted({phase for phase, *_ in plan.launches}) == [0, 1, 2]


@pytest.mark.parametrize("strategy", PLANNERS)
def test_a_tree_without_nodes_has_an_empty_plan(strategy):
    plan = plan_tree(DecodeTree([], [], []), SHAPE, strategy)
    plan.validate()
    assert plan.num_items == plan.num_launches == plan.io().total == 0


@pytest.mark.parametrize("strategy", ["node_chunk", "flatten", "cascade", "deft_paper"])
def test_a_block_beyond_any_tree_is_the_whole_tree(strategy):
    plan = plan_tree(NAMED["few_shot"], SHAPE, strategy, block_kv=2**63)
    plan.validate()
    assert plan.item_tokens.max() <= NAMED["few_shot"].num_tokens


@pytest.mark.parametrize(
    "options,message",
    [
        ({"strategy": "nodes"}, "unknown strategy 'nodes'"),
        ({"strategy": "flatten", "block": 3}, "has no option"),
        ({"strategy": "flatten", "block_kv": 0}, "block_kv must be positive"),
        ({"strategy": "flatten", "block_kv": "abc"}, "block_kv must be positive and an integer"),
        ({"strategy": "node_chunk", "block_kv": 1.5}, "block_kv must be positive and an integer"),
        ({"strategy": "flatten", "query_cap": [1]}, "query_cap must be positive and an integer"),
        ({"strategy": "sequence", "split_len": 2.5}, "split_len must be"),
        ({"strategy": "node", "partial_dtype": "fp12"}, "partial_dtype must be one of"),
        ({"strategy": "node_chunk", "block_kv": -1}, "block_kv must be positive"),
        ({"strategy": "flatten", "query_cap": 1000}, "query_cap must be in"),
        ({"strategy": "sequence", "split_len": "some"}, "split_len must be"),
        ({"strategy": "sequence", "split_len": 1.5}, "split_len must be positive and an integer"),
        ({"strategy": "deft_paper", "block_kv": 0}, "block_kv must be positive"),
        ({"strategy": "deft_paper", "block_kv": -1}, "block_kv must be positive"),
        ({"strategy": "flatten", "block_kv": 24.5}, "block_kv must be positive and an integer"),
        ({"strategy": "cascade", "block_kv": "64"}, "block_kv must be positive and an integer"),
        ({"strategy": "flatten", "query_cap": 1.5}, "query_cap must be positive and an integer"),
        ({"strategy": "node", "partial_dtype": "int8"}, "partial_dtype must be one of"),
        ({"strategy": "node", "tile": 64}, "tile must be"),
        ({"strategy": "node", "tile": {"block_m": 64.0}}, "block_m must be an integer"),
        ({"strategy": "node", "num_qo_heads": 8.0}, "num_qo_heads must be an integer"),
        ({"strategy": "node", "tile": {"block_k": 3}}, "tile keys are"),
        ({"strategy": "node", "tile": {"block_m": 24}}, "power of two"),
        ({"strategy": "node", "dtype_bytes": 1}, "dtype_bytes must be one of"),
        ({"strategy": "node", "head_dim": 576}, "MLA"),
    ],
)
def test_bad_options_are_refused_with_a_reason(options, message):
    heads = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64, **options}
    with pytest.raises(ValueError, match=message):
        make_plan(NAMED["odd"], **heads)


def test_a_group_larger_than_the_tile_is_refused():
    with pytest.raises(ValueError, match="needs a tile of that many rows"):
        plan_tree(NAMED["odd"], HeadShape(32, 1, 64), "node", tile={"block_m": 16})
    for strategy in set(PLANNERS) - {"deft_paper"}:
        with pytest.raises(
            ValueError, match=r"group_size 71 needs .* got \[TileConfig\(block_m=64"
        ):
            plan_tree(NAMED["odd"], HeadShape(71, 1, 64), strategy)
        plan_tree(NAMED["odd"], HeadShape(71, 1, 64), strategy, tile={"block_m": 128}).validate()


def test_deft_paper_takes_none_for_its_block():
    paper = plan_tree(NAMED["wide"], HeadShape(8, 2, 64), "deft_paper")
    again = plan_tree(NAMED["wide"], HeadShape(8, 2, 64), "deft_paper", block_kv=None)
    assert paper.io() == again.io()
