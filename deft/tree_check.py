"""What makes four arrays a decode tree: the checks of DecodeTree and their messages."""

from __future__ import annotations

import numpy as np

from deft.csr import INT32_MAX, IntArray


def check_arrays(
    parent: IntArray, node_len: IntArray, query_node: IntArray, query_len: IntArray | None
) -> None:
    """Refuse arrays that are no forest with queries, naming the first offender.

    Raises:
        ValueError: what was got and what is wanted.
    """
    if len(node_len) != len(parent):
        raise ValueError(f"parent has {len(parent)} nodes but node_len has {len(node_len)}")
    if not len(parent) and len(query_node):
        raise ValueError("a tree without nodes cannot have queries")
    _check_nodes(parent, node_len)
    last = len(parent) - 1
    bad = np.flatnonzero((query_node < 0) | (query_node > last))
    if bad.size:
        raise ValueError(f"query {bad[0]} sits on node {query_node[bad[0]]}, want 0..{last}")
    if query_len is not None:
        _check_query_len(node_len, query_node, query_len)


def _check_nodes(parent: IntArray, node_len: IntArray) -> None:
    last = len(parent) - 1
    bad = np.flatnonzero((parent < -1) | (parent > last))
    if bad.size:
        raise ValueError(f"node {bad[0]} has parent {parent[bad[0]]}, want -1..{last}")
    bad = np.flatnonzero(parent >= np.arange(len(parent)))
    if bad.size:
        raise ValueError(
            f"node {bad[0]} has parent {parent[bad[0]]}: parents must come before children "
            "(a cycle, or nodes out of order)"
        )
    bad = np.flatnonzero(node_len < 0)
    if bad.size:
        raise ValueError(f"node_len of node {bad[0]} is negative: {node_len[bad[0]]}")
    num_tokens = int(node_len.sum(dtype=np.int64))
    if num_tokens > INT32_MAX:
        raise ValueError(f"the tree holds {num_tokens} tokens, beyond int32")


def _check_query_len(node_len: IntArray, query_node: IntArray, query_len: IntArray) -> None:
    if len(query_len) != len(query_node):
        raise ValueError(f"query_len has {len(query_len)} entries for {len(query_node)} queries")
    own = node_len[query_node]
    bad = np.flatnonzero((query_len < 0) | (query_len > own))
    if bad.size:
        i = bad[0]
        raise ValueError(
            f"query_len of query {i} is {query_len[i]}, want 0..{own[i]} (its node's length)"
        )
