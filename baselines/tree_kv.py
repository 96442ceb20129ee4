"""K and V of a whole tree as one tensor a layer, for methods that cannot address a paged pool."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deft.kv_cache import PagedKVCache


class TreeKV(NamedTuple):
    """K and V by node order, and what it took to have them so.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim] for each layer.
        kv_layout: "shared" (views of the pool) or "own_copy".
        layout_us: host time of the copy, device work included.
        layout_bytes: bytes the copy read and wrote, all layers.
        upload_bytes: the slot list that went to the device for it.
    """

    k: list[Tensor]
    v: list[Tensor]
    kv_layout: str
    layout_us: float
    layout_bytes: int
    upload_bytes: int


def tree_kv(cache: PagedKVCache, slots: npt.NDArray[np.int64]) -> TreeKV:
    """Views of the pool where the slots are consecutive, else a copy of every layer.

    Args:
        slots: int64 [num_tokens], pool slot of every token in node order.
    """
    shape, layers = cache.shape, len(cache.k_cache)
    pools = [*cache.k_cache, *cache.v_cache]
    flat = [pool.view(-1, shape.num_kv_heads, shape.head_dim) for pool in pools]
    first = int(slots[0]) if len(slots) else 0
    if np.array_equal(slots, first + np.arange(len(slots))):
        kv = [pool.narrow(0, first, len(slots)) for pool in flat]
        return TreeKV(kv[:layers], kv[layers:], "shared", 0.0, 0, 0)
    _synchronize(cache.device)
    begin = time.perf_counter()
    where = torch.from_numpy(slots).to(cache.device)
    kv = [pool.index_select(0, where) for pool in flat]
    _synchronize(cache.device)
    return TreeKV(
        k=kv[:layers],
        v=kv[layers:],
        kv_layout="own_copy",
        layout_us=(time.perf_counter() - begin) * 1e6,
        layout_bytes=2 * len(slots) * shape.kv_token_bytes * layers,
        upload_bytes=where.numel() * where.element_size(),
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
