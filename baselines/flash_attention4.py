"""flash_attention4: every sequence on its own through FlashAttention-4's forward kernel.

flash-attn-4 (Dao AI Lab, beta; CuTe DSL): float16 and bfloat16 on sm_80 and newer, compiled at
first use. plan() copies every path (path_copies): its page table wants pages of whole key tiles.
num_splits=0 leaves the KV split to the library's heuristic; with pack_gqa the group fills the rows
of one tile.

The package shares the `flash_attn` namespace with flash-attn 2: install them in two environments.
io() counts as flash_attention3 does.
"""

from __future__ import annotations

import importlib
import importlib.metadata

from torch import Tensor

from baselines.flash_attention3 import FlashAttention3
from baselines.path_copies import missing_module

_INSTALL = 'pip install -e ".[fa4]"'


class FlashAttention4(FlashAttention3):
    """FlashAttention-4 over each query's own copy of its path.

    Args:
        name: kernel id in the result rows.
        num_splits: KV splits, 0 for the library's heuristic.
        sm_scale: multiplies q . k; default head_dim ** -0.5.

    Raises:
        ValueError: num_splits is negative or no whole number.
    """

    title = "FlashAttention-4 (flash-attn-4)"
    dtypes = ("float16", "bfloat16")

    def __init__(
        self,
        name: str = "flash_attention4",
        num_splits: int = 0,
        sm_scale: float | None = None,
    ) -> None:
        super().__init__(name, num_splits, sm_scale)

    def _missing(self) -> str | None:
        return missing_module(self.title, "flash_attn.cute.interface", _INSTALL)

    def _what_runs(self) -> str:
        return f"flash-attn-4 {importlib.metadata.version('flash-attn-4')}"

    def _attend(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        library = importlib.import_module("flash_attn.cute.interface")
        o, lse = library.flash_attn_varlen_func(
            q,
            self._k[layer],
            self._v[layer],
            cu_seqlens_q=self._query_starts,
            cu_seqlens_k=self._token_starts,
            max_seqlen_q=1,
            max_seqlen_k=self._longest,
            softmax_scale=self.sm_scale,
            num_splits=self.num_splits,
            pack_gqa=True,
            return_lse=True,
        )[:2]
        return o, lse
