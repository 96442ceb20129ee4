"""BoundPlan: a Plan resolved in a pool, with its tables on the device.

bind finds each node's slots, turns pure chunks whose slots are not consecutive into mixed ones,
packs every table in one buffer and uploads it once. advance() lets open runs grow without a
replan: new tokens join the mixed stream of the items that hold the node's open run, in space kept
for them, so device pointers and grids stay the same and a captured CUDA graph stays valid.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deft.kv_cache import PagedKVCache
from deft.plan import Plan
from deft.shape import torch_dtype
from deft.tensor_checks import check_headroom
from deft.tree import indptr_of, segment_arange

_INT32_MAX = 2**31 - 1


class BoundPlan:
    """See Plan.bind. Device tables are attributes (int32, mask words int64); upload_bytes is what
    bind sent."""

    def __init__(
        self,
        plan: Plan,
        cache: PagedKVCache,
        nodes: npt.NDArray[Any] | None = None,
        headroom: int = 64,
    ) -> None:
        tree = plan.tree
        check_headroom(headroom)
        self.plan, self.cache, self.headroom = plan, cache, headroom
        self.nodes = np.arange(tree.num_nodes) if nodes is None else np.array(nodes)
        self._check_cache()
        self._locate_nodes()
        self._place_tokens()
        self._node_len = tree.node_len.astype(np.int64)
        self._has_room = False
        self._upload()
        self.launches = plan.launches
        self.num_merge_queries = len(plan.merge_queries)
        # Tile classes of one phase run side by side; see kernels/partial.py.
        on_gpu = cache.device.type == "cuda"
        self.side_stream = torch.cuda.Stream(cache.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.most_slots = int(np.diff(plan.merge_indptr).max(initial=0))
        shape, rows = plan.shape, max(plan.num_partials, 1) * plan.shape.num_qo_heads
        self.partial_o = torch.empty(
            (rows, shape.head_dim), dtype=torch_dtype(plan.partial_dtype), device=cache.device
        )
        self.partial_lse = torch.empty(rows, dtype=torch.float32, device=cache.device)

    def _check_cache(self) -> None:
        plan, cache = self.plan, self.cache
        mine, theirs = plan.shape, cache.shape
        if (mine.num_kv_heads, mine.head_dim) != (theirs.num_kv_heads, theirs.head_dim):
            raise ValueError(
                f"the plan is for {mine.num_kv_heads} KV heads x {mine.head_dim}, "
                f"the cache holds {theirs.num_kv_heads} x {theirs.head_dim}"
            )
        if mine.num_qo_heads != theirs.num_qo_heads:
            raise ValueError(
                f"the plan is for {mine.num_qo_heads} query heads, "
                f"the cache's shape has {theirs.num_qo_heads}"
            )
        if len(self.nodes) != plan.tree.num_nodes:
            raise ValueError(f"nodes has {len(self.nodes)} handles for {plan.tree.num_nodes} nodes")
        if cache.num_pages * cache.page_size > _INT32_MAX:
            raise ValueError("a pool of more than 2**31 - 1 slots is not supported")

    def _locate_nodes(self) -> None:
        """Slots of the nodes: a base slot where they are consecutive, else listed one by one."""
        indptr, slots = self.cache.slots(self.nodes)
        lens = np.diff(indptr)
        if not np.array_equal(lens, self.plan.tree.node_len):
            bad = int(np.flatnonzero(lens != self.plan.tree.node_len)[0])
            raise ValueError(
                f"node {bad} holds {lens[bad]} tokens in the cache and "
                f"{self.plan.tree.node_len[bad]} in the plan's tree: plan again"
            )
        self._slot_indptr, self._slots = indptr, slots
        # breaks[i] = slot i does not follow slot i - 1; a prefix count answers "is a range
        # consecutive?"
        breaks = np.r_[True, np.diff(slots) != 1] if len(slots) else np.zeros(0, bool)
        self._break_count = np.r_[0, np.cumsum(breaks)]

    def _place_tokens(self) -> None:
        plan = self.plan
        at = self._slot_indptr[plan.run_node[plan.chunk_run]] + plan.chunk_start
        last = at + plan.chunk_len
        broken = self._break_count[last] - self._break_count[np.minimum(at + 1, last)] > 0
        chunk_item = np.repeat(np.arange(plan.num_items), np.diff(plan.chunk_indptr))
        keep = ~broken
        self._chunk_base = self._slots[at[keep]]
        self._chunk_len = plan.chunk_len[keep]
        self._chunk_indptr = indptr_of(np.bincount(chunk_item[keep], minlength=plan.num_items))
        mixed_item = np.repeat(np.arange(plan.num_items), np.diff(plan.mixed_indptr))
        item = np.r_[mixed_item, chunk_item[broken]]
        run = np.r_[plan.mixed_run, plan.chunk_run[broken]]
        start = np.r_[plan.mixed_start, plan.chunk_start[broken]]
        length = np.r_[plan.mixed_len, plan.chunk_len[broken]].astype(np.int64)
        order = np.argsort(item, kind="stable")
        item, run, start, length = item[order], run[order], start[order], length[order]
        first = self._slot_indptr[plan.run_node[run]] + start
        token = np.repeat(first, length) + segment_arange(length)
        self._token_slot = self._slots[token]
        self._token_mask = plan.run_mask[np.repeat(run, length)]
        counts = np.bincount(item, weights=length, minlength=plan.num_items).astype(np.int64)
        self._token_start = indptr_of(counts)
        self._token_end = self._token_start[1:].copy()
        open_item = np.repeat(np.arange(plan.num_items), np.diff(plan.item_run_indptr))
        self._open_run = np.flatnonzero(plan.run_open)
        self._open_item = open_item[self._open_run]
        reserve = np.bincount(self._open_item, minlength=plan.num_items) * self.headroom
        self._roomy_start = indptr_of(counts + reserve)

    # ---- upload ------------------------------------------------------------------------------
    def _meta(self) -> npt.NDArray[np.int32]:
        plan = self.plan
        meta = np.zeros((plan.num_items, 8), np.int32)
        meta[:, 0] = plan.item_query_indptr[:-1]
        meta[:, 1] = np.diff(plan.item_query_indptr)
        meta[:, 2], meta[:, 3] = self._chunk_indptr[:-1], self._chunk_indptr[1:]
        meta[:, 4], meta[:, 5] = self._token_start[:-1], self._token_end
        return meta

    def _upload(self) -> None:
        plan, device = self.plan, self.cache.device
        tables = {
            "item_meta": self._meta(),
            "item_query": plan.item_query,
            "item_dest": plan.item_dest,
            "chunk_base": self._chunk_base.astype(np.int32),
            "chunk_len": self._chunk_len,
            "merge_query": plan.merge_queries,
            "merge_indptr": plan.merge_indptr.astype(np.int32),
            "token_slot": self._token_slot.astype(np.int32),
            "token_mask": np.ascontiguousarray(self._token_mask).view(np.int32),
        }
        offsets, size = {}, 0
        for name, table in tables.items():
            offsets[name] = size
            size += -(-table.size // 4) * 4  # 16-byte aligned, in int32 units
        pinned = device.type == "cuda"
        host = torch.empty(max(size, 4), dtype=torch.int32, pin_memory=pinned)
        view = host.numpy()
        for name, table in tables.items():
            view[offsets[name] : offsets[name] + table.size] = table.reshape(-1)
        self._buffer = host.to(device, non_blocking=True)
        self._host = host  # kept until the copy on the stream is done
        self.upload_bytes = 4 * size
        for name, table in tables.items():
            setattr(self, name, self._buffer[offsets[name] : offsets[name] + table.size])
        # Token tables live in buffers with room for growth, so that advance() never moves them.
        capacity = int(self._roomy_start[-1])
        words = plan.num_mask_words
        slots = torch.empty(capacity, dtype=torch.int32, device=device)
        masks = torch.empty(capacity * words, dtype=torch.int64, device=device)
        slots[: self.token_slot.numel()].copy_(self.token_slot)
        masks[: self.token_mask.numel() // 2].copy_(self.token_mask.view(torch.int64))
        self.token_slot, self.token_mask = slots, masks

    item_meta: Tensor
    item_query: Tensor
    item_dest: Tensor
    chunk_base: Tensor
    chunk_len: Tensor
    merge_query: Tensor
    merge_indptr: Tensor
    token_slot: Tensor
    token_mask: Tensor

    # ---- growth ------------------------------------------------------------------------------
    def _make_room(self) -> None:
        """Spread the token streams so that each item has its headroom behind it; once per bind."""
        counts = self._token_end - self._token_start[:-1]
        source = np.repeat(self._token_start[:-1], counts) + segment_arange(counts)
        target = np.repeat(self._roomy_start[:-1], counts) + segment_arange(counts)
        slot = np.zeros(int(self._roomy_start[-1]), np.int64)
        mask = np.zeros((len(slot), self.plan.num_mask_words), np.uint64)
        slot[target], mask[target] = self._token_slot[source], self._token_mask[source]
        self._token_slot, self._token_mask = slot, mask
        self._token_start = self._roomy_start
        self._token_end = self._roomy_start[:-1] + counts
        self.token_slot.copy_(torch.from_numpy(slot.astype(np.int32)))
        self.token_mask.copy_(torch.from_numpy(mask.view(np.int64).reshape(-1)))
        self._has_room = True

    def advance(self) -> bool:
        """Take up the tokens appended to the cache since the last bind or advance.

        Uploads the new tokens' slots and masks and the items' stream ends; device buffers, grids
        and launches stay as they are.

        Returns:
            False when a replan is due instead (a node without an open run grew, a node shrank, or
            the headroom is used up); nothing has changed then.
        """
        lens = self.cache.node_lens(self.nodes)
        grown = lens - self._node_len
        if not grown.any():
            return True
        open_nodes = self.plan.run_node[self._open_run]
        new = grown[open_nodes]
        unseen = np.setdiff1d(np.flatnonzero(grown), open_nodes)
        begin, end = self.plan.tree.node_queries
        if (grown < 0).any() or (end[unseen] > begin[unseen]).any():
            return False
        per_item = np.bincount(self._open_item, weights=new, minlength=self.plan.num_items)
        used = self._token_end - self._token_start[:-1] + per_item.astype(np.int64)
        if (used > np.diff(self._roomy_start)).any():
            return False
        if not self._has_room:
            self._make_room()
        self._append(open_nodes, new)
        self._node_len = lens
        return True

    def _append(self, open_nodes: Any, new: Any) -> None:
        device = self.cache.device
        touched = np.unique(open_nodes[new > 0])
        indptr, slots = self.cache.slots(self.nodes[touched])
        first = np.zeros(self.plan.tree.num_nodes, np.int64)
        first[touched] = indptr[1:]  # one past each node's last slot
        order = np.argsort(self._open_item, kind="stable")
        item, new, node = self._open_item[order], new[order], open_nodes[order]
        mask = self.plan.run_mask[self._open_run[order]]
        row = np.repeat(np.arange(len(item)), new)
        slot = slots[np.repeat(first[node] - new, new) + segment_arange(new)]
        per_item = np.bincount(item, weights=new, minlength=self.plan.num_items).astype(np.int64)
        live = np.flatnonzero(per_item)
        at = np.repeat(self._token_end[live], per_item[live]) + segment_arange(per_item[live])
        self._token_end = self._token_end + per_item
        self._token_slot[at], self._token_mask[at] = slot, mask[row]
        where = torch.from_numpy(at).to(device, non_blocking=True)
        words = torch.from_numpy(mask[row].view(np.int64)).to(device, non_blocking=True)
        self.token_slot[where] = torch.from_numpy(slot.astype(np.int32)).to(device)
        self.token_mask.view(-1, self.plan.num_mask_words)[where] = words
        self.item_meta.copy_(torch.from_numpy(self._meta().reshape(-1)))
