"""cudnn_prefix: the prefix that all queries share through a vendor kernel, the rest through ours.

Two levels, as Hydragen has them (Juravsky et al., 2024): all queries and the group of a KV head are
the rows of one plain attention over the shared prefix, which is what cuDNN and FlashAttention do
best; the rest of the tree runs through a planner of this project; a merge weighs the two by their
LSE. Where no token is shared by all queries, only the rest runs.

The prefix is the chain of nodes from the root that every query descends from and none sits on. Its
K and V are views of the pool where the slots are consecutive, else a copy (`own_copy`). io() counts
SDPA's kernel (cuDNN: 128 rows a thread block, FlashAttention-2: 128, 64 above head_dim 128), each
block reading the whole prefix; q brought together head by head where there is a group; the two
outputs and LSEs, written and read by the merge (one fused kernel, compiled by torch at first use on
CUDA; on a CPU plain operations); the merged output and LSE, and the copy of that output into the
caller's buffer. Where the flash backend splits the prefix to fill the GPU, its own partial outputs
are not counted.
"""

from __future__ import annotations

from functools import cache as memoize
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from baselines.baseline import Baseline
from baselines.tree_kv import tree_kv
from deft.attention import TreeAttention
from deft.device_model import DeviceModel, predict_us
from deft.io_model import IOBytes
from deft.kv_cache import PagedKVCache
from deft.shape import HeadShape, torch_dtype
from deft.tree import DecodeTree, LongArray, segment_arange

BACKENDS = ("cudnn", "flash")
_LSE_BYTES = 4
_LOWEST = torch.finfo(torch.float32).min


class TwoLevels(NamedTuple):
    """A tree cut below its shared prefix.

    prefix: int64, the shared nodes, root first. rest: the other nodes as a forest.
    rest_nodes: int64 [rest.num_nodes], each one's id in the tree.
    """

    prefix: LongArray
    rest: DecodeTree
    rest_nodes: LongArray


def two_levels(tree: DecodeTree) -> TwoLevels:
    """Cut a tree below the chain of nodes that every query descends from."""
    begin, end = tree.node_queries
    is_shared = (begin == 0) & (end == tree.num_qo) & (tree.num_qo > 0)
    is_shared[tree.query_node] = False  # its own queries see it only in part, or nothing below
    prefix = np.flatnonzero(is_shared)
    rest_nodes = np.flatnonzero(~is_shared)
    number = np.full(tree.num_nodes + 1, -1, np.int64)  # the last entry stands for "no parent"
    number[rest_nodes] = np.arange(len(rest_nodes))
    rest = DecodeTree(
        number[tree.parent[rest_nodes]],
        tree.node_len[rest_nodes],
        number[tree.query_node],
        tree.query_len,
    )
    return TwoLevels(prefix, rest, rest_nodes)


