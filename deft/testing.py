"""Inputs, error measures and checks, for the tests and for anyone who adds a kernel.

Inputs are quantised to the working dtype first, so the fp64 oracle and the kernel see the same
numbers. Errors are taken per (query, head) row, because a whole-tensor measure hides a lost tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deft.kv_cache import PagedKVCache
from deft.shape import HeadShape, torch_dtype
from deft.tree import DecodeTree

LIMITS = {"float16": 1e-3, "bfloat16": 4e-3, "float32": 1e-5, "float64": 1e-10}


@dataclass(frozen=True)
class Inputs:
    """q [num_qo, num_qo_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim], node order."""

    q: Tensor
    k: Tensor
    v: Tensor


def make_inputs(
    tree: DecodeTree,
    shape: HeadShape,
    seed: int = 0,
    device: str | torch.device = "cpu",
    q_scale: float = 1.0,
) -> Inputs:
    """Standard normal q, k, v, rounded to shape.dtype; q_scale sharpens the softmax."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = torch_dtype(shape.dtype)

    def draw(rows: int, heads: int) -> Tensor:
        return torch.randn(
            (rows, heads, shape.head_dim), generator=generator, device=device, dtype=torch.float32
        )

    q = (draw(tree.num_qo, shape.num_qo_heads) * q_scale).to(dtype)
    k = draw(tree.num_tokens, shape.num_kv_heads).to(dtype)
    v = draw(tree.num_tokens, shape.num_kv_heads).to(dtype)
    return Inputs(q, k, v)


def make_cache(
    tree: DecodeTree,
    shape: HeadShape,
    inputs: Inputs,
    page_size: int = 1,
    num_layers: int = 1,
    device: str | torch.device = "cpu",
    poison: bool = False,
    spare_pages: int = 0,
    scatter_seed: int | None = None,
) -> PagedKVCache:
    """A cache that holds the tree, with the inputs' K and V written to every layer.

    Args:
        poison: fill every slot the tree does not own with NaN, so that an over-read shows.
        spare_pages: pages left free, for growth.
        scatter_seed: shuffle the free pages first, so that nodes are physically scattered.
    """
    pages = int((-(-tree.node_len.astype(np.int64) // page_size)).sum()) + spare_pages
    cache = PagedKVCache(
        shape, max(pages, 1), page_size, num_layers=num_layers, device=device, poison=poison
    )
    if scatter_seed is not None:
        cache.shuffle_free_pages(scatter_seed)
    handles = cache.insert_tree(tree)
    for layer in range(num_layers):
        cache.write(handles, inputs.k, inputs.v, layer)
    return cache


def row_rms_error(o: Tensor, ref: Tensor) -> float:
    """Worst relative RMS error over (query, head) rows: RMS(o - ref) / RMS(ref); NaN counts as
    inf."""
    if not o.numel():
        return 0.0
    diff = (o.double() - ref.double()).square().mean(-1).sqrt()
    size = ref.double().square().mean(-1).sqrt()
    error = torch.where(
        size > 0, diff / size.clamp_min(1e-300), torch.where(diff == 0, 0.0, torch.inf)
    )
    return float(torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf).max())


def max_abs_error(o: Tensor, ref: Tensor) -> float:
    """Largest absolute element error; NaN counts as inf."""
    if not o.numel():
        return 0.0
    return float(torch.nan_to_num((o.double() - ref.double()).abs(), nan=torch.inf).max())


def assert_close(o: Tensor, ref: Tensor, dtype: str) -> None:
    """Row RMS check against the dtype's limit.

    Raises:
        AssertionError: the worst row is over the limit.
    """
    error = row_rms_error(o, ref)
    if not error <= LIMITS[dtype]:
        raise AssertionError(
            f"worst row RMS error {error:.3e} is over the {dtype} limit {LIMITS[dtype]:.0e}"
        )


def assert_lse_close(lse: Tensor, ref: Tensor, dtype: str) -> None:
    """LSE check: equal infinities, absolute error within 10x the dtype's row limit (at least 1e-4).

    Raises:
        AssertionError: an entry is over the limit.
    """
    limit = max(10 * LIMITS[dtype], 1e-4)
    lse, ref = lse.double(), ref.double()
    if not torch.equal(torch.isinf(lse), torch.isinf(ref)):
        raise AssertionError("lse is infinite for other rows than the reference")
    finite = torch.isfinite(ref)
    error = float((lse[finite] - ref[finite]).abs().max()) if bool(finite.any()) else 0.0
    if not error <= limit:
        raise AssertionError(f"lse error {error:.3e} is over {limit:.0e}")


def mass_error(lse: Tensor, tree: DecodeTree) -> float:
    """With q = 0 every visible token weighs the same, so lse = ln(visible tokens).

    Returns:
        The worst |lse - ln(visible)| x visible; one lost or doubled token gives about 1, and a
        right kernel stays below 0.5 up to about 30k tokens.
    """
    if not tree.num_qo:
        return 0.0
    seen = torch.from_numpy(tree.query_kv_len).to(lse.device).double()[:, None]
    expected = seen.log()
    empty = (seen == 0).expand_as(lse)
    if not bool((lse[empty] == -torch.inf).all()):
        return float("inf")
    error = ((lse.double() - expected).abs() * seen)[~empty]
    return float(torch.nan_to_num(error, nan=torch.inf).max()) if error.numel() else 0.0


def assert_mass(
    o: Tensor, lse: Tensor | None, k: Tensor, v: Tensor, tree: DecodeTree, dtype: str
) -> None:
    """The q = 0 check: lse = ln(visible) to half a token, o = mean of the visible V.

    Args:
        o, lse: a kernel's result for q = 0 (lse None: only the mean is checked).
        k, v: node order, as given to the kernel.

    Raises:
        AssertionError: a token was lost, doubled or invented.
    """
    from deft.reference import reference_attention

    if lse is not None:
        error = mass_error(lse, tree)
        if not error < 0.5:
            raise AssertionError(f"mass check: the worst query is off by {error:.2f} tokens")
    ref, _ = reference_attention(torch.zeros_like(o), torch.zeros_like(k), v, tree)
    # The mean of n normal values has RMS 1/sqrt(n) per element, so rounding is compared with V
    # itself.
    worst = max_abs_error(o, ref)
    limit = 4 * LIMITS[dtype]
    if not worst <= limit:
        raise AssertionError(
            f"mass check: o is off the mean of V by {worst:.3e}, limit {limit:.0e}"
        )
