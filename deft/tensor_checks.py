"""Checks of what users pass: each refuses with one line saying what was got and what is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deft.kv_cache import PagedKVCache
from deft.shape import torch_dtype
from deft.tree import DecodeTree


def check_sm_scale(sm_scale: float | None) -> None:
    """Positive and finite, or None."""
    if sm_scale is None:
        return
    if not isinstance(sm_scale, int | float | np.number) or not 0.0 < sm_scale < float("inf"):
        raise ValueError(f"sm_scale must be a positive number or None, got {sm_scale!r}")


def check_headroom(headroom: int) -> None:
    """Whole and not negative."""
    if not isinstance(headroom, int | np.integer) or headroom < 0:
        raise ValueError(f"headroom must be an integer >= 0, got {headroom!r}")


def check_tensor(name: str, x: Any, want: Sequence[int], dtype: Any, device: Any) -> None:
    """A tensor of this shape, dtype and device."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
    if tuple(x.shape) != tuple(want):
        raise ValueError(f"{name} must have shape {list(want)}, got {list(x.shape)}")
    if x.dtype != dtype or x.device != device:
        raise ValueError(f"{name} must be {dtype} on {device}, got {x.dtype} on {x.device}")


def check_run(
    tree: DecodeTree,
    cache: PagedKVCache,
    q: Tensor,
    layer: int,
    out: Tensor | None,
    lse: Tensor | None,
    *,
    contiguous: bool = False,
) -> None:
    """The arguments of an attention kernel's run() against what it planned for.

    Args:
        q: wanted [num_qo, num_qo_heads, head_dim] in the cache's dtype and device, contiguous in
            head_dim.
        layer: wanted in 0..num_layers-1.
        out: like q, or None.
        lse: wanted fp32 [num_qo, num_qo_heads], contiguous, or None.
        contiguous: q and out have to be contiguous as a whole.

    Raises:
        ValueError: what was got and what is wanted.
    """
    shape = cache.shape
    want = (tree.num_qo, shape.num_qo_heads, shape.head_dim)
    dtype = torch_dtype(shape.dtype)
    for name, x in (("q", q), *((("out", out),) if out is not None else ())):
        check_tensor(name, x, want, dtype, cache.device)
        if contiguous and not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {x.stride()}")
        if name == "out" and any(
            stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)
        ):
            raise ValueError(f"out must not share elements between rows, got strides {x.stride()}")
        if x.numel() and x.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in head_dim, got strides {x.stride()}")
    if lse is not None:
        check_tensor("lse", lse, want[:2], torch.float32, cache.device)
        if not lse.is_contiguous():
            raise ValueError(f"lse must be contiguous, got strides {lse.stride()}")
    if not isinstance(layer, int | np.integer) or not 0 <= layer < len(cache.k_cache):
        raise ValueError(f"layer must be in 0..{len(cache.k_cache) - 1}, got {layer!r}")
