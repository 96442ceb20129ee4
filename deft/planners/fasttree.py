"""FastTree: greedy merge-or-split by padded work, two tile classes, on our kernels.

Pan et al., "FastTree: Optimizing Attention Kernel and Runtime for Tree-Structured LLM Inference",
MLSys 2025; the constants are those of its release.
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
from deft.planners.tiles import DEFAULT_NUM_SMS, TileOption, resolve_tiles
from deft.shape import HeadShape
from deft.tree import DecodeTree

if TYPE_CHECKING:
    from deft.device_model import DeviceModel

SPLITS = (1024, 128)  # tokens per item: usual, and where the GPU would stay idle


def fasttree_rule(shape: HeadShape, large: int, small: int, turn: int) -> MergeRule:
    """FastTree's cost: padded rows (0.66), padded tokens (0.33), one more partial (0.1).

    Args:
        large, small: queries that the two tile classes hold.
        turn: tokens per loop turn.
    """
    group = shape.group_size

    def waste(queries: int, tokens: int) -> float:
        tile = large if queries > small else small
        return group * (0.66 * (-queries % tile) * tokens + 0.33 * max(0, turn - tokens) * queries)

    def merges(queries: int, stream: int, child_queries: int, child: int) -> bool:
        split = waste(queries, stream) + waste(child_queries, child) + 0.1 * child_queries
        merge = waste(queries - child_queries, stream) + waste(child_queries, stream + child)
        return split > merge

    return merges


def plan_fasttree(
    tree: DecodeTree,
    shape: HeadShape,
    tile: TileOption = None,
    device: DeviceModel | None = None,
    *,
    partial_dtype: str | None = None,
) -> Plan:
    """FastTree: greedy merge-or-split, two tile classes, streams cut in 1,024 or 128 tokens.

    A class cuts in 128 where 1,024 gives it fewer thread blocks than wanted (132 for the large
    one, 528 for the small one); where that is still under 132, one class takes all.

    Raises:
        ValueError: tiles that do not fit the shape.
    """
    tiles = resolve_tiles(tile, shape)
    sms = device.num_sms if device else DEFAULT_NUM_SMS
    wanted = (sms, 4 * sms)
    splits = [SPLITS[0]] * 2
    for attempt in range(3):
        small, large = (each.queries_per_item(shape.group_size) for each in (tiles[0], tiles[-1]))
        rule = fasttree_rule(shape, large, small, tiles[-1].block_n)
        groups = group_queries(tree, rule)
        counts, tokens = groups.query_end - groups.query_begin, stream_lengths(tree, groups)
        is_large = counts > small
        items = -(-counts // np.where(is_large, large, small))
        items *= -(-tokens[groups.stream] // np.where(is_large, *splits)) * shape.num_kv_heads
        grid = (int(items[is_large].sum()), int(items[~is_large].sum()))
        if attempt == 0:
            is_short = [0 < have < want for have, want in zip(grid, wanted, strict=True)]
            splits = [SPLITS[short] for short in is_short]
            if not any(is_short):
                break
        elif attempt == 1:
            if 0 < grid[0] < sms:
                tiles = tiles[:1]
            elif 0 < grid[1] < sms:
                tiles = tiles[-1:]
            else:
                break
    tiled = tile_groups(groups, large)
    is_large = tiled.query_end - tiled.query_begin > small
    work = stream_items(tree, tiled, np.where(is_large, *splits))
    return build_plan("fasttree", tree, shape, tiles, work, partial_dtype)
