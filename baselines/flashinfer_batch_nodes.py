"""flashinfer_batch_nodes: every node as a request of one FlashInfer BatchAttention, then merged.

BatchAttention of FlashInfer 0.7.4 (its persistent "holistic" kernel) takes requests of any number
of rows in one launch, so all nodes of all levels go at once: q is repeated once per level, and row
i of level l is row l x num_qo + i. What it returns is merged level by level (merge="pairs") or, the
rows first brought side by side, by one merge_states ("states"); "auto" takes pairs up to three
levels.

io() counts the persistent kernel (flashinfer_rules.holistic_cuts: tiles of 128 or 16 rows, KV cut
by total length, partial outputs of cut requests), the repeated q, each level's output and LSE, and
what the merges move.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baselines.flashinfer_library import NUM_SMS, FlashInferBaseline, int32, is_moved, library
from baselines.flashinfer_rules import (
    HOLISTIC_MAX_WORKS,
    Cuts,
    holistic_cuts,
    holistic_works,
    holistic_workspace,
    launch_io,
    plan_bytes,
)
from baselines.requests import Requests, stacked, tree_levels
from deft.device_model import DeviceModel, predict_us
from deft.io_model import IOBytes
from deft.kv_cache import PagedKVCache
from deft.shape import HeadShape, torch_dtype
from deft.tree import DecodeTree, LongArray

MERGES = ("auto", "pairs", "states")
_PAIRS_UP_TO = 3  # levels
_LSE_BYTES = 4


class FlashInferBatchNodes(FlashInferBaseline):
    """All nodes in one BatchAttention launch.

    Args:
        name: kernel id in the result rows.
        merge: "pairs", "states" or "auto".
        min_share: as in flashinfer_cascade: 0 makes a request of every node.
        sm_scale: multiplies q . k; default head_dim ** -0.5.

    Raises:
        ValueError: another merge, or a negative min_share.
    """

    def __init__(
        self,
        name: str = "flashinfer_batch_nodes",
        merge: str = "auto",
        min_share: int = 0,
        sm_scale: float | None = None,
    ) -> None:
        if merge not in MERGES:
            raise ValueError(f"merge must be one of {MERGES}, got {merge!r}")
        if isinstance(min_share, bool) or not isinstance(min_share, int) or min_share < 0:
            raise ValueError(f"min_share must be a whole number from 0, got {min_share!r}")
        super().__init__(name, sm_scale)
        self.merge, self.min_share = merge, min_share
        self._counted: tuple[DecodeTree, int, Requests | None] | None = None

    def _request(self, tree: DecodeTree) -> tuple[int, Requests | None]:
        """(levels, the batch of all of them), None where no query sees a token."""
        if self._counted is None or self._counted[0] is not tree:
            levels = tree_levels(tree, self.min_share)
            self._counted = tree, len(levels), stacked(levels) if levels else None
        return self._counted[1:]

    def _limit(self, shape: HeadShape, tree: DecodeTree) -> str | None:
        req = self._request(tree)[1]
        if req is None:
            return None
        works = holistic_works(req, holistic_cuts(req, shape, _num_sms()), shape)
        if works > HOLISTIC_MAX_WORKS:
            return (
                f"BatchAttention: total_num_works (#q tiles * #kv tiles) {works} exceeds "
                f"max_total_num_works {HOLISTIC_MAX_WORKS}"
            )
        return None

    def _merges(self, levels: int) -> str:
        if levels < 2:
            return "none"
        if self.merge != "auto":
            return self.merge
        return "pairs" if levels <= _PAIRS_UP_TO else "states"

    def _io(self, tree: DecodeTree, shape: HeadShape, num_sms: int) -> tuple[IOBytes, Cuts | None]:
        levels, req = self._request(tree)
        if req is None:
            return IOBytes(), None
        cuts = holistic_cuts(req, shape, num_sms)
        io = launch_io(req, cuts, shape, has_lse=True)
        row_bytes = tree.num_qo * shape.q_token_bytes
        state = row_bytes + tree.num_qo * shape.num_qo_heads * _LSE_BYTES
        merging = {  # beside the write of o, which is `out`
            "none": state + state - row_bytes,
            "pairs": 3 * state * (levels - 1) - row_bytes,
            "states": 3 * state * levels + state - row_bytes,  # side by side, then read
        }[self._merges(levels)]
        moves = 2 * row_bytes if is_moved(tree) else 0
        counted = IOBytes(
            kv=io.kv,
            kv_unique=tree.attended_tokens * shape.kv_token_bytes,
            q=io.q + (1 + levels) * row_bytes + moves,  # repeated per level: read, written
            q_unique=row_bytes,
            out=row_bytes + moves,
            partial=io.partial + levels * state + merging,
            index=io.index,
        )
        return counted, cuts

    def io(self, tree: DecodeTree, shape: HeadShape, page_size: int) -> IOBytes:
        """Counted IO of one run(), merges included."""
        return self._io(tree, shape, NUM_SMS)[0]

    def predict_us(
        self, tree: DecodeTree, shape: HeadShape, page_size: int, device_model: DeviceModel
    ) -> float:
        """Modelled latency: counted bytes, useful FLOPs, the launches of one run()."""
        io, cuts = self._io(tree, shape, device_model.num_sms)
        if cuts is None:
            return 0.0
        levels = self._request(tree)[0]
        merging = {"none": 1, "pairs": levels - 1, "states": 3}[self._merges(levels)]
        return predict_us(io, tree.flops(shape), device_model, cuts.num_ctas, 2 + merging)

    # ---- once a step -------------------------------------------------------------------------
    def _plan(
        self, tree: DecodeTree, cache: PagedKVCache, slots: LongArray, nodes: LongArray
    ) -> None:
        """One batch of all nodes, then the library's own plan."""
        shape, device = cache.shape, cache.device
        levels, req = self._request(tree)
        assert req is not None  # a tree whose queries see nothing is never run
        if "attention" not in self._wrappers:
            made = library().attention.BatchAttention("NHD", str(device))
            needed = holistic_workspace(shape, _num_sms())
            if made.float_workspace_buffer.numel() < needed:
                made.float_workspace_buffer = torch.empty(needed, dtype=torch.uint8, device=device)
            self._wrappers["attention"] = made
        self._wrapper = self._wrappers["attention"]
        self.workspace_bytes = self._wrapper.float_workspace_buffer.numel()
        indptr, indices, _ = self._page_table(req, slots, device)
        dims = (shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim, 1)
        lengths = int32(req.kv_len)
        self._wrapper.plan(
            int32(req.row_indptr), indptr, indices, lengths, *dims, **self._planned(cache)
        )
        self.plan_upload_bytes = plan_bytes(req, holistic_cuts(req, shape, _num_sms()))
        self._take_pools(cache)
        self._take_order(tree, cache)
        size = (levels, tree.num_qo, shape.num_qo_heads, shape.head_dim)
        make = {"dtype": torch_dtype(shape.dtype), "device": device}
        self._rows, self._parts = torch.empty(size, **make), torch.empty(size, **make)
        self._parts_lse = torch.empty(size[:3], device=device)
        how = self._merges(levels)
        self._merged = None
        if how == "states":
            side = (tree.num_qo, levels, *size[2:])
            self._merged = torch.empty(side, **make), torch.empty(side[:3], device=device)
        self._lse = torch.empty(size[1:3], device=device)
        self.path = f"{self._version()} BatchAttention, {levels} levels, merge {how}"

    # ---- once a layer ------------------------------------------------------------------------
    def _run(
        self, cache: PagedKVCache, q: Tensor, layer: int, out: Tensor, lse: Tensor | None
    ) -> Tensor:
        rows, parts, parts_lse = self._rows, self._parts, self._parts_lse
        rows.copy_(self._rows_of(q))  # once per level
        self._wrapper.run(
            rows.flatten(0, 1), self._pools[layer], parts.flatten(0, 1), parts_lse.flatten(0, 1)
        )
        o = out if self._order is None else self._o
        module = library().cascade.get_cascade_module()
        if self._merged is not None:
            v, s = self._merged
            v.copy_(parts.transpose(0, 1))
            s.copy_(parts_lse.transpose(0, 1))
            module.merge_states(v, s, o, self._lse)
        elif len(parts) == 1:
            o.copy_(parts[0])
            self._lse.copy_(parts_lse[0])
        else:
            # The last pair goes straight to the output.
            for v, s in zip(parts[1:-1], parts_lse[1:-1], strict=True):
                library().merge_state_in_place(parts[0], parts_lse[0], v, s)
            module.merge_state(parts[0], parts_lse[0], parts[-1], parts_lse[-1], o, self._lse)
        return self._give(o, self._lse, out, lse)


def _num_sms() -> int:
    if not torch.cuda.is_available():
        return NUM_SMS
    return int(torch.cuda.get_device_properties().multi_processor_count)
