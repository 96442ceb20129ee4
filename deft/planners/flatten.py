"""DeFT-Flatten: the tree's tokens in depth-first order, cut in equal blocks across node borders.

Each block is served with the queries that see any of its tokens, under bit masks (DeFT paper,
section 3.3, "flattened tree KV splitting" with "tree attention masks as bits").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deft.plan import Plan
from deft.plan_builder import WorkList, build_plan
from deft.planners.tiles import (
    DEFAULT_NUM_SMS,
    TileOption,
    auto_block_kv,
    cut_streams,
    piece_ends,
    positive,
    resolve_tiles,
)
from deft.shape import HeadShape, TileConfig
from deft.tree import DecodeTree, indptr_of, segment_arange

if TYPE_CHECKING:
    from deft.device_model import DeviceModel

PAPER_BLOCK_KV = 128
PAPER_QUERY_CAP = 32


def _flatten_work(tree: DecodeTree, block: int, cap: int) -> WorkList:
    """Items = (block, tile of at most cap queries); an item holds only the runs that its tile
    sees."""
    seg = tree.segments
    length = (seg.end - seg.start).astype(np.int64)
    _, piece_block, run, offset = cut_streams(np.array([0, len(length)], np.int64), length, block)
    stop = piece_ends(run, offset, length)
    first = np.flatnonzero(np.r_[True, piece_block[1:] != piece_block[:-1]]) if len(run) else run
    pieces = np.diff(np.r_[first, len(run)])
    begin, end = seg.query_begin[run], seg.query_end[run]
    low = np.minimum.reduceat(begin, first) if len(run) else begin
    high = np.maximum.reduceat(end, first) if len(run) else end
    query_tiles = -(-(high - low) // cap)
    block_of_item = np.repeat(np.arange(len(first)), query_tiles)
    item_begin = low[block_of_item] + segment_arange(query_tiles) * cap
    item_end = np.minimum(item_begin + cap, high[block_of_item])
    # Every (item, piece of its block), less those that no query of the item sees.
    count = pieces[block_of_item]
    item = np.repeat(np.arange(len(item_begin)), count)
    piece = np.repeat(first[block_of_item], count) + segment_arange(count)
    keep = (begin[piece] < item_end[item]) & (end[piece] > item_begin[item])
    item, piece = item[keep], piece[keep]
    run_at = run[piece]
    return WorkList(
        query_begin=item_begin,
        query_end=item_end,
        run_indptr=indptr_of(np.bincount(item, minlength=len(item_begin))),
        run_node=seg.node[run_at],
        run_start=seg.start[run_at] + offset[piece],
        run_end=seg.start[run_at] + stop[piece],
        run_open=seg.is_open[run_at] & (stop[piece] == length[run_at]),
        run_query_begin=begin[piece],
        run_query_end=end[piece],
    )


def plan_flatten(
    tree: DecodeTree,
    shape: HeadShape,
    tile: TileOption = None,
    device: DeviceModel | None = None,
    *,
    block_kv: int | None = None,
    query_cap: int | None = None,
    partial_dtype: str | None = None,
) -> Plan:
    """DeFT-Flatten.

    Args:
        block_kv: tokens per block; None picks a size that fills the SMs.
        query_cap: most queries per item; None: as many as the largest tile holds.

    Raises:
        ValueError: block_kv or query_cap below 1, or a cap that the tile cannot hold.
    """
    tiles = resolve_tiles(tile, shape, long_runs=True)
    most = tiles[-1].queries_per_item(shape.group_size)
    cap = most if query_cap is None else positive("query_cap", query_cap)
    if cap > most:
        raise ValueError(f"query_cap must be in 1..{most} for tile {tiles[-1]}, got {cap}")
    block = _flatten_block(tree, shape, tiles, cap, device) if block_kv is None else block_kv
    work = _flatten_work(tree, positive("block_kv", block), cap)
    return build_plan("flatten", tree, shape, tiles, work, partial_dtype)


def _flatten_block(
    tree: DecodeTree,
    shape: HeadShape,
    tiles: tuple[TileConfig, ...],
    cap: int,
    device: DeviceModel | None,
) -> int:
    seg = tree.segments
    tile_tokens = ((seg.end - seg.start) * -(-(seg.query_end - seg.query_begin) // cap)).sum()
    sms = device.num_sms if device else DEFAULT_NUM_SMS
    return auto_block_kv(tile_tokens, tiles[-1].ctas_per_item(shape), sms)


def paper_tile(shape: HeadShape) -> TileConfig:
    """One CTA per query head, 32 queries in its rows."""
    block_n = 32 if shape.head_dim > 128 else 64
    return TileConfig(PAPER_QUERY_CAP, block_n, num_warps=4, num_stages=2, pack_group=False)


def plan_deft_paper(
    tree: DecodeTree,
    shape: HeadShape,
    tile: TileOption = None,
    device: DeviceModel | None = None,
    *,
    block_kv: int | None = None,
    partial_dtype: str | None = None,
) -> Plan:
    """DeFT-Flatten as the paper's release ran it: at most 32 queries a block's item, one CTA per
    query head (the group is not packed).

    Args:
        block_kv: tokens per block; None is the release's 128.

    Raises:
        ValueError: block_kv below 1, or tiles that do not fit the shape.
    """
    tiles = resolve_tiles(paper_tile(shape) if tile is None else tile, shape)
    cap = min(PAPER_QUERY_CAP, tiles[-1].queries_per_item(shape.group_size))
    block = PAPER_BLOCK_KV if block_kv is None else positive("block_kv", block_kv)
    work = _flatten_work(tree, block, cap)
    return build_plan("deft_paper", tree, shape, tiles, work, partial_dtype)
