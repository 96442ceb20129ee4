"""The frame of FlashAttention kernels: every sequence on its own, over a copy of its path.

They want each sequence's K and V one after the other (or in pages of 256 and more), which the paths
of a tree are not: sequences do not share, so plan() copies every query's path, all layers
(`own_copy`: layout_us, layout_bytes). A tree of 1,024 leaves on a 2,048-token prefix takes 8.7 GB
at 8 KV heads x 128 in 16 bit.
"""

from __future__ import annotations

import importlib.util
from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from baselines.baseline import Baseline
from baselines.plan_checks import memory_reason, path_tokens
from baselines.tree_kv import tree_kv
from deft.io_model import IOBytes
from deft.kv_cache import PagedKVCache
from deft.shape import HeadShape
from deft.tree import DecodeTree, LongArray

INDEX_BYTES = 4


class PathCopies(Baseline):
    """Copies of every path, and a variable-length kernel over them.

    Args:
        name: kernel id in the result rows.
        sm_scale: multiplies q . k; default head_dim ** -0.5.
    """

    capturable = True
    title = "FlashAttention"
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    max_head_dim = 256

    @abstractmethod
    def _missing(self) -> str | None:
        """Why the kernel is not on this machine, or None."""

    @abstractmethod
    def _what_runs(self) -> str:
        """The library and its version: a row's path."""

    @abstractmethod
    def _attend(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """(o like q, natural-log LSE [num_qo_heads, num_qo]) of the planned paths."""

    def unsupported(
        self, shape: HeadShape, tree: DecodeTree, page_size: int, device: torch.device | str
    ) -> str | None:
        """A reason without a GPU or the library, for other shapes, or for a large copy."""
        if torch.device(device).type != "cuda":
            return f"{self.title} needs a CUDA GPU"
        missing = self._missing()
        if missing:
            return missing
        if shape.dtype not in self.dtypes:
            return f"{self.title} takes {' and '.join(self.dtypes)}, not {shape.dtype}"
        if shape.head_dim % 8 or shape.head_dim > self.max_head_dim:
            return (
                f"{self.title} needs head_dim in multiples of 8 up to {self.max_head_dim}, "
                f"got {shape.head_dim}"
            )
        copy = int(tree.query_kv_len.sum()) * shape.kv_token_bytes
        return memory_reason("every sequence's own copy of K and V", copy)

    def _paths_io(self, tree: DecodeTree, shape: HeadShape) -> IOBytes:
        """Each path's K and V once per KV head, its query, its output."""
        rows_bytes = tree.num_qo * shape.q_token_bytes
        kv = int(tree.query_kv_len.sum()) * shape.kv_token_bytes
        return IOBytes(
            kv=kv,
            kv_unique=kv,  # each path is a copy of its own
            q=rows_bytes,
            q_unique=rows_bytes,
            out=3 * rows_bytes,  # and once more into the caller's buffer
            index=2 * INDEX_BYTES * (tree.num_qo + 1) if tree.num_qo else 0,
        )

    # ---- once a step -------------------------------------------------------------------------
    def _plan(
        self, tree: DecodeTree, cache: PagedKVCache, slots: LongArray, nodes: LongArray
    ) -> None:
        """Copy every query's path out of the pool."""
        device = cache.device
        indptr, tokens = path_tokens(tree)
        found = tree_kv(cache, slots[tokens])
        self._take(found)
        self._k, self._v, self.path = found.k, found.v, self._what_runs()
        self.workspace_bytes = self.layout_bytes // 2
        starts = np.stack([np.arange(tree.num_qo + 1), indptr]).astype(np.int32)
        self._query_starts, self._token_starts = torch.from_numpy(starts).to(device)
        self._longest = int(tree.query_kv_len.max()) if tree.num_qo else 0
        blind = np.flatnonzero(tree.query_kv_len == 0)
        self._blind = torch.from_numpy(blind).to(device)
        self.plan_upload_bytes += starts.nbytes + self._blind.nbytes

    # ---- once a layer ------------------------------------------------------------------------
    def _run(
        self, cache: PagedKVCache, q: Tensor, layer: int, out: Tensor, lse: Tensor | None
    ) -> Tensor:
        o, row_lse = self._attend(q, layer)
        out.copy_(o)
        if lse is not None:
            lse.copy_(row_lse.transpose(0, 1))  # [num_qo_heads, num_qo]
        if self._blind.numel():
            out.index_fill_(0, self._blind, 0)
            if lse is not None:
                lse.index_fill_(0, self._blind, -torch.inf)
        return out


def missing_module(title: str, module: str, install: str) -> str | None:
    """Why a library cannot be used here (absent, or its import fails), or None."""
    try:
        if importlib.util.find_spec(module) is None:
            return f"{title} is not installed: {install}"
        importlib.import_module(module)
    except Exception as error:  # a library that raises anything at import is a reason, not a crash
        return f"{title} does not load: {type(error).__name__}: {error}"
    return None
