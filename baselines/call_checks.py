"""Checks that the dense baselines share: the tensors of a run() call and the memory of a plan."""

from __future__ import annotations

import torch
from torch import Tensor

from deft.kv_cache import PagedKVCache
from deft.shape import HeadShape, torch_dtype
from deft.tree import DecodeTree

MEMORY_LIMIT_BYTES = 16 << 30  # beyond this a dense method is no comparison any more


def memory_reason(what: str, num_bytes: int) -> str | None:
    """Why a method is unsupported when its own buffers would take num_bytes, or None."""
    if num_bytes <= MEMORY_LIMIT_BYTES:
        return None
    limit = MEMORY_LIMIT_BYTES >> 30
    return f"{what} would take {num_bytes / 2**30:.1f} GiB, limit {limit} GiB; use a smaller tree"


def check_planned(cache: PagedKVCache | None) -> PagedKVCache:
    """The cache of the last plan().

    Raises:
        ValueError: run() came before plan().
    """
    if cache is None:
        raise ValueError("run() was called before plan(); call plan(tree, cache) once a step")
    return cache


def check_plan(tree: DecodeTree, cache: PagedKVCache) -> None:
    """Refuse a cache that does not hold the tree as handles 0..num_nodes-1.

    Raises:
        ValueError: fewer nodes than the tree has.
    """
    if cache.num_nodes < tree.num_nodes:
        raise ValueError(
            f"the cache holds {cache.num_nodes} nodes, the tree has {tree.num_nodes}; "
            "insert the tree first"
        )


def check_call(
    q: Tensor,
    layer: int,
    tree: DecodeTree,
    cache: PagedKVCache,
    out: Tensor | None,
    lse: Tensor | None,
) -> None:
    """Refuse a call that the plan was not made for.

    Args:
        q: wanted contiguous [num_qo, num_qo_heads, head_dim] in the cache's dtype and device.
        layer: wanted in 0..num_layers-1.
        out: like q, or None.
        lse: wanted fp32 [num_qo, num_qo_heads], or None.

    Raises:
        ValueError: what was got and what is wanted.
    """
    shape: HeadShape = cache.shape
    if not 0 <= layer < cache.num_layers:
        raise ValueError(f"layer must be in 0..{cache.num_layers - 1}, got {layer}")
    rows = (tree.num_qo, shape.num_qo_heads)
    dtype = torch_dtype(shape.dtype)
    _check_tensor("q", q, (*rows, shape.head_dim), dtype, cache.device)
    if out is not None:
        _check_tensor("out", out, (*rows, shape.head_dim), dtype, cache.device)
    if lse is not None:
        _check_tensor("lse", lse, rows, torch.float32, cache.device)


def _check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    got = (tuple(tensor.shape), tensor.dtype, tensor.device)
    if got != (shape, dtype, device):
        raise ValueError(
            f"{name} must be {list(shape)} {dtype} on {device}, "
            f"got {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
