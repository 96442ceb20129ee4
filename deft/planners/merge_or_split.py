"""Merge-or-split grouping: FastTree's greedy rule and PAT's, on our kernels.

Both walk the tree from its roots and ask of every child: do its queries read the parent's tokens
once more, together with their own (merge: the child leaves the parent's group and takes its tokens
along), or does the parent's group keep them, for one more partial output (split)? They differ in
the cost, in the tile classes and in how long token streams are cut.

FastTree: Pan et al., "FastTree: Optimizing Attention Kernel and Runtime for Tree-Structured LLM
Inference", MLSys 2025. PAT: Yi et al., "PAT: Accelerating LLM Decoding via Prefix-Aware Attention
with Resource Efficient Multi-Tile Kernel", arXiv 2511.22333. Constants are those of their releases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from deft.plan import Plan
from deft.plan_builder import WorkList, build_plan
from deft.planners.tiles import (
    DEFAULT_NUM_SMS,
    TileOption,
    cut_streams,
    piece_ends,
    resolve_tiles,
)
from deft.shape import HeadShape, TileConfig
from deft.tree import DecodeTree, LongArray, indptr_of, segment_arange

if TYPE_CHECKING:
    from deft.device_model import DeviceModel

# (queries of the group, tokens of its stream, queries of the child, tokens of the child) -> merge?
MergeRule = Callable[[int, int, int, int], bool]

FASTTREE_SPLITS = (1024, 128)  # tokens per item: usual, and where the GPU would stay idle
PAT_LONG_STREAM = 256  # streams up to this many tokens do not count in the average
PAT_LONG_RATIO = 5  # a stream longer than so many averages is cut
PAT_SHORTEST_CUT = 8  # tokens


class _Groups(NamedTuple):
    """Token streams of merged segments and the ranges of queries that read them.

    run_indptr, run_segment: CSR, the segments of each stream, root to leaf.
    stream: of each range of queries. query_begin, query_end: the ranges, in tree.query_order.
    """

    run_indptr: LongArray
    run_segment: LongArray
    stream: LongArray
    query_begin: LongArray
    query_end: LongArray


def segment_parents(tree: DecodeTree) -> LongArray:
    """int64 [num_segments]: the segment above each in the segments' depth-first order, -1 for none.

    Segments are nested as their query ranges are: the one above is the last earlier one whose
    range holds theirs.
    """
    seg = tree.segments
    ends = seg.query_end.tolist()
    parents = np.full(len(ends), -1, np.int64)
    open_segments: list[int] = []
    for at, begin in enumerate(seg.query_begin.tolist()):
        while open_segments and ends[open_segments[-1]] <= begin:
            open_segments.pop()
        if open_segments:
            parents[at] = open_segments[-1]
        open_segments.append(at)
    return parents


def _group(tree: DecodeTree, merges: MergeRule) -> _Groups:
    """Walk the segments from the roots down, children in order, and decide each by the rule."""
    seg = tree.segments
    parents = segment_parents(tree)
    count = len(parents)
    tokens = (seg.end - seg.start).astype(np.int64).tolist()
    begin, end = seg.query_begin.tolist(), seg.query_end.tolist()
    remaining = [stop - start for start, stop in zip(begin, end, strict=True)]
    stream_len = list(tokens)
    is_merged = np.zeros(count, bool)
    # Depth-first order holds parents before children, and siblings in order: each decision finds
    # its parent's stream and remaining queries as the walk by levels would.
    for child, parent in enumerate(parents.tolist()):
        if parent < 0:
            continue
        queries = end[child] - begin[child]
        if merges(remaining[parent], stream_len[parent], queries, tokens[child]):
            is_merged[child] = True
            remaining[parent] -= queries
            stream_len[child] += stream_len[parent]
    return _streams(parents, is_merged, seg.query_begin, seg.query_end)


def _streams(
    parents: LongArray, is_merged: npt.NDArray[np.bool_], begin: LongArray, end: LongArray
) -> _Groups:
    left_out: list[list[tuple[int, int]]] = [[] for _ in parents]
    for child in np.flatnonzero(is_merged).tolist():
        left_out[parents[child]].append((int(begin[child]), int(end[child])))
    chains: list[list[int]] = []
    stream, starts, stops = [], [], []
    for at, (low, high) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        ranges = []
        for gap_begin, gap_end in [*left_out[at], (high, high)]:
            if gap_begin > low:
                ranges.append((low, gap_begin))
            low = gap_end
        if ranges:
            stream += [len(chains)] * len(ranges)
            starts += [one[0] for one in ranges]
            stops += [one[1] for one in ranges]
            chains.append(_chain(parents, is_merged, at))
    return _Groups(
        run_indptr=indptr_of(np.array([len(chain) for chain in chains], np.int64)),
        run_segment=np.array([one for chain in chains for one in chain], np.int64),
        stream=np.array(stream, np.int64),
        query_begin=np.array(starts, np.int64),
        query_end=np.array(stops, np.int64),
    )


def _chain(parents: LongArray, is_merged: npt.NDArray[np.bool_], at: int) -> list[int]:
    """The segments that a segment's stream holds, root to leaf."""
    chain = [at]
    while is_merged[chain[-1]]:
        chain.append(int(parents[chain[-1]]))
    return chain[::-1]


