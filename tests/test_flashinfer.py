"""FlashInfer's adapters without FlashInfer: its cuts, counted IO by hand, and true reasons."""

from __future__ import annotations

import numpy as np
import pytest

from baselines.flashinfer_batch_nodes import FlashInferBatchNodes
from baselines.flashinfer_cascade import FlashInferCascade
from baselines.flashinfer_decode import FlashInferDecode
from baselines.flashinfer_library import FlashInferBaseline
from baselines.flashinfer_rules import (
    auto_backend,
    decode_cuts,
    fa2_cuts,
    fa2_tile,
    fa3_cuts,
    holistic_cuts,
    holistic_works,
    holistic_workspace,
)
from baselines.flashinfer_tree_mask import FlashInferTreeMask
from baselines.requests import Requests, tree_levels
from deft.shape import HeadShape
from deft.topologies import few_shot, layered
from deft.tree import DecodeTree
from tests.trees import NAMED

GROUPED = HeadShape(8, 2, 64)  # fp16: 512 bytes of K and V a token, 1,024 of q a query
PLAIN = HeadShape(2, 2, 64)  # 512 and 256
SMALL = DecodeTree([-1, 0, 0], [300, 2, 1], [1, 2])  # queries see 302 and 301 tokens
WIDE = few_shot(1000, 40, 3)
ADAPTERS: list[FlashInferBaseline] = [
    FlashInferDecode(),
    FlashInferDecode(tensor_cores=True),
    FlashInferCascade(),
    FlashInferCascade(backend="fa2", min_share=4),
    FlashInferCascade(backend="fa3"),
    FlashInferBatchNodes(),
    FlashInferBatchNodes(merge="states"),
    FlashInferTreeMask(),
]


def batch(rows: list[int], kv_len: list[int]) -> Requests:
    return Requests(
        np.cumsum([0, *rows]), np.cumsum([0, *kv_len]), np.arange(sum(kv_len), dtype=np.int64)
    )


def test_fa2_takes_the_tile_that_holds_the_mean_request() -> None:
    rows = np.array([1, 1, 100])
    assert fa2_tile(rows[:2], 4, 128) == 16
    assert fa2_tile(rows, 1, 128) == 64  # 34 rows in the mean
    assert fa2_tile(rows, 4, 128) == 128
    assert fa2_tile(rows, 4, 256) == 64


def test_fa2_cuts_kv_until_two_blocks_an_sm_are_full() -> None:
    # 4 SMs, 2 KV heads: 4 blocks a head. One request of 300 tokens: 128 is the least chunk.
    cuts = fa2_cuts(batch([2], [300]), GROUPED, 4)
    assert (cuts.tiles.tolist(), cuts.chunks.tolist()) == ([1], [3])
    assert cuts.num_ctas == 6 and cuts.is_split.all()
    # 2,000 tokens over 4 blocks: chunks of 500.
    assert fa2_cuts(batch([2], [2000]), GROUPED, 4).chunks.tolist() == [4]
    # Four requests fill the grid already.
    cuts = fa2_cuts(batch([1] * 4, [2000] * 4), GROUPED, 4)
    assert cuts.chunks.tolist() == [1] * 4 and not cuts.is_split.any()
    # A batch is split as a whole: also what has one chunk goes through the merge.
    cuts = fa2_cuts(batch([1, 1], [1000, 10]), GROUPED, 4)
    assert cuts.chunks.tolist() == [3, 1] and cuts.is_split.all()


def test_fa3_reads_per_query_head_and_auto_takes_it_for_tall_requests() -> None:
    cuts = fa3_cuts(batch([300, 1], [50, 50]), HeadShape(8, 2, 128))
    assert (cuts.tiles.tolist(), cuts.heads) == ([3, 1], 8)
    assert fa3_cuts(batch([300], [50]), GROUPED).tiles.tolist() == [2]  # 192 rows at head_dim 64
    assert auto_backend(batch([64], [9])) == "fa2"
    assert auto_backend(batch([65], [9])) == "fa3"


