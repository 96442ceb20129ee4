"""Runs any bound plan with plain torch, on any device and in any dtype: slow, obviously right.

It reads the very tables that the Triton kernels read (items, chunks, slots, mask words,
destinations), so a wrong table shows here too. 16-bit inputs are computed in fp32, fp64 in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deft.bound_plan import BoundPlan


@torch.no_grad()  # as the kernels: o may be a kept buffer, which must not gather a graph
def run_torch(
    bound: BoundPlan, q: Tensor, layer: int, o: Tensor, lse: Tensor | None, sm_scale: float
) -> None:
    """Run every item of a bound plan, then the merge, as the two Triton stages do.

    Args:
        q, o: [num_qo, num_qo_heads, head_dim].
        lse: fp32 [num_qo, num_qo_heads] to fill with the natural-log LSE, or None.
        sm_scale: multiplies q . k.
    """
    shape = bound.plan.shape
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    flat = (-1, shape.num_kv_heads, shape.head_dim)
    k_cache, v_cache = (
        pool[layer].reshape(flat) for pool in (bound.cache.k_cache, bound.cache.v_cache)
    )
    grouped = q.reshape(-1, shape.num_kv_heads, shape.group_size, shape.head_dim)
    rows = (shape.num_qo_heads, shape.head_dim)
    partial_o = torch.zeros(
        (max(bound.plan.num_partials, 1), *rows), dtype=compute, device=q.device
    )
    partial_lse = torch.full(partial_o.shape[:2], -torch.inf, dtype=compute, device=q.device)
    for query, dest, slots, mask in _items(bound):
        index = torch.from_numpy(query).to(q.device)
        where = torch.from_numpy(slots).to(q.device)
        part_o, part_lse = _attend(
            grouped[index].to(compute),
            k_cache[where].to(compute),
            v_cache[where].to(compute),
            torch.from_numpy(mask).to(q.device),
            sm_scale,
        )
        is_final = torch.from_numpy(dest < 0).to(q.device)
        slot = torch.from_numpy(dest).to(q.device)[~is_final]
        o[index[is_final]] = part_o[is_final].to(o.dtype)
        if lse is not None:
            lse[index[is_final]] = part_lse[is_final].to(lse.dtype)
        stored = part_o[~is_final].to(
            bound.partial_o.dtype if compute != torch.float64 else compute
        )
        partial_o[slot], partial_lse[slot] = stored.to(compute), part_lse[~is_final]
    _merge(bound, partial_o, partial_lse, o, lse)


LongArray = npt.NDArray[np.int64]
ItemTables = tuple[LongArray, LongArray, LongArray, npt.NDArray[np.bool_]]


def _items(bound: BoundPlan) -> Iterator[ItemTables]:
    """(queries, destinations, slots, mask [queries, slots]) of each item, from the device
    tables."""
    words = bound.plan.num_mask_words
    meta = bound.item_meta.cpu().numpy().reshape(-1, 8)
    queries, dests = bound.item_query.cpu().numpy(), bound.item_dest.cpu().numpy()
    bases, lengths = bound.chunk_base.cpu().numpy(), bound.chunk_len.cpu().numpy()
    slots = bound.token_slot.cpu().numpy()
    masks = bound.token_mask.cpu().numpy().view(np.uint64).reshape(-1, words)
    for start, count, chunk, chunk_end, token, token_end, _, _ in meta:
        pure = [
            np.arange(base, base + length, dtype=np.int64)
            for base, length in zip(bases[chunk:chunk_end], lengths[chunk:chunk_end], strict=True)
        ]
        mixed = slots[token:token_end].astype(np.int64)
        num_pure = int(lengths[chunk:chunk_end].sum())
        mask = np.ones((count, num_pure + len(mixed)), bool)
        mask[:, num_pure:] = _bits(masks[token:token_end], int(count))
        at = slice(start, start + count)
        yield (
            queries[at].astype(np.int64),
            dests[at].astype(np.int64),
            np.concatenate([*pure, mixed]),
            mask,
        )


def _bits(words: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.bool_]:
    """Bool [count, tokens]: bit j of each token's mask words."""
    local = np.arange(count)
    shift = (local % 64).astype(np.uint64)
    bits: npt.NDArray[np.bool_] = ((words[:, local // 64] >> shift) & np.uint64(1)).astype(bool).T
    return bits


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """Masked softmax attention of one item.

    Args:
        q: [queries, num_kv_heads, group, head_dim]; k, v: [tokens, num_kv_heads, head_dim].
        mask: bool [queries, tokens], True where the query sees the token.

    Returns:
        o [queries, num_qo_heads, head_dim] and natural-log lse [queries, num_qo_heads].
    """
    logits = torch.einsum("qhgd,thd->qhgt", q, k) * sm_scale
    logits = logits.masked_fill(~mask[:, None, None, :], -torch.inf)
    lse = torch.logsumexp(logits, -1)
    safe = torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)
    weight = torch.exp(logits - safe[..., None])
    o = torch.einsum("qhgt,thd->qhgd", weight, v)
    return o.flatten(1, 2), lse.flatten(1, 2)


def _merge(
    bound: BoundPlan, partial_o: Tensor, partial_lse: Tensor, o: Tensor, lse: Tensor | None
) -> None:
    """Weighted mean of each query's partial slots, summed in slot order."""
    query = bound.merge_query.long()
    if not len(query):
        return
    indptr = bound.merge_indptr.long()
    start, count = indptr[query], indptr[query + 1] - indptr[query]
    most = int(count.max())
    slot = start[:, None] + torch.arange(max(most, 1), device=query.device)
    is_slot = slot < (start + count)[:, None]
    slot = torch.where(is_slot, slot, 0)
    part_lse = partial_lse[slot].masked_fill(~is_slot[..., None], -torch.inf)
    total = torch.logsumexp(part_lse, 1)
    safe = torch.where(total == -torch.inf, torch.zeros_like(total), total)
    merged = torch.zeros_like(partial_o[slot[:, 0]])
    for column in range(most):
        weight = torch.exp(part_lse[:, column] - safe)
        part = partial_o[slot[:, column]] * weight[..., None]
        merged += torch.where((is_slot[:, column])[:, None, None], part, 0.0)
    o[query] = merged.to(o.dtype)
    if lse is not None:
        lse[query] = total.to(lse.dtype)
