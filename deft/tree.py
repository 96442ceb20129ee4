"""DecodeTree: topology, lengths and who attends to what.

A query attends to every token of the nodes on the path from its root to its node, its own node
included. A batch of requests is a forest. All derived arrays are computed once, vectorised over
levels (no per-token work), and cached.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deft.shape import HeadShape

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
_INT32_MAX = 2**31 - 1


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
    if out is values or out.base is not None or out is array:
        out = out.copy()
    out.setflags(write=False)
    return out


def segment_arange(counts: npt.NDArray[Any]) -> LongArray:
    """0..c-1 for every c in counts, concatenated: the vectorised inner loop of the planners."""
    counts = np.asarray(counts, np.int64)
    total = int(counts.sum())
    starts = np.cumsum(counts) - counts
    return np.arange(total, dtype=np.int64) - np.repeat(starts, counts)


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
        query_node: int32 [num_qo], node of each query; inner nodes, repeats and any order are allowed.
        query_len: int32 [num_qo] or None: tokens of its *own* node that a query sees (several causal
            queries in one node); None means all of them.

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
                f"node {bad[0]} has parent {self.parent[bad[0]]}: parents must come before children "
                "(a cycle, or nodes out of order)"
            )
        bad = np.flatnonzero(self.node_len < 0)
        if bad.size:
            raise ValueError(f"node_len of node {bad[0]} is negative: {self.node_len[bad[0]]}")
        if n and int(self.node_len.sum(dtype=np.int64)) > _INT32_MAX:
            raise ValueError(
                f"the tree holds {int(self.node_len.sum(dtype=np.int64))} tokens, beyond int32"
            )
        bad = np.flatnonzero((self.query_node < 0) | (self.query_node >= n))
        if bad.size:
            raise ValueError(
                f"query {bad[0]} sits on node {self.query_node[bad[0]]}, want 0..{n - 1}"
            )
        if self.query_len is not None:
            if len(self.query_len) != len(self.query_node):
                raise ValueError(
                    f"query_len has {len(self.query_len)} entries for {len(self.query_node)} queries"
                )
            own = self.node_len[self.query_node]
            bad = np.flatnonzero((self.query_len < 0) | (self.query_len > own))
            if bad.size:
                i = bad[0]
                raise ValueError(
                    f"query_len of query {i} is {self.query_len[i]}, want 0..{own[i]} (its node's length)"
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
        depth = np.zeros(self.num_nodes, np.int32)
        up = self.parent.copy()
        while (live := np.flatnonzero(up >= 0)).size:
            depth[live] += 1
            up[live] = self.parent[up[live]]
        return depth

    @cached_property
    def root(self) -> IntArray:
        """int32 [num_nodes]: root (request) of each node."""
        root = np.arange(self.num_nodes, dtype=np.int32)
        while (live := np.flatnonzero(self.parent[root] >= 0)).size:
            root[live] = self.parent[root[live]]
        return root

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
        size = np.ones(self.num_nodes, np.int64)
        by_level = self._levels
        for nodes in reversed(by_level[1:]):
            np.add.at(size, self.parent[nodes], size[nodes])
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
        return (
            float(self.query_kv_len.sum()) / self.attended_tokens if self.attended_tokens else 1.0
        )

    def flops(self, shape: HeadShape) -> int:
        """Useful FLOPs of one attention layer: 4 x head_dim per visible (query head, token) pair."""
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
        nodes = np.r_[np.arange(self.num_nodes), np.arange(self.num_nodes), self.query_node]
        cuts = np.r_[np.zeros(self.num_nodes, np.int64), self.node_len, self.query_len]
        pairs = np.unique(np.stack([self.dfs_rank[nodes], cuts, nodes]), axis=1)
        same = pairs[0, 1:] == pairs[0, :-1]
        node = pairs[2, :-1][same]
        start, stop = pairs[1, :-1][same], pairs[1, 1:][same]
        # Own queries come first in the node's range, by query_len: those with query_len < stop drop out.
        rank, length = self.dfs_rank[self.query_node], self.query_len
        key = (rank.astype(np.int64) << 32) + length
        first = np.searchsorted(np.sort(key), (self.dfs_rank[node].astype(np.int64) << 32) + stop)
        first = np.maximum(first, begin[node])
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
        """The same topology and queries with other node lengths."""
        return DecodeTree(self.parent, np.asarray(node_len), self.query_node, self.query_len)

    def to_dict(self) -> dict[str, list[int]]:
        """The file form: parent, node_len, query_node and, if set, query_len as lists."""
        names = ["parent", "node_len", "query_node"] + (
            ["query_len"] if self.query_len is not None else []
        )
        return {name: getattr(self, name).tolist() for name in names}

    def save(self, path: str | Path) -> Path:
        """Write `.json` or `.npz`, chosen by the suffix.

        Raises:
            ValueError: another suffix.
        """
        path = Path(path)
        data = self.to_dict()
        if path.suffix == ".json":
            path.write_text(json.dumps(data))
        elif path.suffix == ".npz":
            np.savez_compressed(
                path, **{name: np.asarray(values, np.int32) for name, values in data.items()}
            )  # type: ignore[arg-type]
        else:
            raise ValueError(f"a tree file ends in .json or .npz, got {path.name!r}")
        return path

    @classmethod
    def load(cls, path: str | Path) -> DecodeTree:
        """Read a tree file written by save() or by hand: {parent, node_len, query_node, query_len?}.

        Raises:
            ValueError: the file is missing, is not such a file, or holds no valid tree.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"no tree file at {path}")
        try:
            if path.suffix == ".npz":
                with np.load(path, allow_pickle=False) as archive:
                    data: Any = {name: archive[name] for name in archive.files}
            elif path.suffix == ".json":
                data = json.loads(path.read_text())
            else:
                raise ValueError("a tree file ends in .json or .npz")
        except Exception as error:
            raise ValueError(f"{path}: not a readable tree file ({error})") from error
        if not isinstance(data, dict):
            raise ValueError(
                f"{path}: want an object with parent, node_len, query_node, got {type(data).__name__}"
            )
        missing = [name for name in ("parent", "node_len", "query_node") if name not in data]
        unknown = sorted(set(data) - {"parent", "node_len", "query_node", "query_len"})
        if missing or unknown:
            raise ValueError(f"{path}: missing keys {missing}, unknown keys {unknown}")
        try:
            return cls(data["parent"], data["node_len"], data["query_node"], data.get("query_len"))
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"{path}: {error}") from error

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DecodeTree):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.parent.tobytes(), self.node_len.tobytes(), self.query_node.tobytes()))

    def __repr__(self) -> str:
        return (
            f"DecodeTree(num_nodes={self.num_nodes}, num_qo={self.num_qo}, num_tokens={self.num_tokens}, "
            f"depth={int(self.depth.max()) + 1 if self.num_nodes else 0}, sharing_factor={self.sharing_factor:.2f})"
        )

    def to_text(self, max_lines: int = 40) -> str:
        """An indented drawing, one node a line: id, tokens, queries on it."""
        counts = (
            np.bincount(self.query_node, minlength=self.num_nodes)
            if self.num_nodes
            else np.zeros(0, int)
        )
        order = np.argsort(self.dfs_rank, kind="stable")
        lines = []
        for node in order[:max_lines]:
            own = (
                f", {counts[node]} quer{'y' if counts[node] == 1 else 'ies'}"
                if counts[node]
                else ""
            )
            lines.append(
                f"{'  ' * int(self.depth[node])}node {node}: {self.node_len[node]} tokens{own}"
            )
        if self.num_nodes > max_lines:
            lines.append(f"... {self.num_nodes - max_lines} more nodes")
        return "\n".join(lines)
