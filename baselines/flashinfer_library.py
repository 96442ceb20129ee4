"""What the FlashInfer adapters share: the library, its limits, rows and pools in its terms.

FlashInfer (Ye et al., "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference
Serving", 2025) addresses KV by pages. A tree's nodes end anywhere in a page, which its tables
cannot say, so the pool is viewed at page size 1 (no copy; `kv_layout` page_1_view where the pool's
pages are larger). Its LSEs are of base 2. Kernels are compiled at first use (30-90 s each) and kept
in FLASHINFER_WORKSPACE_BASE.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
from abc import abstractmethod
from functools import cache as memoize
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baselines.baseline import Baseline
from baselines.requests import Requests
from deft.kv_cache import PagedKVCache
from deft.shape import HeadShape, torch_dtype
from deft.tree import DecodeTree, LongArray

LN_2 = math.log(2)
CHECKED_VERSION = "0.7.4"  # the one whose rules io() counts, and whose calls these adapters use
PIP = 'pip install -e ".[flashinfer]"'
WORKSPACE_BYTES = 128 << 20  # what the library's documentation recommends
NUM_SMS = 132  # of the GPU whose cuts io() counts; more SMs cut K and V finer


@memoize
def library() -> Any:
    """The flashinfer module.

    Raises:
        ImportError: it is not there, or does not load.
    """
    return importlib.import_module("flashinfer")


@memoize
def library_reason() -> str | None:
    """Why FlashInfer cannot be used here, or None."""
    if importlib.util.find_spec("flashinfer") is None:
        return f"FlashInfer is not installed: {PIP}"
    version = importlib.metadata.version("flashinfer-python")
    if version.split(".")[:2] != CHECKED_VERSION.split(".")[:2]:
        return f"FlashInfer {version} is installed, these adapters know {CHECKED_VERSION}: {PIP}"
    try:
        library()
    except Exception as error:  # a library that raises anything at import is a reason, not a crash
        return f"FlashInfer does not load: {type(error).__name__}: {error}"
    return None


def int32(values: LongArray, device: torch.device | str = "cpu") -> Tensor:
    """An int32 tensor of indices or an indptr."""
    return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device)


class FlashInferBaseline(Baseline):
    """Checks and conversions around one FlashInfer wrapper.

    Args:
        name: kernel id in the result rows.
        sm_scale: multiplies q . k; default head_dim ** -0.5.
    """

    capturable = True
    head_dims: tuple[int, ...] = (64, 128, 256)

    def __init__(self, name: str, sm_scale: float | None = None) -> None:
        super().__init__(name, sm_scale)
        self._wrappers: dict[Any, Any] = {}  # kept between plans, as a server keeps them

    def unsupported(
        self, shape: HeadShape, tree: DecodeTree, page_size: int, device: torch.device | str
    ) -> str | None:
        """A reason without a GPU or the library, or for what its kernels do not take."""
        if torch.device(device).type != "cuda":
            return "FlashInfer needs a CUDA GPU"
        reason = library_reason()
        if reason:
            return reason
        if shape.dtype not in ("float16", "bfloat16"):
            return f"FlashInfer takes float16 and bfloat16, not {shape.dtype}"
        if shape.head_dim not in self.head_dims:
            return f"FlashInfer has head_dim {self.head_dims}, not {shape.head_dim}"
        return self._limit(shape, tree)

    @abstractmethod
    def _limit(self, shape: HeadShape, tree: DecodeTree) -> str | None:
        """A reason of this wrapper's own, or None."""

    def _version(self) -> str:
        return f"flashinfer {library().__version__}"

    # ---- once a step -------------------------------------------------------------------------
    def _workspace(self, device: torch.device, num_bytes: int = WORKSPACE_BYTES) -> Tensor:
        """The float workspace that this kernel's wrappers share; zeros at first, as it asks."""
        kept = self._wrappers.get("workspace")
        if kept is None or kept.numel() < num_bytes:
            kept = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._wrappers = {"workspace": kept}
        self.workspace_bytes = kept.numel()
        return kept  # type: ignore[no-any-return]

    def _take_pools(self, cache: PagedKVCache) -> None:
        """Each layer's (K, V) at page size 1."""
        shape = cache.shape
        size = (-1, 1, shape.num_kv_heads, shape.head_dim)
        pairs = zip(cache.k_cache, cache.v_cache, strict=True)
        self._pools = [(k.view(size), v.view(size)) for k, v in pairs]
        self.kv_layout = "shared" if cache.page_size == 1 else "page_1_view"

    def _take_order(self, tree: DecodeTree, cache: PagedKVCache) -> None:
        """Rows of requests are those of query_order: where that is not q's own, q is moved."""
        self._order = None
        if is_moved(tree):
            order = tree.query_order.astype(np.int64)
            self._order = torch.from_numpy(order).to(cache.device)
            size = (tree.num_qo, cache.shape.num_qo_heads, cache.shape.head_dim)
            make = {"dtype": torch_dtype(cache.shape.dtype), "device": cache.device}
            self._q, self._o = torch.empty(size, **make), torch.empty(size, **make)
            self.plan_upload_bytes += order.nbytes

    def _page_table(
        self, req: Requests, slots: LongArray, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(indptr, indices, last page lengths) of a batch; the indptrs are read on the host."""
        indices = int32(slots[req.tokens], device)
        return int32(req.kv_indptr), indices, int32(np.minimum(req.kv_len, 1))

    def _planned(self, cache: PagedKVCache) -> dict[str, Any]:
        """What every plan() of the library is told."""
        dtype = torch_dtype(cache.shape.dtype)
        return {"q_data_type": dtype, "kv_data_type": dtype, "sm_scale": self.sm_scale}

    # ---- once a layer ------------------------------------------------------------------------
    def _rows_of(self, q: Tensor) -> Tensor:
        if self._order is None:
            return q
        return torch.index_select(q, 0, self._order, out=self._q)

    def _give(self, o: Tensor, o_lse: Tensor | None, out: Tensor, lse: Tensor | None) -> Tensor:
        """Rows back in q's order, the LSE to base e."""
        if self._order is None:
            if o is not out:
                out.copy_(o)
            if lse is not None and o_lse is not None:
                torch.mul(o_lse, LN_2, out=lse)
        else:
            out.index_copy_(0, self._order, o)
            if lse is not None and o_lse is not None:
                lse.index_copy_(0, self._order, o_lse * LN_2)
        return out


def is_moved(tree: DecodeTree) -> bool:
    """True where q is not in depth-first order, so that its rows are moved and moved back."""
    order = tree.query_order
    return bool((order[1:] < order[:-1]).any())
