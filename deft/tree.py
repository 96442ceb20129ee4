"""DecodeTree: topology, lengths and who attends to what.

A query attends to every token of the nodes on the path from its root to its node, its own node
included. A batch of requests is a forest. All derived arrays are computed once, vectorised over
levels (no per-token work), and cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deft.csr import IntArray as IntArray
from deft.csr import LongArray as LongArray
from deft.csr import as_int32
from deft.csr import indptr_of as indptr_of
from deft.csr import segment_arange as segment_arange
from deft.segments import Segments as Segments
from deft.segments import cut_segments
from deft.shape import HeadShape
from deft.tree_check import check_arrays
from deft.tree_file import KEYS, OPTIONAL_KEYS, load_arrays, save_arrays, tree_text

_TOPOLOGY_CACHES = (
    *("_root_and_depth", "depth", "root", "children", "roots", "leaves", "dfs_rank"),
    *("_levels", "subtree_size", "query_order", "node_queries", "path"),
)


@dataclass(frozen=True, eq=False, init=False)
class DecodeTree:
    """A forest of KV nodes and the queries that decode over it.

    Args:
        parent: int32 [num_nodes], parent of each node, -1 for a root; parents come before children.
        node_len: int32 [num_nodes], KV tokens of each node, >= 0.
        query_node: int32 [num_qo], node of each query; inner nodes, repeats, any order.
        query_len: int32 [num_qo] or None: tokens of its *own* node that a query sees (several
            causal queries in one node); None means all of them.

    Raises:
        ValueError: a cycle or a parent after its child, a negative length, a query on a missing
            node, a query_len outside 0..node_len, or a value beyond int32.
    """

    parent: IntArray
    node_len: IntArray
    query_node: IntArray
    query_len: IntArray | None = None

    def __init__(
        self,
        parent: npt.ArrayLike,
        node_len: npt.ArrayLike,
        query_node: npt.ArrayLike,
        query_len: npt.ArrayLike | None = None,
    ) -> None:
        given = {"parent": parent, "node_len": node_len, "query_node": query_node}
        for name, values in given.items():
            object.__setattr__(self, name, as_int32(name, values))
        cuts = None if query_len is None else as_int32("query_len", query_len)
        object.__setattr__(self, "query_len", cuts)
        check_arrays(self.parent, self.node_len, self.query_node, self.query_len)

    # ---- sizes -------------------------------------------------------------------------------
    @property
    def num_nodes(self) -> int:
        """Nodes, empty ones included."""
        return len(self.parent)

    @property
    def num_qo(self) -> int:
        """Query tokens."""
        return len(self.query_node)

    @cached_property
    def num_tokens(self) -> int:
        """KV tokens of all nodes."""
        return int(self.node_len.sum(dtype=np.int64))

    @cached_property
    def node_start(self) -> LongArray:
        """int64 [num_nodes]: offset of each node's first token when K/V lie in node order."""
        return indptr_of(self.node_len)[:-1]

    # ---- topology ----------------------------------------------------------------------------
    @cached_property
    def depth(self) -> IntArray:
        """int32 [num_nodes]: 0 for a root."""
        return self._root_and_depth[1]

    @cached_property
    def root(self) -> IntArray:
        """int32 [num_nodes]: root (request) of each node."""
        return self._root_and_depth[0]

    @cached_property
    def _root_and_depth(self) -> tuple[IntArray, IntArray]:
        # Pointer doubling: log2(depth) passes, so that chains of thousands of nodes stay cheap.
        up = np.where(self.parent < 0, np.arange(self.num_nodes), self.parent).astype(np.int32)
        depth = (self.parent >= 0).astype(np.int32)
        while (step := depth[up]).any():
            depth += step
            up = up[up]
        return up, depth

    @cached_property
    def children(self) -> tuple[LongArray, IntArray]:
        """CSR (indptr, node ids) of the children of each node, in node order."""
        order = np.argsort(self.parent, kind="stable").astype(np.int32)
        order = order[self.parent[order] >= 0]
        counts = np.bincount(self.parent[order], minlength=self.num_nodes)
        return indptr_of(counts), order

    @cached_property
    def roots(self) -> IntArray:
        """Node ids without a parent."""
        return np.flatnonzero(self.parent < 0).astype(np.int32)

    @cached_property
    def leaves(self) -> IntArray:
        """Node ids without children."""
        has_child = np.zeros(self.num_nodes, bool)
        has_child[self.parent[self.parent >= 0]] = True
        return np.flatnonzero(~has_child).astype(np.int32)

    @cached_property
    def dfs_rank(self) -> IntArray:
        """int32 [num_nodes]: position of each node in depth-first (preorder) order."""
        size, by_level = self.subtree_size.astype(np.int64), self._levels
        rank = np.zeros(self.num_nodes, np.int64)
        if by_level:
            first = by_level[0]
            rank[first] = np.cumsum(size[first]) - size[first]
        for nodes in by_level[1:]:
            parents = self.parent[nodes]
            order = np.argsort(parents, kind="stable")
            nodes, parents = nodes[order], parents[order]
            before = np.cumsum(size[nodes]) - size[nodes]
            is_first = np.r_[True, parents[1:] != parents[:-1]]
            base = np.repeat(before[is_first], np.diff(np.r_[np.flatnonzero(is_first), len(nodes)]))
            rank[nodes] = rank[parents] + 1 + before - base
        return rank.astype(np.int32)

    @cached_property
    def _levels(self) -> list[IntArray]:
        order = np.argsort(self.depth, kind="stable").astype(np.int32)
        if not order.size:
            return []
        return np.split(order, np.cumsum(np.bincount(self.depth))[:-1])

    @cached_property
    def subtree_size(self) -> IntArray:
        """int32 [num_nodes]: nodes of each node's subtree, itself included."""
        size = np.ones(self.num_nodes, np.int32)
        for nodes in reversed(self._levels[1:]):
            np.add.at(size, self.parent[nodes], size[nodes])
        return size

    @cached_property
    def query_order(self) -> IntArray:
        """Query ids sorted by the depth-first rank of their nodes, then query_len, then query id.

        The queries that see any one token are therefore a contiguous range of this order.
        """
        rank = self.dfs_rank[self.query_node]
        if self.query_len is None:
            return np.argsort(rank, kind="stable").astype(np.int32)
        return np.lexsort((self.query_len, rank)).astype(np.int32)

    @cached_property
    def node_queries(self) -> tuple[LongArray, LongArray]:
        """(begin, end) int64 [num_nodes] each: the queries at or below a node are
        `query_order[begin:end]`, contiguous because the order is depth-first."""
        ranks = self.dfs_rank[self.query_node][self.query_order]
        begin = np.searchsorted(ranks, self.dfs_rank, side="left")
        end = np.searchsorted(ranks, self.dfs_rank + self.subtree_size, side="left")
        return begin, end

    @cached_property
    def path(self) -> tuple[LongArray, IntArray]:
        """CSR (indptr, nodes): the nodes on each query's path, root first, own node last."""
        counts = self.depth[self.query_node].astype(np.int64) + 1
        indptr = indptr_of(counts)
        nodes = np.zeros(int(indptr[-1]), np.int32)
        current = self.query_node.copy()
        at = indptr[1:] - 1
        live = np.arange(self.num_qo)
        while live.size:
            nodes[at[live]] = current[live]
            at[live] -= 1
            current[live] = self.parent[current[live]]
            live = live[current[live] >= 0]
        return indptr, nodes

    # ---- tokens ------------------------------------------------------------------------------
    @cached_property
    def query_kv_len(self) -> LongArray:
        """int64 [num_qo]: KV tokens each query sees."""
        above = self.node_len.astype(np.int64)
        for nodes in self._levels[1:]:
            above[nodes] += above[self.parent[nodes]]
        seen = above[self.query_node]
        if self.query_len is not None:
            seen = seen - self.node_len[self.query_node] + self.query_len
        return seen

    @cached_property
    def attended_tokens(self) -> int:
        """KV tokens that at least one query sees: what must be read at least once."""
        return int((self.segments.end - self.segments.start).sum(dtype=np.int64))

    @cached_property
    def sharing_factor(self) -> float:
        """F_s = sum of path lengths in tokens / attended tokens (1.0 = nothing shared)."""
        unique = self.attended_tokens
        return float(self.query_kv_len.sum()) / unique if unique else 1.0

    def flops(self, shape: HeadShape) -> int:
        """Useful FLOPs of one attention layer: 4 x head_dim per (query head, visible token)."""
        return int(self.query_kv_len.sum()) * shape.num_qo_heads * shape.head_dim * 4

    @cached_property
    def segments(self) -> Segments:
        """Token runs that one set of queries sees, depth-first: what planners group and cut.

        A segment is a node, cut at every distinct query_len of the queries that sit on it. Segments
        without tokens or without queries are left out.
        """
        return cut_segments(self)

    # ---- derived trees and files -------------------------------------------------------------
    def with_lengths(self, node_len: Sequence[int] | npt.NDArray[Any]) -> DecodeTree:
        """The same topology and queries with other node lengths.

        What was derived from the topology alone is carried over: replays call this every step.
        """
        tree = DecodeTree(self.parent, np.asarray(node_len), self.query_node, self.query_len)
        kept = {name: self.__dict__[name] for name in _TOPOLOGY_CACHES if name in self.__dict__}
        tree.__dict__.update(kept)
        return tree

    def to_dict(self) -> dict[str, list[int]]:
        """The file form: parent, node_len, query_node and, if set, query_len as lists."""
        arrays = {name: getattr(self, name) for name in (*KEYS, *OPTIONAL_KEYS)}
        return {name: array.tolist() for name, array in arrays.items() if array is not None}

    def save(self, path: str | Path) -> Path:
        """Write `.json` or `.npz`, chosen by the suffix.

        Raises:
            ValueError: another suffix.
        """
        path = Path(path)
        save_arrays(path, self.to_dict())
        return path

    @classmethod
    def load(cls, path: str | Path) -> DecodeTree:
        """Read a file of save() or one by hand: {parent, node_len, query_node, query_len?}.

        Raises:
            ValueError: the file is missing, is not such a file, or holds no valid tree.
        """
        path = Path(path)
        data = load_arrays(path)
        try:
            return cls(data["parent"], data["node_len"], data["query_node"], data.get("query_len"))
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"{path}: {error}") from error

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DecodeTree):
            return NotImplemented
        if (self.query_len is None) != (other.query_len is None):
            return False
        pairs = [(getattr(self, name), getattr(other, name)) for name in (*KEYS, *OPTIONAL_KEYS)]
        return all(a is b or np.array_equal(a, b) for a, b in pairs)

    def __hash__(self) -> int:
        return hash((self.parent.tobytes(), self.node_len.tobytes(), self.query_node.tobytes()))

    def __repr__(self) -> str:
        levels = int(self.depth.max()) + 1 if self.num_nodes else 0
        return (
            f"DecodeTree(num_nodes={self.num_nodes}, num_qo={self.num_qo}, "
            f"num_tokens={self.num_tokens}, depth={levels}, "
            f"sharing_factor={self.sharing_factor:.2f})"
        )

    def to_text(self, max_lines: int = 40) -> str:
        """An indented drawing, one node a line: id, tokens, queries on it."""
        return tree_text(self, max_lines)
