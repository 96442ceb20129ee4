"""PagedKVCache: the K and V of a living forest of nodes, in one pool of pages.

Every layer has a `[num_pages, page_size, num_kv_heads, head_dim]` tensor (NHD) for K and one for V,
and all layers share the page tables of deft/paged_forest.py. Inserting and appending give tokens
slots; `write` fills them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deft.extents import expand_runs, join_runs, run_pages
from deft.node_table import Handles
from deft.page_pool import PoolFull
from deft.page_table import PageTable, make_page_table
from deft.paged_forest import PagedForest
from deft.shape import HeadShape, torch_dtype
from deft.snapshot import Snapshot
from deft.tree import DecodeTree, LongArray, indptr_of

__all__ = ["PagedKVCache", "PageTable", "PoolFull", "Snapshot"]


class PagedKVCache(PagedForest):
    """A pool of KV pages and the nodes that live in it.

    Args:
        shape: heads and dtype of every layer.
        num_pages: pages of the pool.
        page_size: tokens per page, 1..128.
        num_layers: layers; they share the page tables.
        device: where K and V live ("meta" keeps the tables only).
        poison: fill every slot with NaN, and again when its token goes, so that a read outside
            the tree shows, also in a page that other nodes still hold; for tests.

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
        super().__init__(num_pages, page_size)
        if not isinstance(num_layers, int | np.integer) or num_layers < 1:
            raise ValueError(f"num_layers must be an integer >= 1, got {num_layers!r}")
        self.shape = shape
        self.num_layers = num_layers
        self.poison = poison
        size = (2, num_layers, self.num_pages * self.page_size, shape.num_kv_heads, shape.head_dim)
        # One tensor for all layers, so that an accept copies a token's K and V everywhere at once.
        self._kv = torch.empty(size, dtype=torch_dtype(shape.dtype), device=device)
        if poison:
            self._kv.fill_(float("nan"))
        paged = self._kv.view(2, num_layers, self.num_pages, self.page_size, *size[3:])
        self.k_cache: list[Tensor] = list(paged[0].unbind(0))
        self.v_cache: list[Tensor] = list(paged[1].unbind(0))

    @property
    def device(self) -> torch.device:
        """Device of K and V."""
        return self._kv.device

    def _on_discard(self, base: LongArray, length: LongArray) -> None:
        if self.poison and base.size:
            self._kv.index_fill_(2, self._index(expand_runs(base, length)), float("nan"))

    def _index(self, indices: LongArray) -> Tensor:
        return torch.from_numpy(indices).to(self.device)

    # ---- K and V -----------------------------------------------------------------------------
    def write(self, handles: Handles, k: Tensor, v: Tensor, layer: int = 0) -> None:
        """Store K and V of all tokens of nodes.

        Args:
            handles: distinct nodes.
            k, v: [tokens of the nodes, num_kv_heads, head_dim], node by node; dtype and device of
                the cache.
            layer: 0..num_layers - 1.

        Raises:
            ValueError: a dead or repeated handle, or a wrong shape, dtype, device or layer.
        """
        self._nodes.rows(handles, distinct=True)
        self._store(self.slots(handles)[1], k, v, layer)

    def write_slots(self, slots: npt.NDArray[Any], k: Tensor, v: Tensor, layer: int = 0) -> None:
        """Store K and V of single tokens, such as those that append has just added.

        Args:
            slots: int [n], distinct, from append() or slots().
            k, v: [n, num_kv_heads, head_dim], as write.

        Raises:
            ValueError: a slot outside the pool, or a wrong shape, dtype, device or layer.
        """
        wanted = np.asarray(slots)
        if wanted.ndim != 1 or not np.issubdtype(wanted.dtype, np.integer):
            raise ValueError(f"slots must be integers in one dimension, got {wanted.dtype}")
        num_slots = self.num_pages * self.page_size
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < num_slots:
            raise ValueError(
                f"slots must be in 0..{num_slots - 1}, got {wanted.min()}..{wanted.max()}"
            )
        self._store(wanted.astype(np.int64), k, v, layer)

    def _store(self, slots: LongArray, k: Tensor, v: Tensor, layer: int) -> None:
        self._check_layer(layer)
        want = (len(slots), self.shape.num_kv_heads, self.shape.head_dim)
        for name, given in (("k", k), ("v", v)):
            if not isinstance(given, Tensor):
                raise ValueError(f"{name} must be a tensor, got {type(given).__name__}")
            if tuple(given.shape) != want:
                raise ValueError(
                    f"{name} must have shape {list(want)} (one row for each token), "
                    f"got {list(given.shape)}"
                )
            if given.dtype != self._kv.dtype or given.device != self.device:
                raise ValueError(
                    f"{name} must be {self._kv.dtype} on {self.device} like the cache, "
                    f"got {given.dtype} on {given.device}; convert it with .to()"
                )
        index = self._index(slots)
        # Detached: the pool holds values, and its layers are views that autograd may not change.
        self._kv[0, layer].index_copy_(0, index, k.detach())
        self._kv[1, layer].index_copy_(0, index, v.detach())

    def gather(self, handles: Handles, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Copies of K and V of all tokens of nodes (repeats allowed), node by node.

        Returns:
            k, v: [tokens of the nodes, num_kv_heads, head_dim].

        Raises:
            ValueError: a dead handle or a layer that is not there.
        """
        self._check_layer(layer)
        index = self._index(self.slots(handles)[1])
        return self._kv[0, layer].index_select(0, index), self._kv[1, layer].index_select(0, index)

    def _check_layer(self, layer: int) -> None:
        if not isinstance(layer, int | np.integer) or not 0 <= layer < self.num_layers:
            raise ValueError(f"layer must be in 0..{self.num_layers - 1}, got {layer!r}")

    # ---- speculation -------------------------------------------------------------------------
    def accept(
        self, parents: Handles, path: Handles, path_indptr: npt.NDArray[Any] | None = None
    ) -> int:
        """Move the tokens of accepted nodes to the end of the node above, and prune the rest.

        Everything below a parent goes: the accepted nodes become part of the parent, the others are
        rejected. Page size 1 hands over pages; larger pages copy the accepted tokens into the
        parent's last page (and new ones behind it), all layers at once. The pages that this frees
        are used first, so a full pool is no obstacle unless the parent shares pages itself.

        Args:
            parents: one node, or a batch of distinct nodes, none below another.
            path: accepted nodes of each parent, each a child of the one before it; may be empty.
            path_indptr: int [num_parents + 1], CSR of path by parent; None for a single parent.

        Returns:
            Bytes of K and V copied, over all layers: KV management, no part of attention's IO.

        Raises:
            PoolFull: the parents' new pages are not free even then; nothing was changed.
            ValueError: a dead or repeated handle, a path that does not lead down from its parent,
                or nested parents; nothing was changed.
        """
        tops = self._nodes.rows(parents, distinct=True)
        chain = self._nodes.rows(path, distinct=True)
        indptr = self._path_indptr(path_indptr, len(tops), len(chain))
        self._check_chain(tops, chain, indptr)
        below = self._nodes.below(tops)
        if np.isin(tops, below).any():
            raise ValueError(
                "a parent lies below another parent of the same accept; split the call"
            )
        num_tokens = np.diff(indptr_of(self._nodes.node_len[chain])[indptr])
        if self.page_size == 1:
            self._hand_over(tops, chain, indptr, num_tokens)
            self._drop_below(tops, below)
            return 0
        num_pages = int(self._new_pages(tops, num_tokens).sum())
        _, base, length = self._extents.gather(below)
        self._pool.check_room(num_pages, run_pages(base, length, self.page_size))
        _, source = self.slots(path)
        kept = self._kv.index_select(2, self._index(source))
        self._drop_below(tops, below)
        self._kv.index_copy_(2, self._index(self._append(tops, num_tokens)), kept)
        return kept.numel() * kept.element_size()

    def _path_indptr(
        self, given: npt.NDArray[Any] | None, num_parents: int, num_accepted: int
    ) -> LongArray:
        if given is None and num_parents == 1:
            return np.array([0, num_accepted], np.int64)
        if given is None:
            raise ValueError(f"accept of {num_parents} parents needs path_indptr")
        if not np.issubdtype(np.asarray(given).dtype, np.integer):
            raise ValueError(f"path_indptr must be integers, got {given!r}")
        indptr = np.asarray(given).astype(np.int64)
        ends = indptr.shape == (num_parents + 1,) and (indptr[0], indptr[-1]) == (0, num_accepted)
        if not ends or (np.diff(indptr) < 0).any():
            raise ValueError(
                f"path_indptr must be {num_parents + 1} ascending offsets from 0 to "
                f"{num_accepted}, got {indptr.tolist()}"
            )
        return indptr

    def _check_chain(self, tops: LongArray, chain: LongArray, indptr: LongArray) -> None:
        above = np.r_[-1, chain[:-1]][: len(chain)]
        filled = np.diff(indptr) > 0
        above[indptr[:-1][filled]] = tops[filled]
        bad = np.flatnonzero(self._nodes.parent[chain] != above)
        if bad.size:
            node, wanted = self._nodes.handles(np.array([chain[bad[0]], above[bad[0]]]))
            raise ValueError(
                f"accepted node {node} is not a child of {wanted}: a path must lead down from "
                "its parent"
            )

    def _hand_over(
        self, tops: LongArray, chain: LongArray, indptr: LongArray, num_tokens: LongArray
    ) -> None:
        run_indptr, base, length = self._extents.gather(chain)
        counts = np.diff(run_indptr[indptr])
        self._extents.drop(chain)
        self._extents.push(tops, *join_runs(counts, base, length))
        self._nodes.node_len[chain] = 0
        self._nodes.node_len[tops] += num_tokens

    def _drop_below(self, tops: LongArray, below: LongArray) -> None:
        self._nodes.first_child[tops] = -1
        self._discard(below)

    # ---- page tables -------------------------------------------------------------------------
    def page_table(
        self, paths: DecodeTree | Sequence[Handles], nodes: Handles | None = None
    ) -> PageTable:
        """Paths as lists of whole pages: (kv_indptr, kv_indices, kv_last_page_len), int32.

        Args:
            paths: a tree, for one path per query (query_len respected), or handles of the nodes of
                each path, root first.
            nodes: int64 [num_nodes], handle of each node of the tree; None means 0..num_nodes - 1.

        Raises:
            ValueError: a dead handle, a tree whose lengths are not the cache's, or a path that is
                not made of whole pages: page size over 1 and an inner node with a partial last
                page, or nodes that share pages.
        """
        if isinstance(paths, DecodeTree):
            indptr, rows, seen = self._query_paths(paths, nodes)
        else:
            rows_of = [self._nodes.rows(path) for path in paths]
            indptr = indptr_of(np.array([len(rows) for rows in rows_of], np.int64))
            rows = np.concatenate([np.zeros(0, np.int64), *rows_of])
            seen = self._nodes.node_len[rows]
        return make_page_table(self._extents, indptr, rows, seen, self.page_size)

    def _query_paths(
        self, tree: DecodeTree, nodes: Handles | None
    ) -> tuple[LongArray, LongArray, LongArray]:
        """CSR of the queries' paths in rows, and the tokens of each node that the query sees."""
        rows_of_node = self._nodes.rows(np.arange(tree.num_nodes) if nodes is None else nodes)
        if len(rows_of_node) != tree.num_nodes:
            raise ValueError(f"nodes has {len(rows_of_node)} handles for {tree.num_nodes} nodes")
        lens = self._nodes.node_len[rows_of_node]
        bad = np.flatnonzero(lens != tree.node_len)
        if bad.size:
            raise ValueError(
                f"node {bad[0]} holds {lens[bad[0]]} tokens in the cache and "
                f"{tree.node_len[bad[0]]} in the tree; take a new snapshot"
            )
        indptr, path = tree.path
        seen = lens[path]
        if tree.query_len is not None:
            seen[indptr[1:] - 1] = tree.query_len
        return indptr, rows_of_node[path], seen
