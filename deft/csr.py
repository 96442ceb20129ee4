"""Integer arrays and compressed rows: what trees, plans and caches index with."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
INT32_MAX = 2**31 - 1


def as_int32(name: str, values: npt.ArrayLike) -> IntArray:
    """The values as a read-only one-dimensional int32 array.

    Args:
        name: what the values are, for the message.
        values: integers; an int32 array of another tree is shared, any other is copied.

    Raises:
        ValueError: another dimension, values that are no integers, or a value beyond int32.
    """
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} must be one-dimensional, got lists of unequal length") from error
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    if array.size == 0:
        array = np.zeros(0, np.int32)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must hold integers, got dtype {array.dtype}")
    if array.size and (array.max() > INT32_MAX or array.min() < -INT32_MAX):
        raise ValueError(f"{name} holds a value beyond int32: min {array.min()}, max {array.max()}")
    out = np.ascontiguousarray(array, dtype=np.int32)
    is_frozen = out.base is None and not out.flags.writeable
    if not is_frozen and np.may_share_memory(out, array):
        out = out.copy()
    out.setflags(write=False)
    return out


def segment_arange(counts: npt.NDArray[Any]) -> LongArray:
    """0..c-1 for every c in counts, concatenated: the vectorised inner loop of the planners."""
    counts = np.asarray(counts, np.int64)
    total = int(counts.sum())
    starts = np.cumsum(counts) - counts
    within: LongArray = np.arange(total, dtype=np.int64) - np.repeat(starts, counts)
    return within


def indptr_of(counts: npt.NDArray[Any]) -> LongArray:
    """CSR offsets of the counts: int64, first element 0."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out
