"""The frame that the kernels of this folder share: checks, the kept output, what a row tells.

A kernel need not use it (docs/adding_a_kernel.md asks for four methods and no base class).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baselines.plan_checks import tree_slots
from baselines.tree_kv import TreeKV
from deft.device_model import DeviceModel
from deft.io_model import IOBytes
from deft.kv_cache import PagedKVCache
from deft.shape import HeadShape, torch_dtype
from deft.tensor_checks import check_run, check_sm_scale
from deft.tree import DecodeTree, LongArray


class Baseline(ABC):
    """An AttentionKernel but for what its method does once a step and once a layer.

    Args:
        name: kernel id in the result rows.
        sm_scale: multiplies q . k; default head_dim ** -0.5.

    Raises:
        ValueError: sm_scale is not positive and finite.
    """

    path = ""
    kv_layout = "shared"
    layout_us = 0.0
    layout_bytes = 0
    plan_upload_bytes = 0
    workspace_bytes = 0
    capturable = False
    returns_lse = True

    def __init__(self, name: str, sm_scale: float | None = None) -> None:
        check_sm_scale(sm_scale)
        self.name, self.sm_scale = name, sm_scale
        self._cache: PagedKVCache | None = None

    @abstractmethod
    def unsupported(
        self, shape: HeadShape, tree: DecodeTree, page_size: int, device: torch.device | str
    ) -> str | None:
        """See AttentionKernel."""

    @abstractmethod
    def io(self, tree: DecodeTree, shape: HeadShape, page_size: int) -> IOBytes:
        """See AttentionKernel; what plan() copies is layout_bytes, not this."""

    @abstractmethod
    def predict_us(
        self, tree: DecodeTree, shape: HeadShape, page_size: int, device_model: DeviceModel
    ) -> float:
        """Modelled latency of one run() on a GPU, in microseconds."""

    @abstractmethod
    def _plan(
        self, tree: DecodeTree, cache: PagedKVCache, slots: LongArray, nodes: LongArray
    ) -> None:
        """The method's own planning.

        Args:
            slots: int64 [num_tokens], pool slot of every token in node order.
            nodes: int64 [num_nodes], cache handle of every node.
        """

    @abstractmethod
    def _run(
        self, cache: PagedKVCache, q: Tensor, layer: int, out: Tensor, lse: Tensor | None
    ) -> Tensor:
        """The method's own layer: fill out, and lse where it is given; returns out.

        Another tensor may be returned in place of the kept buffer (`out is self._out`).
        """

    # ---- once a step -------------------------------------------------------------------------
    def plan(
        self, tree: DecodeTree, cache: PagedKVCache, nodes: npt.NDArray[np.int64] | None = None
    ) -> None:
        """Everything that a decoding step does once.

        Args:
            nodes: cache handle of each tree node; default 0..num_nodes-1.

        Raises:
            ValueError: the cache does not hold the tree, or unsupported() has a reason.
        """
        shape = cache.shape
        slots = tree_slots(tree, cache, nodes)
        reason = self.unsupported(shape, tree, cache.page_size, cache.device)
        if reason:
            raise ValueError(reason)
        self._cache = None  # a plan that fails half-way leaves none behind
        handles = np.arange(tree.num_nodes) if nodes is None else np.array(nodes, np.int64)
        self._plan(tree, cache, slots, handles)
        size = (tree.num_qo, shape.num_qo_heads, shape.head_dim)
        self._out = torch.empty(size, dtype=torch_dtype(shape.dtype), device=cache.device)
        self._is_blind = not tree.query_kv_len.any()
        self._tree, self._cache = tree, cache

    def _take(self, kv: TreeKV) -> None:
        """What a row tells of K and V: whose they are, and what a copy took."""
        self.kv_layout, self.layout_us = kv.kv_layout, kv.layout_us
        self.layout_bytes, self.plan_upload_bytes = kv.layout_bytes, kv.upload_bytes

    # ---- once a layer ------------------------------------------------------------------------
    @torch.no_grad()  # a kept output must not gather a graph
    def run(
        self, q: Tensor, layer: int = 0, *, out: Tensor | None = None, lse: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """One layer.

        Args:
            q: [num_qo, num_qo_heads, head_dim], contiguous, the cache's dtype and device.
            layer: layer of the cache.
            out: buffer like q to write; default: one kept buffer, rewritten by each run.
            lse: fp32 [num_qo, num_qo_heads] to fill with the natural-log LSE; None: not computed.
                Left alone by methods that know none (returns_lse is False).

        Returns:
            (out, lse); a query that sees nothing gets o = 0, lse = -inf.

        Raises:
            ValueError: run() before plan(), or a tensor that does not fit the plan.
        """
        cache = self._cache
        if cache is None:
            raise ValueError(f"kernel {self.name}: call plan(tree, cache) before run(q)")
        check_run(self._tree, cache, q, layer, out, lse, contiguous=True)
        out = self._out if out is None else out
        lse = lse if self.returns_lse else None
        if self._is_blind:
            return out.zero_(), None if lse is None else lse.fill_(-torch.inf)
        return self._run(cache, q, layer, out, lse), lse
