"""Sequence-based grouping: one query and its whole path an item; nothing is shared.

A radix-tree server shares memory but reads so: every request its own path. With split_len it is
FlashDecoding / PagedAttention v2 (the path cut in parts, merged afterwards).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from deft.plan import Plan
from deft.plan_builder import WorkList, build_plan
from deft.planners.tiles import (
    DEFAULT_NUM_SMS,
    TileOption,
    auto_block_kv,
    cut_streams,
    piece_ends,
    positive,
    resolve_tiles,
)
from deft.shape import HeadShape
from deft.tree import DecodeTree, indptr_of, segment_arange

if TYPE_CHECKING:
    from deft.device_model import DeviceModel


def plan_sequence(
    tree: DecodeTree,
    shape: HeadShape,
    tile: TileOption = None,
    device: DeviceModel | None = None,
    *,
    split_len: int | str | None = None,
    max_splits: int | None = None,
    partial_dtype: str | None = None,
) -> Plan:
    """One item per query, or per split of its path.

    Args:
        split_len: tokens per split; None does not split; "auto" splits until the SMs are filled.
        max_splits: most splits of a path: splits get longer where the longest path would have more.

    Raises:
        ValueError: split_len is neither None, "auto" nor a positive number, or max_splits is not.
    """
    tiles = resolve_tiles(tile, shape)
    heads = tiles[0].ctas_per_item(shape)
    least = 1
    if max_splits is not None:
        longest = int(tree.query_kv_len.max(initial=0))
        least = max(-(-longest // positive("max_splits", max_splits)), 1)
    work = path_items(
        tree, lambda tokens: max(split_block(split_len, tokens, heads, device), least)
    )
    return build_plan("sequence", tree, shape, tiles, work, partial_dtype)


def path_items(tree: DecodeTree, split: Callable[[int], int], from_depth: int = 0) -> WorkList:
    """Items = (query, split of its path), the path from a depth on.

    Args:
        split: tokens of all paths -> tokens per item.
        from_depth: nodes above it are left to others.
    """
    order = tree.query_order
    indptr, path_node = tree.path
    counts = np.maximum(np.diff(indptr)[order] - from_depth, 0)
    at = np.repeat(indptr[order] + from_depth, counts) + segment_arange(counts)
    node = path_node[at]
    end = tree.node_len[node].astype(np.int64)
    if tree.query_len is not None:
        has_own = counts > 0
        end[indptr_of(counts)[1:][has_own] - 1] = tree.query_len[order][has_own]
    is_open = np.full(len(node), tree.query_len is None)
    keep = end > 0
    runs = np.bincount(np.repeat(np.arange(len(order)), counts)[keep], minlength=len(order))
    node, end, is_open = node[keep], end[keep], is_open[keep]
    block_indptr, piece_block, run, start = cut_streams(indptr_of(runs), end, split(int(end.sum())))
    stop = piece_ends(run, start, end)
    query = np.repeat(np.arange(len(order)), np.diff(block_indptr))
    return WorkList(
        query_begin=query,
        query_end=query + 1,
        run_indptr=indptr_of(np.bincount(piece_block, minlength=len(query))),
        run_node=node[run],
        run_start=start,
        run_end=stop,
        run_open=is_open[run] & (stop == end[run]),
        run_query_begin=query[piece_block],
        run_query_end=query[piece_block] + 1,
    )


def split_block(
    split_len: int | str | None, tokens: int, heads: int, device: DeviceModel | None
) -> int:
    """Tokens per split: split_len, or what fills the SMs for "auto", or all for None.

    Raises:
        ValueError: split_len is neither None, "auto" nor a positive number.
    """
    if split_len is None:
        return 2**31
    if split_len == "auto":
        sms = device.num_sms if device else DEFAULT_NUM_SMS
        return auto_block_kv(tokens, heads, sms, low=128, ctas_per_sm=4)
    if isinstance(split_len, str):
        raise ValueError(f'split_len must be None, "auto" or a positive number, got {split_len!r}')
    return positive("split_len", split_len)
