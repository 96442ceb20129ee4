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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deft.shape import HeadShape
from deft.tree_file import KEYS, OPTIONAL_KEYS, load_arrays, save_arrays, tree_text

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
_INT32_MAX = 2**31 - 1
_TOPOLOGY_CACHES = (
    *("_root_and_depth", "depth", "root", "children", "roots", "leaves", "dfs_rank"),
    *("_levels", "subtree_size", "query_order", "node_queries", "path"),
)


def _as_int32(name: str, values: Any) -> IntArray:
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    if not (np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"{name} must hold integers, got dtype {array.dtype}")
    if array.max() > _INT32_MAX or array.min() < -_INT32_MAX:
        raise ValueError(f"{name} holds a value beyond int32: min {array.min()}, max {array.max()}")
    out = np.ascontiguousarray(array, dtype=np.int32)
    frozen = out.base is None and not out.flags.writeable  # another tree's array: safe to share
    if not frozen and np.may_share_memory(out, array):
        out = out.copy()
    out.setflags(write=False)
    return out


def segment_arange(counts: npt.NDArray[Any]) -> LongArray:
    """0..c-1 for every c in counts, concatenated: the vectorised inner loop of the planners."""
    counts = np.asarray(counts, np.int64)
    total = int(counts.sum())
    starts = np.cumsum(counts) - counts
    within: LongArray = np.arange(total, dtype=np.int64) - np.repeat(starts, counts)
    return within


def indptr_of(counts: npt.NDArray[Any]) -> LongArray:
    """CSR offsets of the counts: int64, first element 0."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


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


@dataclass(frozen=True, eq=False)
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

    def __post_init__(self) -> None:
        for name in ("parent", "node_len", "query_node"):
            object.__setattr__(self, name, _as_int32(name, getattr(self, name)))
        if self.query_len is not None:
            object.__setattr__(self, "query_len", _as_int32("query_len", self.query_len))
        self._validate()

    def _validate(self) -> None:
        n = len(self.parent)
        if len(self.node_len) != n:
            raise ValueError(f"parent has {n} nodes but node_len has {len(self.node_len)}")
        if n == 0 and len(self.query_node):
            raise ValueError("a tree without nodes cannot have queries")
        ids = np.arange(n)
        bad = np.flatnonzero((self.parent < -1) | (self.parent >= n))
        if bad.size:
            raise ValueError(f"node {bad[0]} has parent {self.parent[bad[0]]}, want -1..{n - 1}")
        bad = np.flatnonzero(self.parent >= ids)
        if bad.size:
            raise ValueError(
                f"node {bad[0]} has parent {self.parent[bad[0]]}: parents must come before "
                "children (a cycle, or nodes out of order)"
            )
        bad = np.flatnonzero(self.node_len < 0)
        if bad.size:
            raise ValueError(f"node_len of node {bad[0]} is negative: {self.node_len[bad[0]]}")
        if self.num_tokens > _INT32_MAX:
            raise ValueError(f"the tree holds {self.num_tokens} tokens, beyond int32")
        bad = np.flatnonzero((self.query_node < 0) | (self.query_node >= n))
        if bad.size:
            got = self.query_node[bad[0]]
            raise ValueError(f"query {bad[0]} sits on node {got}, want 0..{n - 1}")
        if self.query_len is not None:
            if len(self.query_len) != len(self.query_node):
                raise ValueError(
                    f"query_len has {len(self.query_len)} entries for {self.num_qo} queries"
                )
            own = self.node_len[self.query_node]
            bad = np.flatnonzero((self.query_len < 0) | (self.query_len > own))
            if bad.size:
                i = bad[0]
                raise ValueError(
                    f"query_len of query {i} is {self.query_len[i]}, "
                    f"want 0..{own[i]} (its node's length)"
                )

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
        begin, end = self.node_queries
        order = np.argsort(self.dfs_rank, kind="stable").astype(np.int32)
        if self.query_len is None:
            keep = order[(self.node_len[order] > 0) & (end[order] > begin[order])]
            zeros = np.zeros(len(keep), np.int32)
            return Segments(
                keep, zeros, self.node_len[keep], begin[keep], end[keep], np.ones(len(keep), bool)
            )
        # Cut points per node: 0, the distinct query_len on it, its length.
        ids = np.arange(self.num_nodes)
        nodes = np.r_[ids, ids, self.query_node]
        cuts = np.r_[np.zeros(self.num_nodes, np.int64), self.node_len, self.query_len]
        rank = self.dfs_rank.astype(np.int64) << 32
        pairs = np.unique(rank[nodes] + cuts)
        same = pairs[1:] >> 32 == pairs[:-1] >> 32
        node = order[pairs[:-1][same] >> 32]
        start, stop = pairs[:-1][same] & _INT32_MAX, pairs[1:][same] & _INT32_MAX
        # A node's own queries come first in its range, by query_len: shorter than stop drop out.
        key = np.sort(rank[self.query_node] + self.query_len)
        first = np.maximum(np.searchsorted(key, rank[node] + stop), begin[node])
        keep = (stop > start) & (end[node] > first)
        full = ~np.isin(node, self.query_node)
        return Segments(
            node[keep].astype(np.int32),
            start[keep].astype(np.int32),
            stop[keep].astype(np.int32),
            first[keep],
            end[node][keep],
            (full & (stop == self.node_len[node]))[keep],
        )

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
