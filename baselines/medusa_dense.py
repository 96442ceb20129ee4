"""medusa_dense: the whole tree for every query, under a dense ancestor mask, through torch's SDPA.

What Medusa and most tree-speculation code do: K and V of the whole tree lie in one tensor, and an
additive mask [num_qo, num_tokens] holds 0 where a query descends from a token's node and -inf where
it does not. SDPA needs contiguous K and V: where the pool's slots of the tree are consecutive they
are used in place, else plan() copies every layer (`own_copy`, counted in layout_bytes).

On CUDA the memory-efficient backend is pinned: with a mask, torch's FlashAttention is out, and the
math backend would spill the logits. It knows no GQA, so K and V are expanded over the group with
stride 0: no copy, but each *query* head streams the whole tree. io() counts that kernel (torch
2.11, CUTLASS fmha): one thread block per query head and 64 queries (32 for head_dim > 128) reads
all of K and V once, and one mask row per query and query head; SDPA writes a tensor of its own,
which is copied into the caller's buffer. (Where no buffer is given and there is no group, it is
returned as it is, a copy less than counted.) backend="cudnn" pins cuDNN, whose blocks hold 128
queries.

A dense mask gives invisible V a weight of 0: a NaN anywhere in the tree reaches every query.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from baselines.baseline import Baseline
from baselines.plan_checks import memory_reason
from baselines.tree_kv import tree_kv
from deft.device_model import DeviceModel, predict_us
from deft.io_model import IOBytes
from deft.kv_cache import PagedKVCache
from deft.shape import HeadShape, torch_dtype
from deft.tree import DecodeTree, LongArray

BACKENDS = {
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_MASK_ALIGNMENT = 16  # elements: an unaligned mask would be padded, that is copied, in every run
_BLOCK_N = 64


class MedusaDenseAttention(Baseline):
    """Dense attention over the whole tree with an ancestor mask.

    Args:
        name: kernel id in the result rows.
        backend: "efficient" or "cudnn", the SDPA backend used on CUDA; the CPU has its own.
        sm_scale: multiplies q . k; default head_dim ** -0.5.

    Raises:
        ValueError: another backend.
    """

    returns_lse = False  # SDPA has none to give

    def __init__(
        self, name: str = "medusa_dense", backend: str = "efficient", sm_scale: float | None = None
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {sorted(BACKENDS)}, got {backend!r}")
        super().__init__(name, sm_scale)
        self.backend = backend

    def unsupported(
        self, shape: HeadShape, tree: DecodeTree, page_size: int, device: torch.device | str
    ) -> str | None:
        """A reason when the mask is too large, or the CUDA backend does not take the shape."""
        if torch.device(device).type == "cuda":
            elements = 16 // shape.dtype_bytes
            if shape.dtype == "float64":
                return "SDPA with a mask takes float16, bfloat16 and float32 on CUDA, not float64"
            if shape.head_dim % elements:
                return f"SDPA with a mask needs head_dim in multiples of {elements} on CUDA"
            if self.backend == "cudnn" and shape.dtype == "float32":
                return "cuDNN attention takes float16 and bfloat16; use backend=efficient"
        return memory_reason("the ancestor mask", _mask_bytes(tree, shape))

    def io(self, tree: DecodeTree, shape: HeadShape, page_size: int) -> IOBytes:
        """Counted IO of one run() on CUDA; the own copy of plan() is layout_bytes, not this."""
        blocks = -(-tree.num_qo // self._block_m(shape)) * shape.num_qo_heads
        token_head_bytes = 2 * shape.head_dim * shape.dtype_bytes
        rows_bytes = tree.num_qo * shape.q_token_bytes
        return IOBytes(
            kv=blocks * tree.num_tokens * token_head_bytes,
            kv_unique=tree.num_tokens * shape.kv_token_bytes if tree.num_qo else 0,
            q=rows_bytes,
            q_unique=rows_bytes,
            out=3 * rows_bytes,  # and once more into the caller's buffer
            mask=tree.num_qo * tree.num_tokens * shape.num_qo_heads * shape.dtype_bytes,
        )

    def predict_us(
        self, tree: DecodeTree, shape: HeadShape, page_size: int, device_model: DeviceModel
    ) -> float:
        """Modelled latency: counted bytes, padded and masked FLOPs, the launches of one run()."""
        block_m = self._block_m(shape)
        blocks = -(-tree.num_qo // block_m) * shape.num_qo_heads
        tokens = -(-tree.num_tokens // _BLOCK_N) * _BLOCK_N
        flops = 4 * shape.head_dim * blocks * block_m * tokens
        io = self.io(tree, shape, page_size)
        return predict_us(io, flops, device_model, blocks, num_launches=2)

    def _block_m(self, shape: HeadShape) -> int:
        if self.backend == "cudnn":
            return 128
        return 64 if shape.head_dim <= 128 else 32

    # ---- once a step -------------------------------------------------------------------------
    def _plan(
        self, tree: DecodeTree, cache: PagedKVCache, slots: LongArray, nodes: LongArray
    ) -> None:
        """Build the mask; find K and V in the pool, or copy them out of it."""
        shape, device = cache.shape, cache.device
        found = tree_kv(cache, slots)
        self._take(found)
        # [group, num_kv_heads, num_tokens, head_dim], the group with stride 0.
        expand = (shape.group_size, -1, -1, -1)
        self._k = [k.transpose(0, 1).expand(expand) for k in found.k]
        self._v = [v.transpose(0, 1).expand(expand) for v in found.v]
        self._build_mask(tree, shape, device)
        self.workspace_bytes = _mask_bytes(tree, shape)
        on_gpu = device.type == "cuda"
        # The CPU's fused kernel is the one named FLASH_ATTENTION; it takes a mask.
        self._backend = BACKENDS[self.backend] if on_gpu else SDPBackend.FLASH_ATTENTION
        self.path = f"torch sdpa {self.backend}" if on_gpu else "torch sdpa cpu"
        self.capturable = on_gpu

    def _build_mask(self, tree: DecodeTree, shape: HeadShape, device: torch.device) -> None:
        """Additive mask [group, num_kv_heads, num_qo, num_tokens], heads with stride 0."""
        indptr, path = tree.path
        sees = np.zeros((tree.num_qo, tree.num_nodes), bool)
        sees[np.repeat(np.arange(tree.num_qo), np.diff(indptr)), path] = True
        node = np.repeat(np.arange(tree.num_nodes, dtype=np.int32), tree.node_len)
        uploads = [torch.from_numpy(x).to(device) for x in (sees, node)]
        seen_nodes, token_node = uploads
        visible = seen_nodes.index_select(1, token_node)
        if tree.query_len is not None:
            offset = np.arange(tree.num_tokens) - tree.node_start[node]
            own = np.stack([tree.query_node, tree.query_len])[:, :, None]
            arrays = (offset.astype(np.int32), own)
            uploads += [torch.from_numpy(x).to(device) for x in arrays]
            token_offset, (own_node, own_len) = uploads[-2:]
            visible &= (token_node != own_node) | (token_offset < own_len)
        width = _mask_width(tree)
        dtype = torch_dtype(shape.dtype)
        mask = torch.zeros((tree.num_qo, width), dtype=dtype, device=device)[:, : tree.num_tokens]
        mask.masked_fill_(visible.logical_not_(), -torch.inf)
        self._mask = mask.expand(shape.group_size, shape.num_kv_heads, -1, -1)
        blind = np.flatnonzero(tree.query_kv_len == 0)
        self._blind = torch.from_numpy(blind).to(device)
        self.plan_upload_bytes += sum(x.numel() * x.element_size() for x in uploads)

    # ---- once a layer ------------------------------------------------------------------------
    def _run(
        self, cache: PagedKVCache, q: Tensor, layer: int, out: Tensor, lse: Tensor | None
    ) -> Tensor:
        shape = cache.shape
        grouped = (len(q), shape.num_kv_heads, shape.group_size, shape.head_dim)
        with sdpa_kernel(self._backend):
            heads_first = scaled_dot_product_attention(
                q.view(grouped).permute(2, 1, 0, 3),
                self._k[layer],
                self._v[layer],
                attn_mask=self._mask,
                scale=self.sm_scale,
            )
        o = heads_first.permute(2, 1, 0, 3)
        if out is self._out and shape.group_size == 1 and o.is_contiguous():
            out = o.view(q.shape)  # rows come out in order already: nothing to copy
        else:
            out.view(grouped).copy_(o)
        if self._blind.numel():
            out.index_fill_(0, self._blind, 0)
        return out


def _mask_width(tree: DecodeTree) -> int:
    return -(-tree.num_tokens // _MASK_ALIGNMENT) * _MASK_ALIGNMENT


def _mask_bytes(tree: DecodeTree, shape: HeadShape) -> int:
    return tree.num_qo * _mask_width(tree) * shape.dtype_bytes
