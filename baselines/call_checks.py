"""Checks that the dense baselines share: the memory of a plan, the cache, and a run()'s tensors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deft.kv_cache import PagedKVCache
from deft.shape import torch_dtype
from deft.tree import DecodeTree, LongArray

MEMORY_LIMIT_BYTES = 16 << 30  # what a dense method may take beside the KV cache


def memory_reason(what: str, num_bytes: int) -> str | None:
    """Why a method is unsupported when its own buffers would take num_bytes, or None."""
    if num_bytes <= MEMORY_LIMIT_BYTES:
        return None
    limit = MEMORY_LIMIT_BYTES >> 30
    return f"{what} would take {num_bytes / 2**30:.1f} GiB, limit {limit} GiB; use a smaller tree"


def tree_slots(
    tree: DecodeTree, cache: PagedKVCache, nodes: npt.NDArray[np.int64] | None
) -> LongArray:
    """int64 [num_tokens]: pool slot of every token, in node order.

    Args:
        nodes: cache handle of each tree node; default 0..num_nodes-1.

    Raises:
        ValueError: the cache does not hold these nodes with the tree's lengths.
    """
    handles = np.arange(tree.num_nodes) if nodes is None else np.asarray(nodes, np.int64)
    if len(handles) != tree.num_nodes:
        raise ValueError(f"nodes has {len(handles)} handles for {tree.num_nodes} nodes")
    indptr, slots = cache.slots(handles)
    wrong = np.flatnonzero(np.diff(indptr) != tree.node_len)
    if wrong.size:
        bad = int(wrong[0])
        raise ValueError(
            f"node {bad} holds {indptr[bad + 1] - indptr[bad]} tokens in the cache and "
            f"{tree.node_len[bad]} in the tree; write the tree to the cache first"
        )
    return slots


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
    shape = cache.shape
    if not 0 <= layer < len(cache.k_cache):
        raise ValueError(f"layer must be in 0..{len(cache.k_cache) - 1}, got {layer}")
    rows = (tree.num_qo, shape.num_qo_heads)
    dtype = torch_dtype(shape.dtype)
    wanted = [
        ("q", q, (*rows, shape.head_dim), dtype),
        ("out", out, (*rows, shape.head_dim), dtype),
    ]
    for name, tensor, size, kind in (*wanted, ("lse", lse, rows, torch.float32)):
        if tensor is None:
            continue
        if (tuple(tensor.shape), tensor.dtype, tensor.device) != (size, kind, cache.device):
            raise ValueError(
                f"{name} must be {list(size)} {kind} on {cache.device}, "
                f"got {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
