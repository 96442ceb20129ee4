"""flash_attention2: every sequence on its own through FlashAttention-2.

The forward kernel of Dao, "FlashAttention-2", 2023, in variable length form: one query row per
sequence over a copy of its path. implementation="auto" takes the flash-attn package where it is
installed (`flash_attn_varlen_func`), else the kernel that torch ships
(`aten::_flash_attention_forward`); a row's `path` says which ran.

io() counts torch 2.11-2.13 and flash-attn 2.8.3, which hold the same kernel: with a group of query
heads it takes them as the rows of one KV head, and q and o are brought into that order and back
(written and read once more); without, one thread block per head. Either way each path's K and V are
read once per KV head. With a group FlashAttention-2's heuristic may split the path where the GPU is
not full; the partial outputs of that split are not counted.
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

IMPLEMENTATIONS = ("auto", "flash_attn", "torch")
_INSTALL = "pip install flash-attn==2.8.3 --no-build-isolation"


class FlashAttention2(PathCopies):
    """FlashAttention-2 over each query's own copy of its path.

    Args:
        name: kernel id in the result rows.
        implementation: "flash_attn" (the package), "torch" or "auto".
        sm_scale: multiplies q . k; default head_dim ** -0.5.

    Raises:
        ValueError: another implementation.
    """

    title = "FlashAttention-2"

    def __init__(
        self,
        name: str = "flash_attention2",
        implementation: str = "auto",
        sm_scale: float | None = None,
    ) -> None:
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}"
            )
        super().__init__(name, sm_scale)
        self.implementation = implementation

    def _package(self) -> str | None:
        return missing_module("flash-attn", "flash_attn.flash_attn_interface", _INSTALL)

    def _missing(self) -> str | None:
        return self._package() if self.implementation == "flash_attn" else None

    @property
    def _uses_package(self) -> bool:
        return self.implementation == "flash_attn" or (
            self.implementation == "auto" and self._package() is None
        )

    def _what_runs(self) -> str:
        if self._uses_package:
            return f"flash-attn {importlib.metadata.version('flash-attn')}"
        return f"torch {torch.__version__} aten::_flash_attention_forward"

    def io(self, tree: DecodeTree, shape: HeadShape, page_size: int) -> IOBytes:
        """Counted IO of one run(); the copy of plan() is layout_bytes, not this."""
        io = self._paths_io(tree, shape)
        moves = 1 if shape.group_size == 1 else 3
        return replace(io, q=moves * io.q, out=io.out + (moves - 1) * io.q)

    def predict_us(
        self, tree: DecodeTree, shape: HeadShape, page_size: int, device_model: DeviceModel
    ) -> float:
        """Modelled latency: counted bytes, useful FLOPs, the launches of one run()."""
        io = self.io(tree, shape, page_size)
        ctas = tree.num_qo * shape.num_kv_heads
        launches = 2 if shape.group_size == 1 else 4
        return predict_us(io, tree.flops(shape), device_model, ctas, launches)

    def _attend(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        k, v = self._k[layer], self._v[layer]
        starts, lengths = (self._query_starts, self._token_starts), (1, self._longest)
        if self._uses_package:
            library = importlib.import_module("flash_attn.flash_attn_interface")
            o, lse, _ = library.flash_attn_varlen_func(
                q, k, v, *starts, *lengths, softmax_scale=self.sm_scale, return_attn_probs=True
            )
            return o, lse
        found = torch.ops.aten._flash_attention_forward(
            q, k, v, *starts, *lengths, 0.0, False, False, scale=self.sm_scale
        )
        return found[0], found[1]
