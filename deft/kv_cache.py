"""PagedKVCache: the K and V of a living forest of nodes, in one pool of pages.

Every layer has a `[num_pages, page_size, num_kv_heads, head_dim]` tensor (NHD) for K and one for V,
and all layers share one page table. A slot is `page * page_size + offset`. A node owns whole pages
and a child starts a new page, except nodes inserted with `insert_tokens` (or share_pages), which lie
back to back in pages that they share; a page is free when its last owner is gone. The tokens of a
node are kept as maximal runs of slots (deft/extents.py), so `runs` needs no search.

Methods that take many nodes are vectorised. A pool without enough free pages raises PoolFull before
anything is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deft.extents import ExtentArena, expand_runs, page_runs
from deft.node_table import Handles, NodeTable
from deft.page_pool import PagePool, PoolFull
from deft.shape import HeadShape, torch_dtype
from deft.tree import DecodeTree, IntArray, LongArray, indptr_of, segment_arange

__all__ = ["PagedKVCache", "PoolFull"]


class PagedKVCache:
    """A pool of KV pages and the nodes that live in it.

    Args:
        shape: heads and dtype of every layer.
        num_pages: pages of the pool.
        page_size: tokens per page, 1..128.
        num_layers: layers; they share the page table.
        device: where K and V live ("meta" keeps the tables only).
        poison: fill every page with NaN, and again when it is freed, so that a read outside the
            tree shows; for tests.

    Attributes:
        k_cache, v_cache: one `[num_pages, page_size, num_kv_heads, head_dim]` tensor per layer.

    Raises:
        ValueError: a size outside its range.
    """

    def __init__(
        self,
        shape: HeadShape,
        num_pages: int,
        page_size: int,
        *,
        num_layers: int = 1,
        device: str | torch.device = "cpu",
        poison: bool = False,
    ) -> None:
        if not 1 <= page_size <= 128:
            raise ValueError(f"page_size must be in 1..128, got {page_size}")
        if num_layers < 1:
            raise ValueError(f"num_layers must be >= 1, got {num_layers}")
        self.shape = shape
        self.page_size = page_size
        self.num_layers = num_layers
        self.poison = poison
        self._pool = PagePool(num_pages)
        self._nodes = NodeTable()
        self._extents = ExtentArena()
        self._num_tokens = 0
        size = (2, num_layers, num_pages * page_size, shape.num_kv_heads, shape.head_dim)
        self._kv = torch.empty(size, dtype=torch_dtype(shape.dtype), device=device)
        if poison:
            self._kv.fill_(float("nan"))
        paged = self._kv.view(2, num_layers, num_pages, page_size, *size[3:])
        self.k_cache: list[Tensor] = list(paged[0].unbind(0))
        self.v_cache: list[Tensor] = list(paged[1].unbind(0))

    # ---- sizes -------------------------------------------------------------------------------
    @property
    def device(self) -> torch.device:
        """Device of K and V."""
        return self._kv.device

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._pool.num_pages

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
        """Slots of owned pages that hold no token / slots of owned pages (0.0 when none is owned)."""
        slots = self._pool.num_used * self.page_size
        return 1.0 - self._num_tokens / slots if slots else 0.0

    # ---- growing -----------------------------------------------------------------------------
    def insert_tree(self, tree: DecodeTree, under: Handles = -1, *, share_pages: bool = False) -> LongArray:
        """Add all nodes of a tree, with pages for their tokens (not written yet).

        Args:
            tree: topology and lengths; its queries are not used.
            under: the node that the tree's roots hang under (-1: none), or one for each root in order.
            share_pages: lay the tokens of all nodes under one `under` node (or of one new root) back
                to back in shared pages, instead of starting each node on a new page.

        Returns:
            int64 [num_nodes] handles; 0..num_nodes-1 in a fresh cache.

        Raises:
            PoolFull: not enough free pages; nothing was changed.
            ValueError: a dead handle, or a number of them that is not 1 or the number of roots.
        """
        under_rows = self._under_rows(under, len(tree.roots))
        length = tree.node_len.astype(np.int64)
        if share_pages:
            stream = self._shared_stream(tree, under_rows)
        else:
            num_pages = -(-length // self.page_size)
            stream = np.arange(tree.num_nodes), (np.cumsum(num_pages) - num_pages) * self.page_size
        rows = self._lay(length, stream, tree.parent.astype(np.int64), under_rows)
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
        if num_children < 0:
            raise ValueError(f"fork needs num_children >= 0, got {num_children}")
        none = np.zeros(num_children, np.int32)
        return self.insert_tree(DecodeTree(none - 1, none, []), handle)  # type: ignore[arg-type]

    def append(self, handles: Handles, num_tokens: int | npt.NDArray[Any] = 1) -> LongArray:
        """Add tokens (not written yet) to the end of nodes; nodes below them see the new tokens too.

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
            raise ValueError(f"num_tokens must be an integer or {len(rows)} integers, got {num_tokens!r}")
        if extra.size and extra.min() < 0:
            raise ValueError(f"num_tokens must be >= 0, got {int(extra.min())}")
        return self._append(rows, np.broadcast_to(extra.astype(np.int64), rows.shape))

    def _append(self, rows: LongArray, extra: LongArray) -> LongArray:
        size = self.page_size
        fill = np.minimum(extra, self._nodes.room[rows])
        rest = extra - fill
        num_pages = -(-rest // size)
        pages = self._pool.take(int(num_pages.sum()))
        position = (np.cumsum(num_pages) - num_pages) * size
        tail = np.flatnonzero(fill)
        tail_base = self._extents.end_slot(rows)
        self._extents.push(rows[tail], np.ones(len(tail), np.int64), tail_base[tail], fill[tail])
        if pages.size:
            self._extents.push(rows, *page_runs(pages, size, position, rest))
        self._nodes.node_len[rows] += extra
        self._nodes.room[rows] += num_pages * size - extra
        self._num_tokens += int(extra.sum())
        # Token t of a node: in the room behind its end while t < fill, then on its new pages.
        step = segment_arange(extra) - np.repeat(fill, extra)
        slots = step + np.repeat(tail_base + fill, extra)
        fresh = step >= 0
        on_stream = (np.repeat(position, extra) + step)[fresh]
        slots[fresh] = pages[on_stream // size] * size + on_stream % size
        return slots

    def _under_rows(self, under: Handles, num_roots: int) -> LongArray:
        wanted: npt.NDArray[Any] = np.atleast_1d(np.asarray(under))
        if wanted.shape not in ((1,), (num_roots,)) or not np.issubdtype(wanted.dtype, np.integer):
            raise ValueError(f"`under` must be one handle or one for each of {num_roots} roots, got {under!r}")
        rows = np.full(len(wanted), -1, np.int64)
        rows[wanted != -1] = self._nodes.rows(wanted[wanted != -1])
        return np.broadcast_to(rows, num_roots) if len(rows) != num_roots else rows

    def _shared_stream(self, tree: DecodeTree, under_rows: LongArray) -> tuple[LongArray, LongArray]:
        """Node order and stream positions that put each group back to back from a new page on."""
        group_of_root = np.where(under_rows >= 0, under_rows, -1 - np.arange(len(under_rows)))
        _, group_of_root = np.unique(group_of_root, return_inverse=True)
        group = group_of_root[np.searchsorted(tree.roots, tree.root)]
        order = np.argsort(group, kind="stable")
        length = tree.node_len[order].astype(np.int64)
        num_groups = len(group_of_root)
        tokens = np.bincount(group, weights=tree.node_len, minlength=num_groups).astype(np.int64)
        padded = -(-tokens // self.page_size) * self.page_size
        gap = (np.cumsum(padded) - padded) - (np.cumsum(tokens) - tokens)
        return order, np.cumsum(length) - length + gap[group[order]]

    def _lay(
        self, length: LongArray, stream: tuple[LongArray, LongArray], parent: LongArray, under_rows: LongArray
    ) -> LongArray:
        """Take pages for nodes laid on a stream (order, position), then add the nodes; rows."""
        order, position = stream
        size = self.page_size
        begin, ordered = position[length[order] > 0], length[order]
        last = begin + ordered[ordered > 0] - 1
        touched = expand_runs(begin // size, last // size - begin // size + 1)
        owners = np.bincount(touched)
        pages = self._pool.take(len(owners), owners)
        rows = self._nodes.add(parent, under_rows)
        self._nodes.node_len[rows] = length
        self._nodes.room[rows] = 0
        self._extents.push(rows[order], *page_runs(pages, size, position, ordered))
        self._num_tokens += int(length.sum())
        return rows
