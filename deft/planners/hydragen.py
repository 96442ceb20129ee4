"""Hydragen: shared levels as batched attention of all queries below a node, the rest per sequence.

Juravsky et al., "Hydragen: High-Throughput LLM Inference with Shared Prefixes", 2024
(arXiv 2402.05099). A level is one batched operation, so its nodes must have equal lengths and equal
numbers of queries; from the first level that has not, or that nobody shares, every query reads the
rest of its path alone. On our kernels, both parts cut to fill the SMs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deft.plan import Plan
from deft.plan_builder import WorkList, build_plan
from deft.planners.node import node_block, tiled_segments
from deft.planners.sequence import path_items, split_block
from deft.planners.tiles import TileOption, resolve_tiles
from deft.shape import HeadShape
from deft.tree import DecodeTree

if TYPE_CHECKING:
    from deft.device_model import DeviceModel


def shared_levels(tree: DecodeTree) -> int:
    """Levels from the roots on that are batched: equal nodes, each seen by two queries or more."""
    seg = tree.segments
    begin, end = tree.node_queries
    queries = end - begin
    whole = np.zeros(tree.num_nodes, bool)
    whole[seg.node[(seg.end - seg.start) == tree.node_len[seg.node]]] = True
    whole |= tree.node_len == 0
    num_levels = int(tree.depth.max(initial=-1)) + 1
    for level in range(num_levels):
        here = tree.depth == level
        is_equal = np.ptp(tree.node_len[here]) == 0 and np.ptp(queries[here]) == 0
        if not (is_equal and whole[here].all() and queries[here][0] > 1):
            return level
    return num_levels


def plan_hydragen(
    tree: DecodeTree,
    shape: HeadShape,
    tile: TileOption = None,
    device: DeviceModel | None = None,
    *,
    partial_dtype: str | None = None,
) -> Plan:
    """Hydragen: one launch per shared level, one for the sequences' own parts, then the merge.

    Raises:
        ValueError: tiles that do not fit the shape.
    """
    tiles = resolve_tiles(tile, shape)
    levels = shared_levels(tree)
    shared = tree.depth[tree.segments.node] < levels
    prefix = tiled_segments(
        tree, shape, tiles, node_block(tree, shape, tiles, device), shared, by_level=True
    )
    heads = tiles[0].ctas_per_item(shape)
    own = path_items(tree, lambda tokens: split_block("auto", tokens, heads, device), levels)
    return build_plan("hydragen", tree, shape, tiles, _joined(prefix, own, levels), partial_dtype)


def _joined(prefix: WorkList, own: WorkList, phase: int) -> WorkList:
    assert prefix.phase is not None
    runs = prefix.run_indptr[-1]
    parts = {
        name: np.r_[getattr(prefix, name), getattr(own, name)]
        for name in WorkList.__dataclass_fields__
        if name not in ("run_indptr", "phase")
    }
    return WorkList(
        **parts,
        run_indptr=np.r_[prefix.run_indptr, own.run_indptr[1:] + runs],
        phase=np.r_[prefix.phase, np.full(len(own.query_begin), phase)],
    )