def test_the_cuda_core_decode_splits_where_the_grid_is_short() -> None:
    assert not decode_cuts(batch([1] * 16, [999] * 16), GROUPED, 4, 8).is_split.any()
    cuts = decode_cuts(batch([1, 1], [1000, 300]), GROUPED, 4, 2)  # 8 blocks: 4 a head
    assert cuts.chunks.tolist() == [3, 1]


def test_batch_attention_has_two_classes_of_tiles() -> None:
    # Packed rows 80 and 4: tiles of 128 and 16. 1,000 + 3 tokens, 2 heads over 8 blocks: 256.
    cuts = holistic_cuts(batch([20, 1], [1000, 3]), GROUPED, 4)
    assert cuts.tiles.tolist() == [1, 1]
    assert cuts.chunks.tolist() == [8, 1]  # 256 halved for the large class
    assert cuts.is_split.tolist() == [True, False]
    req = batch([20, 1], [1000, 3])
    assert holistic_works(req, cuts, GROUPED) == 16
    # 4 x 8 x 144 splits of 2 heads, 64 halves and a float.
    assert holistic_workspace(GROUPED, 4) == 4 * 8 * 144 * 2 * 132 + 1024


def test_decode_io_by_hand() -> None:
    # Tensor cores: 132 SMs x 2 blocks / 2 heads = 132 blocks, so 128-token chunks: 3 and 3.
    io = FlashInferDecode(tensor_cores=True).io(SMALL, GROUPED, 1)
    assert io.kv == 603 * 512
    assert io.kv_unique == 303 * 512
    assert (io.q, io.q_unique, io.out) == (6 * 1024, 2 * 1024, 2 * 1024)
    assert io.partial == 2 * 6 * (1024 + 8 * 4)  # six partial outputs and LSEs, written and read
    assert io.index == 4 * (603 * 2 + 3 * 6 + 2 * 2 + 2)
    short = FlashInferDecode(tensor_cores=True).io(few_shot(60, 3, 4), PLAIN, 1)
    assert (short.kv, short.partial, short.out) == (3 * 64 * 512, 0, 3 * 256)


def test_cascade_io_by_hand() -> None:
    # Level 0: 40 rows x group 4 = 160 packed rows, two tiles of 128 over 1,000 tokens;
    # 132 // 2 = 66 chunks would fit, 128 tokens are the least: 8 chunks.
    # Level 1: 40 requests of one row (4 packed: tile 16) and 3 tokens, no split.
    io = FlashInferCascade(backend="fa2").io(WIDE, GROUPED, 1)
    assert io.kv == (2 * 1000 + 40 * 3) * 512
    assert io.kv_unique == (1000 + 40 * 3) * 512
    assert io.q == (40 * 8 + 40) * 1024
    state = 40 * (1024 + 32)
    # Chunks' parts; two levels' states but for o; a merge reads two and writes one.
    assert io.partial == 2 * 8 * state + (2 * state - 40 * 1024) + 3 * state
    assert io.out == 40 * 1024
    # fa3: no packing: one tile of 192 rows a query head reads 1,000 tokens.
    assert FlashInferCascade(backend="fa3").io(WIDE, GROUPED, 1).kv == (1000 + 40 * 3) * 4 * 512
    # auto: no request has more than 64 rows.
    assert FlashInferCascade().io(WIDE, GROUPED, 1) == io
    # Everything read by each query: one level, nothing to merge.
    alone = FlashInferCascade(backend="fa2", min_share=41).io(WIDE, GROUPED, 1)
    assert alone.kv == 40 * 1003 * 512


def test_cascade_counts_moved_rows_of_queries_out_of_order() -> None:
    mixed = DecodeTree([-1, 0, 0], [300, 2, 1], [2, 1])
    plain = FlashInferCascade().io(SMALL, GROUPED, 1)
    moved = FlashInferCascade().io(mixed, GROUPED, 1)
    assert moved.q - plain.q == moved.out - plain.out == 2 * 2 * 1024


