"""AttentionKernel: what every kernel of the benchmark looks like; when our Triton kernels run."""

from __future__ import annotations

import os
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from deft.io_model import IOBytes
from deft.kv_cache import PagedKVCache
from deft.shape import HeadShape
from deft.tree import DecodeTree


@runtime_checkable
class AttentionKernel(Protocol):
    """A kernel of the benchmark: one Python file with such a class, and one conf/kernel/NAME.yaml.

    After plan() a kernel also tells, as attributes: path (which code really runs), kv_layout
    ("shared", "page_1_view" or "own_copy"), layout_us and layout_bytes (the cost of an own copy),
    plan_upload_bytes, workspace_bytes, and capturable (run() may be recorded in a CUDA graph).
    """

    name: str

    def unsupported(
        self, shape: HeadShape, tree: DecodeTree, page_size: int, device: torch.device | str
    ) -> str | None:
        """Why this kernel cannot run here, in one line; None when it can."""

    def io(self, tree: DecodeTree, shape: HeadShape, page_size: int) -> IOBytes:
        """Counted IO of one run(); needs no library, GPU or pool."""

    def plan(self, tree: DecodeTree, cache: PagedKVCache) -> None:
        """Everything done once a decoding step, on the host or the device."""

    def run(
        self, q: Tensor, layer: int = 0, *, out: Tensor | None = None, lse: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """One layer: (o, lse); no host synchronisation, static buffers."""


def under_interpreter() -> bool:
    """True when Triton kernels run in Triton's interpreter (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def triton_unsupported(shape: HeadShape, device: torch.device | str) -> str | None:
    """Why our Triton kernels cannot run for a shape on a device; None when they can."""
    on_gpu = torch.device(device).type == "cuda"
    if shape.dtype == "float64":
        return (
            "our Triton kernels take float16, bfloat16 and float32; use backend=torch for float64"
        )
    if not on_gpu and not under_interpreter():
        return (
            "Triton on CPU tensors runs only in its interpreter: set TRITON_INTERPRET=1 before "
            "Python starts, or use backend=torch"
        )
    if under_interpreter() and shape.dtype == "bfloat16":
        return "Triton's interpreter computes bfloat16 wrongly; use float16, or backend=torch"
    try:
        import triton  # noqa: F401
    except ImportError:
        return 'the triton package is missing: pip install "triton>=3.6", or use backend=torch'
    return None
