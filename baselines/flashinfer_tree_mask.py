"""flashinfer_tree_mask: FlashInfer's prefill over the whole tree under a packed ancestor mask.

BatchPrefillWithPagedKVCacheWrapper of FlashInfer 0.7.4 with a custom mask, as tree speculation uses
it: each root is a request, its queries are the rows, its attended tokens the KV, and one bit per
(query, token) tells who sees what. plan() builds the mask on the GPU; the library packs it. Only
the fa2 backend takes a mask; it skips nothing, so every query tile reads the whole tree.

io() counts that kernel (flashinfer_rules.fa2_cuts) and the mask's bits once per KV head.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from baselines.flashinfer_library import NUM_SMS, FlashInferBaseline, int32, is_moved, library
from baselines.flashinfer_rules import Cuts, fa2_cuts, launch_io, plan_bytes
from baselines.plan_checks import memory_reason
from baselines.requests import Requests, whole_trees
from deft.device_model import DeviceModel, predict_us
from deft.io_model import IOBytes
from deft.kv_cache import PagedKVCache
from deft.shape import HeadShape
from deft.tree import DecodeTree, LongArray


class FlashInferTreeMask(FlashInferBaseline):
    """FlashInfer's prefill with a custom mask.

    Args:
        name: kernel id in the result rows.
        sm_scale: multiplies q . k; default head_dim ** -0.5.
    """

    def __init__(self, name: str = "flashinfer_tree_mask", sm_scale: float | None = None) -> None:
        super().__init__(name, sm_scale)

    def _limit(self, shape: HeadShape, tree: DecodeTree) -> str | None:
        bits = _mask_bits(whole_trees(tree))
        if bits >= 2**31:  # the library counts mask entries in int32
            return f"the mask has {bits:,} entries, FlashInfer's int32 offsets hold {2**31 - 1:,}"
        return memory_reason("the mask before it is packed", bits)

    def _io(self, tree: DecodeTree, shape: HeadShape, num_sms: int) -> tuple[IOBytes, Cuts]:
        req = whole_trees(tree)
        cuts = fa2_cuts(req, shape, num_sms)
        io = launch_io(req, cuts, shape, has_lse=False)
        moves = 2 * tree.num_qo * shape.q_token_bytes if is_moved(tree) else 0
        mask = IOBytes(mask=-(-_mask_bits(req) // 8) * shape.num_kv_heads, q=moves, out=moves)
        return io + mask, cuts

    def io(self, tree: DecodeTree, shape: HeadShape, page_size: int) -> IOBytes:
        """Counted IO of one run()."""
        return self._io(tree, shape, NUM_SMS)[0] if tree.num_qo else IOBytes()

    def predict_us(
        self, tree: DecodeTree, shape: HeadShape, page_size: int, device_model: DeviceModel
    ) -> float:
        """Modelled latency: counted bytes, masked FLOPs, one launch and the merge of a split."""
        if not tree.num_qo:
            return 0.0
        io, cuts = self._io(tree, shape, device_model.num_sms)
        flops = 4 * shape.head_dim * shape.num_qo_heads * _mask_bits(whole_trees(tree))
        launches = 1 + bool(cuts.is_split.any()) + 2 * is_moved(tree)
        return predict_us(io, flops, device_model, cuts.num_ctas, launches)

    # ---- once a step -------------------------------------------------------------------------
    def _plan(
        self, tree: DecodeTree, cache: PagedKVCache, slots: LongArray, nodes: LongArray
    ) -> None:
        """The mask and page tables of every root, then the wrapper's own plan."""
        shape, device = cache.shape, cache.device
        req = whole_trees(tree)
        workspace = self._workspace(device)
        if "prefill" not in self._wrappers:
            self._wrappers["prefill"] = library().BatchPrefillWithPagedKVCacheWrapper(
                workspace, "NHD", backend="fa2"
            )
        self._wrapper = self._wrappers["prefill"]
        mask, uploaded = _tree_mask(tree, req, device)
        table = self._page_table(req, slots, device)
        heads = (shape.num_qo_heads, shape.num_kv_heads, shape.head_dim)
        self._wrapper.plan(
            int32(req.row_indptr), *table, *heads, 1, custom_mask=mask, **self._planned(cache)
        )
        self.plan_upload_bytes = plan_bytes(req, fa2_cuts(req, shape, NUM_SMS)) + uploaded
        self._take_pools(cache)
        self._take_order(tree, cache)
        self._lse = torch.empty((tree.num_qo, shape.num_qo_heads), device=device)
        blind = np.flatnonzero(tree.query_kv_len[tree.query_order] == 0)
        self._blind = int32(blind, device).long()
        self.path = f"{self._version()} prefill fa2, custom mask"

    # ---- once a layer ------------------------------------------------------------------------
    def _run(
        self, cache: PagedKVCache, q: Tensor, layer: int, out: Tensor, lse: Tensor | None
    ) -> Tensor:
        o = out if self._order is None else self._o
        found = None if lse is None else self._lse
        self._wrapper.run(
            self._rows_of(q), self._pools[layer], out=o, lse=found, return_lse=lse is not None
        )
        if self._blind.numel():
            o.index_fill_(0, self._blind, 0)
            if found is not None:
                found.index_fill_(0, self._blind, -torch.inf)
        return self._give(o, found, out, lse)


def _mask_bits(req: Requests) -> int:
    return int((req.rows * req.kv_len).sum())


def _tree_mask(tree: DecodeTree, req: Requests, device: torch.device) -> tuple[Tensor, int]:
    """(bool mask of all requests, row by row; bytes uploaded for it)."""
    indptr, path = tree.path
    order = tree.query_order
    sees = np.zeros((tree.num_qo, tree.num_nodes), bool)
    sees[np.repeat(np.arange(tree.num_qo), np.diff(indptr)), path] = True
    node = np.repeat(np.arange(tree.num_nodes), tree.node_len)[req.tokens]
    arrays = [sees[order], node]
    if tree.query_len is not None:
        offset = req.tokens - tree.node_start[node]
        arrays += [offset, tree.query_node[order], tree.query_len[order]]
    seen, *rest = (torch.from_numpy(x).to(device) for x in arrays)
    rows, tokens = req.row_indptr.tolist(), req.kv_indptr.tolist()
    parts = []
    for i in range(len(rows) - 1):
        mine, ours = slice(rows[i], rows[i + 1]), slice(tokens[i], tokens[i + 1])
        part = seen[mine].index_select(1, rest[0][ours])
        if len(rest) > 1:
            at, own, cut = rest[1][ours], rest[2][mine, None], rest[3][mine, None]
            part &= (rest[0][ours] != own) | (at < cut)
        parts.append(part.flatten())
    return torch.cat(parts), sum(x.nbytes for x in arrays)
