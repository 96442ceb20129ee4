"""What a batched attention library is asked for a tree: requests of query rows and their KV tokens.

A request is a run of rows, consecutive in `tree.query_order`, that see the same list of tokens.
Plain numpy: no library, GPU or pool.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from deft.tree import DecodeTree, LongArray, indptr_of, segment_arange


class Requests(NamedTuple):
    """A batch of requests; the rows of one see its tokens and no other.

    Args:
        row_indptr: int64 [num_requests + 1], rows of each request, from 0 to the number of rows.
        kv_indptr: int64 [num_requests + 1], where the tokens of each request begin.
        tokens: int64, node-order tokens, root first.
    """

    row_indptr: LongArray
    kv_indptr: LongArray
    tokens: LongArray

    @property
    def rows(self) -> LongArray:
        """Query rows of each request."""
        return np.diff(self.row_indptr)

    @property
    def kv_len(self) -> LongArray:
        """KV tokens of each request."""
        return np.diff(self.kv_indptr)

    @property
    def has_gaps(self) -> bool:
        """True where some rows see nothing here."""
        return bool((self.kv_len == 0).any())


class _Parts(NamedTuple):
    """Token runs by request: request, first node-order token, tokens; in path order."""

    request: LongArray
    start: LongArray
    length: LongArray


def _tiled(begin: LongArray, end: LongArray, parts: _Parts, num_rows: int) -> Requests:
    """Requests of disjoint row ranges in ascending order, with empty ones for the rows between."""
    borders = np.unique(np.concatenate([[0], begin, end, [num_rows]]))
    at = np.searchsorted(borders, begin)  # of every range among the borders
    counts = np.zeros(len(borders) - 1, np.int64)
    np.add.at(counts, at[parts.request], parts.length)
    tokens = np.repeat(parts.start, parts.length) + segment_arange(parts.length)
    return Requests(borders, indptr_of(counts), tokens)


def tree_levels(tree: DecodeTree, min_share: int = 0) -> list[Requests]:
    """A batch for each level of sharing; every row's tokens are those of its request in each level.

    Args:
        tree: queries in any order; rows are those of `tree.query_order`.
        min_share: 0 makes a level of every level of nodes, as cascade attention has them. From 1
            on, runs that the same queries see are one request, and runs that fewer than min_share
            queries see are read by each of these queries in one last level of their own.

    Returns:
        Levels root first; none where no query sees a token.
    """
    seg = tree.segments
    start = tree.node_start[seg.node] + seg.start
    length = (seg.end - seg.start).astype(np.int64)
    begin, end = seg.query_begin, seg.query_end
    is_shared = end - begin >= max(min_share, 1)
    first, last = begin[is_shared], end[is_shared]
    is_new = np.ones(len(first), bool)
    if min_share:
        is_new[1:] = (first[1:] != first[:-1]) | (last[1:] != last[:-1])
    group = np.cumsum(is_new) - 1
    parts = _Parts(group, start[is_shared], length[is_shared])
    levels = _nested(first[is_new], last[is_new], parts, tree.num_qo)
    if not is_shared.all():
        levels.append(_private(begin, end, start, length, ~is_shared, tree.num_qo))
    return levels


def _nested(begin: LongArray, end: LongArray, parts: _Parts, num_rows: int) -> list[Requests]:
    """Levels of nested row ranges, which come outer first and then left to right."""
    # A range lies in all ranges before it but those that have ended.
    depth = np.arange(len(begin)) - np.searchsorted(np.sort(end), begin, side="right")
    levels = []
    for level in range(int(depth.max()) + 1 if len(depth) else 0):
        is_here = depth == level
        number = np.cumsum(is_here) - 1
        mine = is_here[parts.request]
        here = _Parts(number[parts.request[mine]], parts.start[mine], parts.length[mine])
        levels.append(_tiled(begin[is_here], end[is_here], here, num_rows))
    return levels


def _private(
    begin: LongArray,
    end: LongArray,
    start: LongArray,
    length: LongArray,
    chosen: np.ndarray,
    num_rows: int,
) -> Requests:
    """Every row as a request of its own over the chosen runs."""
    width = (end - begin)[chosen]
    row = np.repeat(begin[chosen], width) + segment_arange(width)
    order = np.argsort(row, kind="stable")
    row = row[order]
    parts = _Parts(
        row, np.repeat(start[chosen], width)[order], np.repeat(length[chosen], width)[order]
    )
    every = np.arange(num_rows)
    return _tiled(every, every + 1, parts, num_rows)


def stacked(levels: list[Requests]) -> Requests:
    """All levels as one batch: level i has rows i * num_rows and on."""
    num_rows = int(levels[0].row_indptr[-1])
    rows = [level.row_indptr[:-1] + i * num_rows for i, level in enumerate(levels)]
    counts = np.concatenate([level.kv_len for level in levels])
    tokens = np.concatenate([level.tokens for level in levels])
    return Requests(np.concatenate([*rows, [len(levels) * num_rows]]), indptr_of(counts), tokens)


def whole_trees(tree: DecodeTree) -> Requests:
    """Every root as a request: its queries over all of its tokens that some query sees."""
    seg = tree.segments
    root = tree.root[seg.node]
    begin, end = tree.node_queries
    is_first = np.ones(len(root), bool)
    is_first[1:] = root[1:] != root[:-1]
    parts = _Parts(
        np.cumsum(is_first) - 1,
        tree.node_start[seg.node] + seg.start,
        (seg.end - seg.start).astype(np.int64),
    )
    roots = root[is_first]
    return _tiled(begin[roots], end[roots], parts, tree.num_qo)
