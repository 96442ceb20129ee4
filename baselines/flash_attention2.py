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

import time

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baselines.plan_checks import memory_reason, path_tokens, tree_slots
from deft.device_model import DeviceModel, predict_us
from deft.io_model import IOBytes
from deft.kv_cache import PagedKVCache
from deft.shape import HeadShape
from deft.tensor_checks import check_run, check_sm_scale
from deft.tree import DecodeTree

_INDEX_BYTES = 4


class FlashAttention2:
    """FlashAttention-2 over each query's own copy of its path.

    Args:
        name: kernel id in the result rows.
        sm_scale: multiplies q . k; default head_dim ** -0.5.
    """

    path = "torch aten::_flash_attention_forward"
    kv_layout = "own_copy"
    layout_us = 0.0
    layout_bytes = 0
    plan_upload_bytes = 0
    workspace_bytes = 0
    capturable = True

    def __init__(self, name: str = "flash_attention2", sm_scale: float | None = None) -> None:
        check_sm_scale(sm_scale)
        self.name, self.sm_scale = name, sm_scale
        self._cache: PagedKVCache | None = None

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
    def plan(
        self, tree: DecodeTree, cache: PagedKVCache, nodes: npt.NDArray[np.int64] | None = None
    ) -> None:
        """Copy every query's path out of the pool.

        Args:
            nodes: cache handle of each tree node; default 0..num_nodes-1.

        Raises:
            ValueError: the cache does not hold the tree, or unsupported() has a reason.
        """
        shape, device = cache.shape, cache.device
        slots = tree_slots(tree, cache, nodes)
        reason = self.unsupported(shape, tree, cache.page_size, device)
        if reason:
            raise ValueError(reason)
        indptr, tokens = path_tokens(tree)
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        where = torch.from_numpy(slots[tokens]).to(device)
        flat = (-1, shape.num_kv_heads, shape.head_dim)
        self._k = [pool.view(flat).index_select(0, where) for pool in cache.k_cache]
        self._v = [pool.view(flat).index_select(0, where) for pool in cache.v_cache]
        torch.cuda.synchronize(device)
        self.layout_us = (time.perf_counter() - begin) * 1e6
        self.layout_bytes = 2 * len(tokens) * shape.kv_token_bytes * len(self._k)
        self.workspace_bytes = self.layout_bytes // 2
        starts = np.stack([np.arange(tree.num_qo + 1), indptr]).astype(np.int32)
        self._query_starts, self._token_starts = torch.from_numpy(starts).to(device)
        self._longest = int(tree.query_kv_len.max()) if tree.num_qo else 0
        blind = np.flatnonzero(tree.query_kv_len == 0)
        self._blind = torch.from_numpy(blind).to(device)
        self.plan_upload_bytes = where.nbytes + starts.nbytes + self._blind.nbytes
        self._tree, self._cache = tree, cache
        self._out: Tensor | None = None

    # ---- once a layer ------------------------------------------------------------------------
    @torch.no_grad()  # a kept output must not gather a graph
    def run(
        self, q: Tensor, layer: int = 0, *, out: Tensor | None = None, lse: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """One layer.

        Args:
            q: [num_qo, num_qo_heads, head_dim], contiguous, the cache's dtype and device.
            layer: layer of the cache.
            out: buffer like q to write; default: one kept buffer, rewritten by each run.
            lse: fp32 [num_qo, num_qo_heads] to fill with the natural-log LSE; None: not written.

        Returns:
            (out, lse); a query that sees nothing gets o = 0, lse = -inf.

        Raises:
            ValueError: run() before plan(), or a tensor that does not fit the plan.
        """
        cache = self._cache
        if cache is None:
            raise ValueError(f"kernel {self.name}: call plan(tree, cache) before run(q)")
        check_run(self._tree, cache, q, layer, out, lse, contiguous=True)
        if out is None:
            self._out = torch.empty_like(q) if self._out is None else self._out
            out = self._out
        if not self._longest:
            if lse is not None:
                lse.fill_(-torch.inf)
            return out.zero_(), lse
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
        return out, lse
