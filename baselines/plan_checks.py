"""What baselines share: a limit on their buffers, a tree's pool slots, the tokens of its paths."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deft.kv_cache import PagedKVCache
from deft.tree import DecodeTree, LongArray, indptr_of, segment_arange

MEMORY_LIMIT_BYTES = 16 << 30  # what a dense method may take beside the KV cache


def memory_reason(what: str, num_bytes: int) -> str | None:
    """Why a method is unsupported when its own buffers would take num_bytes, or None."""
    if num_bytes <= MEMORY_LIMIT_BYTES:
        return None
    limit = MEMORY_LIMIT_BYTES >> 30
    return f"{what} would take {num_bytes / 2**30:.1f} GiB, limit {limit} GiB; use a smaller tree"


def tree_slots(
    tree: DecodeTree, cache: PagedKVCache, nodes: npt.NDArray[np.int64] | None
) -> LongArray:
    """int64 [num_tokens]: pool slot of every token, in node order.

    Args:
        nodes: cache handle of each tree node; default 0..num_nodes-1.

    Raises:
        ValueError: the cache does not hold these nodes with the tree's lengths.
    """
    handles = np.arange(tree.num_nodes) if nodes is None else np.asarray(nodes)
    if handles.ndim != 1 or not np.issubdtype(handles.dtype, np.integer):
        raise ValueError(f"node handles must be integers in one dimension, got {handles.dtype}")
    if len(handles) != tree.num_nodes:
        raise ValueError(f"nodes has {len(handles)} handles for {tree.num_nodes} nodes")
    indptr, slots = cache.slots(handles.astype(np.int64))
    wrong = np.flatnonzero(np.diff(indptr) != tree.node_len)
    if wrong.size:
        bad = int(wrong[0])
        raise ValueError(
            f"node {bad} holds {indptr[bad + 1] - indptr[bad]} tokens in the cache and "
            f"{tree.node_len[bad]} in the tree; write the tree to the cache first"
        )
    return slots


def path_tokens(tree: DecodeTree) -> tuple[LongArray, LongArray]:
    """(indptr [num_qo + 1], tokens): CSR by query, the node-order tokens it sees, root first."""
    indptr, path = tree.path
    length = tree.node_len[path].astype(np.int64)
    if tree.query_len is not None:
        length[indptr[1:] - 1] = tree.query_len
    tokens = np.repeat(tree.node_start[path], length) + segment_arange(length)
    return indptr_of(tree.query_kv_len), tokens
