"""Stage 2: join the partial results of each query, in slot order (root to leaf).

o = sum_s w_s o_s / sum_s w_s with w_s = 2 ** (lse_s - max lse); the order of the sum is fixed, so
the result is the same bits on every run. No slots, or only empty ones: o = 0 and lse = -inf. One
non-empty slot among empty ones passes through unchanged (its weight is exactly 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from deft.bound_plan import BoundPlan


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
    BLOCK_H: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    query = tl.load(merge_query_ptr + tl.program_id(0)).to(tl.int64)
    start = tl.load(merge_indptr_ptr + query).to(tl.int64)
    end = tl.load(merge_indptr_ptr + query + 1).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, BLOCK_D)
    is_h = offs_h < NUM_QO_HEADS
    in_o = is_h[:, None] & (offs_d < HEAD_DIM)[None, :]

    m_i = tl.full([BLOCK_H], float("-inf"), tl.float32)
    for slot in tl.range(start, end, num_stages=NUM_STAGES):
        at = slot * NUM_QO_HEADS + offs_h
        m_i = tl.maximum(m_i, tl.load(partial_lse_ptr + at, mask=is_h, other=float("-inf")))
    m_safe = tl.where(m_i == float("-inf"), 0.0, m_i)
    l_i = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for slot in tl.range(start, end, num_stages=NUM_STAGES):
        at = slot * NUM_QO_HEADS + offs_h
        weight = tl.exp2(tl.load(partial_lse_ptr + at, mask=is_h, other=float("-inf")) - m_safe)
        part = tl.load(
            partial_o_ptr + at[:, None] * HEAD_DIM + offs_d[None, :], mask=in_o, other=0.0
        )
        acc += part.to(tl.float32) * weight[:, None]
        l_i += weight
    is_empty = l_i == 0.0
    l_i = tl.where(is_empty, 1.0, l_i)
    acc = acc / l_i[:, None]
    o_at = query * stride_om + offs_h * stride_oh
    tl.store(o_ptr + o_at[:, None] + offs_d[None, :], acc.to(o_ptr.dtype.element_ty), mask=in_o)
    if WRITE_LSE:
        lse2 = tl.where(is_empty, float("-inf"), m_i + tl.log2(l_i))
        tl.store(lse_ptr + query * NUM_QO_HEADS + offs_h, lse2 * 0.6931471805599453, mask=is_h)


def launch_merge(bound: BoundPlan, o: Tensor, lse: Tensor | None) -> None:
    """Merge every query that has partial slots, or none at all, of a bound plan.

    Args:
        o: [num_qo, num_qo_heads, head_dim]; lse: fp32 [num_qo, num_qo_heads] or None.
    """
    if not bound.num_merge_queries:
        return
    shape = bound.plan.shape
    # Small units spread over the SMs: a warp per query and a few heads.
    block_h = min(4, triton.next_power_of_2(shape.num_qo_heads))
    _merge_kernel[(bound.num_merge_queries, triton.cdiv(shape.num_qo_heads, block_h))](
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
        BLOCK_H=block_h,
        WRITE_LSE=lse is not None,
        NUM_STAGES=3,
        num_warps=4 if shape.head_dim * block_h >= 512 else 2,
    )
