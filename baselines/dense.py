"""dense: every query on its own, in plain PyTorch. Slow, small, and right by inspection.

For each query: gather K and V of its path from the pool, take logits in fp32, subtract their
maximum, exponentiate, sum, multiply with V, divide. Nothing is shared between queries, and every
intermediate goes through memory; io() counts each of these passes, operation by operation:

    K, V      index_select (read + write), cast to fp32 unless fp32 (read + write), bmm (read)
    q         cast to fp32 unless fp32 (read + write), scale (read + write), bmm (read)
    logits    bmm (write), amax (read), sub (read + write), exp (read + write), sum (read), bmm (read)
    row sums  max and sum of a row: nine passes over one fp32 number
    out       bmm (write fp32), div (read fp32 + write)

fp64 inputs are computed in fp64 and skip the casts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from baselines.call_checks import check_call, check_plan, check_planned, memory_reason
from deft.device_model import DeviceModel, predict_us
from deft.io_model import IOBytes
from deft.kv_cache import PagedKVCache
from deft.reference import visible_tokens
from deft.shape import HeadShape, torch_dtype
from deft.tree import DecodeTree, indptr_of

_LOGIT_PASSES = 8
_ROW_SUM_PASSES = 9
_SLOT_BYTES = 4
_LAUNCHES_PER_QUERY = 13  # 2 gathers, 2 casts, 2 bmm, 4 softmax, 1 division, 2 for the LSE


class DenseAttention:
    """Dense attention over each query's gathered path.

    Args:
        name: kernel id in the result rows.
        sm_scale: default head_dim ** -0.5.
    """

    def __init__(self, name: str = "dense", sm_scale: float | None = None) -> None:
        self.name = name
        self.sm_scale = sm_scale
        self.path = "torch gather + bmm"
        self.kv_layout = "shared"
        self.layout_us = 0.0
        self.layout_bytes = 0
        self.plan_upload_bytes = 0
        self.workspace_bytes = 0
        self.capturable = True
        self._cache: PagedKVCache | None = None

    def unsupported(
        self, shape: HeadShape, tree: DecodeTree, page_size: int, device: torch.device | str
    ) -> str | None:
        """A reason when the slot table and one query's intermediates pass the memory limit."""
        return memory_reason("the slot table and gathered K/V", _workspace_bytes(tree, shape))

    def io(self, tree: DecodeTree, shape: HeadShape, page_size: int) -> IOBytes:
        """Counted IO of one run(), as the module docstring lists it; page_size plays no part."""
        b, wide = shape.dtype_bytes, _compute_bytes(shape)
        casts = wide != b
        seen = int(tree.query_kv_len.sum())
        rows = int((tree.query_kv_len > 0).sum()) * shape.num_qo_heads
        elements = tree.num_qo * shape.num_qo_heads * shape.head_dim
        kv_pass = 2 * shape.num_kv_heads * shape.head_dim * seen
        logits = _LOGIT_PASSES * shape.num_qo_heads * seen + _ROW_SUM_PASSES * rows
        return IOBytes(
            kv=kv_pass * (2 * b + casts * (b + wide) + wide),
            kv_unique=tree.attended_tokens * shape.kv_token_bytes,
            q=elements * (casts * (b + wide) + 2 * wide) + rows * shape.head_dim * wide,
            q_unique=elements * b,
            out=rows * shape.head_dim * (2 * wide + b)
            + (elements - rows * shape.head_dim) * b,  # queries that see nothing: zeros only
            index=2 * _SLOT_BYTES * seen,
            logits=logits * wide,
        )

    def predict_us(
        self, tree: DecodeTree, shape: HeadShape, page_size: int, device_model: DeviceModel
    ) -> float:
        """Modelled latency: the counted bytes, and one launch per operation and query."""
        launches = _LAUNCHES_PER_QUERY * int((tree.query_kv_len > 0).sum()) + 2
        io = self.io(tree, shape, page_size)
        return predict_us(io, tree.flops(shape), device_model, num_launches=launches)

    def plan(self, tree: DecodeTree, cache: PagedKVCache) -> None:
        """Upload the pool slots of every query's path.

        Raises:
            ValueError: the cache does not hold the tree.
        """
        check_plan(tree, cache)
        _, slots = cache.slots(np.arange(tree.num_nodes))
        paths = [visible_tokens(tree, query) for query in range(tree.num_qo)]
        tokens = np.concatenate([np.zeros(0, np.int64), *paths])
        table = torch.from_numpy(slots[tokens].astype(np.int32)).to(cache.device)
        ends = indptr_of(tree.query_kv_len)
        self._slots = [
            table[begin:end] for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        ]
        shape = cache.shape
        rows = (tree.num_qo, shape.num_qo_heads)
        self._o = torch.zeros(
            (*rows, shape.head_dim), dtype=torch_dtype(shape.dtype), device=cache.device
        )
        self._lse = torch.empty(rows, dtype=torch.float32, device=cache.device)
        self._tree, self._cache = tree, cache
        self.plan_upload_bytes = table.numel() * _SLOT_BYTES
        self.workspace_bytes = _workspace_bytes(tree, shape)

    def run(
        self, q: Tensor, layer: int = 0, *, out: Tensor | None = None, lse: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """One layer.

        Args:
            q: [num_qo, num_qo_heads, head_dim], contiguous.
            layer: layer of the cache.
            out, lse: where to write; default buffers that the next run() overwrites.

        Returns:
            (o like q, lse fp32 [num_qo, num_qo_heads], natural log).

        Raises:
            ValueError: a tensor the plan was not made for, or no plan.
        """
        cache = check_planned(self._cache)
        check_call(q, layer, self._tree, cache, out, lse)
        o = self._o if out is None else out
        lse = self._lse if lse is None else lse
        shape = cache.shape
        wide = torch.float64 if shape.dtype == "float64" else torch.float32
        scale = shape.head_dim**-0.5 if self.sm_scale is None else self.sm_scale
        grouped = (shape.num_kv_heads, shape.group_size, shape.head_dim)
        scaled = q.to(wide) * scale
        k_pool = cache.k_cache[layer].view(-1, shape.num_kv_heads, shape.head_dim)
        v_pool = cache.v_cache[layer].view(-1, shape.num_kv_heads, shape.head_dim)
        for query, slots in enumerate(self._slots):
            if not slots.numel():
                o[query].zero_()
                lse[query].fill_(-torch.inf)
                continue
            k = k_pool.index_select(0, slots).to(wide)
            v = v_pool.index_select(0, slots).to(wide)
            logits = torch.bmm(scaled[query].view(grouped), k.permute(1, 2, 0))
            top = logits.amax(-1, keepdim=True)
            weights = logits.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True)
            mean = torch.bmm(weights, v.transpose(0, 1)).div_(total)
            o[query].view(grouped).copy_(mean)
            torch.add(top, total.log(), out=top)
            lse[query].copy_(top.view(-1))
        return o, lse


def _compute_bytes(shape: HeadShape) -> int:
    return max(4, shape.dtype_bytes)


def _workspace_bytes(tree: DecodeTree, shape: HeadShape) -> int:
    """Slot table, and the gathered copies and logits of the longest path."""
    longest = int(tree.query_kv_len.max()) if tree.num_qo else 0
    wide = _compute_bytes(shape)
    copies = shape.dtype_bytes + (wide if wide != shape.dtype_bytes else 0)
    per_token = 2 * shape.num_kv_heads * shape.head_dim * copies + shape.num_qo_heads * wide
    return int(tree.query_kv_len.sum()) * _SLOT_BYTES + longest * per_token
