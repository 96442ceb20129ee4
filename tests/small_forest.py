"""A small forest, numbered K/V rows and the full state of a cache, for the cache's tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from deft.kv_cache import PagedKVCache
from deft.shape import HeadShape
from deft.tree import DecodeTree

SHAPE = HeadShape(num_qo_heads=4, num_kv_heads=2, head_dim=4, dtype="float32")


def forest(query_len: list[int] | None = None) -> DecodeTree:
    """Two requests, an empty inner node, lengths that fill pages and that do not."""
    return DecodeTree([-1, 0, 0, 1, -1, 4], [48, 0, 7, 130, 16, 1], [2, 3, 4, 5, 3], query_len)


def rows(values: list[int] | np.ndarray) -> torch.Tensor:
    """K or V rows whose every element is the token's number."""
    column = torch.as_tensor(np.asarray(values), dtype=torch.float32)
    return column[:, None, None].expand(-1, SHAPE.num_kv_heads, SHAPE.head_dim).contiguous()


def tokens_of(cache: PagedKVCache, handles: Any, layer: int = 0) -> list[int]:
    return cache.gather(handles, layer)[0][:, 0, 0].int().tolist()


def state_of(cache: PagedKVCache) -> list[Any]:
    snapshot = cache.snapshot()
    pages = np.arange(cache.num_pages)
    counts = (cache.num_free_pages, cache.peak_pages, cache.num_nodes, cache.num_tokens)
    tables = (*snapshot, *cache.slots(snapshot.handles), cache._pool.owners(pages))
    return [counts, *(table.tolist() for table in tables)]
