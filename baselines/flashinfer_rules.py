"""How FlashInfer 0.7.4 cuts a batch into thread blocks: what its counted IO follows from.

From include/flashinfer/attention/scheduler.cuh of that release. All kernels read K and V once per
KV head and query tile, but fa3, which does so once per query head. A batch that is cut over its KV
tokens writes every cut's output and LSE and reads them in a merge launch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from baselines.requests import Requests
from deft.io_model import IOBytes
from deft.shape import HeadShape
from deft.tree import LongArray

_INDEX_BYTES = 4
_LSE_BYTES = 4
_MIN_CHUNK = 128  # tokens, at page size 1
HOLISTIC_MAX_WORKS = 65536  # work items of a class that BatchAttention has room for
_HOLISTIC_TILES = (128, 16)


class Cuts(NamedTuple):
    """Thread blocks of one launch.

    Args:
        tiles: query tiles of each request.
        chunks: KV chunks of each request.
        is_split: [num_requests], the request's outputs go through a merge.
        heads: heads that read K and V apart: KV heads, for fa3 query heads.
    """

    tiles: LongArray
    chunks: LongArray
    is_split: np.ndarray
    heads: int

    @property
    def num_ctas(self) -> int:
        """Work items, one per head; the grid may hold fewer persistent blocks."""
        return int((self.tiles * self.chunks).sum()) * self.heads


def _ceil(a: LongArray, b: int) -> LongArray:
    return -(-a // b)


def fa2_tile(rows: LongArray, group: int, head_dim: int) -> int:
    """Rows (query x group) of a query tile of the fa2 prefill kernel."""
    packed = int(rows.sum()) * group // max(len(rows), 1)
    if packed > 64 and head_dim < 256:
        return 128
    return 64 if packed > 16 else 16


def fa2_cuts(req: Requests, shape: HeadShape, num_sms: int, blocks_per_sm: int = 2) -> Cuts:
    """The fa2 prefill kernel: the least KV chunk whose blocks fit two to an SM."""
    tile = fa2_tile(req.rows, shape.group_size, shape.head_dim)
    tiles = _ceil(req.rows * shape.group_size, tile)
    kv = np.maximum(req.kv_len, 1)
    limit = num_sms * blocks_per_sm // shape.num_kv_heads
    low, high = _MIN_CHUNK, max(int(kv.max()), 1) if len(kv) else 1
    longest = high
    while low < high:
        middle = (low + high) // 2
        if int((tiles * _ceil(kv, middle)).sum()) > limit:
            low = middle + 1
        else:
            high = middle
    is_split = low < longest
    chunks = _ceil(kv, low) if is_split else np.ones_like(kv)
    return Cuts(tiles, chunks, np.full(len(kv), is_split), shape.num_kv_heads)


def fa3_cuts(req: Requests, shape: HeadShape) -> Cuts:
    """The fa3 prefill kernel: no KV chunks, and no packing of the group."""
    tile = 192 if shape.head_dim == 64 else 128
    ones = np.ones(len(req.rows), np.int64)
    return Cuts(_ceil(req.rows, tile), ones, ones == 0, shape.num_qo_heads)


def auto_backend(req: Requests) -> str:
    """What backend="auto" takes on Hopper: fa3 where a request has more than 64 rows."""
    return "fa3" if len(req.rows) and int(req.rows.max()) > 64 else "fa2"


def decode_cuts(req: Requests, shape: HeadShape, num_sms: int, blocks_per_sm: int) -> Cuts:
    """The CUDA-core decode kernel: split only where whole sequences leave the grid unfilled."""
    kv = np.maximum(req.kv_len, 1)
    ones = np.ones_like(kv)
    limit = num_sms * blocks_per_sm
    if len(kv) * shape.num_kv_heads >= limit:
        return Cuts(ones, ones, ones == 0, shape.num_kv_heads)
    low, high = _MIN_CHUNK, int(kv.max())
    while low < high:
        middle = (low + high) // 2
        if int(_ceil(kv, middle).sum()) * shape.num_kv_heads > limit:
            low = middle + 1
        else:
            high = middle
    chunks = _ceil(kv, low)
    is_split = int(chunks.sum()) > len(kv)
    return Cuts(ones, chunks if is_split else ones, np.full(len(kv), is_split), shape.num_kv_heads)


def holistic_cuts(req: Requests, shape: HeadShape, num_sms: int) -> Cuts:
    """BatchAttention: tiles of 128 or 16 rows in one persistent launch, KV cut by total length."""
    clusters = num_sms * (1 if shape.head_dim >= 256 else 2)
    packed = req.rows * shape.group_size
    is_large = packed > _HOLISTIC_TILES[1]
    tiles = np.where(is_large, _ceil(packed, 128), _ceil(packed, 16))
    total = int((tiles * req.kv_len).sum()) * shape.num_kv_heads
    share = max(-(-total // clusters), 1)
    limit = 128 if share <= 128 else -(-share // 256) * 256
    limits = np.where(is_large, limit // min(shape.num_kv_heads, 2), limit)
    chunks = np.maximum(-(-req.kv_len // limits), 1)
    return Cuts(tiles, chunks, chunks > 1, shape.num_kv_heads)


def holistic_works(req: Requests, cuts: Cuts, shape: HeadShape) -> int:
    """Work items of the fuller of BatchAttention's two classes."""
    is_large = req.rows * shape.group_size > _HOLISTIC_TILES[1]
    works = cuts.tiles * cuts.chunks * shape.num_kv_heads
    return max(int(works[is_large].sum()), int(works[~is_large].sum()))


def holistic_workspace(shape: HeadShape, num_sms: int) -> int:
    """Bytes of partial outputs and LSEs that BatchAttention's plan() takes, whatever the batch."""
    clusters = num_sms * (1 if shape.head_dim >= 256 else 2)
    splits = 4 * clusters * sum(_HOLISTIC_TILES)
    return splits * shape.num_kv_heads * (2 * shape.head_dim + 4) + 1024


def launch_io(req: Requests, cuts: Cuts, shape: HeadShape, has_lse: bool) -> IOBytes:
    """Counted IO of one attention launch and its merge of KV chunks.

    Its own output is counted as `out`; `has_lse` adds the LSE of each row to it.
    """
    row_bytes = shape.q_token_bytes
    lse_bytes = shape.num_qo_heads * _LSE_BYTES
    tokens = int((cuts.tiles * req.kv_len).sum())
    per_head = cuts.heads // shape.num_kv_heads
    rows, parts = int(req.rows.sum()), int((req.rows * cuts.chunks)[cuts.is_split].sum())
    return IOBytes(
        kv=tokens * shape.kv_token_bytes * per_head,
        kv_unique=len(np.unique(req.tokens)) * shape.kv_token_bytes,
        q=int((req.rows * cuts.chunks).sum()) * row_bytes,
        q_unique=rows * row_bytes,
        out=rows * (row_bytes + (lse_bytes if has_lse else 0)),
        partial=2 * parts * (row_bytes + lse_bytes),
        index=_INDEX_BYTES
        * (tokens * cuts.heads + 3 * int((cuts.tiles * cuts.chunks).sum()) + 2 * len(req.rows) + 2),
    )


def plan_bytes(req: Requests, cuts: Cuts) -> int:
    """What plan() sends to the GPU: page indices, indptrs, last page lengths, its work list."""
    requests = len(req.rows)
    work = 3 * int((cuts.tiles * cuts.chunks).sum())
    merge = int(req.rows.sum()) + 1 if cuts.is_split.any() else 0
    return _INDEX_BYTES * (len(req.tokens) + 4 * requests + 3 + work + merge)
