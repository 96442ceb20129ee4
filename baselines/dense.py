"""dense: every query on its own, in plain PyTorch. Slow, small, and right by inspection.

For each query: gather K and V of its path from the pool, take logits in fp32, subtract their
maximum, exponentiate, sum, multiply with V, divide. Nothing is shared between queries, and every
intermediate goes through memory; io() counts each of these passes, operation by operation:

    K, V      index_select (read + write), cast to fp32 (read + write), bmm (read)
    q         cast to fp32 (read + write), scale (read + write), bmm (read)
    logits    bmm (write), amax (read), sub and exp (read + write each), sum (read), bmm (read)
    row       maximum and sum (write, read each)
    out       bmm (write), div (read + write), cast and store (read + write)

fp32 inputs skip the two casts on the left; fp64 inputs are computed in fp64 and skip them too.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from baselines.baseline import Baseline
from baselines.plan_checks import memory_reason, path_tokens
from deft.device_model import DeviceModel, predict_us
from deft.io_model import IOBytes
from deft.kv_cache import PagedKVCache
from deft.shape import HeadShape
from deft.tree import DecodeTree, LongArray

_LOGIT_PASSES = 8
_ROW_PASSES = 4
_SLOT_BYTES = 4
_LAUNCHES_PER_QUERY = 10  # two gathers, two products, amax, sub, exp, sum, div, store


class DenseAttention(Baseline):
    """Dense attention over each query's gathered path.

    Args:
        name: kernel id in the result rows.
        sm_scale: multiplies q . k; default head_dim ** -0.5.
    """

    path = "torch gather + bmm"

    def __init__(self, name: str = "dense", sm_scale: float | None = None) -> None:
        super().__init__(name, sm_scale)

    def unsupported(
        self, shape: HeadShape, tree: DecodeTree, page_size: int, device: torch.device | str
    ) -> str | None:
        """A reason when the slot table and one query's intermediates pass the memory limit."""
        return memory_reason("the slot table and gathered K/V", _workspace_bytes(tree, shape))

    def io(self, tree: DecodeTree, shape: HeadShape, page_size: int) -> IOBytes:
        """Counted IO of one run(), as the module docstring lists it, the same for any page size."""
        b, wide = shape.dtype_bytes, _compute_bytes(shape)
        cast = b + wide if wide != b else 0
        seen = int(tree.query_kv_len.sum())
        all_rows = tree.num_qo * shape.num_qo_heads
        rows = int((tree.query_kv_len > 0).sum()) * shape.num_qo_heads  # others only store zeros
        dim = shape.head_dim
        return IOBytes(
            kv=2 * shape.num_kv_heads * dim * seen * (2 * b + cast + wide),
            kv_unique=tree.attended_tokens * shape.kv_token_bytes,
            q=all_rows * dim * (cast + 2 * wide) + rows * dim * wide,
            q_unique=tree.num_qo * shape.q_token_bytes,
            out=rows * dim * 4 * wide + all_rows * dim * b,
            index=2 * _SLOT_BYTES * seen,
            logits=(_LOGIT_PASSES * shape.num_qo_heads * seen + _ROW_PASSES * rows) * wide,
        )

    def predict_us(
        self, tree: DecodeTree, shape: HeadShape, page_size: int, device_model: DeviceModel
    ) -> float:
        """Modelled latency: the counted bytes, and one launch per operation of each query."""
        casts = shape.dtype_bytes < 4
        per_query = _LAUNCHES_PER_QUERY + 2 * casts
        launches = 1 + casts + per_query * int((tree.query_kv_len > 0).sum())
        io = self.io(tree, shape, page_size)
        return predict_us(io, tree.flops(shape), device_model, num_launches=launches)

    def _plan(
        self, tree: DecodeTree, cache: PagedKVCache, slots: LongArray, nodes: LongArray
    ) -> None:
        """Upload the pool slots of every query's path."""
        table = torch.from_numpy(slots[path_tokens(tree)[1]].astype(np.int32)).to(cache.device)
        self._slots = torch.split_with_sizes(table, tree.query_kv_len.tolist())
        self.plan_upload_bytes = table.numel() * _SLOT_BYTES
        self.workspace_bytes = _workspace_bytes(tree, cache.shape)
        self.capturable = cache.device.type == "cuda"

    def _run(
        self, cache: PagedKVCache, q: Tensor, layer: int, out: Tensor, lse: Tensor | None
    ) -> Tensor:
        shape = cache.shape
        wide = torch.float64 if shape.dtype == "float64" else torch.float32
        scale = shape.head_dim**-0.5 if self.sm_scale is None else self.sm_scale
        grouped = (shape.num_kv_heads, shape.group_size, shape.head_dim)
        scaled = q.to(wide) * scale
        k_pool = cache.k_cache[layer].view(-1, shape.num_kv_heads, shape.head_dim)
        v_pool = cache.v_cache[layer].view(-1, shape.num_kv_heads, shape.head_dim)
        for query, slots in enumerate(self._slots):
            if not slots.numel():
                out[query].zero_()
                if lse is not None:
                    lse[query].fill_(-torch.inf)
                continue
            k = k_pool.index_select(0, slots).to(wide)
            v = v_pool.index_select(0, slots).to(wide)
            logits = torch.bmm(scaled[query].view(grouped), k.permute(1, 2, 0))
            maximum = logits.amax(-1, keepdim=True)
            weights = logits.sub_(maximum).exp_()
            total = weights.sum(-1, keepdim=True)
            mean = torch.bmm(weights, v.transpose(0, 1)).div_(total)
            out[query].view(grouped).copy_(mean)
            if lse is not None:
                lse[query].copy_((maximum + total.log()).view(-1))
        return out


def _compute_bytes(shape: HeadShape) -> int:
    return max(4, shape.dtype_bytes)


def _workspace_bytes(tree: DecodeTree, shape: HeadShape) -> int:
    """Slot table, and the gathered copies and logits of the longest path."""
    longest = int(tree.query_kv_len.max()) if tree.num_qo else 0
    b, wide = shape.dtype_bytes, _compute_bytes(shape)
    copies = b + wide if wide != b else b
    per_token = 2 * shape.num_kv_heads * shape.head_dim * copies + shape.num_qo_heads * wide
    return int(tree.query_kv_len.sum()) * _SLOT_BYTES + longest * per_token
