"""Checks of what users pass: each refuses with one line saying what was got and what is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deft.bound_plan import BoundPlan
from deft.shape import torch_dtype


def check_sm_scale(sm_scale: float | None) -> None:
    """Positive and finite, or None."""
    if sm_scale is not None and not 0.0 < sm_scale < float("inf"):
        raise ValueError(f"sm_scale must be a positive number or None, got {sm_scale!r}")


def check_tensor(name: str, x: Any, want: Sequence[int], dtype: Any, device: Any) -> None:
    """A tensor of this shape, dtype and device."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
    if tuple(x.shape) != tuple(want):
        raise ValueError(f"{name} must have shape {list(want)}, got {list(x.shape)}")
    if x.dtype != dtype or x.device != device:
        raise ValueError(f"{name} must be {dtype} on {device}, got {x.dtype} on {x.device}")


def check_run(bound: BoundPlan, q: Tensor, layer: int, out: Tensor, lse: Tensor | None) -> None:
    """The arguments of TreeAttention.run against the bound plan."""
    shape, cache = bound.plan.shape, bound.cache
    want = (bound.plan.tree.num_qo, shape.num_qo_heads, shape.head_dim)
    dtype = torch_dtype(cache.shape.dtype)
    check_tensor("q", q, want, dtype, cache.device)
    check_tensor("out", out, want, dtype, cache.device)
    for name, x in (("q", q), ("out", out)):
        if x.numel() and x.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in head_dim, got strides {x.stride()}")
    if lse is not None:
        check_tensor("lse", lse, want[:2], torch.float32, cache.device)
        if not lse.is_contiguous():
            raise ValueError(f"lse must be contiguous, got strides {lse.stride()}")
    if not 0 <= layer < len(cache.k_cache):
        raise ValueError(f"layer must be in 0..{len(cache.k_cache) - 1}, got {layer}")
