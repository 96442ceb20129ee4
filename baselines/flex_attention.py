"""flex_attention: torch's FlexAttention over the whole tree under a block mask of ancestors.

Queries stand in depth-first order, so those that see a token are one range: the mask compares a
query's place with two int32 per token, and a block of 128 queries x 128 tokens is skipped where
nobody sees anything, and unmasked where everybody sees everything. The block mask is built on the
host in plan(); it is this method's planning.

On CUDA the operator is compiled (torch.compile, dynamic shapes; the first run() of a head layout
takes 4-6 s beside an H200), always to its general kernel. K and V must be one tensor in node order:
views of the pool where its slots are consecutive, else a copy (`own_copy`). io() counts the
compiled kernel of torch 2.11-2.13: one thread block per query head and block of queries reads K and
V of the blocks it does not skip (no packing of the group), and the two int32 of every token in a
masked block; o is written by the kernel and copied into the caller's buffer. Where the queries'
order is not theirs in the tree, that copy permutes o, and q is permuted before, which is counted.

On a CPU the operator runs uncompiled, as plain matrix products: for numerics, not for speed.
"""

from __future__ import annotations

import warnings
from functools import cache as memoize
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baselines.baseline import Baseline
from baselines.plan_checks import memory_reason
from baselines.tree_kv import tree_kv
from deft.device_model import DeviceModel, predict_us
from deft.io_model import IOBytes
from deft.kv_cache import PagedKVCache
from deft.shape import HeadShape
from deft.tree import DecodeTree, LongArray

BLOCK = 128
BoolArray = npt.NDArray[np.bool_]


class TreeBlocks(NamedTuple):
    """Which blocks of queries (in query_order) see which blocks of tokens (in node order).

    some, every: bool [query blocks, token blocks]: anyone sees anything; everyone everything.
    begin, end: int32 [num_tokens], places in query_order that see each token.
    """

    some: BoolArray
    every: BoolArray
    begin: npt.NDArray[np.int32]
    end: npt.NDArray[np.int32]