class CudnnPrefixAttention(Baseline):
    """The shared prefix through SDPA, the rest through a planner, merged by LSE.

    Args:
        name: kernel id in the result rows.
        backend: "cudnn" or "flash", the SDPA backend used on CUDA; the CPU has its own.
        rest: planner of what is not shared by all: "flatten", or "sequence" as in Hydragen.
        sm_scale: multiplies q . k; default head_dim ** -0.5.

    Raises:
        ValueError: another backend, or an unknown planner.
    """

    def __init__(
        self,
        name: str = "cudnn_prefix",
        backend: str = "cudnn",
        rest: str = "flatten",
        sm_scale: float | None = None,
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
        super().__init__(name, sm_scale)
        self.backend = backend
        options: dict[str, Any] = {"split_len": "auto"} if rest == "sequence" else {}
        self._rest = TreeAttention(rest, sm_scale=sm_scale, **options)
        self._counted: tuple[DecodeTree, TwoLevels] | None = None

    def _levels(self, tree: DecodeTree) -> TwoLevels:
        if self._counted is None or self._counted[0] is not tree:
            self._counted = tree, two_levels(tree)
        return self._counted[1]

    def unsupported(
        self, shape: HeadShape, tree: DecodeTree, page_size: int, device: torch.device | str
    ) -> str | None:
        """A reason where the vendor kernel does not take the shape, or the planner does not."""
        if shape.dtype == "float64":
            return "the two levels are merged by float32 LSEs, too coarse for float64"
        if torch.device(device).type == "cuda":
            if shape.dtype not in ("float16", "bfloat16"):
                return f"SDPA's {self.backend} backend takes float16 and bfloat16 on CUDA"
            if shape.head_dim % 8 or (self.backend == "cudnn" and shape.head_dim > 128):
                limit = 128 if self.backend == "cudnn" else 256
                return f"SDPA's {self.backend} backend wants head_dim % 8 == 0, at most {limit}"
        return self._rest.unsupported(shape, self._levels(tree).rest, page_size, device)

    # ---- counted -----------------------------------------------------------------------------
    def _blocks(self, tree: DecodeTree, shape: HeadShape) -> int:
        rows = 64 if self.backend == "flash" and shape.head_dim > 128 else 128
        return -(-tree.num_qo * shape.group_size // rows)

    def io(self, tree: DecodeTree, shape: HeadShape, page_size: int) -> IOBytes:
        """Counted IO of one run() on CUDA; plan()'s own copy is layout_bytes, not this."""
        levels = self._levels(tree)
        rest = self._rest.io(levels.rest, shape, page_size)
        tokens = int(tree.node_len[levels.prefix].sum())
        if not tokens:
            return rest
        rows_bytes = tree.num_qo * shape.q_token_bytes
        lse_bytes = tree.num_qo * shape.num_qo_heads * _LSE_BYTES
        q_moves = 1 if shape.group_size == 1 else 3  # gathered head by head: read, written, read
        return IOBytes(
            kv=rest.kv + self._blocks(tree, shape) * tokens * shape.kv_token_bytes,
            kv_unique=rest.kv_unique + tokens * shape.kv_token_bytes,
            q=rest.q + q_moves * rows_bytes,
            q_unique=rows_bytes,
            out=3 * rows_bytes,  # merged, then copied: written, read, written
            # Two outputs and LSEs, written and read; the merged LSE, written.
            partial=rest.partial + 2 * 2 * (rows_bytes + lse_bytes) + lse_bytes,
            mask=rest.mask,
            index=rest.index,
        )

    def predict_us(
        self, tree: DecodeTree, shape: HeadShape, page_size: int, device_model: DeviceModel
    ) -> float:
        """Modelled latency: the prefix and the rest one after the other, then the merge."""
        levels = self._levels(tree)
        rest = self._rest.predict_us(levels.rest, shape, page_size, device_model)
        tokens = int(tree.node_len[levels.prefix].sum())
        if not tokens:
            return rest
        whole, below = self.io(tree, shape, page_size), self._rest.io(levels.rest, shape, page_size)
        terms = ("kv", "kv_unique", "q", "out", "partial")
        prefix = IOBytes(**{term: getattr(whole, term) - getattr(below, term) for term in terms})
        flops = 4 * shape.head_dim * shape.num_qo_heads * tree.num_qo * tokens
        ctas = self._blocks(tree, shape) * shape.num_kv_heads
        launches = 3 + (shape.group_size > 1)  # SDPA, merge, copy; q gathered
        return rest + predict_us(prefix, flops, device_model, ctas, launches)

    # ---- once a step -------------------------------------------------------------------------
    def _plan(
        self, tree: DecodeTree, cache: PagedKVCache, slots: LongArray, nodes: LongArray
    ) -> None:
        """Cut the tree, plan the rest, find the prefix's K and V."""
        levels = self._levels(tree)
        self._rest.plan(levels.rest, cache, nodes[levels.rest_nodes])
        counts = tree.node_len[levels.prefix].astype(np.int64)
        where = np.repeat(tree.node_start[levels.prefix], counts) + segment_arange(counts)
        found = tree_kv(cache, slots[where])
        self._k = [k.transpose(0, 1)[None] for k in found.k]
        self._v = [v.transpose(0, 1)[None] for v in found.v]
        self._take(found)
        self.plan_upload_bytes += self._rest.plan_upload_bytes
        shape, device = cache.shape, cache.device
        size = (tree.num_qo, shape.num_qo_heads, shape.head_dim)
        self._below = torch.empty(size, dtype=torch_dtype(shape.dtype), device=device)
        self._below_lse = torch.empty(size[:2], dtype=torch.float32, device=device)
        self.workspace_bytes = self._rest.workspace_bytes + self._below.nbytes * 2
        self._has_prefix = len(where) > 0
        on_gpu = device.type == "cuda"
        vendor = f"torch sdpa {self.backend if on_gpu else 'cpu'}"
        self.path = f"{vendor} + {self._rest.path}" if self._has_prefix else self._rest.path
        self.capturable = self._rest.capturable

    # ---- once a layer ------------------------------------------------------------------------
    def _run(
        self, cache: PagedKVCache, q: Tensor, layer: int, out: Tensor, lse: Tensor | None
    ) -> Tensor:
        if not self._has_prefix:
            return self._rest.run(q, layer, out=out, lse=lse)[0]
        shape = cache.shape
        self._rest.run(q, layer, out=self._below, lse=self._below_lse)
        grouped = (len(q), shape.num_kv_heads, shape.group_size, shape.head_dim)
        rows = q.view(grouped).transpose(0, 1).reshape(1, shape.num_kv_heads, -1, shape.head_dim)
        above, above_lse = self._attend(rows, self._k[layer], self._v[layer])
        above = above.view(grouped[1], grouped[0], *grouped[2:]).transpose(0, 1)
        above_lse = above_lse.reshape(grouped[1], grouped[0], grouped[2]).transpose(0, 1)
        merged, merged_lse = _merge(q.device.type == "cuda")(
            above, above_lse, self._below.view(grouped), self._below_lse.view(grouped[:3])
        )
        out.view(grouped).copy_(merged)
        if lse is not None:
            lse.view(grouped[:3]).copy_(merged_lse)
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(o, lse) of dense attention, [1, heads, rows, head_dim] and [1, heads, rows(, 1)]."""
        ops, scale = torch.ops.aten, self.sm_scale
        if q.device.type != "cuda":
            o, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
            _mark_rows_of_no_weight(q[0], k[0], lse[0])
        elif self.backend == "cudnn":
            o, lse = ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=scale)[:2]
        else:
            o, lse = ops._scaled_dot_product_flash_attention(q, k, v, scale=scale)[:2]
        return o, lse.float()


def _mark_rows_of_no_weight(q: Tensor, k: Tensor, lse: Tensor) -> None:
    """Set to -inf, in place, the LSE of rows whose logits are all -inf: the CPU's kernel says 0.

    Args:
        q, k: [heads, rows, head_dim] and [heads, tokens, head_dim].
        lse: [heads, rows].
    """
    for head in torch.nonzero((lse == 0).any(-1)).flatten().tolist():
        rows = torch.nonzero(lse[head] == 0).flatten()
        logits = q[head, rows].float() @ k[head].float().T  # the scale is positive: same sign
        lse[head, rows[logits.amax(-1) == -torch.inf]] = -torch.inf


def _weighted(
    above: Tensor, above_lse: Tensor, below: Tensor, below_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean of two outputs by exp(LSE), and its LSE: 0 and -inf where both are -inf.

    An LSE of +inf is FlashAttention's for a row whose logits are all -inf.
    """
    above_lse = above_lse.masked_fill(above_lse == torch.inf, -torch.inf)
    top = torch.maximum(above_lse, below_lse).clamp_min(_LOWEST)  # finite: -inf - -inf is NaN
    first, second = (above_lse - top).exp(), (below_lse - top).exp()
    total = first + second  # at least 1, or 0 where both are -inf
    share = 1 / total.clamp_min(1)
    wide = torch.promote_types(above.dtype, torch.float32)
    mixed = above.to(wide) * (first * share)[..., None]
    mixed = mixed + below.to(wide) * (second * share)[..., None]
    return mixed.to(above.dtype), top + total.log()


@memoize
def _merge(compiled: bool) -> Any:
    return torch.compile(_weighted, dynamic=True) if compiled else _weighted
