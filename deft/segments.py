"""Segments: the token runs of a tree that one set of queries sees, which planners group and cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from deft.csr import INT32_MAX, IntArray, LongArray

if TYPE_CHECKING:
    from deft.tree import DecodeTree


class Segments(NamedTuple):
    """Token runs [start, end) of nodes and the range [begin, stop) of `query_order` that sees them.

    is_open: the run grows with its node (its end is the node's length).
    """

    node: IntArray
    start: IntArray
    end: IntArray
    query_begin: LongArray
    query_end: LongArray
    is_open: npt.NDArray[np.bool_]


def cut_segments(tree: DecodeTree) -> Segments:
    """The segments of a tree, depth-first: nodes, cut at every distinct query_len on them.

    Runs without tokens, or that no query sees, are left out.
    """
    begin, end = tree.node_queries
    order = np.argsort(tree.dfs_rank, kind="stable").astype(np.int32)
    if tree.query_len is None:
        keep = order[(tree.node_len[order] > 0) & (end[order] > begin[order])]
        zeros = np.zeros(len(keep), np.int32)
        is_open = np.ones(len(keep), bool)
        return Segments(keep, zeros, tree.node_len[keep], begin[keep], end[keep], is_open)
    # Cut points of each node: 0, the distinct query_len on it, its length.
    ids = np.arange(tree.num_nodes)
    nodes = np.r_[ids, ids, tree.query_node]
    cuts = np.r_[np.zeros(tree.num_nodes, np.int64), tree.node_len, tree.query_len]
    rank = tree.dfs_rank.astype(np.int64) << 32
    pairs = np.unique(rank[nodes] + cuts)
    same = pairs[1:] >> 32 == pairs[:-1] >> 32
    node = order[pairs[:-1][same] >> 32]
    start, stop = pairs[:-1][same] & INT32_MAX, pairs[1:][same] & INT32_MAX
    # A node's own queries come first in its range, by query_len: shorter than stop drop out.
    key = np.sort(rank[tree.query_node] + tree.query_len)
    first = np.maximum(np.searchsorted(key, rank[node] + stop), begin[node])
    keep = end[node] > first
    has_no_cut = ~np.isin(node, tree.query_node)
    return Segments(
        node[keep].astype(np.int32),
        start[keep].astype(np.int32),
        stop[keep].astype(np.int32),
        first[keep],
        end[node][keep],
        (has_no_cut & (stop == tree.node_len[node]))[keep],
    )