def tree_blocks(tree: DecodeTree) -> TreeBlocks:
    """The block mask of a tree."""
    seg = tree.segments
    begin = np.zeros(tree.num_tokens, np.int32)
    end = np.zeros(tree.num_tokens, np.int32)
    first = tree.node_start[seg.node] + seg.start
    length = (seg.end - seg.start).astype(np.int64)
    tokens = np.repeat(first - (np.cumsum(length) - length), length) + np.arange(length.sum())
    begin[tokens] = np.repeat(seg.query_begin, length)
    end[tokens] = np.repeat(seg.query_end, length)
    query_blocks, token_blocks = -(-tree.num_qo // BLOCK), -(-tree.num_tokens // BLOCK)
    some = np.zeros((query_blocks, token_blocks), bool)
    every = np.zeros((query_blocks, token_blocks), bool)
    starts = np.arange(token_blocks) * BLOCK
    for block in range(query_blocks):
        low, high = block * BLOCK, min((block + 1) * BLOCK, tree.num_qo)
        sees = (begin < high) & (end > low) & (end > begin)
        some[block] = np.logical_or.reduceat(sees, starts)
        every[block] = np.logical_and.reduceat((begin <= low) & (end >= high), starts)
    if tree.num_tokens % BLOCK:  # a ragged last block is masked: its bound is checked there
        every[:, -1:] = False
    return TreeBlocks(some, every, begin, end)


class FlexAttention(Baseline):
    """FlexAttention with a tree's block mask.

    Args:
        name: kernel id in the result rows.
        sm_scale: multiplies q . k; default head_dim ** -0.5.
    """

    def __init__(self, name: str = "flex_attention", sm_scale: float | None = None) -> None:
        super().__init__(name, sm_scale)
        self._counted: tuple[DecodeTree, TreeBlocks] | None = None

    def unsupported(
        self, shape: HeadShape, tree: DecodeTree, page_size: int, device: torch.device | str
    ) -> str | None:
        """A reason for shapes that the compiled kernel does not take, or a too large CPU run."""
        if torch.device(device).type == "cuda":
            if shape.dtype == "float64":
                return "compiled FlexAttention takes float16, bfloat16 and float32, not float64"
            if shape.head_dim < 16:
                return f"compiled FlexAttention needs head_dim >= 16, got {shape.head_dim}"
            return None
        if shape.dtype == "bfloat16":
            return "uncompiled FlexAttention rounds its logits to bfloat16; use float16 on a CPU"
        logits = 3 * tree.num_qo * tree.num_tokens * shape.num_qo_heads * 4
        return memory_reason("uncompiled FlexAttention's logits", logits)

    def _blocks(self, tree: DecodeTree) -> TreeBlocks:
        if self._counted is None or self._counted[0] is not tree:
            self._counted = tree, tree_blocks(tree)
        return self._counted[1]

    def io(self, tree: DecodeTree, shape: HeadShape, page_size: int) -> IOBytes:
        """Counted IO of one run() of the compiled kernel; plan()'s own copy is layout_bytes."""
        blocks = self._blocks(tree)
        token_head_bytes = 2 * shape.head_dim * shape.dtype_bytes
        visited = int(blocks.some.sum()) * BLOCK
        masked = int((blocks.some & ~blocks.every).sum()) * BLOCK
        rows_bytes = tree.num_qo * shape.q_token_bytes
        moves = 1 if _is_sorted(tree) else 3  # a permutation reads and writes the rows once more
        return IOBytes(
            kv=visited * shape.num_qo_heads * token_head_bytes,
            kv_unique=tree.attended_tokens * shape.kv_token_bytes,
            q=moves * rows_bytes,
            q_unique=rows_bytes,
            out=3 * rows_bytes,  # and once more into the caller's buffer
            mask=masked * shape.num_qo_heads * 8,
            index=int(blocks.some.sum()) * shape.num_qo_heads * 4,
        )

    def predict_us(
        self, tree: DecodeTree, shape: HeadShape, page_size: int, device_model: DeviceModel
    ) -> float:
        """Modelled latency: counted bytes, FLOPs of whole blocks, the launches of one run()."""
        blocks = self._blocks(tree)
        flops = 4 * shape.head_dim * shape.num_qo_heads * int(blocks.some.sum()) * BLOCK * BLOCK
        ctas = blocks.some.shape[0] * shape.num_qo_heads
        launches = 2 if _is_sorted(tree) else 3
        return predict_us(self.io(tree, shape, page_size), flops, device_model, ctas, launches)

    # ---- once a step -------------------------------------------------------------------------
    def _plan(
        self, tree: DecodeTree, cache: PagedKVCache, slots: LongArray, nodes: LongArray
    ) -> None:
        """Build the block mask; find K and V in the pool, or copy them out of it."""
        device = cache.device
        found = tree_kv(cache, slots)
        self._take(found)
        self._k = [k.transpose(0, 1)[None] for k in found.k]
        self._v = [v.transpose(0, 1)[None] for v in found.v]
        self._order = None
        if not _is_sorted(tree):
            self._order = torch.from_numpy(tree.query_order.astype(np.int64)).to(device)
            self.plan_upload_bytes += 8 * tree.num_qo
        if tree.num_qo and tree.num_tokens:
            self._upload_mask(tree, device)
        on_gpu = device.type == "cuda"
        self.path = "torch flex_attention " + ("compiled" if on_gpu else "uncompiled")
        self.capturable = on_gpu

    def _upload_mask(self, tree: DecodeTree, device: torch.device) -> None:
        from torch.nn.attention.flex_attention import BlockMask

        blocks = self._blocks(tree)
        lists = [_block_lists(kind) for kind in (blocks.some & ~blocks.every, blocks.every)]
        arrays = [*lists[0], *lists[1], blocks.begin, blocks.end]
        counts, which, full_counts, full_which, begin, end = (
            torch.from_numpy(array).to(device) for array in arrays
        )
        self.plan_upload_bytes += sum(array.nbytes for array in arrays)
        self.workspace_bytes = sum(array.nbytes for array in arrays)

        def sees(batch: Tensor, head: Tensor, query: Tensor, token: Tensor) -> Tensor:
            visible: Tensor = (begin[token] <= query) & (query < end[token])
            return visible

        self._mask = BlockMask.from_kv_blocks(
            counts[None, None],
            which[None, None],
            full_counts[None, None],
            full_which[None, None],
            BLOCK_SIZE=BLOCK,
            mask_mod=sees,
            seq_lengths=(tree.num_qo, tree.num_tokens),
            compute_q_blocks=False,
        )

    # ---- once a layer ------------------------------------------------------------------------
    def _run(
        self, cache: PagedKVCache, q: Tensor, layer: int, out: Tensor, lse: Tensor | None
    ) -> Tensor:
        rows = q.detach() if self._order is None else q.index_select(0, self._order)
        o, row_lse = _operator(q.device.type == "cuda")(
            rows.transpose(0, 1)[None],
            self._k[layer],
            self._v[layer],
            block_mask=self._mask,
            scale=self.sm_scale,
            enable_gqa=cache.shape.group_size > 1,
            return_lse=True,
        )
        self._store(out, o[0].transpose(0, 1))
        if lse is not None:
            self._store(lse, row_lse[0].transpose(0, 1))
        return out

    def _store(self, target: Tensor, rows: Tensor) -> None:
        if self._order is None:
            target.copy_(rows)
        else:
            target.index_copy_(0, self._order, rows.to(target.dtype))


@memoize
def _operator(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if compiled:
        # Its second kernel, for few queries, has no configuration for a tree's block mask there.
        options = {"FORCE_USE_FLEX_ATTENTION": True}
        return partial(torch.compile(flex_attention, dynamic=True), kernel_options=options)
    operator: Any = flex_attention

    def uncompiled(*tensors: Tensor, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it advises to compile
            return operator(*tensors, **options)

    return uncompiled


def _block_lists(blocks: BoolArray) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Per block of queries, the number of its blocks of tokens and their ids (the rest follow)."""
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return blocks.sum(1).astype(np.int32), order


def _is_sorted(tree: DecodeTree) -> bool:
    return bool((np.diff(tree.query_order) > 0).all())
