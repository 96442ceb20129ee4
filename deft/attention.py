"""AttentionKernel, what every kernel of the benchmark looks like; TreeAttention, a planner run by
our executors; tree_attention(), one call from tensors to output.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from deft.bound_plan import BoundPlan
from deft.device_model import DeviceModel, predict_us
from deft.io_model import IOBytes
from deft.kernel_protocol import AttentionKernel, triton_unsupported, under_interpreter
from deft.kv_cache import PagedKVCache
from deft.plan import Plan
from deft.planners import check_options, plan_tree
from deft.shape import HeadShape, dtype_name
from deft.tensor_checks import check_headroom, check_run, check_sm_scale, check_tensor
from deft.tree import DecodeTree

__all__ = ["AttentionKernel", "TreeAttention", "tree_attention"]
BACKENDS = ("auto", "torch", "triton")
_OUT_OF_SCOPE = {
    "logits_soft_cap": "logits soft-cap",
    "window_left": "sliding-window attention",
    "sliding_window": "sliding-window attention",
    "sinks": "attention sinks",
    "k_scale": "fp8 caches",
    "v_scale": "fp8 caches",
}


class TreeAttention:
    """A planner and the executor that runs its plans.

    Args:
        planner: a key of `deft.planners.PLANNERS`.
        name: kernel id shown in tables; default: the planner.
        backend: "triton", "torch", or "auto" (triton where it can run at full speed, else torch).
        sm_scale: multiplies q . k, positive; default head_dim ** -0.5.
        headroom: tokens that each open run may grow by advance() before a replan.
        device_model: name or JSON path of the GPU to plan for (its SM count); default: 132 SMs.
        planner_options: the planner's own (block_kv, query_cap, split_len, tile, partial_dtype).

    Raises:
        ValueError: an unknown planner, option or backend, or a feature that is out of scope.
    """

    kv_layout = "shared"
    layout_us = 0.0
    layout_bytes = 0

    def __init__(
        self,
        planner: str = "flatten",
        *,
        name: str | None = None,
        backend: str = "auto",
        sm_scale: float | None = None,
        headroom: int = 64,
        device_model: str | None = None,
        **planner_options: Any,
    ) -> None:
        for option, feature in _OUT_OF_SCOPE.items():
            if planner_options.pop(option, None) is not None:
                raise ValueError(f"{option}: {feature} is out of scope of this project")
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
        check_options(planner, planner_options)
        check_sm_scale(sm_scale)
        check_headroom(headroom)
        self.planner, self.backend, self.sm_scale = planner, backend, sm_scale
        self.name = name or planner
        self.headroom = headroom
        self.options = planner_options
        self.device_model = DeviceModel.load(device_model) if device_model else None
        self._bound: BoundPlan | None = None
        self._counted: tuple[DecodeTree, HeadShape, Plan] | None = None

    # ---- before a run ------------------------------------------------------------------------
    def _resolved_backend(self, shape: HeadShape, device: torch.device | str) -> str:
        if self.backend != "auto":
            return self.backend
        full_speed = torch.device(device).type == "cuda" and not under_interpreter()
        return "triton" if full_speed and triton_unsupported(shape, device) is None else "torch"

    def unsupported(
        self, shape: HeadShape, tree: DecodeTree, page_size: int, device: torch.device | str
    ) -> str | None:
        """See AttentionKernel."""
        if self._resolved_backend(shape, device) == "triton":
            reason = triton_unsupported(shape, device)
            if reason:
                return reason
        try:
            self._plan_of(tree, shape)
        except ValueError as error:
            return str(error)
        return None

    def _plan_of(self, tree: DecodeTree, shape: HeadShape) -> Plan:
        """The plan of a tree; the last one is kept, so that io() after plan() costs nothing."""
        if self._counted and self._counted[0] is tree and self._counted[1] == shape:
            return self._counted[2]
        plan = plan_tree(tree, shape, self.planner, self.device_model, **self.options)
        self._counted = (tree, shape, plan)
        return plan

    def io(self, tree: DecodeTree, shape: HeadShape, page_size: int) -> IOBytes:
        """See AttentionKernel; counted from the plan, the same for every page size."""
        return self._plan_of(tree, shape).io()

    def predict_us(
        self, tree: DecodeTree, shape: HeadShape, page_size: int, device: DeviceModel
    ) -> float:
        """Modelled latency of one run() on a GPU, in microseconds."""
        plan = self._plan_of(tree, shape)
        return predict_us(
            plan.io(),
            plan.padded_flops,
            device,
            plan.num_ctas,
            plan.num_launches,
            longest_turns=int(plan.item_turns.max()) if plan.num_items else 0,
        )

    # ---- plan and run ------------------------------------------------------------------------
    def plan(
        self, tree: DecodeTree, cache: PagedKVCache, nodes: npt.NDArray[Any] | None = None
    ) -> None:
        """Plan and bind: everything that a decoding step does once.

        Args:
            nodes: int64 [num_nodes], cache handle of each tree node; default 0..num_nodes-1.

        Raises:
            ValueError: the planner cannot serve the shape, or the cache does not hold the tree.
        """
        plan = plan_tree(tree, cache.shape, self.planner, self.device_model, **self.options)
        self._counted = (tree, cache.shape, plan)
        backend = self._resolved_backend(cache.shape, cache.device)
        reason = triton_unsupported(cache.shape, cache.device) if backend == "triton" else None
        if reason:
            raise ValueError(reason)
        self._backend = backend
        self._bound = plan.bind(cache, nodes, self.headroom)
        self._out: Tensor | None = None

    def advance(self) -> bool:
        """Take up appended tokens without a replan; see BoundPlan.advance."""
        return self.bound.advance()

    @property
    def bound(self) -> BoundPlan:
        """The bound plan.

        Raises:
            ValueError: plan() was not called.
        """
        if self._bound is None:
            raise ValueError(f"kernel {self.name}: call plan(tree, cache) before run(q)")
        return self._bound

    def run(
        self, q: Tensor, layer: int = 0, *, out: Tensor | None = None, lse: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of one layer over the planned tree.

        Args:
            q: [num_qo, num_qo_heads, head_dim], the cache's dtype and device.
            layer: layer of the cache.
            out: buffer like q to write; default: one kept buffer, rewritten by each run.
            lse: fp32 [num_qo, num_qo_heads] to fill with the natural-log LSE; None: not computed.

        Returns:
            (out, lse); a query that sees nothing gets o = 0, lse = -inf.

        Raises:
            ValueError: a shape, dtype, device or layout other than the above.
        """
        bound = self.bound
        check_run(bound.plan.tree, bound.cache, q, layer, out, lse)
        if out is None:
            if self._out is None:
                self._out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            out = self._out
        scale = bound.plan.shape.head_dim**-0.5 if self.sm_scale is None else self.sm_scale
        if self._backend == "torch":
            from deft.executor import run_torch

            run_torch(bound, q, layer, out, lse, scale)
        else:
            from deft.kernels.merge import launch_merge
            from deft.kernels.partial import launch_partials

            launch_partials(bound, q, layer, out, lse, scale)
            launch_merge(bound, out, lse)
        return out, lse

    # ---- what a row tells --------------------------------------------------------------------
    @property
    def path(self) -> str:
        """The code that runs."""
        if self._bound is None:
            return ""
        return "torch executor" if self._backend == "torch" else "triton two-stage"

    @property
    def capturable(self) -> bool:
        """True when run() may be recorded in a CUDA graph."""
        return self._bound is not None and self._backend == "triton"

    @property
    def plan_upload_bytes(self) -> int:
        """Bytes that plan() sent to the device."""
        return self.bound.upload_bytes

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the partial outputs and LSEs."""
        return self.bound.plan.workspace_bytes


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tree: DecodeTree,
    sm_scale: float | None = None,
    strategy: str = "flatten",
    backend: str = "auto",
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of every query over the nodes on its path, in one call.

    For a decoding loop keep a PagedKVCache and a TreeAttention instead: this copies k and v and
    plans each time.

    Args:
        q: [num_qo, num_qo_heads, head_dim].
        k, v: [tree.num_tokens, num_kv_heads, head_dim], in node order; q's dtype and device.
        tree: who attends to what.
        sm_scale: multiplies q . k; default head_dim ** -0.5.
        strategy: a planner's name.
        backend: "auto", "torch" or "triton".
        return_lse: also return the natural-log LSE, fp32 [num_qo, num_qo_heads].
        options: the planner's own.

    Returns:
        o like q, or (o, lse).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, or an unknown strategy.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 3:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor [rows, heads, head_dim], got {got}")
    if not isinstance(tree, DecodeTree):
        raise ValueError(f"tree must be a DecodeTree, got {type(tree).__name__}")
    shape = HeadShape(q.shape[1], k.shape[1], q.shape[2], dtype_name(q.dtype))
    check_tensor("q", q, (tree.num_qo, q.shape[1], q.shape[2]), q.dtype, q.device)
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x, (tree.num_tokens, k.shape[1], q.shape[2]), q.dtype, q.device)
    kernel = TreeAttention(strategy, backend=backend, sm_scale=sm_scale, **options)
    reason = kernel.unsupported(shape, tree, 1, q.device)
    if reason:
        raise ValueError(reason)
    cache = PagedKVCache(shape, max(tree.num_tokens, 1), 1, device=q.device)
    cache.write(cache.insert_tree(tree), k, v)
    kernel.plan(tree, cache)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
    o, lse = kernel.run(
        q.contiguous(), out=torch.empty(q.shape, dtype=q.dtype, device=q.device), lse=lse
    )
    return (o, lse) if lse is not None else o
