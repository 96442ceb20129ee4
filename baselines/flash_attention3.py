"""flash_attention3: every sequence on its own through FlashAttention-3's forward kernel.

Shah et al., "FlashAttention-3", 2024, as packed in fa3-fwd 0.0.3: Hopper only, bfloat16 only, no
page table, so plan() copies every path (path_copies). num_splits=0 leaves the KV split to the
library's heuristic, 1 does not split; with pack_gqa the group of a KV head fills the rows of one
tile, and K and V are read once per KV head.

io() counts each path's K and V once per KV head (pack_gqa), and the partial outputs of a fixed
num_splits (fp32, written and read); those that the heuristic makes are not counted.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import replace

import torch
from torch import Tensor

from baselines.path_copies import PathCopies, missing_module
from deft.device_model import DeviceModel, predict_us
from deft.io_model import IOBytes
from deft.shape import HeadShape
from deft.tree import DecodeTree

_INSTALL = 'pip install -e ".[fa3]"'


class FlashAttention3(PathCopies):
    """FlashAttention-3 over each query's own copy of its path.

    Args:
        name: kernel id in the result rows.
        num_splits: KV splits, 0 for the library's heuristic.
        sm_scale: multiplies q . k; default head_dim ** -0.5.

    Raises:
        ValueError: num_splits is negative or no whole number.
    """

    title = "FlashAttention-3 (fa3-fwd)"
    dtypes: tuple[str, ...] = ("bfloat16",)

    def __init__(
        self,
        name: str = "flash_attention3",
        num_splits: int = 0,
        sm_scale: float | None = None,
    ) -> None:
        if isinstance(num_splits, bool) or not isinstance(num_splits, int) or num_splits < 0:
            raise ValueError(f"num_splits must be a whole number from 0, got {num_splits!r}")
        super().__init__(name, sm_scale)
        self.num_splits = num_splits

    def _missing(self) -> str | None:
        return missing_module(self.title, "fa3_fwd_interface", _INSTALL) or hopper_reason(
            self.title
        )

    def _what_runs(self) -> str:
        return f"fa3-fwd {importlib.metadata.version('fa3_fwd')}"

    def io(self, tree: DecodeTree, shape: HeadShape, page_size: int) -> IOBytes:
        """Counted IO of one run(); the copy of plan() is layout_bytes, not this."""
        io = self._paths_io(tree, shape)
        if self.num_splits < 2:
            return io
        row = shape.num_qo_heads * (shape.head_dim + 1) * 4
        return replace(io, partial=2 * self.num_splits * tree.num_qo * row)

    def predict_us(
        self, tree: DecodeTree, shape: HeadShape, page_size: int, device_model: DeviceModel
    ) -> float:
        """Modelled latency: counted bytes, useful FLOPs, the kernel, its merge and a copy of o."""
        io = self.io(tree, shape, page_size)
        ctas = tree.num_qo * shape.num_kv_heads * max(self.num_splits, 1)
        launches = 2 + (self.num_splits != 1)
        return predict_us(io, tree.flops(shape), device_model, ctas, launches)

    def _attend(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        library = importlib.import_module("fa3_fwd_interface")
        o, lse, *_ = library.flash_attn_varlen_func(
            q,
            self._k[layer],
            self._v[layer],
            self._query_starts,
            self._token_starts,
            1,
            self._longest,
            softmax_scale=self.sm_scale,
            num_splits=self.num_splits,
            pack_gqa=True,
            return_attn_probs=True,
        )
        return o, lse


def hopper_reason(title: str) -> str | None:
    """Why a kernel of Hopper's does not run on this GPU, or None."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return None if major == 9 else f"{title} needs Hopper (sm_90), this GPU is sm_{major}{minor}"
