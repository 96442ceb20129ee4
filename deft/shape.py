"""Head layout and tile configuration: the two small records every planner and kernel receives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

_OUT_OF_SCOPE_DTYPES = ("float8_e4m3fn", "float8_e5m2", "fp8", "uint8", "int8")


def _check_integer(name: str, value: object) -> None:
    if not isinstance(value, int | np.integer):
        raise ValueError(f"{name} must be an integer, got {value!r}")


@dataclass(frozen=True)
class HeadShape:
    """Heads of one attention layer.

    Args:
        num_qo_heads: query (and output) heads.
        num_kv_heads: key/value heads; must divide num_qo_heads.
        head_dim: elements per head, 1..256.
        dtype: "float16", "bfloat16", "float32" or "float64" (the last two mostly for tests).

    Raises:
        ValueError: a layout that no kernel of this project can run, with the reason.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float16"

    def __post_init__(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads", "head_dim"):
            _check_integer(name, getattr(self, name))
        if self.num_qo_heads < 1 or self.num_kv_heads < 1:
            raise ValueError(
                f"head counts must be positive, got num_qo_heads={self.num_qo_heads}, "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                "num_qo_heads must be a multiple of num_kv_heads, "
                f"got {self.num_qo_heads} and {self.num_kv_heads}"
            )
        if self.head_dim == 576:
            raise ValueError(
                "head_dim 576 is MLA (576/512), which is out of scope; use head_dim <= 256"
            )
        if not 1 <= self.head_dim <= 256:
            raise ValueError(f"head_dim must be in 1..256, got {self.head_dim}")
        if self.dtype in _OUT_OF_SCOPE_DTYPES:
            raise ValueError(
                f"dtype {self.dtype} is out of scope (no fp8 cache); "
                f"use one of {sorted(DTYPE_BYTES)}"
            )
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {sorted(DTYPE_BYTES)}, got {self.dtype!r}")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def dtype_bytes(self) -> int:
        """Bytes per element of q, k, v and o."""
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of K and V of one token, all KV heads."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def q_token_bytes(self) -> int:
        """Bytes of one query row (or one output row), all query heads."""
        return self.num_qo_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True)
class TileConfig:
    """One CTA's tile: chosen by the planner, carried by the Plan, never changed by a launcher.

    Args:
        block_m: rows (queries x group when pack_group, else queries); a power of two >= 16.
        block_n: KV tokens per loop turn; a power of two >= 16.
        num_warps: warps of the CTA.
        num_stages: software-pipeline depth of the KV loop.
        pack_group: pack the query heads of one KV head into the rows (one CTA per KV head);
            False: one CTA per query head.

    Raises:
        ValueError: a value outside the ranges above.
    """

    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 2
    pack_group: bool = True

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "num_warps", "num_stages"):
            _check_integer(name, getattr(self, name))
        for name in ("block_m", "block_n"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two >= 16, got {value}")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps must be 1, 2, 4, 8 or 16, got {self.num_warps}")
        if self.num_stages < 1:
            raise ValueError(f"num_stages must be >= 1, got {self.num_stages}")

    def queries_per_item(self, group_size: int) -> int:
        """Most queries one item may hold.

        Raises:
            ValueError: the group does not fit the tile's rows.
        """
        if not self.pack_group:
            return self.block_m
        if group_size > self.block_m:
            raise ValueError(f"group_size {group_size} does not fit block_m {self.block_m}")
        return self.block_m // group_size

    def ctas_per_item(self, shape: HeadShape) -> int:
        """Thread blocks launched for one item: one per KV head, or one per query head."""
        return shape.num_kv_heads if self.pack_group else shape.num_qo_heads


def torch_dtype(name: str):  # type: ignore[no-untyped-def]
    """The torch dtype of a HeadShape.dtype name (torch imported late)."""
    import torch

    return getattr(torch, name)


def dtype_name(dtype: object) -> str:
    """The HeadShape.dtype name of a torch or numpy dtype."""
    text = str(dtype)
    return text.split(".")[-1] if text.startswith("torch.") else np.dtype(dtype).name  # type: ignore[call-overload]