def _tile_groups(groups: _Groups, cap: int) -> _Groups:
    """The groups with their ranges of queries cut to at most cap."""
    counts = -(-(groups.query_end - groups.query_begin) // cap)
    at = np.repeat(np.arange(len(counts)), counts)
    start = groups.query_begin[at] + segment_arange(counts) * cap
    stop = np.minimum(start + cap, groups.query_end[at])
    return groups._replace(stream=groups.stream[at], query_begin=start, query_end=stop)


def _stream_lengths(tree: DecodeTree, groups: _Groups) -> LongArray:
    seg = tree.segments
    length = (seg.end - seg.start).astype(np.int64)[groups.run_segment]
    total = np.r_[0, np.cumsum(length)]
    lengths: LongArray = total[groups.run_indptr[1:]] - total[groups.run_indptr[:-1]]
    return lengths


def _work_list(tree: DecodeTree, groups: _Groups, block: LongArray) -> WorkList:
    """Items = (range of queries, block of its stream).

    Args:
        block: int64 [ranges], tokens per item of each range.
    """
    seg = tree.segments
    counts = np.diff(groups.run_indptr)[groups.stream]
    at = np.repeat(groups.run_indptr[groups.stream], counts) + segment_arange(counts)
    segment = groups.run_segment[at]
    start = seg.start[segment].astype(np.int64)
    length = seg.end[segment] - start
    block_indptr, piece_item, run, offset = cut_streams(indptr_of(counts), length, block)
    stop = piece_ends(run, offset, length)
    item_range = np.repeat(np.arange(len(block)), np.diff(block_indptr))
    begin, end = groups.query_begin[item_range], groups.query_end[item_range]
    return WorkList(
        query_begin=begin,
        query_end=end,
        run_indptr=indptr_of(np.bincount(piece_item, minlength=len(item_range))),
        run_node=seg.node[segment[run]],
        run_start=start[run] + offset,
        run_end=start[run] + stop,
        run_open=seg.is_open[segment[run]] & (stop == length[run]),
        run_query_begin=begin[piece_item],
        run_query_end=end[piece_item],
    )


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
    splits = [FASTTREE_SPLITS[0]] * 2
    for attempt in range(3):
        small, large = (each.queries_per_item(shape.group_size) for each in (tiles[0], tiles[-1]))
        rule = fasttree_rule(shape, large, small, tiles[-1].block_n)
        groups = _group(tree, rule)
        counts, tokens = groups.query_end - groups.query_begin, _stream_lengths(tree, groups)
        is_large = counts > small
        items = -(-counts // np.where(is_large, large, small))
        items *= -(-tokens[groups.stream] // np.where(is_large, *splits)) * shape.num_kv_heads
        grid = (int(items[is_large].sum()), int(items[~is_large].sum()))
        if attempt == 0:
            is_short = [0 < have < want for have, want in zip(grid, wanted, strict=True)]
            splits = [FASTTREE_SPLITS[short] for short in is_short]
            if not any(is_short):
                break
        elif attempt == 1:
            if 0 < grid[0] < sms:
                tiles = tiles[:1]
            elif 0 < grid[1] < sms:
                tiles = tiles[-1:]
            else:
                break
    tiled = _tile_groups(groups, large)
    is_large = tiled.query_end - tiled.query_begin > small
    work = _work_list(tree, tiled, np.where(is_large, *splits))
    return build_plan("fasttree", tree, shape, tiles, work, partial_dtype)


def _pat_blocks(shape: HeadShape, lengths: LongArray) -> LongArray:
    """Tokens per item of each range: PAT's cut of long streams and of short grids."""
    pieces = np.ones(len(lengths), np.int64)
    long = lengths[lengths > PAT_LONG_STREAM]
    if len(long):
        mean = float(long.mean())
        is_longest = lengths > PAT_LONG_RATIO * mean
        pieces[is_longest] = np.ceil(lengths[is_longest] / mean)
    wanted = _pat_grid(shape.num_kv_heads)
    block = -(-lengths // pieces)
    while (
        len(block) and int((-(-lengths // block)).sum()) < wanted and block.max() > PAT_SHORTEST_CUT
    ):
        block[block.argmax()] = -(-block.max() // 2)
    return block


def _pat_grid(num_kv_heads: int) -> int:
    for heads, items in ((4, 54), (8, 27), (16, 13), (32, 6)):
        if num_kv_heads <= heads:
            return items
    return 4


def pat_tiles(shape: HeadShape) -> tuple[TileConfig, ...]:
    """PAT's rows (16, 32, 64) with 1, 2 and 4 warps; tokens per turn as measured on our kernels."""
    turn = 32 if shape.head_dim > 128 or shape.dtype_bytes > 2 else 64
    stages = 2 if turn == 32 else 3
    small = TileConfig(block_m=16, block_n=32, num_warps=1, num_stages=stages)
    middle = TileConfig(block_m=32, block_n=32, num_warps=2, num_stages=stages)
    large = TileConfig(block_m=64, block_n=turn, num_warps=4, num_stages=stages)
    return tuple(each for each in (small, middle, large) if each.block_m >= shape.group_size)


def plan_pat(
    tree: DecodeTree,
    shape: HeadShape,
    tile: TileOption = None,
    device: DeviceModel | None = None,
    *,
    partial_dtype: str | None = None,
) -> Plan:
    """PAT: merge-or-split by 64-row tiles, three tile classes side by side, few cuts of streams.

    Raises:
        ValueError: tiles that do not fit the shape.
    """
    tiles = resolve_tiles(pat_tiles(shape) if tile is None else tile, shape)
    cap = tiles[-1].queries_per_item(shape.group_size)
    tiled = _tile_groups(_group(tree, pat_rule(cap)), cap)
    lengths = _stream_lengths(tree, tiled)[tiled.stream]
    work = _work_list(tree, tiled, _pat_blocks(shape, lengths))
    return build_plan("pat", tree, shape, tiles, work, partial_dtype)
