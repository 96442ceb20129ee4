"""Default tile classes, and the block size that fills a GPU: what planners fall back on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from deft.shape import HeadShape, TileConfig

TileOption = TileConfig | Mapping[str, Any] | Iterable[TileConfig | Mapping[str, Any]] | None
DEFAULT_NUM_SMS = 132
# Thread blocks per SM that automatic block sizes aim at (docs/kernel_log.md, entry 2).
CTAS_PER_SM = 2


def default_tiles(shape: HeadShape, long_runs: bool = False) -> tuple[TileConfig, ...]:
    """Tile classes by ascending rows, as measured on an H200 (docs/kernel_log.md, entry 2).

    Args:
        long_runs: the planner fills its blocks across node borders, so a turn of 64 tokens is full.
    """
    wide = shape.head_dim > 128 or shape.dtype_bytes > 2
    stages = 2 if wide else 3
    small = TileConfig(block_m=16, block_n=32, num_warps=1, num_stages=stages)
    if long_runs and not wide:
        small = TileConfig(block_m=16, block_n=64, num_warps=2, num_stages=stages)
    narrow = wide or (long_runs and shape.group_size >= 4)
    middle = TileConfig(block_m=64, block_n=32 if narrow else 64, num_warps=4, num_stages=stages)
    return (small, middle) if shape.group_size <= 16 else (middle,)


def resolve_tiles(
    tile: TileOption, shape: HeadShape, long_runs: bool = False
) -> tuple[TileConfig, ...]:
    """The tiles option of a planner as TileConfigs by ascending rows.

    Raises:
        ValueError: no tile can hold one query's group, or pack_group differs between tiles.
    """
    if tile is None:
        tiles: tuple[TileConfig, ...] = default_tiles(shape, long_runs)
    elif isinstance(tile, TileConfig | Mapping):
        tiles = (_as_tile(tile),)
    elif not isinstance(tile, Iterable):
        raise ValueError(f"tile must be a tile's keys or a list of them, got {tile!r}")
    else:
        tiles = tuple(_as_tile(one) for one in tile)
    if len({t.pack_group for t in tiles}) > 1:
        raise ValueError("all tiles of a plan must agree on pack_group")
    fitting = [t for t in tiles if not t.pack_group or t.block_m >= shape.group_size]
    if not fitting:
        raise ValueError(
            f"group_size {shape.group_size} needs a tile of that many rows, got {list(tiles)}"
        )
    return tuple(sorted(fitting, key=lambda t: t.block_m))


def positive(name: str, value: Any) -> int:
    """The value of a planner's option that counts tokens or queries.

    Raises:
        ValueError: not an integer, or below 1.
    """
    if not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be positive and an integer, got {value!r}")
    return min(int(value), 2**31)  # no tree holds more tokens


def _as_tile(tile: TileConfig | Mapping[str, Any]) -> TileConfig:
    if isinstance(tile, TileConfig):
        return tile
    try:
        return TileConfig(**tile)
    except TypeError as error:
        raise ValueError(
            f"tile keys are block_m, block_n, num_warps, num_stages, pack_group: {error}"
        ) from error


def auto_block_kv(
    tile_tokens: int | np.int64,
    ctas_per_item: int,
    num_sms: int,
    low: int = 64,
    high: int = 2048,
    ctas_per_sm: int | None = None,
) -> int:
    """Power-of-two KV block such that token-tile pairs / block x heads fill the GPU's SMs.

    Args:
        tile_tokens: sum over query tiles of the tokens each reads.
        ctas_per_item: thread blocks per item (heads).
        ctas_per_sm: thread blocks per SM to aim at; default CTAS_PER_SM.
    """
    slots = num_sms * (ctas_per_sm or CTAS_PER_SM)
    want = float(tile_tokens) * ctas_per_item / slots
    return int(np.clip(2 ** np.floor(np.log2(max(want, 1.0))), low, high))


def cut_streams(
    run_indptr: npt.NDArray[np.int64], length: npt.NDArray[Any], block: int | npt.NDArray[Any]
) -> tuple[
    npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]
]:
    """Cut CSR streams of runs in equal blocks, across run borders.

    Args:
        block: tokens per block, one number or one per stream.

    Returns:
        (block_indptr [streams + 1], piece_block, piece_run, piece_start): blocks of each stream,
        and the pieces in order: the block each belongs to, its run, and its start within the run.
        A piece ends where the next one of its run starts, or at the run's end.
    """
    length = np.asarray(length, np.int64)
    total = np.r_[0, np.cumsum(length)]
    stream = np.repeat(np.arange(len(run_indptr) - 1), np.diff(run_indptr))
    offset = total[:-1] - total[run_indptr[:-1]][stream]  # of each run within its stream
    stream_len = total[run_indptr[1:]] - total[run_indptr[:-1]]
    per_stream = np.broadcast_to(np.asarray(block, np.int64), stream_len.shape)
    blocks = -(-stream_len // per_stream)
    block_indptr = np.r_[0, np.cumsum(blocks)]
    size = per_stream[stream]
    first, last = offset // size, (offset + np.maximum(length, 1) - 1) // size
    pieces = np.where(length > 0, last - first + 1, 0)
    piece_run = np.repeat(np.arange(len(length)), pieces)
    within = np.arange(len(piece_run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    number = first[piece_run] + within
    piece_start = np.maximum(number * size[piece_run] - offset[piece_run], 0)
    return block_indptr, block_indptr[stream[piece_run]] + number, piece_run, piece_start


def piece_ends(
    piece_run: npt.NDArray[np.int64], piece_start: npt.NDArray[np.int64], length: npt.NDArray[Any]
) -> npt.NDArray[np.int64]:
    """End of each piece within its run."""
    end = np.asarray(length, np.int64)[piece_run]
    same = piece_run[1:] == piece_run[:-1]
    end[:-1][same] = piece_start[1:][same]
    return end
