"""PagedForest: the page tables of a living forest of nodes; no K or V (deft/kv_cache.py adds them).

A slot is `page * page_size + offset`. A node owns whole pages and a child starts a new page, except
nodes inserted with `insert_tokens` (or share_pages), which lie back to back in pages that they
share; a page is free when its last owner is gone. The tokens of a node are kept as maximal runs of
slots (deft/extents.py), so `runs` needs no search.

Methods that take many nodes are vectorised. A pool without enough free pages raises PoolFull before
anything is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deft.extents import ExtentArena, expand_runs, run_pages
from deft.node_table import Handles, NodeTable
from deft.page_pool import PagePool
from deft.page_stream import own_pages_layout, page_runs, shared_pages_layout, stream_slots
from deft.snapshot import Snapshot, take_snapshot
from deft.tree import DecodeTree, LongArray, indptr_of, segment_arange


class PagedForest:
    """Nodes, the pages they hold and the slots of their tokens.

    Args:
        num_pages: pages of the pool.
        page_size: tokens per page, 1..128.

    Raises:
        ValueError: a size outside its range.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if not isinstance(page_size, int | np.integer) or not 1 <= page_size <= 128:
            raise ValueError(f"page_size must be an integer in 1..128, got {page_size!r}")
        self.page_size = int(page_size)
        self._pool = PagePool(num_pages)
        self.num_pages = self._pool.num_pages
        self._nodes = NodeTable()
        self._extents = ExtentArena()
        self._num_tokens = 0

    # ---- sizes -------------------------------------------------------------------------------
    @property
    def num_free_pages(self) -> int:
        """Pages that no node owns."""
        return self._pool.num_free

    @property
    def peak_pages(self) -> int:
        """Most pages owned at any time so far."""
        return self._pool.peak_pages

    @property
    def num_nodes(self) -> int:
        """Live nodes, empty ones included."""
        return self._nodes.num_nodes

    @property
    def num_tokens(self) -> int:
        """Tokens of all live nodes."""
        return self._num_tokens

    @property
    def fragmentation(self) -> float:
        """Slots of owned pages without a token / slots of owned pages (0.0 when none is owned)."""
        slots = self._pool.num_used * self.page_size
        return 1.0 - self._num_tokens / slots if slots else 0.0

    # ---- growing -----------------------------------------------------------------------------
    def insert_tree(
        self, tree: DecodeTree, under: Handles = -1, *, share_pages: bool = False
    ) -> LongArray:
        """Add all nodes of a tree, with pages for their tokens (not written yet).

        Args:
            tree: topology and lengths; its queries are not used.
            under: the node that the tree's roots hang under (-1: none), or one for each root in
                order.
            share_pages: lay the tokens of all nodes under one `under` node (or of one new root)
                back to back in shared pages, instead of starting each node on a new page.

        Returns:
            int64 [num_nodes] handles; 0..num_nodes-1 in a fresh cache.

        Raises:
            PoolFull: not enough free pages; nothing was changed.
            ValueError: a dead handle, or a number of them that is not 1 or the number of roots.
        """
        under_rows = self._nodes.rows_above(under, len(tree.roots))
        length = tree.node_len.astype(np.int64)
        if share_pages:
            layout = shared_pages_layout(tree, under_rows, self.page_size)
        else:
            layout = own_pages_layout(length, self.page_size)
        rows = self._lay(length, layout, tree.parent.astype(np.int64), under_rows)
        if not share_pages:
            self._nodes.room[rows] = -length % self.page_size
        return self._nodes.handles(rows)

    def insert_tokens(self, under: Handles, parent: Sequence[int] | npt.NDArray[Any]) -> LongArray:
        """Add a tree of one-token nodes, as speculative decoding does; they share pages.

        Args:
            under: a live node, or one for each entry -1 of parent (a batch); tokens under one node
                share pages, those under different nodes do not.
            parent: int [n], index within this call of each token's parent, -1: hangs under `under`.

        Returns:
            int64 [n] handles.

        Raises:
            PoolFull, ValueError: as insert_tree.
        """
        self._nodes.rows(under)
        tree = DecodeTree(parent, np.ones(len(parent), np.int32), [])  # type: ignore[arg-type]
        return self.insert_tree(tree, under, share_pages=True)

    def insert(self, parent: int, num_tokens: int) -> int:
        """Add one node with num_tokens tokens under a node, or as a root (-1); returns its handle.

        Raises:
            PoolFull, ValueError: as insert_tree; ValueError also for a negative num_tokens.
        """
        return int(self.insert_tree(DecodeTree([-1], [num_tokens], []), parent)[0])  # type: ignore[arg-type]

    def fork(self, handle: int, num_children: int) -> LongArray:
        """Add num_children empty nodes under a node; int64 handles. Pages are taken as they grow.

        Raises:
            ValueError: a dead handle or a negative number.
        """
        if not isinstance(num_children, int | np.integer) or num_children < 0:
            raise ValueError(f"num_children must be an integer >= 0, got {num_children!r}")
        self._nodes.rows(handle)
        return self.insert_tree(DecodeTree([-1] * num_children, [0] * num_children, []), handle)  # type: ignore[arg-type]

    def append(self, handles: Handles, num_tokens: int | npt.NDArray[Any] = 1) -> LongArray:
        """Add tokens (not written yet) to the end of nodes; nodes below them see the tokens too.

        Args:
            handles: distinct nodes.
            num_tokens: for every node, or one number for each.

        Returns:
            int64 slots of the new tokens, node by node.

        Raises:
            PoolFull: not enough free pages for all; nothing was changed.
            ValueError: a dead or repeated handle, a negative or misshapen num_tokens.
        """
        rows = self._nodes.rows(handles, distinct=True)
        extra = np.asarray(num_tokens)
        if extra.shape not in ((), (1,), rows.shape) or not np.issubdtype(extra.dtype, np.integer):
            raise ValueError(
                f"num_tokens must be an integer or {len(rows)} integers, got {num_tokens!r}"
            )
        if extra.size and not 0 <= extra.min() <= extra.max() < 2**31:
            raise ValueError(f"num_tokens must be in 0..2**31 - 1, got {num_tokens!r}")
        return self._append(rows, np.broadcast_to(extra.astype(np.int64), rows.shape))

    def _new_pages(self, rows: LongArray, extra: LongArray) -> LongArray:
        """int64: pages that each row needs for extra more tokens."""
        rest: LongArray = np.maximum(extra - self._nodes.room[rows], 0)
        return -(-rest // self.page_size)

    def _append(self, rows: LongArray, extra: LongArray) -> LongArray:
        size = self.page_size
        fill = np.minimum(extra, self._nodes.room[rows])
        num_pages = self._new_pages(rows, extra)
        pages = self._pool.take(int(num_pages.sum()))
        position = (np.cumsum(num_pages) - num_pages) * size
        tail = np.flatnonzero(fill)
        tail_base = self._extents.end_slot(rows)
        self._extents.push(rows[tail], np.ones(len(tail), np.int64), tail_base[tail], fill[tail])
        if pages.size:
            self._extents.push(rows, *page_runs(pages, size, position, extra - fill))
        self._nodes.node_len[rows] += extra
        self._nodes.room[rows] += num_pages * size - extra
        self._num_tokens += int(extra.sum())
        # Token t of a node: in the room behind its end while t < fill, then on its new pages.
        step = segment_arange(extra) - np.repeat(fill, extra)
        slots: LongArray = step + np.repeat(tail_base + fill, extra)
        fresh = step >= 0
        slots[fresh] = stream_slots(pages, size, (np.repeat(position, extra) + step)[fresh])
        return slots

    def _lay(
        self,
        length: LongArray,
        layout: tuple[LongArray, LongArray],
        parent: LongArray,
        under_rows: LongArray,
    ) -> LongArray:
        """Take pages for nodes laid on a stream (order, position), then add the nodes; rows."""
        size, (order, position) = self.page_size, layout
        begin, ordered = position[length[order] > 0], length[order]
        last = begin + ordered[ordered > 0] - 1
        touched = expand_runs(begin // size, last // size - begin // size + 1)
        owners = np.bincount(touched)
        pages = self._pool.take(len(owners), owners)
        rows = self._nodes.add(parent, under_rows)
        self._nodes.node_len[rows] = length
        self._extents.push(rows[order], *page_runs(pages, size, position, ordered))
        self._num_tokens += int(length.sum())
        return rows

    # ---- shrinking ---------------------------------------------------------------------------
    def prune(self, handles: Handles) -> int:
        """Remove nodes and everything below them; costs O(nodes removed + pages they held).

        Pages that other nodes hold stay theirs, and no live token moves.

        Args:
            handles: distinct nodes; one may lie below another.

        Returns:
            Pages that became free.

        Raises:
            ValueError: a dead or repeated handle; nothing was changed.
        """
        tops = self._nodes.rows(handles, distinct=True)
        self._nodes.unlink(tops)  # first, so that no walk enters another top when they are nested
        return self._discard(np.concatenate([tops, self._nodes.below(tops)]))

    def _discard(self, rows: LongArray) -> int:
        """Free rows that no live node's child list names; pages that became free."""
        _, base, length = self._extents.gather(rows)
        freed = self._pool.release(run_pages(base, length, self.page_size))
        self._num_tokens -= int(self._nodes.node_len[rows].sum())
        self._extents.drop(rows)
        self._nodes.remove(rows)
        self._on_discard(base, length)
        return len(freed)

    def _on_discard(self, base: LongArray, length: LongArray) -> None:
        """Called with the runs of slots whose tokens have just gone."""

    def shuffle_free_pages(self, seed: int) -> None:
        """Hand out the free pages in a random order from now on, so that nodes are scattered."""
        self._pool.shuffle(seed)

    # ---- reading -----------------------------------------------------------------------------
    def node_len(self, handle: int) -> int:
        """Tokens of one node.

        Raises:
            ValueError: a dead handle, or not exactly one.
        """
        return int(self.node_lens(handle).item())

    def node_lens(self, handles: Handles) -> LongArray:
        """int64 [n]: tokens of each node; ValueError for a dead handle."""
        lens: LongArray = self._nodes.node_len[self._nodes.rows(handles)]
        return lens

    def runs(self, handles: Handles) -> tuple[LongArray, LongArray, LongArray]:
        """Maximal runs of consecutive slots, in token order, node by node.

        Returns:
            CSR by node: indptr int64 [n + 1]; first slot and length of each run, int64.

        Raises:
            ValueError: a dead handle.
        """
        return self._extents.gather(self._nodes.rows(handles))

    def slots(self, handles: Handles) -> tuple[LongArray, LongArray]:
        """CSR of the tokens' slots: indptr int64 [n + 1], slots int64 in token order, node by node.

        Raises:
            ValueError: a dead handle.
        """
        rows = self._nodes.rows(handles)
        _, base, length = self._extents.gather(rows)
        return indptr_of(self._nodes.node_len[rows]), expand_runs(base, length)

    def path(self, handle: int) -> LongArray:
        """int64: the handles from the root down to a node, itself included.

        Raises:
            ValueError: a dead handle.
        """
        row = int(self._nodes.rows(handle).item())
        rows = []
        while row >= 0:
            rows.append(row)
            row = self._nodes.parent.item(row)
        return self._nodes.handles(np.array(rows[::-1], np.int64))

    def snapshot(self) -> Snapshot:
        """The live forest as arrays; see Snapshot.tree for a DecodeTree of it."""
        return take_snapshot(self._nodes)