def test_batch_nodes_io_by_hand() -> None:
    # 160 packed rows: two tiles of 128; total (2,000 + 120) x 2 heads over 264 blocks: 17 tokens
    # a block, so the least limit of 128, halved for the large class: 1,000 tokens are 16 chunks.
    io = FlashInferBatchNodes(merge="pairs").io(WIDE, GROUPED, 1)
    assert io.kv == (2 * 1000 + 40 * 3) * 512
    rows, state = 40 * 1024, 40 * (1024 + 32)
    assert io.q == 40 * 16 * 1024 + 40 * 1024 + 3 * rows  # items, and q repeated for two levels
    assert io.partial == 2 * 16 * state + 2 * state + 3 * state - rows
    assert io.out == rows
    states = FlashInferBatchNodes(merge="states").io(WIDE, GROUPED, 1)
    assert states.partial - io.partial == 3 * 2 * state + state - 3 * state


def test_tree_mask_io_by_hand() -> None:
    # 160 packed rows: two tiles over all 1,120 tokens; 66 blocks a head: chunks of 128.
    io = FlashInferTreeMask().io(WIDE, GROUPED, 1)
    assert io.kv == 2 * 1120 * 512
    assert io.kv_unique == 1120 * 512
    assert io.mask == 40 * 1120 // 8 * 2
    assert io.partial == 2 * 9 * 40 * (1024 + 32)
    assert io.q == 9 * 40 * 1024


@pytest.mark.parametrize("kernel", ADAPTERS, ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("tree", NAMED.values(), ids=NAMED)
def test_io_is_counted_for_odd_trees(kernel: FlashInferBaseline, tree: DecodeTree) -> None:
    io = kernel.io(tree, GROUPED, 1)
    assert io.kv >= io.kv_unique == tree.attended_tokens * GROUPED.kv_token_bytes
    assert all(value >= 0 for value in io.as_columns().values())


@pytest.mark.parametrize("kernel", ADAPTERS, ids=lambda kernel: type(kernel).__name__)
def test_without_a_gpu_the_reason_is_the_gpu(kernel: FlashInferBaseline) -> None:
    assert kernel.unsupported(GROUPED, SMALL, 1, "cpu") == "FlashInfer needs a CUDA GPU"


def test_limits_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baselines.flashinfer_library.library_reason", lambda: None)

    def reason(kernel: FlashInferBaseline, shape: HeadShape, tree: DecodeTree = SMALL) -> str:
        return str(kernel.unsupported(shape, tree, 1, "cuda"))

    assert "not float32" in reason(FlashInferDecode(), HeadShape(2, 2, 64, "float32"))
    assert "not 80" in reason(FlashInferDecode(), HeadShape(2, 2, 80))
    assert "use tensor_cores=true" in reason(FlashInferDecode(), HeadShape(5, 1, 64))
    assert reason(FlashInferDecode(tensor_cores=True), HeadShape(5, 1, 64)) == "None"
    deep = layered([1] * 70, [2] * 70)
    assert "70 levels need a wrapper each" in reason(FlashInferCascade(), GROUPED, deep)
    assert reason(FlashInferCascade(min_share=1), GROUPED, deep) == "None"
    many = layered([1] + [4096] * 2, [64, 8, 8])
    wide = HeadShape(32, 32, 128)
    assert "exceeds max_total_num_works 65536" in reason(FlashInferBatchNodes(), wide, many)
    assert "int32 offsets" in reason(FlashInferTreeMask(), GROUPED, few_shot(300_000, 8000, 1))


def test_wrong_knobs_are_refused() -> None:
    with pytest.raises(ValueError, match="backend must be one of"):
        FlashInferCascade(backend="fa4")
    with pytest.raises(ValueError, match="min_share must be"):
        FlashInferCascade(min_share=-1)
    with pytest.raises(ValueError, match="merge must be one of"):
        FlashInferBatchNodes(merge="tree")
    with pytest.raises(ValueError, match="tensor_cores must be"):
        FlashInferDecode(tensor_cores="false")  # type: ignore[arg-type]


def test_one_level_takes_no_merge() -> None:
    assert len(tree_levels(layered([1], [9]))) == 1
    io = FlashInferBatchNodes().io(layered([1], [9]), PLAIN, 1)
    assert io.partial == (256 + 8) * 2 + 8  # its state written, read, and the LSE written again
