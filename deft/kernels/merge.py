"""Stage 2: join the partial results of each query, in slot order (root to leaf).

o = sum_s w_s o_s / sum_s w_s with w_s = 2 ** (lse_s - max lse). Slots are taken BLOCK_S at a time,
all loads of a tile in flight together, since a chain of one-slot turns was most of the time of a
plan with many splits (docs/kernel_log.md, entry 2). The order of the sum is fixed, so the result
is the same bits on every run. No slots, or only empty ones: o = 0 and lse = -inf. One non-empty
slot among empty ones passes through unchanged (its weight is exactly 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from deft.bound_plan import BoundPlan

MAX_BLOCK_S = 16


@triton.jit
def _merge_kernel(
    partial_o_ptr,
    partial_lse_ptr,
    o_ptr,
    lse_ptr,
    merge_query_ptr,
    merge_indptr_ptr,
    stride_om,
    stride_oh,
    NUM_QO_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WRITE_LSE: tl.constexpr,
):
    head = tl.program_id(1)
    query = tl.load(merge_query_ptr + tl.program_id(0)).to(tl.int64)
    start = tl.load(merge_indptr_ptr + query).to(tl.int64)
    end = tl.load(merge_indptr_ptr + query + 1).to(tl.int64)
    offs_s = tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, BLOCK_D)
    is_d = offs_d < HEAD_DIM

    m_i = float("-inf")
    l_i = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for slot in tl.range(start, end, BLOCK_S):
        is_s = slot + offs_s < end
        at = (slot + offs_s) * NUM_QO_HEADS + head
        lse2 = tl.load(partial_lse_ptr + at, mask=is_s, other=float("-inf"))
        part = tl.load(
            partial_o_ptr + at[:, None] * HEAD_DIM + offs_d[None, :],
            mask=is_s[:, None] & is_d[None, :],
            other=0.0,
        ).to(tl.float32)
        m_new = tl.maximum(m_i, tl.max(lse2, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2(lse2 - m_safe)
        alpha = tl.exp2(m_i - m_safe)
        acc = acc * alpha + tl.sum(part * weight[:, None], 0)
        l_i = l_i * alpha + tl.sum(weight, 0)
        m_i = m_new
    is_empty = l_i == 0.0
    l_i = tl.where(is_empty, 1.0, l_i)
    o_at = o_ptr + query * stride_om + head * stride_oh + offs_d
    tl.store(o_at, (acc / l_i).to(o_ptr.dtype.element_ty), mask=is_d)
    if WRITE_LSE:
        lse2 = tl.where(is_empty, float("-inf"), m_i + tl.log2(l_i))
        tl.store(lse_ptr + query * NUM_QO_HEADS + head, lse2 * 0.6931471805599453)


def launch_merge(bound: BoundPlan, o: Tensor, lse: Tensor | None) -> None:
    """Merge every query that has partial slots, or none at all, of a bound plan.

    Args:
        o: [num_qo, num_qo_heads, head_dim]; lse: fp32 [num_qo, num_qo_heads] or None.
    """
    if not bound.num_merge_queries:
        return
    shape = bound.plan.shape
    block_s = min(MAX_BLOCK_S, max(4, triton.next_power_of_2(bound.most_slots)))
    _merge_kernel[(bound.num_merge_queries, shape.num_qo_heads)](
        bound.partial_o,
        bound.partial_lse,
        o,
        lse if lse is not None else bound.partial_lse,
        bound.merge_query,
        bound.merge_indptr,
        o.stride(0),
        o.stride(1),
        NUM_QO_HEADS=shape.num_qo_heads,
        HEAD_DIM=shape.head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(shape.head_dim)),
        BLOCK_S=block_s,
        WRITE_LSE=lse is not None,
        num_warps=1 if block_s * shape.head_dim <= 1024 else 2,
    )
