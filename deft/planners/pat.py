"""PAT: merge-or-split by tiles of 64 rows, three tile classes side by side, on our kernels.

Yi et al., "PAT: Accelerating LLM Decoding via Prefix-Aware Attention with Resource Efficient
Multi-Tile Kernel", arXiv 2511.22333; the constants are those of its release.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deft.plan import Plan
from deft.plan_builder import build_plan
from deft.planners.merge_or_split import (
    MergeRule,
    group_queries,
    stream_items,
    stream_lengths,
    tile_groups,
)
from deft.planners.tiles import TileOption, positive, resolve_tiles
from deft.shape import HeadShape, TileConfig
from deft.tree import DecodeTree, LongArray

if TYPE_CHECKING:
    from deft.device_model import DeviceModel

LONG_STREAM = 256  # streams up to this many tokens do not count in the average
LONG_RATIO = 5  # a stream longer than so many averages is cut
SHORTEST_CUT = 8  # tokens; the release says 8 blocks


def pat_rule(cap: int) -> MergeRule:
    """PAT's rule: merge where that takes no more reads of the stream than partials are worth.

    Args:
        cap: queries that the largest tile holds.
    """

    def merges(queries: int, stream: int, child_queries: int, child: int) -> bool:
        tiles_saved = -(-queries // cap) - -(-(queries - child_queries) // cap)
        tiles_saved -= -(-child_queries // cap)
        return queries == child_queries or tiles_saved * stream + 4 * child_queries >= 0

    return merges


def pat_tiles(shape: HeadShape) -> tuple[TileConfig, ...]:
    """PAT's rows (16, 32, 64) with 1, 2 and 4 warps; tokens per turn as in default_tiles()."""
    turn = 32 if shape.head_dim > 128 or shape.dtype_bytes > 2 else 64
    stages = 2 if turn == 32 else 3
    small = TileConfig(block_m=16, block_n=32, num_warps=1, num_stages=stages)
    middle = TileConfig(block_m=32, block_n=32, num_warps=2, num_stages=stages)
    large = TileConfig(block_m=64, block_n=turn, num_warps=4, num_stages=stages)
    return (*(t for t in (small, middle) if t.block_m >= shape.group_size), large)


def _pat_blocks(shape: HeadShape, lengths: LongArray, shortest_cut: int) -> LongArray:
    """Tokens per item of each range: PAT's cut of long streams and of short grids."""
    pieces = np.ones(len(lengths), np.int64)
    long = lengths[lengths > LONG_STREAM]
    if len(long):
        mean = float(long.mean())
        is_longest = lengths > LONG_RATIO * mean
        pieces[is_longest] = np.ceil(lengths[is_longest] / mean)
    wanted = _pat_grid(shape.num_kv_heads)
    block = -(-lengths // pieces)
    while len(block) and int((-(-lengths // block)).sum()) < wanted and block.max() > shortest_cut:
        block[block.argmax()] = -(-block.max() // 2)
    return block


def _pat_grid(num_kv_heads: int) -> int:
    for heads, items in ((4, 54), (8, 27), (16, 13), (32, 6)):
        if num_kv_heads <= heads:
            return items
    return 4


def plan_pat(
    tree: DecodeTree,
    shape: HeadShape,
    tile: TileOption = None,
    device: DeviceModel | None = None,
    *,
    shortest_cut: int = SHORTEST_CUT,
    partial_dtype: str | None = None,
) -> Plan:
    """PAT: merge-or-split by 64-row tiles, three tile classes side by side, few cuts of streams.

    Args:
        shortest_cut: streams of up to this many tokens are not cut to fill the grid.

    Raises:
        ValueError: tiles that do not fit the shape, or shortest_cut below 1.
    """
    tiles = resolve_tiles(pat_tiles(shape) if tile is None else tile, shape)
    cap = tiles[-1].queries_per_item(shape.group_size)
    tiled = tile_groups(group_queries(tree, pat_rule(cap)), cap)
    lengths = stream_lengths(tree, tiled)[tiled.stream]
    blocks = _pat_blocks(shape, lengths, positive("shortest_cut", shortest_cut))
    work = stream_items(tree, tiled, blocks)
    return build_plan("pat", tree, shape, tiles, work, partial_dtype)
