"""Plan: the one intermediate form that every strategy emits and every executor runs.

A plan is a list of items. One item is one CTA per KV head (per query head without pack_group): some
queries, and the token runs they read. Runs are cut in chunks of block_n tokens of two kinds:

- pure: consecutive tokens of one run that all the item's queries see (base slot + length, no mask);
- mixed: tokens listed one by one, each with a slot and ceil(queries / 64) mask words.

An item's result for a query is final when no other item serves that query; otherwise it goes to a
partial slot, and a merge launch joins the slots of a query in root-to-leaf order. Everything here
is in node coordinates: validate() and io() need neither a pool nor a GPU. See docs/plan.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from deft.io_model import IOBytes
from deft.shape import DTYPE_BYTES, HeadShape, TileConfig
from deft.tree import DecodeTree, IntArray, LongArray, segment_arange

if TYPE_CHECKING:
    from deft.bound_plan import BoundPlan
    from deft.kv_cache import PagedKVCache

FINAL = -1
MaskArray = npt.NDArray[np.uint64]
_ITEM_META_BYTES = 32  # query offset and count, chunk range, token range: eight int32
_CHUNK_BYTES = 8  # base slot and length
_SLOT_BYTES = 4


@dataclass(frozen=True, eq=False)
class Plan:
    """Items, their queries, runs, chunks and destinations; all arrays are read-only by convention.

    Args:
        strategy: planner that made it.
        tree, shape, tiles: what it was made for; item i uses tiles[item_tile[i]].
        partial_dtype: dtype name of partial outputs.
        item_phase, item_tile: int32 [num_items]; launches run by (phase, tile), in this order.
        item_query_indptr, item_query, item_dest: CSR of query ids and their destination
            (FINAL or a partial slot).
        item_run_indptr, run_node, run_start, run_end, run_open, run_mask: CSR of runs
            [start, end) of a node; run_open: the run grows with its node; run_mask uint64
            [num_runs, words]: bit j set when the item's query j sees the run.
        chunk_indptr, chunk_run, chunk_start, chunk_len: CSR by item of the pure chunks
            (start in node coordinates).
        mixed_indptr, mixed_run, mixed_start, mixed_len: CSR by item of the pieces whose tokens are
            listed one by one.
        merge_indptr: int64 [num_qo + 1], partial slots of each query, root to leaf.
    """

    strategy: str
    tree: DecodeTree
    shape: HeadShape
    tiles: tuple[TileConfig, ...]
    partial_dtype: str
    item_phase: IntArray
    item_tile: IntArray
    item_query_indptr: LongArray
    item_query: IntArray
    item_dest: IntArray
    item_run_indptr: LongArray
    run_node: IntArray
    run_start: IntArray
    run_end: IntArray
    run_open: npt.NDArray[np.bool_]
    run_mask: MaskArray
    chunk_indptr: LongArray
    chunk_run: IntArray
    chunk_start: IntArray
    chunk_len: IntArray
    mixed_indptr: LongArray
    mixed_run: IntArray
    mixed_start: IntArray
    mixed_len: IntArray
    merge_indptr: LongArray

    # ---- sizes -------------------------------------------------------------------------------
    @property
    def num_items(self) -> int:
        """Items of all phases."""
        return len(self.item_phase)

    @property
    def num_partials(self) -> int:
        """Partial slots: one output row per query head and one LSE each."""
        return int(self.merge_indptr[-1])

    @property
    def num_mask_words(self) -> int:
        """64-bit mask words per mixed token."""
        return int(self.run_mask.shape[1])

    @property
    def launches(self) -> list[tuple[int, int, int, int]]:
        """(phase, tile, first item, end item) of each partial launch, in stream order."""
        if not self.num_items:
            return []
        key = self.item_phase.astype(np.int64) * len(self.tiles) + self.item_tile
        first = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
        stop = np.r_[first[1:], self.num_items]
        return [
            (int(self.item_phase[a]), int(self.item_tile[a]), int(a), int(b))
            for a, b in zip(first, stop, strict=True)
        ]

    @property
    def merge_queries(self) -> IntArray:
        """Queries that the merge launch writes: those with partial slots, and those with no
        item."""
        return np.setdiff1d(
            np.arange(self.tree.num_qo), self.item_query[self.item_dest == FINAL]
        ).astype(np.int32)

    @property
    def num_launches(self) -> int:
        """Kernel launches of one run()."""
        return len(self.launches) + bool(len(self.merge_queries))

    @property
    def item_ctas(self) -> LongArray:
        """int64 [num_items]: thread blocks of each item."""
        per_tile = np.array([tile.ctas_per_item(self.shape) for tile in self.tiles], np.int64)
        return per_tile[self.item_tile]

    @property
    def num_ctas(self) -> int:
        """Thread blocks of all partial launches."""
        return int(self.item_ctas.sum())

    @property
    def partial_bytes(self) -> int:
        """Size of the partial outputs and their LSEs, which is the workspace of run()."""
        row = self.shape.head_dim * DTYPE_BYTES[self.partial_dtype] + 4
        return self.num_partials * self.shape.num_qo_heads * row

    workspace_bytes = partial_bytes

    def _per_item(self, indptr: LongArray, values: npt.NDArray[Any]) -> LongArray:
        total = np.r_[0, np.cumsum(values, dtype=np.int64)]
        return total[indptr[1:]] - total[indptr[:-1]]  # type: ignore[no-any-return]

    @property
    def item_tokens(self) -> LongArray:
        """int64 [num_items]: tokens each item loads, once per CTA."""
        return self._per_item(self.chunk_indptr, self.chunk_len) + self._per_item(
            self.mixed_indptr, self.mixed_len
        )

    @property
    def item_turns(self) -> LongArray:
        """int64 [num_items]: loop turns of block_n tokens each item takes."""
        block_n = np.array([tile.block_n for tile in self.tiles], np.int64)[self.item_tile]
        mixed = self._per_item(self.mixed_indptr, self.mixed_len)
        turns: LongArray = np.diff(self.chunk_indptr) + -(-mixed // block_n)
        return turns

    @property
    def padded_flops(self) -> int:
        """FLOPs issued, padded rows, padded tokens and masked pairs included."""
        area = np.array([tile.block_m * tile.block_n for tile in self.tiles], np.int64)
        per_item = self.item_turns * area[self.item_tile] * self.item_ctas
        return int(per_item.sum()) * 4 * self.shape.head_dim

    # ---- counted IO --------------------------------------------------------------------------
    def io(self) -> IOBytes:
        """Counted IO of one run(), term by term (docs/io.md)."""
        shape, ctas = self.shape, self.item_ctas
        queries = np.diff(self.item_query_indptr)
        mixed = self._per_item(self.mixed_indptr, self.mixed_len)
        token_head = 2 * shape.head_dim * shape.dtype_bytes
        index = (
            _ITEM_META_BYTES
            + 8 * queries
            + _CHUNK_BYTES * np.diff(self.chunk_indptr)
            + _SLOT_BYTES * mixed
        )
        merging = len(self.merge_queries)
        return IOBytes(
            kv=int((self.item_tokens * ctas).sum()) * token_head,
            kv_unique=self.tree.attended_tokens * shape.kv_token_bytes,
            q=int(queries.sum()) * shape.q_token_bytes,
            q_unique=self.tree.num_qo * shape.q_token_bytes,
            out=self.tree.num_qo * shape.q_token_bytes,
            partial=2 * self.partial_bytes,
            mask=int((mixed * ctas).sum()) * 8 * self.num_mask_words,
            index=int((index * ctas).sum()) + merging * shape.num_kv_heads * 12,
        )

    # ---- proof -------------------------------------------------------------------------------
    def validate(self, tree: DecodeTree | None = None) -> None:
        """Prove that every (query, visible token) pair is covered once and no invisible pair is.

        Works on intervals per (query, node), now and after any growth that the open runs allow.

        Raises:
            ValueError: the first pair that is lost, doubled or not visible; a cut item that does
                not fit its tile; a destination that two items share.
        """
        tree = self.tree if tree is None else tree
        self._validate_tiles()
        query, node, start, end, is_open = self._covered_intervals()
        want_query, want_node, want_len = _visible_intervals(tree)
        key = query.astype(np.int64) * tree.num_nodes + node
        want_key = want_query.astype(np.int64) * tree.num_nodes + want_node
        order = np.lexsort((start, key))
        key, start, end, is_open = key[order], start[order], end[order], is_open[order]
        self._compare_keys(tree, key, want_key)
        visible = want_len[np.searchsorted(want_key, key)]
        is_first = np.r_[True, key[1:] != key[:-1]] if len(key) else np.zeros(0, bool)
        is_last = np.r_[is_first[1:], True] if len(key) else is_first
        follows = np.r_[0, end[:-1]] if len(key) else start
        bad = np.where(is_first, start != 0, start != follows) | (is_last & (end != visible))
        # Open runs of a node must be the last piece of every query that sees the node's end.
        bad |= is_open & ~is_last
        grows = np.isin(
            key % max(tree.num_nodes, 1), np.unique(key[is_open] % max(tree.num_nodes, 1))
        )
        bad |= is_last & grows & ~is_open
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise ValueError(
                f"plan {self.strategy!r}: query {key[at] // tree.num_nodes} reads tokens "
                f"[{start[at]}, {end[at]}) of node {key[at] % tree.num_nodes}, which leaves a gap, "
                f"an overlap or an end other than {visible[at]} (open run: {bool(is_open[at])})"
            )
        self._validate_destinations(tree)

    def _compare_keys(self, tree: DecodeTree, key: LongArray, want_key: LongArray) -> None:
        for extra, what in (
            (np.setdiff1d(key, want_key), "reads node {1}, which query {0} does not see"),
            (np.setdiff1d(want_key, key), "never reads node {1} for query {0}"),
        ):
            if len(extra):
                pair = divmod(int(extra[0]), tree.num_nodes)
                raise ValueError(f"plan {self.strategy!r} " + what.format(*pair))

    def _validate_tiles(self) -> None:
        most = np.array([t.queries_per_item(self.shape.group_size) for t in self.tiles])
        over = np.flatnonzero(np.diff(self.item_query_indptr) > most[self.item_tile])
        if len(over):
            raise ValueError(
                f"plan {self.strategy!r}: item {over[0]} holds more queries than its tile allows"
            )
        block_n = np.array([t.block_n for t in self.tiles])
        item = np.repeat(np.arange(self.num_items), np.diff(self.chunk_indptr))
        bad = (self.chunk_len < 1) | (self.chunk_len > block_n[self.item_tile[item]])
        if bad.any():
            raise ValueError(
                f"plan {self.strategy!r}: chunk {np.flatnonzero(bad)[0]} has a bad length"
            )

    def _validate_destinations(self, tree: DecodeTree) -> None:
        dest, query = self.item_dest, self.item_query
        slots = np.sort(dest[dest != FINAL])
        if not np.array_equal(slots, np.arange(self.num_partials)):
            raise ValueError(
                f"plan {self.strategy!r}: partial slots are not used exactly once each"
            )
        partial = dest != FINAL
        owner = np.searchsorted(self.merge_indptr, dest[partial], side="right") - 1
        final = np.bincount(query[~partial], minlength=tree.num_qo)
        counts = np.bincount(query, minlength=tree.num_qo)
        if not np.array_equal(owner, query[partial]) or ((final > 0) & (counts != 1)).any():
            raise ValueError(f"plan {self.strategy!r}: a destination belongs to another query")

    def _covered_intervals(self) -> tuple[IntArray, IntArray, LongArray, LongArray, Any]:
        """(query, node, start, end, open) of every chunk and mixed piece, expanded by its mask
        bits."""
        run_item = np.repeat(np.arange(self.num_items), np.diff(self.item_run_indptr))
        run = np.r_[self.chunk_run, self.mixed_run]
        start = np.r_[self.chunk_start, self.mixed_start].astype(np.int64)
        end = start + np.r_[self.chunk_len, self.mixed_len]
        is_pure = np.arange(len(run)) < len(self.chunk_run)
        count = np.diff(self.item_query_indptr)[run_item[run]]
        piece = np.repeat(np.arange(len(run)), count)
        local = segment_arange(count)
        item = run_item[run[piece]]
        bit = (
            self.run_mask[run[piece], local // 64] >> (local % 64).astype(np.uint64)
        ) & np.uint64(1)
        keep = (bit == 1) | is_pure[
            piece
        ]  # a pure chunk applies no mask, whatever the run's bits say
        piece, local, item = piece[keep], local[keep], item[keep]
        query = self.item_query[self.item_query_indptr[item] + local]
        ends_run = self.run_open[run] & (end == self.run_end[run])
        return query, self.run_node[run[piece]], start[piece], end[piece], ends_run[piece]

    # ---- binding -----------------------------------------------------------------------------
    def bind(
        self, cache: PagedKVCache, nodes: npt.NDArray[Any] | None = None, headroom: int = 64
    ) -> BoundPlan:
        """Resolve slots in a pool, and upload the tables once, on the current stream.

        Args:
            cache: pool that holds the tree.
            nodes: int64 [num_nodes], cache handle of each tree node; default 0..num_nodes-1.
            headroom: tokens that each open run may grow before advance() asks for a replan.

        Raises:
            ValueError: the cache's head layout or node lengths are not the plan's.
        """
        from deft.bound_plan import BoundPlan

        return BoundPlan(self, cache, nodes, headroom)


def _visible_intervals(tree: DecodeTree) -> tuple[IntArray, IntArray, LongArray]:
    """(query, node, visible tokens) of every non-empty pair, sorted by query and node."""
    indptr, node = tree.path
    query = np.repeat(np.arange(tree.num_qo, dtype=np.int32), np.diff(indptr))
    length = tree.node_len[node].astype(np.int64)
    if tree.query_len is not None:
        length[indptr[1:] - 1] = tree.query_len
    keep = length > 0
    query, node, length = query[keep], node[keep], length[keep]
    order = np.lexsort((node, query))
    return query[order], node[order], length[order]
