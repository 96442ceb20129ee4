"""ExtentArena: where the tokens of each node lie, as maximal runs of consecutive slots.

A node's tokens are a list of extents (base slot, length). All lists lie in one arena in CSR form
with spare capacity: a new node gets exactly what it needs, a list that outgrows its place moves to
the arena's end with twice the room, and the arena is compacted when half of it is waste. So
appending one extent to many nodes is a few numpy calls, and costs O(extents) amortised.
"""

from __future__ import annotations

import numpy as np

from deft.tree import LongArray, indptr_of, segment_arange


def expand_runs(base: LongArray, length: LongArray) -> LongArray:
    """int64 [length.sum()]: the members of runs that start at base, in order."""
    return np.repeat(base, length) + segment_arange(length)


def run_pages(base: LongArray, length: LongArray, page_size: int) -> LongArray:
    """int64: the pages that runs of slots touch, run by run; runs have tokens (length > 0)."""
    first = base // page_size
    return expand_runs(first, (base + length - 1) // page_size - first + 1)


def join_runs(
    counts: LongArray, base: LongArray, length: LongArray
) -> tuple[LongArray, LongArray, LongArray]:
    """Make runs maximal: join those that continue the run before them within one owner.

    Args:
        counts: int64 [n], runs of each owner.
        base, length: int64 [counts.sum()], in owner order.

    Returns:
        counts, base and length of the joined runs.
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    is_first = np.ones(len(base), bool)
    is_first[1:] = (base[1:] != base[:-1] + length[:-1]) | (owner[1:] != owner[:-1])
    first = np.flatnonzero(is_first)
    joined = np.diff(np.r_[indptr_of(length)[first], length.sum()])
    return np.bincount(owner[first], minlength=len(counts)), base[first], joined


class ExtentArena:
    """Lists of (base slot, length), one for each row of a node table."""

    def __init__(self, capacity: int = 64) -> None:
        self._base: LongArray = np.zeros(capacity, np.int64)
        self._length: LongArray = np.zeros(capacity, np.int64)
        self._start: LongArray = np.zeros(capacity, np.int64)
        self._count: LongArray = np.zeros(capacity, np.int64)
        self._room: LongArray = np.zeros(capacity, np.int64)
        self._end = 0
        self._reserved = 0

    def gather(self, rows: LongArray) -> tuple[LongArray, LongArray, LongArray]:
        """CSR of the extents of rows: indptr int64 [n + 1], base slot, length. Rows may repeat."""
        counts = self._count[rows]
        at = expand_runs(self._start[rows], counts)
        return indptr_of(counts), self._base[at], self._length[at]

    def end_slot(self, rows: LongArray) -> LongArray:
        """int64 [n]: the slot behind the last token of each row, -1 where a row has none."""
        filled = self._count[rows] > 0
        last = (self._start[rows] + self._count[rows] - 1) * filled
        return np.where(filled, self._base[last] + self._length[last], -1)

    def push(self, rows: LongArray, counts: LongArray, base: LongArray, length: LongArray) -> None:
        """Append counts[i] extents to row i; a first one that continues the row's last is merged.

        Args:
            rows: int64 [n], distinct.
            counts: int64 [n], extents for each row, >= 0.
            base, length: int64 [counts.sum()], in row order, maximal among themselves.
        """
        self._fit_rows(rows)
        first = indptr_of(counts)[:-1]
        end = self.end_slot(rows)
        candidate = np.flatnonzero((counts > 0) & (end >= 0))
        joined = candidate[end[candidate] == base[first[candidate]]]
        if joined.size:
            last = self._start[rows[joined]] + self._count[rows[joined]] - 1
            self._length[last] += length[first[joined]]
            keep = np.ones(len(base), bool)
            keep[first[joined]] = False
            base, length = base[keep], length[keep]
            counts = counts.copy()
            counts[joined] -= 1
        if not base.size:
            return
        self._make_room(rows, counts)
        at = expand_runs(self._start[rows] + self._count[rows], counts)
        self._base[at] = base
        self._length[at] = length
        self._count[rows] += counts

    def drop(self, rows: LongArray) -> None:
        """Forget the extents of rows."""
        self._reserved -= int(self._room[rows].sum())
        self._start[rows] = self._count[rows] = self._room[rows] = 0

    def _fit_rows(self, rows: LongArray) -> None:
        wanted = int(rows.max()) + 1 if rows.size else 0
        if wanted > len(self._start):
            extra = np.zeros(max(wanted, 2 * len(self._start)) - len(self._start), np.int64)
            self._start = np.concatenate([self._start, extra])
            self._count = np.concatenate([self._count, extra])
            self._room = np.concatenate([self._room, extra])

    def _make_room(self, rows: LongArray, counts: LongArray) -> None:
        need = self._count[rows] + counts
        moving = rows[need > self._room[rows]]
        if not moving.size:
            return
        need = need[need > self._room[rows]]
        room = np.where(self._room[moving] > 0, 2 * need, need)
        total = int(room.sum())
        if self._end + total > len(self._base):
            self._compact_or_grow(total)
        start = self._end + np.cumsum(room) - room
        old = expand_runs(self._start[moving], self._count[moving])
        new = expand_runs(start, self._count[moving])
        self._base[new], self._length[new] = self._base[old], self._length[old]
        self._reserved += total - int(self._room[moving].sum())
        self._start[moving], self._room[moving] = start, room
        self._end += total

    def _compact_or_grow(self, extra: int) -> None:
        wanted = self._reserved + extra
        capacity = len(self._base) if 2 * wanted <= len(self._base) else 2 * wanted
        rows = np.flatnonzero(self._room)
        room, count = self._room[rows], self._count[rows]
        start = np.cumsum(room) - room
        old, new = expand_runs(self._start[rows], count), expand_runs(start, count)
        base, length = np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
        base[new], length[new] = self._base[old], self._length[old]
        self._base, self._length = base, length
        self._start[rows] = start
        self._end = self._reserved
