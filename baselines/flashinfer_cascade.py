"""flashinfer_cascade: one FlashInfer prefill wrapper per level of the tree, merged pairwise.

What MultiLevelCascadeAttentionWrapper of FlashInfer 0.7.4 does (last level first, then
merge_state_in_place for every other level), with the backend of its wrappers as a knob it lacks:
"auto" (its default: fa3 on Hopper for levels with a request of more than 64 rows, else fa2), "fa2",
"fa3". fa3 reads K and V once per *query* head.

min_share=0 makes a level of every level of nodes, as the library's users do. A deep tree then pays
a launch and a merge per level; from min_share=1 on, runs with the same queries are one level, and
runs that fewer than min_share queries see are read by each query in a last level of its own.

io() counts every level's launch (flashinfer_rules), each level's output and LSE, and what the
merges read and write; where q is not in depth-first order, moving its rows and those of o.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baselines.flashinfer_library import (
    NUM_SMS,
    FlashInferBaseline,
    int32,
    is_moved,
    library,
)
from baselines.flashinfer_rules import (
    Cuts,
    auto_backend,
    fa2_cuts,
    fa3_cuts,
    launch_io,
    plan_bytes,
)
from baselines.requests import Requests, tree_levels
from deft.device_model import DeviceModel, predict_us
from deft.io_model import IOBytes
from deft.kv_cache import PagedKVCache
from deft.shape import HeadShape, torch_dtype
from deft.tree import DecodeTree, LongArray

BACKENDS = ("auto", "fa2", "fa3")
MAX_LEVELS = 64  # each holds 8 MiB of the GPU's and 8 MiB of pinned memory
_LSE_BYTES = 4


class FlashInferCascade(FlashInferBaseline):
    """FlashInfer's multi-level cascade.

    Args:
        name: kernel id in the result rows.
        backend: "auto", "fa2" or "fa3", of every level's wrapper.
        min_share: 0: a level per level of nodes; else see the module.
        sm_scale: multiplies q . k; default head_dim ** -0.5.

    Raises:
        ValueError: another backend, or a negative min_share.
    """

    def __init__(
        self,
        name: str = "flashinfer_cascade",
        backend: str = "auto",
        min_share: int = 0,
        sm_scale: float | None = None,
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
        if isinstance(min_share, bool) or not isinstance(min_share, int) or min_share < 0:
            raise ValueError(f"min_share must be a whole number from 0, got {min_share!r}")
        super().__init__(name, sm_scale)
        self.backend, self.min_share = backend, min_share
        self._counted: tuple[DecodeTree, list[Requests]] | None = None

    def _levels(self, tree: DecodeTree) -> list[Requests]:
        if self._counted is None or self._counted[0] is not tree:
            self._counted = tree, tree_levels(tree, self.min_share)
        return self._counted[1]

    def _limit(self, shape: HeadShape, tree: DecodeTree) -> str | None:
        levels = len(self._levels(tree))
        if levels > MAX_LEVELS:
            return f"{levels} levels need a wrapper each, at most {MAX_LEVELS}; raise min_share"
        is_hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == 9
        return None if self.backend != "fa3" or is_hopper else "FlashInfer's fa3 needs Hopper"

    def _cuts(self, req: Requests, shape: HeadShape, num_sms: int = NUM_SMS) -> Cuts:
        backend = auto_backend(req) if self.backend == "auto" else self.backend
        return fa3_cuts(req, shape) if backend == "fa3" else fa2_cuts(req, shape, num_sms)

    def _io(self, tree: DecodeTree, shape: HeadShape, num_sms: int) -> tuple[IOBytes, int, int]:
        """(counted IO, thread blocks, launches)."""
        levels = self._levels(tree)
        row_bytes = tree.num_qo * shape.q_token_bytes
        state = row_bytes + tree.num_qo * shape.num_qo_heads * _LSE_BYTES
        io, ctas, launches = IOBytes(), 0, 0
        for req in levels:
            cuts = self._cuts(req, shape, num_sms)
            io += launch_io(req, cuts, shape, has_lse=True)
            ctas += cuts.num_ctas
            launches += 1 + bool(cuts.is_split.any())
        merges = max(len(levels) - 1, 0)
        moves = 2 * row_bytes if levels and is_moved(tree) else 0
        # Each level's state was counted as output: one of them is, the others are partial.
        partial = io.partial + io.out - row_bytes + 3 * state * merges if levels else 0
        io = IOBytes(
            kv=io.kv,
            kv_unique=tree.attended_tokens * shape.kv_token_bytes,
            q=io.q + moves,
            q_unique=row_bytes if levels else 0,
            out=(row_bytes if levels else 0) + moves,
            partial=partial,
            index=io.index,
        )
        return io, ctas, launches + merges + 2 * bool(moves)

    def io(self, tree: DecodeTree, shape: HeadShape, page_size: int) -> IOBytes:
        """Counted IO of one run(), all levels and merges."""
        return self._io(tree, shape, NUM_SMS)[0]

    def predict_us(
        self, tree: DecodeTree, shape: HeadShape, page_size: int, device_model: DeviceModel
    ) -> float:
        """Modelled latency: counted bytes, useful FLOPs, the launches of all levels and merges."""
        io, ctas, launches = self._io(tree, shape, device_model.num_sms)
        return predict_us(io, tree.flops(shape), device_model, ctas, launches)

    # ---- once a step -------------------------------------------------------------------------
    def _plan(
        self, tree: DecodeTree, cache: PagedKVCache, slots: LongArray, nodes: LongArray
    ) -> None:
        """Every level's requests and page table, then its wrapper's own plan."""
        shape, device = cache.shape, cache.device
        levels = self._levels(tree)
        workspace = self._workspace(device)
        heads = (shape.num_qo_heads, shape.num_kv_heads, shape.head_dim)
        self._planned_levels: list[Any] = []
        self.plan_upload_bytes = 0
        for i, req in enumerate(levels):
            if i not in self._wrappers:
                self._wrappers[i] = library().BatchPrefillWithPagedKVCacheWrapper(
                    workspace, "NHD", backend=self.backend
                )
            table = self._page_table(req, slots, device)
            self._wrappers[i].plan(int32(req.row_indptr), *table, *heads, 1, **self._planned(cache))
            self._planned_levels.append(self._wrappers[i])
            self.plan_upload_bytes += plan_bytes(req, self._cuts(req, shape))
        self._take_pools(cache)
        self._take_order(tree, cache)
        size = (tree.num_qo, shape.num_qo_heads, shape.head_dim)
        dtype = torch_dtype(shape.dtype)
        self._states = [
            (torch.empty(size, dtype=dtype, device=device), torch.empty(size[:2], device=device))
            for _ in range(min(len(levels), 2))
        ]
        used = sorted({str(wrapper._backend) for wrapper in self._planned_levels})
        self.path = f"{self._version()} cascade {'+'.join(used)}, {len(levels)} levels"

    # ---- once a layer ------------------------------------------------------------------------
    def _run(
        self, cache: PagedKVCache, q: Tensor, layer: int, out: Tensor, lse: Tensor | None
    ) -> Tensor:
        rows, pools = self._rows_of(q), self._pools[layer]
        o = out if self._order is None else self._o
        o_lse = self._states[0][1]
        self._planned_levels[-1].run(rows, pools, out=o, lse=o_lse, return_lse=True)
        for wrapper in self._planned_levels[:-1]:
            other, other_lse = self._states[1]
            wrapper.run(rows, pools, out=other, lse=other_lse, return_lse=True)
            library().merge_state_in_place(o, o_lse, other, other_lse)
        return self._give(o, o_lse, out, lse)
