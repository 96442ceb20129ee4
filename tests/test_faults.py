"""Faults seen in other kernels: each is put in, and a check must fail; then the right kernel
passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from deft.attention import TreeAttention
from deft.planners import plan_tree
from deft.reference import reference_attention, visible_tokens
from deft.shape import HeadShape
from deft.testing import (
    assert_close,
    assert_lse_close,
    assert_mass,
    make_cache,
    make_inputs,
    mass_error,
    row_rms_error,
)
from deft.topologies import few_shot, layered
from deft.tree import DecodeTree
from tests.trees import ODD, STRATEGIES

SHAPE = HeadShape(4, 2, 64)
BACKENDS = ("torch", "triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(tree, inputs, *, plan=None, strategy="flatten_24", backend="torch", shape=SHAPE, **cache):
    """(o, lse) of a strategy, or of a plan given in its place."""
    name, options = STRATEGIES[strategy]
    kernel = TreeAttention(name, backend=backend, **options)
    pool = make_cache(tree, shape, inputs, device=DEVICE, **cache)
    kernel.plan(tree, pool)
    if plan is not None:
        kernel._bound = plan.bind(pool)
    out = torch.full_like(inputs.q, float("nan"))
    lse = torch.full(out.shape[:2], float("nan"), device=DEVICE)
    return kernel.run(inputs.q, out=out, lse=lse)


def with_one_token_less(plan):
    """The plan with the last token of its longest pure chunk left out."""
    at = int(np.argmax(plan.chunk_len))
    length = plan.chunk_len.copy()
    length[at] -= 1
    return replace(plan, chunk_len=length)


@pytest.mark.parametrize("backend", BACKENDS)
def test_single_lost_token_fails_the_mass_check(backend):
    """At 4,000 tokens one lost token is below the row error's limit; the mass check sees it."""
    tree = few_shot(4000, 2, 3) if backend == "torch" else few_shot(700, 2, 3)
    inputs = make_inputs(tree, SHAPE, device=DEVICE)
    zero = replace(inputs, q=torch.zeros_like(inputs.q))
    bad = with_one_token_less(plan_tree(tree, SHAPE, "node"))
    o, lse = run(tree, zero, plan=bad, backend=backend)
    assert 0.9 < mass_error(lse, tree) < 1.1
    with pytest.raises(AssertionError, match="mass check"):
        assert_mass(o, lse, inputs.k, inputs.v, tree, "float16")
    o, lse = run(tree, zero, strategy="node", backend=backend)
    assert_mass(o, lse, inputs.k, inputs.v, tree, "float16")


def test_a_lost_tile_fails_the_row_check_where_allclose_is_blind():
    """At 16k tokens `allclose(atol=1e-2)` passes with a whole tile lost; the row error does not."""
    tree = few_shot(16000, 1, 1)
    inputs = make_inputs(tree, SHAPE, device=DEVICE)
    plan = plan_tree(tree, SHAPE, "node")
    length = plan.chunk_len.copy()
    length[7] = 0
    o, _ = run(tree, inputs, plan=replace(plan, chunk_len=length))
    ref, _ = reference_attention(inputs.q, inputs.k, inputs.v, tree)
    assert torch.allclose(o.double(), ref, atol=1e-2)
    with pytest.raises(AssertionError, match="row RMS"):
        assert_close(o, ref, "float16")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_hot_values_show_which_tokens_were_read(backend, strategy):
    """V = one-hot of the token: with q = 0 each seen token shows as 1 / visible, no other shows."""
    tree = layered([1, 2, 4], [13, 9, 7])
    tree = tree.with_lengths(np.array([20, 9, 0, 7, 16, 1, 10]))
    shape = HeadShape(2, 1, 64, "float32")
    inputs = make_inputs(tree, shape, device=DEVICE)
    eye = torch.eye(tree.num_tokens, 64, device=DEVICE)[:, None, :]
    inputs = replace(inputs, q=torch.zeros_like(inputs.q), v=eye)
    o, _ = run(tree, inputs, strategy=strategy, backend=backend, shape=shape)
    for query in range(tree.num_qo):
        seen = visible_tokens(tree, query)
        want = torch.zeros(64)
        want[seen[seen < 64]] = 1 / len(seen)
        assert torch.allclose(o[query].cpu(), want.expand(2, 64), atol=1e-6)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_poisoned_pool(backend, page_size):
    """Pages and slots that the tree does not own hold NaN; reading one would show."""
    inputs = make_inputs(ODD, SHAPE, device=DEVICE)
    cache = {"page_size": page_size, "poison": True, "spare_pages": 3, "scatter_seed": 5}
    o, _ = run(ODD, inputs, backend=backend, **cache)
    assert_close(o, reference_attention(inputs.q, inputs.k, inputs.v, ODD)[0], "float16")


