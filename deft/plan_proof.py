"""The proof that a plan is right, on intervals per query and node: no per-token bitmaps, no GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from deft.plan import FINAL, Plan
from deft.tree import DecodeTree, IntArray, LongArray, segment_arange


def prove(plan: Plan, tree: DecodeTree) -> None:
    """Plan.validate(): see there.

    Raises:
        ValueError: the first fault found, naming the strategy and the place.
    """
    _check_rows(plan, tree)
    _check_tiles(plan)
    query, node, start, end, is_open = _covered_intervals(plan)
    want_query, want_node, want_len = _visible_intervals(tree)
    key = query.astype(np.int64) * tree.num_nodes + node
    want_key = want_query.astype(np.int64) * tree.num_nodes + want_node
    order = np.lexsort((start, key))
    key, start, end, is_open = key[order], start[order], end[order], is_open[order]
    _compare_keys(plan, tree, key, want_key)
    visible = want_len[np.searchsorted(want_key, key)]
    is_first = np.r_[True, key[1:] != key[:-1]] if len(key) else np.zeros(0, bool)
    is_last = np.r_[is_first[1:], True] if len(key) else is_first
    follows = np.r_[0, end[:-1]] if len(key) else start
    bad = np.where(is_first, start != 0, start != follows) | (is_last & (end != visible))
    # Open runs of a node must be the last piece of every query that sees the node's end.
    bad |= is_open & ~is_last
    grows = np.isin(key % max(tree.num_nodes, 1), np.unique(key[is_open] % max(tree.num_nodes, 1)))
    bad |= is_last & grows & ~is_open
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"plan {plan.strategy!r}: query {key[at] // tree.num_nodes} reads tokens "
            f"[{start[at]}, {end[at]}) of node {key[at] % tree.num_nodes}, which leaves a gap, "
            f"an overlap or an end other than {visible[at]} (open run: {bool(is_open[at])})"
        )
    _check_destinations(plan, tree)


def _compare_keys(plan: Plan, tree: DecodeTree, key: LongArray, want_key: LongArray) -> None:
    for extra, what in (
        (np.setdiff1d(key, want_key), "reads node {1}, which query {0} does not see"),
        (np.setdiff1d(want_key, key), "never reads node {1} for query {0}"),
    ):
        if len(extra):
            pair = divmod(int(extra[0]), tree.num_nodes)
            raise ValueError(f"plan {plan.strategy!r} " + what.format(*pair))


def _check_rows(plan: Plan, tree: DecodeTree) -> None:
    """Offsets ascend over all entries, and a piece lies in the item that its run lies in."""
    for name, count, entries in (
        ("item_query_indptr", plan.num_items, len(plan.item_query)),
        ("item_run_indptr", plan.num_items, len(plan.run_node)),
        ("chunk_indptr", plan.num_items, len(plan.chunk_run)),
        ("mixed_indptr", plan.num_items, len(plan.mixed_run)),
        ("merge_indptr", tree.num_qo, plan.num_partials),
    ):
        indptr = getattr(plan, name)
        ends = indptr.shape == (count + 1,) and (indptr[0], indptr[-1]) == (0, entries)
        if not ends or (np.diff(indptr) < 0).any():
            raise ValueError(
                f"plan {plan.strategy!r}: {name} must be {count + 1} ascending offsets from 0 to "
                f"{entries}"
            )
    run_item = np.repeat(np.arange(plan.num_items), np.diff(plan.item_run_indptr))
    for name in ("chunk", "mixed"):
        run = getattr(plan, f"{name}_run")
        item = np.repeat(np.arange(plan.num_items), np.diff(getattr(plan, f"{name}_indptr")))
        bad = np.flatnonzero((run < 0) | (run >= len(run_item)))
        if not bad.size:
            bad = np.flatnonzero(run_item[run] != item)
        if bad.size:
            raise ValueError(
                f"plan {plan.strategy!r}: {name} piece {bad[0]} of item {item[bad[0]]} has run "
                f"{run[bad[0]]}, which is not a run of that item"
            )
    bad = np.flatnonzero((plan.run_node < 0) | (plan.run_node >= tree.num_nodes))
    if bad.size:
        raise ValueError(
            f"plan {plan.strategy!r}: run {bad[0]} is of node {plan.run_node[bad[0]]}, "
            f"want 0..{tree.num_nodes - 1}"
        )
    bad = np.flatnonzero(plan.run_open & (plan.run_end != tree.node_len[plan.run_node]))
    if bad.size:
        raise ValueError(
            f"plan {plan.strategy!r}: run {bad[0]} is open but has an end other than its node's"
        )


def _check_tiles(plan: Plan) -> None:
    lost = np.flatnonzero((plan.item_tile < 0) | (plan.item_tile >= len(plan.tiles)))
    if lost.size:
        raise ValueError(f"plan {plan.strategy!r}: item {lost[0]} has a tile that the plan lacks")
    most = np.array([t.queries_per_item(plan.shape.group_size) for t in plan.tiles])
    over = np.flatnonzero(np.diff(plan.item_query_indptr) > most[plan.item_tile])
    if len(over):
        raise ValueError(
            f"plan {plan.strategy!r}: item {over[0]} holds more queries than its tile allows"
        )
    block_n = np.array([t.block_n for t in plan.tiles])
    item = np.repeat(np.arange(plan.num_items), np.diff(plan.chunk_indptr))
    bad = (plan.chunk_len < 1) | (plan.chunk_len > block_n[plan.item_tile[item]])
    if bad.any():
        raise ValueError(f"plan {plan.strategy!r}: chunk {np.flatnonzero(bad)[0]} has a bad length")


def _check_destinations(plan: Plan, tree: DecodeTree) -> None:
    dest, query = plan.item_dest, plan.item_query
    slots = np.sort(dest[dest != FINAL])
    if not np.array_equal(slots, np.arange(plan.num_partials)):
        raise ValueError(f"plan {plan.strategy!r}: partial slots are not used exactly once each")
    partial = dest != FINAL
    owner = np.searchsorted(plan.merge_indptr, dest[partial], side="right") - 1
    final = np.bincount(query[~partial], minlength=tree.num_qo)
    counts = np.bincount(query, minlength=tree.num_qo)
    if not np.array_equal(owner, query[partial]) or ((final > 0) & (counts != 1)).any():
        raise ValueError(f"plan {plan.strategy!r}: a destination belongs to another query")


def _covered_intervals(plan: Plan) -> tuple[IntArray, IntArray, LongArray, LongArray, Any]:
    """(query, node, start, end, open) of every chunk and mixed piece, expanded by its mask
    bits."""
    run_item = np.repeat(np.arange(plan.num_items), np.diff(plan.item_run_indptr))
    run = np.r_[plan.chunk_run, plan.mixed_run]
    start = np.r_[plan.chunk_start, plan.mixed_start].astype(np.int64)
    end = start + np.r_[plan.chunk_len, plan.mixed_len]
    is_pure = np.arange(len(run)) < len(plan.chunk_run)
    count = np.diff(plan.item_query_indptr)[run_item[run]]
    piece = np.repeat(np.arange(len(run)), count)
    local = segment_arange(count)
    item = run_item[run[piece]]
    bit = (plan.run_mask[run[piece], local // 64] >> (local % 64).astype(np.uint64)) & np.uint64(1)
    # Binding lists a pure chunk one by one, under its mask, where its slots are not consecutive.
    masked = np.flatnonzero(is_pure[piece] & (bit == 0))
    if masked.size:
        raise ValueError(
            f"plan {plan.strategy!r}: pure chunk {piece[masked[0]]} has a run whose mask leaves "
            f"out query {local[masked[0]]} of its item"
        )
    keep = bit == 1
    piece, local, item = piece[keep], local[keep], item[keep]
    query = plan.item_query[plan.item_query_indptr[item] + local]
    ends_run = plan.run_open[run] & (end == plan.run_end[run])
    return query, plan.run_node[run[piece]], start[piece], end[piece], ends_run[piece]


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
