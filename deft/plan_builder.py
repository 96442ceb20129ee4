"""From a planner's work list (query ranges and runs) to a Plan: masks, chunks, slots, launch order.

Planners work on `tree.query_order`, in which the queries that see any one token are a contiguous
range. So a work list needs a range per item and a range per run, and masks are bit ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deft.plan import FINAL, MaskArray, Plan
from deft.shape import DTYPE_BYTES, HeadShape, TileConfig
from deft.tree import DecodeTree, LongArray, indptr_of, segment_arange

AnyArray = npt.NDArray[Any]


@dataclass(frozen=True)
class WorkList:
    """What a planner decides; items in depth-first (root to leaf) order.

    Args:
        query_begin, query_end: int [num_items], each item's range of `tree.query_order`.
        run_indptr: int64 [num_items + 1], runs of each item.
        run_node, run_start, run_end, run_open: the runs, in node coordinates.
        run_query_begin, run_query_end: range of `tree.query_order` that sees each run.
        phase: int [num_items] or None: stream-ordered launch groups.
    """

    query_begin: AnyArray
    query_end: AnyArray
    run_indptr: LongArray
    run_node: AnyArray
    run_start: AnyArray
    run_end: AnyArray
    run_open: AnyArray
    run_query_begin: AnyArray
    run_query_end: AnyArray
    phase: AnyArray | None = None


def build_plan(
    strategy: str,
    tree: DecodeTree,
    shape: HeadShape,
    tiles: Sequence[TileConfig],
    work: WorkList,
    partial_dtype: str | None = None,
) -> Plan:
    """Turn a work list into a Plan.

    Each item takes the smallest tile that its queries fit. Within a launch the longest items come
    first, so that the last wave is short.

    Args:
        tiles: by ascending rows; the largest must fit every item.
        partial_dtype: dtype of partial outputs; default: see default_partial_dtype().

    Raises:
        ValueError: an item with more queries than the largest tile holds, or an unknown dtype.
    """
    if partial_dtype is not None and partial_dtype not in DTYPE_BYTES:
        raise ValueError(
            f"partial_dtype must be one of {sorted(DTYPE_BYTES)}, got {partial_dtype!r}"
        )
    queries = np.asarray(work.query_end - work.query_begin, np.int64)
    tile = _choose_tiles(queries, tiles, shape.group_size)
    phase = np.zeros(len(queries), np.int64) if work.phase is None else np.asarray(work.phase)
    run_item = np.repeat(np.arange(len(queries)), np.diff(work.run_indptr))
    low = np.maximum(work.run_query_begin - work.query_begin[run_item], 0)
    high = np.minimum(work.run_query_end, work.query_end[run_item]) - work.query_begin[run_item]
    is_full = (low == 0) & (high == queries[run_item])
    length = np.asarray(work.run_end - work.run_start, np.int64)

    # Launch order: phase, tile, longest first (stable, so equal items stay in tree order).
    tokens = np.bincount(run_item, weights=length, minlength=len(queries)).astype(np.int64)
    order = np.lexsort((-tokens, tile, phase))
    dest, merge_indptr = _destinations(tree, work, queries)
    query_indptr = indptr_of(queries)
    pick_q = _gather_rows(query_indptr, order)
    pick_r = _gather_rows(work.run_indptr, order)
    positions = np.repeat(work.query_begin, queries) + segment_arange(queries)
    words = max(1, -(-int(queries.max(initial=1)) // 64))
    tile, item_runs = tile[order], np.diff(work.run_indptr)[order]
    chunks = _chunks(tile, tiles, indptr_of(item_runs), length[pick_r], is_full[pick_r])
    node_start = np.asarray(work.run_start)[pick_r]
    return Plan(
        strategy=strategy,
        tree=tree,
        shape=shape,
        tiles=tuple(tiles),
        partial_dtype=partial_dtype or default_partial_dtype(shape),
        item_phase=phase[order].astype(np.int32),
        item_tile=tile.astype(np.int32),
        item_query_indptr=indptr_of(queries[order]),
        item_query=tree.query_order[positions[pick_q]],
        item_dest=dest[pick_q].astype(np.int32),
        item_run_indptr=indptr_of(item_runs),
        run_node=np.asarray(work.run_node, np.int32)[pick_r],
        run_start=node_start.astype(np.int32),
        run_end=np.asarray(work.run_end)[pick_r].astype(np.int32),
        run_open=np.asarray(work.run_open, bool)[pick_r],
        run_mask=_bit_ranges(low[pick_r], high[pick_r], words),
        merge_indptr=merge_indptr,
        chunk_indptr=chunks.pure_indptr,
        chunk_run=chunks.pure_run.astype(np.int32),
        chunk_start=(node_start[chunks.pure_run] + chunks.pure_offset).astype(np.int32),
        chunk_len=chunks.pure_len.astype(np.int32),
        mixed_indptr=chunks.mixed_indptr,
        mixed_run=chunks.mixed_run.astype(np.int32),
        mixed_start=(node_start[chunks.mixed_run] + chunks.mixed_offset).astype(np.int32),
        mixed_len=chunks.mixed_len.astype(np.int32),
    )


def default_partial_dtype(shape: HeadShape) -> str:
    """dtype of partial outputs: 16-bit only where the error budget allows (kernel_log, entry 3).

    bfloat16 partials put 16 of 3,000 cases over the row limit, so bfloat16 caches keep float32.
    """
    return "float32" if shape.dtype == "bfloat16" else shape.dtype


def _choose_tiles(queries: LongArray, tiles: Sequence[TileConfig], group_size: int) -> LongArray:
    rows = np.array([tile.queries_per_item(group_size) for tile in tiles], np.int64)
    if (np.diff(rows) < 0).any():
        raise ValueError(f"tiles must come by ascending rows, got {[t.block_m for t in tiles]}")
    tile = np.searchsorted(rows, queries)
    if len(tile) and tile.max() == len(tiles):
        raise ValueError(f"an item has {queries.max()} queries, the largest tile holds {rows[-1]}")
    return tile


def _gather_rows(indptr: LongArray, order: LongArray) -> LongArray:
    """Element indices of the CSR rows taken in a new order."""
    counts = np.diff(indptr)[order]
    return np.repeat(indptr[order], counts) + segment_arange(counts)


def _destinations(
    tree: DecodeTree, work: WorkList, queries: LongArray
) -> tuple[LongArray, LongArray]:
    """Destination of every (item, query), items in depth-first order, and the merge CSR."""
    positions = np.repeat(work.query_begin, queries) + segment_arange(queries)
    query = tree.query_order[positions]
    counts = np.bincount(query, minlength=tree.num_qo)
    merge_indptr = indptr_of(np.where(counts > 1, counts, 0))
    order = np.argsort(query, kind="stable")
    dest = np.full(len(query), FINAL, np.int64)
    ordinal = segment_arange(counts)
    sorted_query = query[order]
    dest[order] = np.where(counts[sorted_query] > 1, merge_indptr[sorted_query] + ordinal, FINAL)
    return dest, merge_indptr


def _bit_ranges(low: AnyArray, high: AnyArray, words: int) -> MaskArray:
    """uint64 [n, words] with bits low..high-1 set."""
    offset = 64 * np.arange(words)
    low = np.clip(low[:, None] - offset, 0, 64)
    high = np.clip(high[:, None] - offset, 0, 64)

    def below(bits: AnyArray) -> MaskArray:
        """A mask of the lowest `bits` bits (a shift by 64 is undefined, so 0 is apart)."""
        shift = (64 - np.maximum(bits, 1)).astype(np.uint64)
        mask: MaskArray = np.where(bits > 0, np.uint64(0xFFFFFFFFFFFFFFFF) >> shift, np.uint64(0))
        return mask

    return below(high) & ~below(low)


@dataclass(frozen=True)
class _Chunks:
    pure_indptr: LongArray
    pure_run: LongArray
    pure_offset: LongArray
    pure_len: LongArray
    mixed_indptr: LongArray
    mixed_run: LongArray
    mixed_offset: LongArray
    mixed_len: LongArray


def _chunks(
    tile: LongArray,
    tiles: Sequence[TileConfig],
    run_indptr: LongArray,
    length: LongArray,
    is_full: AnyArray,
) -> _Chunks:
    """Cut runs in pure chunks and mixed pieces.

    Whole chunks of a fully visible run are pure. Its tail is a pure chunk too (one loop turn),
    unless listing all of an item's tails one by one takes fewer turns.
    """
    num_items = len(tile)
    item = np.repeat(np.arange(num_items), np.diff(run_indptr))
    block = np.array([t.block_n for t in tiles], np.int64)[tile]
    whole = np.where(is_full, length // block[item], 0)
    tail = np.asarray(length - whole * block[item], np.int64)

    def per_item(values: AnyArray) -> LongArray:
        return np.bincount(item, weights=values, minlength=num_items).astype(np.int64)

    masked = per_item(np.where(is_full, 0, tail))
    tails = per_item(np.where(is_full, tail, 0))
    num_tails = per_item(is_full & (tail > 0))
    join = -(-(masked + tails) // block) < num_tails + -(-masked // block)
    is_mixed = (tail > 0) & (~is_full | join[item])
    pure_count = whole + ((tail > 0) & ~is_mixed)
    pure_run = np.repeat(np.arange(len(length)), pure_count)
    offset = segment_arange(pure_count) * block[item[pure_run]]
    mixed_run = np.flatnonzero(is_mixed)
    return _Chunks(
        pure_indptr=indptr_of(per_item(pure_count)),
        pure_run=pure_run,
        pure_offset=offset,
        pure_len=np.minimum(block[item[pure_run]], length[pure_run] - offset),
        mixed_indptr=indptr_of(per_item(is_mixed)),
        mixed_run=mixed_run,
        mixed_offset=(whole * block[item])[mixed_run],
        mixed_len=tail[mixed_run],
    )
