"""flashinfer_decode: every sequence on its own through FlashInfer's paged batch decode.

BatchDecodeWithPagedKVCacheWrapper of FlashInfer 0.7.4: split-KV decode over page tables, no
sharing. tensor_cores=False, the library's default, is its CUDA-core kernel: one thread block per
sequence, KV head and KV chunk; True runs its prefill kernel (fa2) with the group as the rows of a
16-row tile. Which is faster depends on the group, so both are swept.

io() counts those kernels (see flashinfer_rules): each path's K and V once per KV head. The
CUDA-core kernel's chunks depend on how many of its blocks an SM holds; 8 is assumed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from baselines.flashinfer_library import NUM_SMS, FlashInferBaseline, int32, library
from baselines.flashinfer_rules import Cuts, decode_cuts, fa2_cuts, launch_io, plan_bytes
from baselines.plan_checks import path_tokens
from baselines.requests import Requests
from deft.device_model import DeviceModel, predict_us
from deft.io_model import IOBytes
from deft.kv_cache import PagedKVCache
from deft.shape import HeadShape
from deft.tree import DecodeTree, LongArray

CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)
_CUDA_CORE_BLOCKS_PER_SM = 8


class FlashInferDecode(FlashInferBaseline):
    """FlashInfer's batch decode.

    Args:
        name: kernel id in the result rows.
        tensor_cores: the wrapper's use_tensor_cores.
        sm_scale: multiplies q . k; default head_dim ** -0.5.

    Raises:
        ValueError: tensor_cores is no bool.
    """

    def __init__(
        self,
        name: str = "flashinfer_decode",
        tensor_cores: bool = False,
        sm_scale: float | None = None,
    ) -> None:
        if not isinstance(tensor_cores, bool):
            raise ValueError(f"tensor_cores must be true or false, got {tensor_cores!r}")
        super().__init__(name, sm_scale)
        self.tensor_cores = tensor_cores

    def _limit(self, shape: HeadShape, tree: DecodeTree) -> str | None:
        if not self.tensor_cores and shape.group_size not in CUDA_CORE_GROUPS:
            return (
                f"FlashInfer's CUDA-core decode has groups {CUDA_CORE_GROUPS}, not "
                f"{shape.group_size}; use tensor_cores=true"
            )
        return None

    def _cuts(self, req: Requests, shape: HeadShape, num_sms: int = NUM_SMS) -> Cuts:
        if self.tensor_cores:
            return fa2_cuts(req, shape, num_sms)
        return decode_cuts(req, shape, num_sms, _CUDA_CORE_BLOCKS_PER_SM)

    def io(self, tree: DecodeTree, shape: HeadShape, page_size: int) -> IOBytes:
        """Counted IO of one run()."""
        if not tree.num_qo:
            return IOBytes()
        req = _sequences(tree)
        return launch_io(req, self._cuts(req, shape), shape, has_lse=False)

    def predict_us(
        self, tree: DecodeTree, shape: HeadShape, page_size: int, device_model: DeviceModel
    ) -> float:
        """Modelled latency: counted bytes, useful FLOPs, one launch and the merge of a split."""
        if not tree.num_qo:
            return 0.0
        req = _sequences(tree)
        cuts = self._cuts(req, shape, device_model.num_sms)
        io = launch_io(req, cuts, shape, has_lse=False)
        launches = 1 + bool(cuts.is_split.any())
        return predict_us(io, tree.flops(shape), device_model, cuts.num_ctas, launches)

    # ---- once a step -------------------------------------------------------------------------
    def _plan(
        self, tree: DecodeTree, cache: PagedKVCache, slots: LongArray, nodes: LongArray
    ) -> None:
        """Page tables of every path, then the wrapper's own plan."""
        shape, device = cache.shape, cache.device
        req = _sequences(tree)
        indptr, indices, last = self._page_table(req, slots, device)
        workspace = self._workspace(device)
        if "decode" not in self._wrappers:
            self._wrappers["decode"] = library().BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=self.tensor_cores
            )
        self._wrapper = self._wrappers["decode"]
        heads = (shape.num_qo_heads, shape.num_kv_heads, shape.head_dim)
        self._wrapper.plan(indptr, indices, last, *heads, 1, **self._planned(cache))
        self._take_pools(cache)
        self._lse = torch.empty((tree.num_qo, shape.num_qo_heads), device=device)
        blind = np.flatnonzero(tree.query_kv_len == 0)
        self._blind = int32(blind, device).long()
        self.plan_upload_bytes = plan_bytes(req, self._cuts(req, shape)) + self._blind.nbytes
        cores = "tensor cores" if self.tensor_cores else "CUDA cores"
        self.path = f"{self._version()} decode {self._wrapper.resolved_backend}, {cores}"
        self._order = None

    # ---- once a layer ------------------------------------------------------------------------
    def _run(
        self, cache: PagedKVCache, q: Tensor, layer: int, out: Tensor, lse: Tensor | None
    ) -> Tensor:
        found = None if lse is None else self._lse
        self._wrapper.run(q, self._pools[layer], out=out, lse=found, return_lse=lse is not None)
        self._give(out, found, out, lse)
        if self._blind.numel():
            out.index_fill_(0, self._blind, 0)
            if lse is not None:
                lse.index_fill_(0, self._blind, -torch.inf)
        return out


def _sequences(tree: DecodeTree) -> Requests:
    """Every query as a request over its path."""
    indptr, tokens = path_tokens(tree)
    return Requests(np.arange(tree.num_qo + 1), indptr, tokens)
