"""PageTable: paths of nodes as lists of whole pages, the form that paged-attention kernels take."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from deft.extents import ExtentArena, run_pages
from deft.tree import IntArray, LongArray, indptr_of

_INT32_MAX = 2**31 - 1


class PageTable(NamedTuple):
    """Pages of each path, in CSR; int32 all.

    kv_indptr: [num_paths + 1].
    kv_indices: [kv_indptr[-1]], page ids.
    kv_last_page_len: [num_paths], tokens of the path's last page, 1..page_size; 0 without tokens.
    """

    kv_indptr: IntArray
    kv_indices: IntArray
    kv_last_page_len: IntArray


def make_page_table(
    extents: ExtentArena, indptr: LongArray, rows: LongArray, seen: LongArray, page_size: int
) -> PageTable:
    """The page table of paths.

    Args:
        extents: where the tokens of each row lie.
        indptr: int64 [num_paths + 1], CSR of the paths.
        rows: int64 [indptr[-1]], the nodes of each path, root first.
        seen: int64 [indptr[-1]], leading tokens of each node that belong to the path.
        page_size: tokens per page.

    Raises:
        ValueError: a path whose tokens are not whole pages (all but its last page full).
    """
    run_indptr, base, length = extents.gather(rows)
    counts = np.diff(run_indptr)
    token = indptr_of(length)
    before = token[:-1] - np.repeat(token[run_indptr[:-1]], counts)  # tokens of the node so far
    length = np.clip(np.repeat(seen, counts) - before, 0, length)
    path = np.repeat(np.repeat(np.arange(len(indptr) - 1), np.diff(indptr)), counts)
    kept = length > 0
    base, length, path = base[kept], length[kept], path[kept]
    is_last = np.r_[path[1:] != path[:-1], np.ones(min(len(path), 1), bool)]
    starts_inside = base % page_size != 0
    ends_inside = ((base + length) % page_size != 0) & ~is_last
    bad = np.flatnonzero(starts_inside | ends_inside)
    if bad.size:
        what = "starts" if starts_inside[bad[0]] else "ends"
        raise ValueError(
            f"path {path[bad[0]]} is not made of whole pages of {page_size} tokens: one of its "
            f"nodes {what} inside a page; use page_size 1, or inner nodes that fill their pages "
            "and share none"
        )
    pages = run_pages(base, length, page_size)
    num_pages = np.bincount(path, -(-length // page_size), len(indptr) - 1).astype(np.int64)
    if len(pages) > _INT32_MAX:
        raise ValueError(f"the page table has {len(pages)} entries, beyond int32; use fewer paths")
    last_len = np.zeros(len(indptr) - 1, np.int32)
    last_len[path[is_last]] = (length[is_last] - 1) % page_size + 1
    return PageTable(indptr_of(num_pages).astype(np.int32), pages.astype(np.int32), last_len)
