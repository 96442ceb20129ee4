"""Node-based grouping: one node and the queries below it an item (DeFT-Node), optionally cut in
chunks of block_kv tokens (DeFT-Node-Chunk; DeFT paper, section 3.2), or level by level (cascade).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from deft.plan import Plan
from deft.plan_builder import WorkList, build_plan
from deft.planners.tiles import DEFAULT_NUM_SMS, TileOption, auto_block_kv, positive, resolve_tiles
from deft.shape import HeadShape, TileConfig
from deft.tree import DecodeTree, indptr_of, segment_arange

if TYPE_CHECKING:
    from deft.device_model import DeviceModel


def tiled_segments(
    tree: DecodeTree,
    shape: HeadShape,
    tiles: tuple[TileConfig, ...],
    block: int,
    which: npt.NDArray[np.bool_] | None = None,
    by_level: bool = False,
) -> WorkList:
    """Items = (segment, chunk of block tokens, tile of queries), in depth-first order.

    Args:
        which: bool [num_segments], the segments to take; default all.
        by_level: a phase per level of the tree.
    """
    seg = tree.segments
    if which is not None:
        seg = seg._replace(**{name: value[which] for name, value in seg._asdict().items()})
    length = (seg.end - seg.start).astype(np.int64)
    cap = tiles[-1].queries_per_item(shape.group_size)
    chunks = -(-length // block)
    query_tiles = -(-(seg.query_end - seg.query_begin) // cap)
    per_seg = chunks * query_tiles
    at = np.repeat(np.arange(len(length)), per_seg)
    number = segment_arange(per_seg)
    chunk, query_tile = number // query_tiles[at], number % query_tiles[at]
    start = seg.start[at] + chunk * block
    end = np.minimum(start + block, seg.end[at])
    begin = seg.query_begin[at] + query_tile * cap
    stop = np.minimum(begin + cap, seg.query_end[at])
    return WorkList(
        query_begin=begin,
        query_end=stop,
        run_indptr=indptr_of(np.ones(len(at), np.int64)),
        run_node=seg.node[at],
        run_start=start,
        run_end=end,
        run_open=seg.is_open[at] & (end == seg.end[at]),
        run_query_begin=begin,
        run_query_end=stop,
        phase=tree.depth[seg.node[at]] if by_level else None,
    )


def node_block(
    tree: DecodeTree, shape: HeadShape, tiles: tuple[TileConfig, ...], device: DeviceModel | None
) -> int:
    """Tokens per chunk of a node such that the chunks fill the SMs."""
    seg = tree.segments
    cap = tiles[-1].queries_per_item(shape.group_size)
    tile_tokens = ((seg.end - seg.start) * -(-(seg.query_end - seg.query_begin) // cap)).sum()
    sms = device.num_sms if device else DEFAULT_NUM_SMS
    return auto_block_kv(tile_tokens, tiles[-1].ctas_per_item(shape), sms)


def plan_node(
    tree: DecodeTree,
    shape: HeadShape,
    tile: TileOption = None,
    device: DeviceModel | None = None,
    *,
    partial_dtype: str | None = None,
) -> Plan:
    """DeFT-Node: a node is one item, however long (per tile of queries)."""
    tiles = resolve_tiles(tile, shape)
    return build_plan(
        "node", tree, shape, tiles, tiled_segments(tree, shape, tiles, 2**31), partial_dtype
    )


def plan_node_chunk(
    tree: DecodeTree,
    shape: HeadShape,
    tile: TileOption = None,
    device: DeviceModel | None = None,
    *,
    block_kv: int | None = None,
    partial_dtype: str | None = None,
) -> Plan:
    """DeFT-Node-Chunk: nodes longer than block_kv tokens are cut.

    Args:
        block_kv: tokens per chunk; None picks a size that fills the SMs.

    Raises:
        ValueError: block_kv below 1.
    """
    tiles = resolve_tiles(tile, shape)
    block = node_block(tree, shape, tiles, device) if block_kv is None else block_kv
    block = positive("block_kv", block)
    return build_plan(
        "node_chunk", tree, shape, tiles, tiled_segments(tree, shape, tiles, block), partial_dtype
    )


def plan_cascade(
    tree: DecodeTree,
    shape: HeadShape,
    tile: TileOption = None,
    device: DeviceModel | None = None,
    *,
    block_kv: int | None = None,
    partial_dtype: str | None = None,
) -> Plan:
    """Cascade inference: one launch per tree level, nodes cut to fill the SMs, one merge at the
    end.

    Rule of FlashInfer's multi-level cascade (Ye et al., "Cascade Inference", 2024), on our kernels.
    """
    tiles = resolve_tiles(tile, shape)
    block = node_block(tree, shape, tiles, device) if block_kv is None else block_kv
    block = positive("block_kv", block)
    work = tiled_segments(tree, shape, tiles, block, by_level=True)
    return build_plan("cascade", tree, shape, tiles, work, partial_dtype)
