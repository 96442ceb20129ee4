"""The gate: no latency without a right output.

Layer 0 of the pool holds the K and V that are timed; its output is compared with the fp64 oracle,
row by row. Layer 1 is a census: with q = 0 every visible token weighs the same, and V is one-hot
(token t points at dimension t mod head_dim), so the output times the number of visible tokens
counts them. One token lost, doubled or read by mistake is off by one in its dimension, where a
comparison of random values is blind. Every slot that the tree does not own holds NaN, and outputs
start as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deft.kv_cache import PagedKVCache
from deft.reference import reference_attention
from deft.shape import HeadShape
from deft.testing import (
    LIMITS,
    Inputs,
    assert_lse_close,
    make_cache,
    make_inputs,
    mass_error,
    max_abs_error,
    row_rms_error,
)
from deft.tree import DecodeTree

SPARE_PAGES = 16
ORACLE_LAYER, CENSUS_LAYER = 0, 1
# |lse - ln(visible)| x visible is fp32 rounding noise beyond this many visible tokens.
MASS_MAX_VISIBLE = 30_000
# Half a unit in the last place, relative: what rounding may do to a count.
_ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-20, "float64": 2**-40}


@dataclass(frozen=True)
class Verdict:
    """What the gate found; reason is None for a right kernel."""

    reason: str | None
    row_rms_err: float | None = None
    max_abs_err: float | None = None


@dataclass(frozen=True)
class Case:
    """One tree with its inputs, pool and oracle; shared by all kernels of a point."""

    tree: DecodeTree
    shape: HeadShape
    inputs: Inputs
    cache: PagedKVCache

    @cached_property
    def reference(self) -> tuple[Tensor, Tensor]:
        """The oracle's (o, lse) in fp64."""
        return reference_attention(self.inputs.q, self.inputs.k, self.inputs.v, self.tree)

    @cached_property
    def census(self) -> Tensor:
        """fp64 [num_qo, head_dim]: visible tokens that point at each dimension."""
        counts = _visible_counts(self.tree, self.shape.head_dim)
        return torch.from_numpy(counts).to(self.cache.device)

    def fresh_tree(self) -> DecodeTree:
        """The tree without anything derived from it, as a new decoding step would bring it."""
        tree = self.tree
        return DecodeTree(tree.parent, tree.node_len, tree.query_node, tree.query_len)


def _spread(start: np.ndarray, length: np.ndarray, dims: int) -> np.ndarray:
    """[rows, dims]: how many of the tokens start .. start + length - 1 are t mod dims, per t."""
    offset = (np.arange(dims)[None, :] - start[:, None]) % dims
    counts: np.ndarray = np.maximum(0, -(-(length[:, None] - offset) // dims))
    return counts


def _visible_counts(tree: DecodeTree, dims: int) -> np.ndarray:
    counts = _spread(tree.node_start, tree.node_len.astype(np.int64), dims)
    own = counts.copy()
    for level in range(1, int(tree.depth.max(initial=0)) + 1):
        nodes = np.flatnonzero(tree.depth == level)
        counts[nodes] += counts[tree.parent[nodes]]
    seen = counts[tree.query_node].astype(np.float64)
    if tree.query_len is not None:
        start = tree.node_start[tree.query_node]
        seen += _spread(start, tree.query_len.astype(np.int64), dims) - own[tree.query_node]
    return seen


def make_case(
    tree: DecodeTree,
    shape: HeadShape,
    page_size: int = 1,
    seed: int = 0,
    device: torch.device | str = "cpu",
    scatter_seed: int | None = None,
) -> Case:
    """Inputs and a poisoned two-layer pool for a tree.

    Args:
        scatter_seed: shuffle the pool's pages first, so that nodes are physically scattered.
    """
    inputs = make_inputs(tree, shape, seed, device)
    cache = make_cache(
        tree,
        shape,
        inputs,
        page_size,
        num_layers=2,
        device=device,
        poison=True,
        spare_pages=SPARE_PAGES,
        scatter_seed=scatter_seed,
    )
    one_hot = torch.zeros_like(inputs.v)
    tokens = torch.arange(tree.num_tokens, device=inputs.v.device)
    one_hot[tokens, :, tokens % shape.head_dim] = 1
    cache.write(np.arange(tree.num_nodes), inputs.k, one_hot, CENSUS_LAYER)
    return Case(tree, shape, inputs, cache)


def _poisoned_run(kernel: Any, q: Tensor, layer: int) -> tuple[Tensor, Tensor | None, str | None]:
    """(o, lse, what run() did to the buffers that it must not do, or None)."""
    kept = q.clone()
    out = torch.full_like(q, torch.nan)
    lse = torch.full(q.shape[:2], torch.nan, dtype=torch.float32, device=q.device)
    o, lse_out = kernel.run(q, layer, out=out, lse=lse)
    if q.is_cuda:
        torch.cuda.synchronize(q.device)
    reason = None
    if not torch.equal(q, kept):
        q.copy_(kept)  # the kernels after this one get the same inputs
        reason = "run() writes to q"
    elif o.data_ptr() != out.data_ptr():
        reason = "run() does not write into the out that it is given"
    elif lse_out is not None and lse_out.data_ptr() != lse.data_ptr():
        reason = "run() does not write into the lse that it is given"
    return o, lse_out, reason


def _census_reason(o: Tensor, lse: Tensor | None, case: Case) -> str | None:
    visible = torch.from_numpy(case.tree.query_kv_len).to(o.device).double()
    found = o.double() * visible[:, None, None]
    expected = case.census[:, None, :]
    limit = torch.clamp(4 * _ROUNDING[case.shape.dtype] * expected, min=0.5)
    excess = torch.nan_to_num((found - expected).abs() / limit, nan=torch.inf)
    if excess.numel() and not bool(excess.max() < 1):
        query = int(excess.amax((1, 2)).argmax())
        return f"census: query {query} does not read exactly its visible tokens"
    if lse is not None and int(case.tree.query_kv_len.max(initial=0)) <= MASS_MAX_VISIBLE:
        error = mass_error(lse, case.tree)
        if not error < 0.5:
            return f"mass: exp(lse) of the worst query is off by {error:.2f} tokens"
    return None


def check_kernel(kernel: Any, case: Case) -> Verdict:
    """Run a planned kernel on a case and compare it with the oracle and the census.

    Args:
        kernel: an AttentionKernel after plan(case.tree, case.cache).

    Returns:
        The verdict; errors of the kernel itself are raised, not judged.
    """
    o, lse, misuse = _poisoned_run(kernel, case.inputs.q, ORACLE_LAYER)
    if o.shape != case.inputs.q.shape or o.dtype != case.inputs.q.dtype:
        want = f"{list(case.inputs.q.shape)} {case.inputs.q.dtype}"
        return Verdict(f"o is {list(o.shape)} {o.dtype}, want {want}")
    ref_o, ref_lse = case.reference
    rms, worst = row_rms_error(o, ref_o), max_abs_error(o, ref_o)
    limit = LIMITS[case.shape.dtype]
    if not rms <= limit:
        reason = f"worst row RMS error {rms:.2e} is over the {case.shape.dtype} limit {limit:.0e}"
        return Verdict(reason, rms, worst)
    if lse is not None:
        try:
            assert_lse_close(lse, ref_lse, case.shape.dtype)
        except AssertionError as error:
            return Verdict(str(error), rms, worst)
    if misuse:
        return Verdict(misuse, rms, worst)
    o, lse, misuse = _poisoned_run(kernel, torch.zeros_like(case.inputs.q), CENSUS_LAYER)
    return Verdict(misuse or _census_reason(o, lse, case), rms, worst)
