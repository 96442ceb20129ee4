"""NodeTable: the nodes of a living forest in arrays, with handles that outlive neighbours.

Rows are reused, so the table stays as large as the most nodes that ever lived at once. A handle is
`generation * 2**32 + row`: the handle of a node that is gone never names its row's next tenant.
Children hang in doubly linked sibling lists held in arrays; a subtree is collected breadth first,
child and sibling links followed together, with numpy once the frontier is wide enough to pay.
Births are numbered and a parent is always older than its children, so sorting by birth gives
parent-before-child order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from deft.tree import LongArray

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
# Below this many nodes a Python step (0.2 us a node) beats the fixed cost of a numpy round (5 us).
_SCALAR_FRONTIER = 24

Handles = int | np.integer | Sequence[int] | npt.NDArray[np.integer]


class NodeTable:
    """Topology, lengths and handles of the live nodes; columns are int64 arrays indexed by row.

    Attributes:
        parent: row of the parent, -1 for a root.
        node_len: tokens.
        room: free slots right behind the last token that no other node can take.
        birth: running number of the insertion.
    """

    _EMPTY: ClassVar[dict[str, int]] = {
        "parent": -1,
        "first_child": -1,
        "next_sibling": -1,
        "prev_sibling": -1,
        "generation": 0,
        "birth": -1,
        "node_len": 0,
        "room": 0,
    }

    parent: LongArray
    first_child: LongArray
    next_sibling: LongArray
    prev_sibling: LongArray
    generation: LongArray
    birth: LongArray
    node_len: LongArray
    room: LongArray

    def __init__(self, capacity: int = 64) -> None:
        for name, empty in self._EMPTY.items():
            setattr(self, name, np.full(capacity, empty, np.int64))
        self._returned: LongArray = np.zeros(capacity, np.int64)
        self._num_returned = 0
        self._first_unused = 0
        self._next_birth = 0

    @property
    def capacity(self) -> int:
        """Rows that the columns can hold now."""
        return len(self.parent)

    @property
    def num_nodes(self) -> int:
        """Live nodes."""
        return self._first_unused - self._num_returned

    # ---- handles -----------------------------------------------------------------------------
    def handles(self, rows: LongArray) -> LongArray:
        """int64: the handles of live rows."""
        return (self.generation[rows] << _ROW_BITS) | rows

    def rows(self, handles: Handles, *, distinct: bool = False) -> LongArray:
        """int64 [n]: the rows of one handle or of several.

        Raises:
            ValueError: not integers, a node that does not live, or a repeat where distinct is set.
        """
        wanted: npt.NDArray[Any] = np.atleast_1d(np.asarray(handles))
        if wanted.size == 0:
            return np.zeros(0, np.int64)
        if wanted.ndim != 1 or not np.issubdtype(wanted.dtype, np.integer):
            raise ValueError(
                f"node handles must be integers in one dimension, got {wanted.dtype} of shape "
                f"{wanted.shape}"
            )
        wanted = wanted.astype(np.int64)
        rows = wanted & _ROW_MASK
        known = (wanted >= 0) & (rows < self._first_unused)
        known[known] = self.generation[rows[known]] == wanted[known] >> _ROW_BITS
        known[known] = self.birth[rows[known]] >= 0
        if not known.all():
            raise ValueError(
                f"node {wanted[~known][0]} does not live: pruned, accepted or never inserted"
            )
        if distinct and len(rows) > 1 and len(np.unique(rows)) < len(rows):
            raise ValueError("a node handle is listed twice")
        return rows

    def rows_above(self, handles: Handles, count: int) -> LongArray:
        """int64 [count]: the rows of one handle for all or of one each; -1 stands for no node.

        Raises:
            ValueError: a node that does not live, or another number of handles.
        """
        wanted: npt.NDArray[Any] = np.atleast_1d(np.asarray(handles))
        if wanted.shape not in ((1,), (count,)) or not np.issubdtype(wanted.dtype, np.integer):
            raise ValueError(
                f"`under` must be one handle or one for each of {count} roots, got {handles!r}"
            )
        rows = np.full(len(wanted), -1, np.int64)
        rows[wanted != -1] = self.rows(wanted[wanted != -1])
        return rows if len(rows) == count else np.repeat(rows, count)

    # ---- growth and removal ------------------------------------------------------------------
    def add(self, local_parent: LongArray, under: LongArray) -> LongArray:
        """Add nodes that hang under each other or under live nodes.

        Args:
            local_parent: int64 [n], index of the parent within this call, or -1.
            under: int64 [nodes with local_parent -1], row each of them hangs under, -1 for a root.

        Returns:
            int64 [n] rows.
        """
        rows = self._take_rows(len(local_parent))
        parent = np.empty_like(rows)
        is_top = local_parent < 0
        parent[is_top] = under
        parent[~is_top] = rows[local_parent[~is_top]]
        self.parent[rows] = parent
        self.birth[rows] = self._next_birth + np.arange(len(rows))
        self._next_birth += len(rows)
        self.first_child[rows] = -1
        self._link(rows, parent)
        return rows

    def _take_rows(self, count: int) -> LongArray:
        reused = min(count, self._num_returned)
        begin = self._num_returned - reused
        old = self._returned[begin : self._num_returned][::-1]
        end = self._first_unused + count - reused
        rows = np.concatenate([old, np.arange(self._first_unused, end, dtype=np.int64)])
        if end > self.capacity:
            grown = max(end, 2 * self.capacity)
            for name, empty in self._EMPTY.items():
                column = np.full(grown, empty, np.int64)
                column[: self._first_unused] = getattr(self, name)[: self._first_unused]
                setattr(self, name, column)
            self._returned = np.concatenate(
                [self._returned, np.zeros(grown - len(self._returned), np.int64)]
            )
        self._num_returned = begin
        self._first_unused = end
        return rows

    def _link(self, rows: LongArray, parent: LongArray) -> None:
        """Put rows in front of the child lists of their parents."""
        self.next_sibling[rows] = self.prev_sibling[rows] = -1
        rows, parent = rows[parent >= 0], parent[parent >= 0]
        if not rows.size:
            return
        order = np.argsort(parent, kind="stable")
        rows, parent = rows[order], parent[order]
        adjacent = np.flatnonzero(parent[1:] == parent[:-1])
        self.next_sibling[rows[adjacent]] = rows[adjacent + 1]
        self.prev_sibling[rows[adjacent + 1]] = rows[adjacent]
        is_first = np.r_[True, parent[1:] != parent[:-1]]
        is_last = np.r_[is_first[1:], True]
        heads, tails, parents = rows[is_first], rows[is_last], parent[is_first]
        old = self.first_child[parents]
        self.next_sibling[tails] = old
        self.prev_sibling[old[old >= 0]] = tails[old >= 0]
        self.first_child[parents] = heads

    def unlink(self, rows: LongArray) -> None:
        """Take rows out of the child lists of their parents."""
        for row in rows.tolist():
            before, after = self.prev_sibling.item(row), self.next_sibling.item(row)
            if before >= 0:
                self.next_sibling[before] = after
            elif (parent := self.parent.item(row)) >= 0:
                self.first_child[parent] = after
            if after >= 0:
                self.prev_sibling[after] = before

    def remove(self, rows: LongArray) -> None:
        """Free rows (unlinked before, or gone with their parent); their handles die."""
        rows = np.sort(rows)
        self.generation[rows] += 1
        self.birth[rows] = -1
        self.node_len[rows] = self.room[rows] = 0
        self._returned[self._num_returned : self._num_returned + len(rows)] = rows[::-1]
        self._num_returned += len(rows)

    # ---- walks -------------------------------------------------------------------------------
    def below(self, tops: LongArray) -> LongArray:
        """int64: every row strictly below tops, once for each of tops that it is below."""
        start = self.first_child[tops]
        frontier = start[start >= 0]
        found = [frontier]
        while frontier.size:
            if frontier.size < _SCALAR_FRONTIER:
                frontier = self._walk_narrow(frontier, found)
            else:
                after = np.concatenate([self.first_child[frontier], self.next_sibling[frontier]])
                frontier = after[after >= 0]
                found.append(frontier)
        return np.concatenate(found)

    def _walk_narrow(self, frontier: LongArray, found: list[LongArray]) -> LongArray:
        level, seen = frontier.tolist(), []
        child, sibling = self.first_child.item, self.next_sibling.item
        while level and len(level) < _SCALAR_FRONTIER:
            level = [row for at in level for row in (child(at), sibling(at)) if row >= 0]
            seen += level
        found.append(np.array(seen, np.int64))
        return np.array(level, np.int64)

    def live(self) -> LongArray:
        """int64 [num_nodes]: live rows, parents before children (oldest first)."""
        rows = np.flatnonzero(self.birth[: self._first_unused] >= 0)
        return rows[np.argsort(self.birth[rows], kind="stable")]
