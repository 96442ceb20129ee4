"""Where nodes go on a stream of new pages, and which runs of slots that makes.

A stream is the pages of one insertion end to end: its position p is slot
`pages[p // page_size] * page_size + p % page_size`. A layout is an order of nodes and the position
of the first token of each.
"""

from __future__ import annotations

import numpy as np

from deft.tree import DecodeTree, LongArray


def own_pages_layout(length: LongArray, page_size: int) -> tuple[LongArray, LongArray]:
    """Node order and positions that start every node on a new page."""
    num_pages = -(-length // page_size)
    return np.arange(len(length)), (np.cumsum(num_pages) - num_pages) * page_size


def shared_pages_layout(
    tree: DecodeTree, under: LongArray, page_size: int
) -> tuple[LongArray, LongArray]:
    """Node order and positions that put the nodes of each group back to back from a new page on.

    Args:
        tree: the nodes.
        under: int64 [num_roots], what each root hangs under: roots under one node are a group, and
            so is each root under none (-1).
        page_size: tokens per page.
    """
    num_groups = len(under)
    group_of_root = np.where(under >= 0, under, np.arange(num_groups) - num_groups)
    _, group_of_root = np.unique(group_of_root, return_inverse=True)
    group = group_of_root[np.searchsorted(tree.roots, tree.root)]
    order = np.argsort(group, kind="stable")
    length = tree.node_len[order].astype(np.int64)
    tokens = np.bincount(group, weights=tree.node_len, minlength=num_groups).astype(np.int64)
    padded = -(-tokens // page_size) * page_size
    gap = (np.cumsum(padded) - padded) - (np.cumsum(tokens) - tokens)
    return order, np.cumsum(length) - length + gap[group[order]]


def stream_slots(pages: LongArray, page_size: int, position: LongArray) -> LongArray:
    """int64: the slots of stream positions."""
    slots: LongArray = pages[position // page_size] * page_size + position % page_size
    return slots


def page_runs(
    pages: LongArray, page_size: int, position: LongArray, length: LongArray
) -> tuple[LongArray, LongArray, LongArray]:
    """Maximal slot runs of nodes laid on a stream of pages.

    Args:
        pages: int64 [num_pages], the stream's page ids.
        page_size: tokens per page.
        position: int64 [n], ascending: stream position of each node's first token.
        length: int64 [n], tokens of each node; every page holds a token in its first slot.

    Returns:
        counts int64 [n] runs per node, and base slot and length of each run in node order.
    """
    live = np.flatnonzero(length > 0)
    begin = position[live]
    end = begin + length[live]
    jumps = np.flatnonzero(pages[1:] != pages[:-1] + 1) + 1
    if jumps.size:
        start = np.union1d(begin, jumps * page_size)
        owner = np.searchsorted(begin, start, side="right") - 1
    else:
        start, owner = begin, np.arange(len(live))
    stop = end[owner]
    np.minimum(stop[:-1], start[1:], out=stop[:-1])
    base = stream_slots(pages, page_size, start)
    counts = np.bincount(live[owner], minlength=len(length))
    return counts, base, stop - start
