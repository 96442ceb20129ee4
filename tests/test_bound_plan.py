"""Binding: any page size and slot order; growth without a replan, and when a replan is asked
for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from deft import DecodeTree, HeadShape, PagedKVCache, TreeAttention
from deft.planners import plan_tree
from deft.reference import reference_attention
from deft.testing import assert_close, make_cache, make_inputs
from deft.topologies import few_shot
from tests.trees import CAUSAL, ODD, STRATEGIES

SHAPE = HeadShape(4, 2, 64, "float32")
GROWING = ("sequence", "sequence_split", "node", "node_chunk", "flatten", "flatten_24", "cascade")


def grown(cache, tree, inputs, nodes, rng):
    """One token more on every node of `nodes`: (tree, inputs with the new K and V in node
    order)."""
    cache.append(nodes, 1)
    lens = tree.node_len.copy()
    lens[nodes] += 1
    taller = tree.with_lengths(lens)
    fresh = make_inputs(taller, SHAPE, seed=int(rng.integers(1 << 30)))
    cache.write(np.arange(tree.num_nodes), fresh.k, fresh.v)
    return taller, fresh


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("strategy", GROWING)
def test_advance_serves_grown_leaves_without_a_replan(strategy, backend):
    tree, (name, options) = ODD, STRATEGIES[strategy]
    rng = np.random.default_rng(3)
    inputs = make_inputs(tree, SHAPE)
    cache = make_cache(tree, SHAPE, inputs, 16, poison=True, spare_pages=12, scatter_seed=2)
    kernel = TreeAttention(name, backend=backend, headroom=4, **options)
    kernel.plan(tree, cache)
    pointers = [
        getattr(kernel.bound, n).data_ptr() for n in ("token_slot", "token_mask", "item_meta")
    ]
    open_nodes = np.unique(kernel.bound.plan.run_node[kernel.bound.plan.run_open])
    for _ in range(3 if backend == "torch" else 1):
        tree, inputs = grown(cache, tree, inputs, open_nodes, rng)
        assert kernel.advance()
        o, _ = kernel.run(inputs.q)
        assert_close(o, reference_attention(inputs.q, inputs.k, inputs.v, tree)[0], "float32")
    now = [getattr(kernel.bound, n).data_ptr() for n in ("token_slot", "token_mask", "item_meta")]
    assert now == pointers  # a captured graph stays valid


def test_advance_asks_for_a_replan_when_the_headroom_is_used_up():
    tree = few_shot(20, 3, 5)
    inputs = make_inputs(tree, SHAPE)
    cache = make_cache(tree, SHAPE, inputs, spare_pages=50)
    kernel = TreeAttention("node", backend="torch", headroom=2)
    kernel.plan(tree, cache)
    leaves = np.array([1, 2, 3])
    cache.append(leaves, 2)
    assert kernel.advance()
    cache.append(leaves, 1)
    assert not kernel.advance()
    assert not kernel.advance()  # and nothing was taken up half


def test_advance_without_growth_changes_nothing():
    inputs = make_inputs(ODD, SHAPE)
    kernel = TreeAttention("flatten", backend="torch")
    kernel.plan(ODD, make_cache(ODD, SHAPE, inputs))
    before = kernel.bound.item_meta.clone()
    assert kernel.advance()
    assert torch.equal(before, kernel.bound.item_meta)


def test_causal_nodes_do_not_grow():
    """query_len fixes what a query sees, so a grown node needs a new plan."""
    inputs = make_inputs(CAUSAL, SHAPE)
    cache = make_cache(CAUSAL, SHAPE, inputs, spare_pages=9)
    kernel = TreeAttention("sequence", backend="torch")
    kernel.plan(CAUSAL, cache)
    cache.append(np.array([3]), 1)
    assert not kernel.advance()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scattered_slots_turn_pure_chunks_into_listed_tokens(strategy):
    name, options = STRATEGIES[strategy]
    inputs = make_inputs(ODD, SHAPE)
    plan = plan_tree(ODD, SHAPE, name, **options)
    near = plan.bind(make_cache(ODD, SHAPE, inputs))
    far = plan.bind(make_cache(ODD, SHAPE, inputs, spare_pages=40, scatter_seed=1))
    assert near.chunk_len.sum() == plan.chunk_len.sum()
    assert far.chunk_len.sum() < near.chunk_len.sum() or not len(plan.chunk_len)
    for bound in (near, far):
        meta = bound.item_meta.view(-1, 8)
        assert (meta[:, 5] - meta[:, 4]).sum() + bound.chunk_len.sum() == plan.item_tokens.sum()


def test_nodes_of_a_living_cache_are_found_by_handle():
    """A pruned and refilled pool: handles are not 0..n-1 any more."""
    tree = few_shot(20, 3, 5)
    inputs = make_inputs(tree, SHAPE)
    cache = PagedKVCache(SHAPE, 60, 1)
    junk = cache.insert_tree(few_shot(7, 2, 3))
    handles = cache.insert_tree(tree)
    cache.prune(junk[:1])
    cache.write(handles, inputs.k, inputs.v)
    kernel = TreeAttention("flatten", backend="torch")
    kernel.plan(tree, cache, nodes=handles)
    o, _ = kernel.run(inputs.q)
    assert_close(o, reference_attention(inputs.q, inputs.k, inputs.v, tree)[0], "float32")


def test_a_snapshot_of_a_living_forest_can_be_planned():
    cache = PagedKVCache(SHAPE, 80, 4)
    root = cache.insert(-1, 10)
    children = cache.fork(root, 3)
    cache.append(children, 5)
    cache.prune(children[1:2])
    snapshot = cache.snapshot()
    tree = snapshot.tree(children[[0, 2]])
    inputs = make_inputs(tree, SHAPE)
    cache.write(snapshot.handles, inputs.k, inputs.v)
    kernel = TreeAttention("node_chunk", backend="torch", block_kv=16)
    kernel.plan(tree, cache, nodes=snapshot.handles)
    o, _ = kernel.run(inputs.q)
    assert_close(o, reference_attention(inputs.q, inputs.k, inputs.v, tree)[0], "float32")


def test_bind_refuses_what_does_not_fit():
    plan = plan_tree(ODD, SHAPE, "node")
    other = HeadShape(4, 4, 64, "float32")
    inputs = make_inputs(ODD, other)
    with pytest.raises(ValueError, match="the cache holds 4 x 64"):
        plan.bind(make_cache(ODD, other, inputs))
    with pytest.raises(ValueError, match="handles for"):
        plan.bind(make_cache(ODD, SHAPE, make_inputs(ODD, SHAPE)), nodes=np.arange(3))
    cache = make_cache(ODD, SHAPE, make_inputs(ODD, SHAPE), spare_pages=1)
    with pytest.raises(ValueError, match="must be integers"):
        plan.bind(cache, nodes=np.arange(ODD.num_nodes) + 0.5)
    for headroom in (-5, 1.5, "a", None):
        with pytest.raises(ValueError, match="headroom must be an integer >= 0"):
            plan.bind(cache, headroom=headroom)
    with pytest.raises(ValueError, match="the plan is for 8 query heads"):
        plan_tree(ODD, replace(SHAPE, num_qo_heads=8), "node").bind(cache)
    cache.append(np.array([0]), 1)
    with pytest.raises(ValueError, match="plan again"):
        plan.bind(cache)


def test_upload_bytes_are_what_the_tables_hold():
    inputs = make_inputs(ODD, SHAPE)
    bound = plan_tree(ODD, SHAPE, "node").bind(make_cache(ODD, SHAPE, inputs))
    assert bound.upload_bytes >= 32 * bound.plan.num_items
    assert bound.upload_bytes < 64 * 1024


def test_a_tree_with_a_single_query_and_a_big_pool():
    tree = DecodeTree([-1], [5], [0])
    inputs = make_inputs(tree, SHAPE)
    cache = make_cache(tree, SHAPE, inputs, spare_pages=5000, scatter_seed=9)
    kernel = TreeAttention("flatten", backend="torch")
    kernel.plan(tree, cache)
    o, _ = kernel.run(inputs.q)
    assert_close(o, reference_attention(inputs.q, inputs.k, inputs.v, tree)[0], "float32")
