"""The DeFT paper's own way of counting IO, beside the exact count of Plan.io().

Its counter charges K and V at 2 bytes per element for every *query* head (for grouped-query models
that is group_size times the bytes that exist) and sums over layers and steps. Methods differ only
in how often they charge a token: once in the tree (flatten), once per 32 queries that share it
(node, node_chunk), or once per query (sequence: radix attention). A bit mask is 8 bytes per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deft.shape import HeadShape
from deft.tree import DecodeTree, LongArray

PAPER_QUERY_CAP = 32
_KV_ELEMENT_BYTES = 4  # K and V of one element, 2 bytes each
_MASK_BYTES = 8
_COUNT_OF_METHOD = {
    "flatten": "tree_tokens",
    "node": "capped_tokens",
    "node_chunk": "capped_tokens",
    "sequence": "path_tokens",
}
PAPER_METHODS = tuple(_COUNT_OF_METHOD)


@dataclass(frozen=True, eq=False)
class StepCounts:
    """Token counts of decode steps, one entry per step; what every paper-convention figure needs.

    Args:
        tree_tokens: int64 [steps], tokens that at least one query sees, each once.
        capped_tokens: int64 [steps], each token once per 32 queries (or part of 32) that see it.
        path_tokens: int64 [steps], each token once per query that sees it.
        num_qo: int64 [steps], queries.
    """

    tree_tokens: LongArray
    capped_tokens: LongArray
    path_tokens: LongArray
    num_qo: LongArray

    @property
    def num_steps(self) -> int:
        """Decode steps counted."""
        return len(self.tree_tokens)


def query_tiles(num_queries: LongArray) -> LongArray:
    """Tiles of at most 32 queries: how often the paper's Node kernel loads a token they share."""
    tiles: LongArray = -(-num_queries // PAPER_QUERY_CAP)
    return tiles


def count_tree(tree: DecodeTree) -> StepCounts:
    """The counts of a single step over `tree`."""
    runs = tree.segments
    length = (runs.end - runs.start).astype(np.int64)
    capped = int((length * query_tiles(runs.query_end - runs.query_begin)).sum())

    def one(value: int) -> LongArray:
        return np.array([value], np.int64)

    return StepCounts(
        tree_tokens=one(tree.attended_tokens),
        capped_tokens=one(capped),
        path_tokens=one(int(tree.query_kv_len.sum())),
        num_qo=one(tree.num_qo),
    )


def paper_kv_bytes(
    method: str, counted: StepCounts | DecodeTree, shape: HeadShape, num_layers: int = 1
) -> int:
    """KV bytes of all steps in the paper's convention.

    Args:
        method: "flatten", "node", "node_chunk" or "sequence" (radix attention).
        counted: a tree (one step), or the counts of a replay.
        shape: head layout; its KV heads play no part.
        num_layers: attention layers summed over.

    Raises:
        ValueError: a method that the paper's counter does not know.
    """
    if method not in _COUNT_OF_METHOD:
        raise ValueError(f"paper IO counts {', '.join(PAPER_METHODS)}; got method {method!r}")
    counts = count_tree(counted) if isinstance(counted, DecodeTree) else counted
    tokens = int(getattr(counts, _COUNT_OF_METHOD[method]).sum())
    return tokens * shape.num_qo_heads * shape.head_dim * _KV_ELEMENT_BYTES * num_layers


def paper_mask_bytes(method: str, counted: StepCounts | DecodeTree, num_layers: int = 1) -> int:
    """Bit-mask bytes of all steps in the paper's convention: only flatten has a mask.

    Raises:
        ValueError: a method that the paper's counter does not know.
    """
    if method not in _COUNT_OF_METHOD:
        raise ValueError(f"paper IO counts {', '.join(PAPER_METHODS)}; got method {method!r}")
    if method != "flatten":
        return 0
    counts = count_tree(counted) if isinstance(counted, DecodeTree) else counted
    return int(counts.tree_tokens.sum()) * _MASK_BYTES * num_layers
