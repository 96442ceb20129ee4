"""Executors against the fp64 oracle: the torch one, and the Triton kernels in the interpreter.

The pairwise covering set holds every pair of (group, head_dim), (group, page size), (head_dim, page
size) and every strategy; the full product runs on a GPU (scripts/device/full_product.py).
"""

from __future__ import annotations

import itertools

import pytest
import torch

from deft.attention import TreeAttention
from deft.reference import reference_attention
from deft.shape import HeadShape
from deft.testing import assert_close, assert_lse_close, assert_mass, make_cache, make_inputs
from tests.trees import NAMED, ODD, STRATEGIES

GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
HEAD_DIMS = (64, 80, 96, 128, 256)
PAGES = (1, 16, 64)


def covering_set():
    """Rows (group, head_dim, page, strategy, dtype): all pairs of the first three factors."""
    strategies = itertools.cycle(STRATEGIES)
    pages = itertools.cycle(PAGES)
    rows = []
    for d, head_dim in enumerate(HEAD_DIMS):
        for g, group in enumerate(GROUPS):
            page = PAGES[(g + d) % 3]
            dtype = "float32" if (g + d) % 5 == 0 and head_dim < 256 else "float16"
            rows.append((group, head_dim, page, next(strategies), dtype))
        next(strategies)
        next(pages)
    return rows


def check(tree, shape, strategy, page, backend, device="cpu", q_scale=1.0):
    name, options = STRATEGIES[strategy]
    inputs = make_inputs(tree, shape, seed=7, q_scale=q_scale, device=device)
    cache = make_cache(
        tree, shape, inputs, page, device=device, poison=True, spare_pages=2, scatter_seed=page
    )
    kernel = TreeAttention(name, backend=backend, **options)
    kernel.plan(tree, cache)
    out = torch.full_like(inputs.q, float("nan"))
    lse = torch.full(inputs.q.shape[:2], float("nan"), device=device)
    kernel.run(inputs.q, out=out, lse=lse)
    ref, ref_lse = reference_attention(inputs.q, inputs.k, inputs.v, tree)
    assert_close(out, ref, shape.dtype)
    assert_lse_close(lse, ref_lse, shape.dtype)
    kernel.run(torch.zeros_like(inputs.q), out=out, lse=lse)
    assert_mass(out, lse, inputs.k, inputs.v, tree, shape.dtype)


def test_the_covering_set_covers_every_pair():
    rows = covering_set()
    assert {row[:2] for row in rows} == set(itertools.product(GROUPS, HEAD_DIMS))
    assert {(row[0], row[2]) for row in rows} == set(itertools.product(GROUPS, PAGES))
    assert {row[1:3] for row in rows} == set(itertools.product(HEAD_DIMS, PAGES))
    assert {row[3] for row in rows} == set(STRATEGIES)


@pytest.mark.parametrize("row", covering_set(), ids=lambda row: "-".join(map(str, row)))
def test_triton_covering_set(row):
    group, head_dim, page, strategy, dtype = row
    num_kv_heads = 2 if group <= 3 else 1
    shape = HeadShape(group * num_kv_heads, num_kv_heads, head_dim, dtype)
    check(ODD, shape, strategy, page, "triton", "cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tree", NAMED.values(), ids=NAMED)
def test_torch_on_named_trees(tree, strategy):
    check(tree, HeadShape(6, 2, 64, "float32"), strategy, 3, "torch")


@pytest.mark.parametrize("strategy", ["flatten_24", "sequence_split"])
@pytest.mark.parametrize("tree", NAMED.values(), ids=NAMED)
def test_triton_on_named_trees(tree, strategy):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    check(tree, HeadShape(2, 1, 64), strategy, 1, "triton", device)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_in_every_dtype(dtype):
    check(ODD, HeadShape(4, 2, 64, dtype), "flatten_24", 16, "torch")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_several_mask_words(dtype):
    """More than 64 queries in one item, in a tile of 128 rows."""
    tree = NAMED["wide"]
    shape = HeadShape(1, 1, 64, dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = make_inputs(tree, shape, seed=3, device=device)
    cache = make_cache(tree, shape, inputs, device=device)
    tile = {"block_m": 128, "block_n": 32}
    kernel = TreeAttention("flatten", backend="triton", tile=tile, block_kv=64)
    kernel.plan(tree, cache)
    assert kernel.bound.plan.num_mask_words == 2
    o, _ = kernel.run(inputs.q)
    assert_close(o, reference_attention(inputs.q, inputs.k, inputs.v, tree)[0], dtype)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_same_bits_on_every_run(backend):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = make_inputs(ODD, HeadShape(4, 2, 64), device=device)
    kernel = TreeAttention("flatten", backend=backend, block_kv=24)
    kernel.plan(ODD, make_cache(ODD, HeadShape(4, 2, 64), inputs, device=device))
    first = kernel.run(inputs.q)[0].clone()
    for _ in range(2):
        assert torch.equal(first, kernel.run(inputs.q)[0])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_layers_and_strided_q(backend):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = HeadShape(4, 2, 64)
    inputs = make_inputs(ODD, shape, device=device)
    cache = make_cache(ODD, shape, inputs, num_layers=3, device=device)
    cache.k_cache[0].zero_()
    cache.v_cache[2].zero_()
    kernel = TreeAttention("node", backend=backend)
    kernel.plan(ODD, cache)
    wide = torch.zeros((ODD.num_qo, 4, 128), dtype=torch.float16, device=device)
    wide[..., :64] = inputs.q
    o, _ = kernel.run(wide[..., :64], layer=1)
    assert_close(o, reference_attention(inputs.q, inputs.k, inputs.v, ODD)[0], "float16")
    assert not kernel.run(inputs.q, layer=2)[0].any()
