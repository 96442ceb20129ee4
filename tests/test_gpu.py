"""What only a GPU can show: bfloat16, CUDA graphs, growth under a captured graph, huge pools."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deft import HeadShape, PagedKVCache, TreeAttention
from deft.reference import reference_attention
from deft.testing import assert_close, assert_mass, make_cache, make_inputs
from deft.topologies import few_shot, layered
from tests.trees import NAMED, ODD, STRATEGIES

pytestmark = pytest.mark.gpu
SHAPE = HeadShape(8, 2, 128, "bfloat16")


def captured(kernel, q, out):
    """A CUDA graph of one run."""
    kernel.run(q, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.run(q, out=out)
    return graph


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tree", NAMED.values(), ids=NAMED)
def test_bfloat16(tree, strategy):
    name, options = STRATEGIES[strategy]
    inputs = make_inputs(tree, SHAPE, device="cuda")
    kernel = TreeAttention(name, backend="triton", **options)
    kernel.plan(tree, make_cache(tree, SHAPE, inputs, 16, device="cuda", poison=True))
    o, _ = kernel.run(inputs.q)
    assert_close(o, reference_attention(inputs.q, inputs.k, inputs.v, tree)[0], "bfloat16")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_graph_replays_give_the_same_bits(strategy):
    name, options = STRATEGIES[strategy]
    tree = layered([1, 4, 64], [300, 100, 40])
    inputs = make_inputs(tree, SHAPE, device="cuda")
    kernel = TreeAttention(name, backend="triton", **options)
    kernel.plan(tree, make_cache(tree, SHAPE, inputs, device="cuda"))
    assert kernel.capturable
    out = torch.full_like(inputs.q, float("nan"))
    graph = captured(kernel, inputs.q, out)
    first = out.clone()
    for _ in range(200):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first)
    assert_close(out, reference_attention(inputs.q, inputs.k, inputs.v, tree)[0], "bfloat16")


@pytest.mark.parametrize("strategy", ["sequence_auto", "node", "flatten"])
def test_a_captured_graph_survives_growth(strategy):
    name, options = STRATEGIES[strategy]
    tree = ODD
    inputs = make_inputs(tree, SHAPE, device="cuda")
    cache = make_cache(tree, SHAPE, inputs, 16, device="cuda", spare_pages=40, poison=True)
    kernel = TreeAttention(name, backend="triton", **options)
    kernel.plan(tree, cache)
    q, out = inputs.q.clone(), torch.empty_like(inputs.q)
    graph = captured(kernel, q, out)
    leaves = np.array([3, 5, 7])
    for step in range(20):
        cache.append(leaves, 1)
        lens = tree.node_len.copy()
        lens[leaves] += 1
        tree = tree.with_lengths(lens)
        inputs = make_inputs(tree, SHAPE, seed=step, device="cuda")
        cache.write(np.arange(tree.num_nodes), inputs.k, inputs.v)
        q.copy_(inputs.q)
        assert kernel.advance()
        graph.replay()
        assert_close(out, reference_attention(inputs.q, inputs.k, inputs.v, tree)[0], "bfloat16")


def test_offsets_beyond_int32():
    """A pool of more than 2**31 elements per layer: slots at its end are found."""
    shape = HeadShape(32, 32, 128)
    tree = few_shot(500, 4, 20)
    cache = PagedKVCache(shape, 700_000, 1, device="cuda")
    cache.insert(-1, 690_000)
    handles = cache.insert_tree(tree)
    inputs = make_inputs(tree, shape, device="cuda")
    cache.write(handles, inputs.k, inputs.v)
    kernel = TreeAttention("flatten", backend="triton")
    kernel.plan(tree, cache, nodes=handles)
    o, _ = kernel.run(inputs.q)
    assert_close(o, reference_attention(inputs.q, inputs.k, inputs.v, tree)[0], "float16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mass_of_a_long_prefix(dtype):
    tree, shape = few_shot(20_000, 16, 33), HeadShape(8, 2, 128, dtype)
    inputs = make_inputs(tree, shape, device="cuda")
    kernel = TreeAttention("flatten", backend="triton")
    kernel.plan(tree, make_cache(tree, shape, inputs, device="cuda"))
    lse = torch.empty(inputs.q.shape[:2], device="cuda")
    o, lse = kernel.run(torch.zeros_like(inputs.q), lse=lse)
    assert_mass(o, lse, inputs.k, inputs.v, tree, dtype)