@pytest.mark.parametrize("backend", BACKENDS)
def test_poisoned_pool_shows_an_over_read(backend):
    """The same with the fault in: a chunk one token too long reads a poisoned slot."""
    tree = few_shot(20, 2, 5)
    inputs = make_inputs(tree, SHAPE, device=DEVICE)
    kernel = TreeAttention("node", backend=backend)
    kernel.plan(tree, make_cache(tree, SHAPE, inputs, 16, device=DEVICE, poison=True))
    kernel.bound.chunk_len += 1
    o, _ = kernel.run(inputs.q)
    assert row_rms_error(o, reference_attention(inputs.q, inputs.k, inputs.v, tree)[0]) > 1e-3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strict_prefix_keeps_its_tokens(strategy):
    """A query on an inner node, whose path is a strict prefix of another's."""
    tree = DecodeTree([-1, 0, 1, 2], [30, 20, 10, 5], [0, 1, 2, 3, 1])
    inputs = make_inputs(tree, SHAPE, device=DEVICE)
    o, lse = run(tree, inputs, strategy=strategy)
    ref, ref_lse = reference_attention(inputs.q, inputs.k, inputs.v, tree)
    assert_close(o, ref, "float16")
    assert_lse_close(lse, ref_lse, "float16")
    cut = DecodeTree([-1, 0, 1, 2], [30, 20, 10, 5], [0, 0, 2, 3, 0])  # the fault: its node is lost
    assert row_rms_error(o, reference_attention(inputs.q, inputs.k, inputs.v, cut)[0]) > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_nodes_and_queries_that_see_nothing(backend):
    tree = DecodeTree([-1, 0, -1, 2], [0, 7, 0, 0], [1, 3, 2, 0])
    inputs = make_inputs(tree, SHAPE, device=DEVICE)
    o, lse = run(tree, inputs, backend=backend)
    ref, ref_lse = reference_attention(inputs.q, inputs.k, inputs.v, tree)
    assert_close(o, ref, "float16")
    assert_lse_close(lse, ref_lse, "float16")
    assert (o[1:] == 0).all() and (lse[1:] == -torch.inf).all()
    assert torch.isfinite(lse[0]).all()


@pytest.mark.parametrize("offset", [-1e5, -20.0, 20.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_offset(backend, offset):
    """Adding one number to all logits of a query changes nothing but its LSE, wherever the max
    is."""
    shape = HeadShape(2, 1, 64, "float32")
    inputs = make_inputs(ODD, shape, device=DEVICE)
    # One dimension of K is 1, that of q is offset / sm_scale: every logit moves by the offset.
    q, k = inputs.q.clone(), inputs.k.clone()
    q[..., 0], k[..., 0] = offset * 8.0, 1.0
    inputs = replace(inputs, q=q, k=k)
    o, lse = run(ODD, inputs, backend=backend, shape=shape)
    ref, ref_lse = reference_attention(q, k, inputs.v, ODD)
    # At 1e5 the fp32 spacing is 8e-3 (1.6e-2 in base 2): logits, and so weights, are off by that
    # much in any fp32 softmax. A row maximum with a finite sentinel loses the row: an error of 1.
    limit = 1e-5 if abs(offset) < 100 else 5e-2
    assert row_rms_error(o, ref) < limit
    assert torch.allclose(lse.double(), ref_lse, atol=limit)


def test_a_row_maximum_that_starts_at_zero_is_caught_by_the_offset_test():
    """The fault itself: m = 0 at the start loses all rows whose logits are far below."""
    logits = torch.full((1, 8), -1e5)
    weight = torch.exp(logits - torch.clamp(logits.max(), min=0))
    assert weight.sum() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_the_trees_own_tokens_reaches_every_query_that_sees_them(backend):
    tree = few_shot(10, 3, 4)
    inputs = make_inputs(tree, SHAPE, device=DEVICE)
    inputs.k[int(tree.node_start[2])] = float("nan")  # a token of the second leaf only
    o, _ = run(tree, inputs, backend=backend, strategy="node")
    assert torch.isnan(o[1]).all()
    assert torch.isfinite(o[0]).all() and torch.isfinite(o[2]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_written_past_the_end(backend):
    inputs = make_inputs(ODD, SHAPE, device=DEVICE)
    kernel = TreeAttention("flatten", backend=backend, block_kv=24)
    kernel.plan(ODD, make_cache(ODD, SHAPE, inputs, device=DEVICE))
    room = torch.full((ODD.num_qo + 2, *inputs.q.shape[1:]), 77.0, device=DEVICE).half()
    kernel.run(inputs.q, out=room[1:-1])
    assert (room[0] == 77).all() and (room[-1] == 77).all()
    assert torch.equal(room[1:-1], kernel.run(inputs.q)[0])


def test_query_order_does_not_matter():
    inputs = make_inputs(ODD, SHAPE, device=DEVICE)
    o, _ = run(ODD, inputs)
    order = torch.randperm(ODD.num_qo, generator=torch.Generator().manual_seed(1))
    shuffled = DecodeTree(ODD.parent, ODD.node_len, ODD.query_node[order.numpy()])
    again, _ = run(shuffled, replace(inputs, q=inputs.q[order.to(DEVICE)]))
    assert row_rms_error(again, o[order.to(DEVICE)].double()) < 1e-3


def test_nan_where_the_reference_is_zero_is_an_error():
    zeros = torch.zeros(1, 1, 4)
    assert row_rms_error(zeros * float("nan"), zeros) == float("inf")
    assert row_rms_error(zeros, zeros) == 0
