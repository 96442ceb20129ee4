"""flash_attention2: every sequence on its own through FlashAttention-2 as shipped in torch.

The forward kernel of Dao, "FlashAttention-2", 2023, by `aten::_flash_attention_forward` in variable
length form: one query row per sequence, and each sequence's K and V one after the other. Sequences
do not share, so plan() copies every query's path, all layers (`own_copy`: layout_us, layout_bytes):
a tree of 1,024 leaves on a 2,048-token prefix takes 8.7 GB at 8 KV heads x 128 in fp16.

io() counts torch 2.11-2.13: with a group of query heads the kernel takes them as the rows of one KV
head, and q and o are brought into that order and back (written and read once more); without, one
thread block per head. Either way each path's K and V are read once per KV head. With a group torch
also lets FlashAttention-2's heuristic split the path where the GPU is not full; the partial outputs
of that split are not counted.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from baselines.baseline import Baseline
from baselines.plan_checks import memory_reason, path_tokens
from baselines.tree_kv import tree_kv
from deft.device_model import DeviceModel, predict_us
from deft.io_model import IOBytes
from deft.kv_cache import PagedKVCache
from deft.shape import HeadShape
from deft.tree import DecodeTree, LongArray

_INDEX_BYTES = 4


class FlashAttention2(Baseline):
    """FlashAttention-2 over each query's own copy of its path.

    Args:
        name: kernel id in the result rows.
        sm_scale: multiplies q . k; default head_dim ** -0.5.
    """

    path = "torch aten::_flash_attention_forward"
    capturable = True

    def __init__(self, name: str = "flash_attention2", sm_scale: float | None = None) -> None:
        super().__init__(name, sm_scale)

    def unsupported(
        self, shape: HeadShape, tree: DecodeTree, page_size: int, device: torch.device | str
    ) -> str | None:
        """A reason without a GPU, for a shape FlashAttention-2 does not take, or a large copy."""
        if torch.device(device).type != "cuda":
            return "FlashAttention-2 needs a CUDA GPU"
        if shape.dtype not in ("float16", "bfloat16"):
            return f"FlashAttention-2 takes float16 and bfloat16, not {shape.dtype}"
        if shape.head_dim % 8:
            return f"FlashAttention-2 needs head_dim in multiples of 8, got {shape.head_dim}"
        copy = int(tree.query_kv_len.sum()) * shape.kv_token_bytes
        return memory_reason("every sequence's own copy of K and V", copy)

    def io(self, tree: DecodeTree, shape: HeadShape, page_size: int) -> IOBytes:
        """Counted IO of one run(); the copy of plan() is layout_bytes, not this."""
        rows_bytes = tree.num_qo * shape.q_token_bytes
        moves = 1 if shape.group_size == 1 else 3
        kv = int(tree.query_kv_len.sum()) * shape.kv_token_bytes
        return IOBytes(
            kv=kv,
            kv_unique=kv,  # each path is a copy of its own
            q=moves * rows_bytes,
            q_unique=rows_bytes,
            out=(moves + 2) * rows_bytes,  # and once more into the caller's buffer
            index=2 * _INDEX_BYTES * (tree.num_qo + 1) if tree.num_qo else 0,
        )

    def predict_us(
        self, tree: DecodeTree, shape: HeadShape, page_size: int, device_model: DeviceModel
    ) -> float:
        """Modelled latency: counted bytes, useful FLOPs, the launches of one run()."""
        io = self.io(tree, shape, page_size)
        ctas = tree.num_qo * shape.num_kv_heads
        launches = 2 if shape.group_size == 1 else 4
        return predict_us(io, tree.flops(shape), device_model, ctas, launches)

    # ---- once a step -------------------------------------------------------------------------
    def _plan(
        self, tree: DecodeTree, cache: PagedKVCache, slots: LongArray, nodes: LongArray
    ) -> None:
        """Copy every query's path out of the pool."""
        device = cache.device
        indptr, tokens = path_tokens(tree)
        found = tree_kv(cache, slots[tokens])
        self._take(found)
        self._k, self._v = found.k, found.v
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
        o, row_lse = torch.ops.aten._flash_attention_forward(
            q,
            self._k[layer],
            self._v[layer],
            self._query_starts,
            self._token_starts,
            1,
            self._longest,
            0.0,
            False,
            False,
            scale=self.sm_scale,
        )[:2]
        out.copy_(o)
        if lse is not None:
            lse.copy_(row_lse.transpose(0, 1))  # [num_qo_heads, num_qo]
        if self._blind.numel():
            out.index_fill_(0, self._blind, 0)
            if lse is not None:
                lse.index_fill_(0, self._blind, -torch.inf)
        return out
