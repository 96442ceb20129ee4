"""Snapshot: the live forest of a cache as arrays, and the DecodeTree of queries on it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from deft.node_table import Handles, NodeTable
from deft.tree import DecodeTree, IntArray, LongArray


class Snapshot(NamedTuple):
    """The live forest, parents before children.

    parent: int32 [num_nodes], index into these arrays, -1 for a root.
    node_len: int32 [num_nodes], tokens.
    handles: int64 [num_nodes], oldest node first: the `nodes` of a plan made for `tree(...)`.
    """

    parent: IntArray
    node_len: IntArray
    handles: LongArray

    def tree(self, query_handles: Handles, query_len: Any = None) -> DecodeTree:
        """The forest as a DecodeTree with one query on each of query_handles (repeats allowed).

        Raises:
            ValueError: a handle that is not in the snapshot, or a bad query_len (see DecodeTree).
        """
        wanted = np.atleast_1d(np.asarray(query_handles))
        if wanted.size and (wanted.ndim != 1 or not np.issubdtype(wanted.dtype, np.integer)):
            raise ValueError(f"query handles must be integers in one dimension, got {wanted.dtype}")
        wanted = wanted.astype(np.int64)
        order = np.argsort(self.handles)
        at = np.searchsorted(self.handles, wanted, sorter=order)
        node = order[np.minimum(at, len(order) - 1)] if len(order) else np.zeros(0, np.int64)
        missing = wanted[self.handles[node] != wanted] if len(order) else wanted
        if missing.size:
            raise ValueError(f"node {missing[0]} is not in this snapshot; take a new one")
        return DecodeTree(self.parent, self.node_len, node.astype(np.int32), query_len)


def take_snapshot(nodes: NodeTable) -> Snapshot:
    """All live nodes of a table."""
    rows = nodes.live()
    index = np.full(nodes.capacity + 1, -1, np.int32)  # the last entry stands for "no parent"
    index[rows] = np.arange(len(rows))
    return Snapshot(
        index[nodes.parent[rows]], nodes.node_len[rows].astype(np.int32), nodes.handles(rows)
    )
