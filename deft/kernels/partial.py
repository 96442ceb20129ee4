"""Stage 1: one CTA per (item, KV head) attends its queries to its token runs.

Online softmax (Milakov & Gimelshein 2018; FlashAttention-2, algorithm 1) over two kinds of chunks:
pure ones (a base slot, no mask) and mixed ones (a slot and mask words per token). A row that has
seen nothing keeps m = -inf, l = 0, acc = 0, with no finite sentinel. Results go to the output
(final) or to a partial slot, normalised, with a base-2 LSE in fp32.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from deft.bound_plan import BoundPlan

LOG2_E = 1.4426950408889634


@triton.jit
def _partial_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    partial_o_ptr,
    partial_lse_ptr,
    item_meta_ptr,
    item_query_ptr,
    item_dest_ptr,
    chunk_base_ptr,
    chunk_len_ptr,
    token_slot_ptr,
    token_mask_ptr,
    first_item,
    qk_scale,
    stride_qm,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_om,
    stride_oh,
    NUM_HEADS: tl.constexpr,
    NUM_QO_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PACK_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    item = first_item + pid // NUM_HEADS
    head = pid % NUM_HEADS
    meta = item_meta_ptr + item * 8
    query_start = tl.load(meta)
    num_queries = tl.load(meta + 1)
    chunk_start = tl.load(meta + 2)
    chunk_end = tl.load(meta + 3)
    token_start = tl.load(meta + 4)
    token_end = tl.load(meta + 5)

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    if PACK_GROUP:
        local = offs_m // GROUP_SIZE
        kv_head = head
        qo_head = head * GROUP_SIZE + offs_m % GROUP_SIZE
    else:
        local = offs_m
        kv_head = head // GROUP_SIZE
        qo_head = head + offs_m * 0
    is_row = local < num_queries
    is_d = offs_d < HEAD_DIM
    query = tl.load(item_query_ptr + query_start + local, mask=is_row, other=0).to(tl.int64)
    q_at = query * stride_qm + qo_head * stride_qh
    q = tl.load(
        q_ptr + q_at[:, None] + offs_d[None, :], mask=is_row[:, None] & is_d[None, :], other=0.0
    )
    k_base = k_ptr + kv_head.to(tl.int64) * stride_kh
    v_base = v_ptr + kv_head.to(tl.int64) * stride_kh

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    for chunk in tl.range(chunk_start, chunk_end, num_stages=NUM_STAGES):
        base = tl.load(chunk_base_ptr + chunk).to(tl.int64)
        length = tl.load(chunk_len_ptr + chunk)
        is_n = offs_n < length
        kv_at = (base + offs_n) * stride_kn
        in_kv = is_n[:, None] & is_d[None, :] if HEAD_DIM != BLOCK_D else is_n[:, None]
        k = tl.load(k_base + kv_at[:, None] + offs_d[None, :], mask=in_kv, other=0.0)
        qk = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION)
        qk = tl.where(is_n[None, :], qk, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1) * qk_scale)
        p = tl.exp2(qk * qk_scale - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = tl.load(v_base + kv_at[:, None] + offs_d[None, :], mask=in_kv, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=INPUT_PRECISION)
        m_i = m_new

    for token in tl.range(token_start, token_end, BLOCK_N, num_stages=NUM_STAGES):
        offs_t = token + offs_n
        is_n = offs_t < token_end
        slot = tl.load(token_slot_ptr + offs_t, mask=is_n, other=0).to(tl.int64)
        kv_at = slot * stride_kn
        in_kv = is_n[:, None] & is_d[None, :] if HEAD_DIM != BLOCK_D else is_n[:, None]
        k = tl.load(k_base + kv_at[:, None] + offs_d[None, :], mask=in_kv, other=0.0)
        qk = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION)
        # A padding token has an all-zero mask word, so the mask also hides the tail.
        words = tl.load(token_mask_ptr + offs_t * NUM_WORDS, mask=is_n, other=0)
        bits = (words[None, :] >> (local % 64).to(tl.int64)[:, None]) & 1
        for word in tl.static_range(1, NUM_WORDS):
            words = tl.load(token_mask_ptr + offs_t * NUM_WORDS + word, mask=is_n, other=0)
            more = (words[None, :] >> (local % 64).to(tl.int64)[:, None]) & 1
            bits = tl.where((local // 64 == word)[:, None], more, bits)
        qk = tl.where(bits != 0, qk, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1) * qk_scale)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(qk * qk_scale - m_safe[:, None])
        alpha = tl.exp2(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = tl.load(v_base + kv_at[:, None] + offs_d[None, :], mask=in_kv, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=INPUT_PRECISION)
        m_i = m_new

    has_seen = l_i > 0
    has_nan = l_i != l_i  # NaN inputs pass through, as in dense attention
    l_i = tl.where(has_seen | has_nan, l_i, 1.0)
    acc = acc / l_i[:, None]
    lse2 = tl.where(has_seen | has_nan, m_i + tl.log2(l_i), float("-inf"))
    dest = tl.load(item_dest_ptr + query_start + local, mask=is_row, other=0)
    to_o = is_row & (dest < 0)
    o_at = query * stride_om + qo_head * stride_oh
    tl.store(
        o_ptr + o_at[:, None] + offs_d[None, :],
        acc.to(o_ptr.dtype.element_ty),
        mask=to_o[:, None] & is_d[None, :],
    )
    if WRITE_LSE:
        tl.store(lse_ptr + query * NUM_QO_HEADS + qo_head, lse2 * 0.6931471805599453, mask=to_o)
    to_partial = is_row & (dest >= 0)
    part = dest.to(tl.int64) * NUM_QO_HEADS + qo_head
    tl.store(
        partial_o_ptr + part[:, None] * HEAD_DIM + offs_d[None, :],
        acc.to(partial_o_ptr.dtype.element_ty),
        mask=to_partial[:, None] & is_d[None, :],
    )
    tl.store(partial_lse_ptr + part, lse2, mask=to_partial)


def launch_partials(
    bound: BoundPlan, q: Tensor, layer: int, o: Tensor, lse: Tensor | None, sm_scale: float
) -> None:
    """Launch every (phase, tile) group of a bound plan: phases in stream order, the tile classes of
    one phase side by side (they write different rows).

    Args:
        q, o: [num_qo, num_qo_heads, head_dim], last dimension contiguous.
        lse: fp32 [num_qo, num_qo_heads] contiguous, or None.
        sm_scale: positive.
    """
    for _, group in groupby(bound.launches, key=lambda launch: launch[0]):
        launches = list(group)
        if len(launches) == 1 or bound.side_stream is None:
            for launch in launches:
                _launch(bound, launch, q, layer, o, lse, sm_scale)
            continue
        current = torch.cuda.current_stream(q.device)
        bound.side_stream.wait_stream(current)
        with torch.cuda.stream(bound.side_stream):
            _launch(bound, launches[0], q, layer, o, lse, sm_scale)
        for launch in launches[1:]:
            _launch(bound, launch, q, layer, o, lse, sm_scale)
        current.wait_stream(bound.side_stream)


def _launch(
    bound: BoundPlan,
    launch: tuple[int, int, int, int],
    q: Tensor,
    layer: int,
    o: Tensor,
    lse: Tensor | None,
    sm_scale: float,
) -> None:
    shape = bound.plan.shape
    k_cache, v_cache = bound.cache.k_cache[layer], bound.cache.v_cache[layer]
    _, tile_index, first, end = launch
    tile = bound.plan.tiles[tile_index]
    heads = tile.ctas_per_item(shape)
    _partial_attention_kernel[((end - first) * heads,)](
        q,
        k_cache,
        v_cache,
        o,
        lse if lse is not None else bound.partial_lse,
        bound.partial_o,
        bound.partial_lse,
        bound.item_meta,
        bound.item_query,
        bound.item_dest,
        bound.chunk_base,
        bound.chunk_len,
        bound.token_slot,
        bound.token_mask,
        first,
        sm_scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        k_cache.stride(1),
        k_cache.stride(2),
        o.stride(0),
        o.stride(1),
        NUM_HEADS=heads,
        NUM_QO_HEADS=shape.num_qo_heads,
        GROUP_SIZE=shape.group_size,
        PACK_GROUP=tile.pack_group,
        HEAD_DIM=shape.head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(shape.head_dim)),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        NUM_WORDS=bound.plan.num_mask_words,
        WRITE_LSE=lse is not None,
        NUM_STAGES=tile.num_stages,
        INPUT_PRECISION="ieee",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
