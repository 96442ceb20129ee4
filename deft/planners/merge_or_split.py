"""Merge-or-split grouping: what FastTree's and PAT's planners share.

Both walk the tree from its roots and ask of every child: do its queries read the parent's tokens
once more, together with their own (merge: the child leaves the parent's group and takes its tokens
along), or does the parent's group keep them, for one more partial output (split)? They differ in
the cost, in the tile classes and in how long token streams are cut.

The rule and the tiles are the planner's own: deft/planners/fasttree.py, deft/planners/pat.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from deft.plan_builder import WorkList
from deft.planners.tiles import (
    cut_streams,
    piece_ends,
)
from deft.tree import DecodeTree, LongArray, indptr_of, segment_arange

if TYPE_CHECKING:
    pass

# (queries of the group, tokens of its stream, queries of the child, tokens of the child) -> merge?
MergeRule = Callable[[int, int, int, int], bool]


class Groups(NamedTuple):
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


def group_queries(tree: DecodeTree, merges: MergeRule) -> Groups:
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
) -> Groups:
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
    return Groups(
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


def tile_groups(groups: Groups, cap: int) -> Groups:
    """The groups with their ranges of queries cut to at most cap."""
    counts = -(-(groups.query_end - groups.query_begin) // cap)
    at = np.repeat(np.arange(len(counts)), counts)
    start = groups.query_begin[at] + segment_arange(counts) * cap
    stop = np.minimum(start + cap, groups.query_end[at])
    return groups._replace(stream=groups.stream[at], query_begin=start, query_end=stop)


def stream_lengths(tree: DecodeTree, groups: Groups) -> LongArray:
    """Tokens of each stream."""
    seg = tree.segments
    length = (seg.end - seg.start).astype(np.int64)[groups.run_segment]
    total = np.r_[0, np.cumsum(length)]
    lengths: LongArray = total[groups.run_indptr[1:]] - total[groups.run_indptr[:-1]]
    return lengths


def stream_items(tree: DecodeTree, groups: Groups, block: LongArray) -> WorkList:
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
