"""Counted IO of the two-level, block-sparse and per-sequence baselines, written out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from baselines.baseline import Baseline
from baselines.cudnn_prefix import CudnnPrefixAttention, two_levels
from baselines.flash_attention2 import FlashAttention2
from baselines.flash_attention3 import FlashAttention3
from baselines.flash_attention4 import FlashAttention4
from baselines.flex_attention import FlexAttention, tree_blocks
from baselines.medusa_dense import MedusaDenseAttention
from baselines.plan_checks import path_tokens
from deft.planners import plan_tree
from deft.reference import visible_tokens
from deft.shape import HeadShape
from deft.testing import make_cache, make_inputs
from deft.topologies import few_shot, forest, layered
from deft.tree import DecodeTree
from tests.trees import CAUSAL, NAMED

GROUPED = HeadShape(4, 2, 8)  # fp16: 64 bytes of K and V a token, 64 of q a query
PLAIN = HeadShape(2, 2, 8)  # 64 and 32
SMALL = DecodeTree([-1, 0, 0], [3, 2, 1], [1, 2])  # queries see 5 and 4 tokens


@pytest.mark.parametrize("tree", NAMED.values(), ids=NAMED)
def test_path_tokens_are_the_visible_tokens_of_each_query(tree: DecodeTree) -> None:
    indptr, tokens = path_tokens(tree)
    assert len(indptr) == tree.num_qo + 1
    for query in range(tree.num_qo):
        seen = tokens[indptr[query] : indptr[query + 1]]
        assert np.array_equal(seen, visible_tokens(tree, query))


def test_flash_attention2_reads_every_path() -> None:
    io = FlashAttention2().io(SMALL, GROUPED, 1)
    assert io.kv == io.kv_unique == (5 + 4) * 64
    # With a group q is brought into another order (read, written, read), and o back and out.
    assert (io.q, io.q_unique, io.out) == (3 * 2 * 64, 2 * 64, 5 * 2 * 64)
    assert io.index == 2 * 3 * 4
    plain = FlashAttention2().io(few_shot(100, 3, 10), PLAIN, 1)
    assert plain.kv == 3 * 110 * 64
    assert (plain.q, plain.out) == (3 * 32, 3 * 3 * 32)


def test_flash_attention2_says_what_it_needs() -> None:
    kernel, shape = FlashAttention2(), HeadShape(32, 8, 128)
    assert "needs a CUDA GPU" in str(kernel.unsupported(shape, SMALL, 1, "cpu"))
    assert kernel.unsupported(shape, SMALL, 1, "cuda") is None
    assert "multiples of 8" in str(kernel.unsupported(HeadShape(4, 4, 36), SMALL, 1, "cuda"))
    float32 = HeadShape(4, 4, 64, "float32")
    assert "not float32" in str(kernel.unsupported(float32, SMALL, 1, "cuda"))
    large = few_shot(100_000, 100, 10)
    assert "own copy of K and V would take 38.2" in str(kernel.unsupported(shape, large, 1, "cuda"))


def test_two_levels_cut_below_what_all_queries_share() -> None:
    tree = layered([1, 1, 3], [7, 5, 2])
    cut = two_levels(tree)
    assert cut.prefix.tolist() == [0, 1]
    assert cut.rest == DecodeTree([-1, -1, -1], [2, 2, 2], [0, 1, 2])
    assert cut.rest_nodes.tolist() == [2, 3, 4]
    # A node with a query of its own is not shared as a whole; two roots share nothing.
    assert two_levels(DecodeTree([-1, 0], [7, 5], [0, 1])).prefix.tolist() == []
    assert two_levels(forest([SMALL, SMALL])).prefix.tolist() == []
    assert two_levels(CAUSAL).rest.query_len is not None


@pytest.mark.parametrize("kernel", [FlashAttention3, FlashAttention4])
def test_flash_attention3_and_4_count_paths_and_fixed_splits(kernel: type[FlashAttention3]) -> None:
    # The queries see 5 and 4 tokens of 64 bytes, group packed; o is written, read and copied.
    io = kernel().io(SMALL, GROUPED, 1)
    assert io.kv == io.kv_unique == 9 * 64
    assert (io.q, io.out, io.partial) == (2 * 64, 3 * 2 * 64, 0)
    # 3 fp32 outputs of 8 and an LSE for each of 4 heads, written and read.
    assert kernel(num_splits=3).io(SMALL, GROUPED, 1).partial == 2 * 3 * 2 * 4 * 9 * 4
    with pytest.raises(ValueError, match="num_splits"):
        kernel(num_splits=-1)


def test_cudnn_prefix_counts_two_levels_and_their_merge() -> None:
    kernel = CudnnPrefixAttention(rest="sequence")
    io = kernel.io(SMALL, PLAIN, 1)
    rest = kernel._rest.io(DecodeTree([-1, -1], [2, 1], [0, 1]), PLAIN, 1)
    assert rest.kv == 3 * 64 and rest.partial == 0
    # The prefix: 2 queries are one block of 128 rows, which reads 3 tokens.
    assert io.kv == 3 * 64 + rest.kv
    assert io.kv_unique == 6 * 64
    # The merge writes 2 x 32 bytes; they are read again and written to the caller's buffer.
    assert (io.q, io.out) == (2 * 32 + rest.q, 3 * 2 * 32)
    # Two outputs of 2 x 32 bytes and two LSEs of 2 queries x 2 heads x 4, written and read; the
    # merged LSE, written.
    assert io.partial == 2 * 2 * (64 + 16) + 16
    many = few_shot(3, 200, 1)
    grouped = CudnnPrefixAttention(rest="sequence").io(many, GROUPED, 1)
    assert grouped.kv == (4 * 3 + 200) * 64  # 400 rows a KV head: four blocks
    alone = CudnnPrefixAttention().io(forest([SMALL, SMALL]), PLAIN, 1)
    # Nothing is shared by all: no second output, and the rest writes the caller's buffer.
    assert (alone.partial, alone.out) == (0, 4 * 32)


def test_flex_attention_counts_the_blocks_that_it_visits() -> None:
    io = FlexAttention().io(SMALL, GROUPED, 1)
    # One block of 128 tokens, masked (the tree ends in it), read by each of 4 query heads.
    assert io.kv == 4 * 128 * 2 * 8 * 2
    assert io.kv_unique == 6 * 64
    assert (io.mask, io.index) == (4 * 128 * 8, 4 * 4)
    # q read; o written, read again, and written to the caller's buffer.
    assert (io.q, io.out) == (2 * 64, 3 * 2 * 64)
    # 256 shared tokens, then 256 leaves of one token: two blocks of queries see the two blocks
    # above them whole, and of the two below each its own, under the mask.
    tree = few_shot(256, 256, 1)
    blocks = tree_blocks(tree)
    assert blocks.some.tolist() == [[True, True, True, False], [True, True, False, True]]
    assert blocks.every.tolist() == [[True, True, False, False]] * 2
    wide = FlexAttention().io(tree, PLAIN, 1)
    assert wide.kv == 2 * 6 * 128 * 2 * 8 * 2
    assert wide.mask == 2 * 2 * 128 * 8


def test_flex_attention_permutes_queries_that_stand_in_another_order() -> None:
    swapped = DecodeTree([-1, 0, 0], [3, 2, 1], [2, 1])
    io = FlexAttention().io(swapped, GROUPED, 1)
    assert (io.q, io.out) == (3 * 2 * 64, 3 * 2 * 64)


@pytest.mark.parametrize("tree", NAMED.values(), ids=NAMED)
def test_block_mask_covers_what_queries_see(tree: DecodeTree) -> None:
    blocks = tree_blocks(tree)
    sees = np.zeros((tree.num_qo, tree.num_tokens), bool)
    for place, query in enumerate(tree.query_order):
        sees[place, visible_tokens(tree, int(query))] = True
    place = np.arange(tree.num_qo)[:, None]
    assert np.array_equal((blocks.begin <= place) & (place < blocks.end), sees)
    for row in range(blocks.some.shape[0]):
        for column in range(blocks.some.shape[1]):
            part = sees[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
            assert blocks.some[row, column] == part.any()
            assert not blocks.every[row, column] or part.all()


@pytest.mark.parametrize("kernel", [CudnnPrefixAttention, MedusaDenseAttention])
@pytest.mark.parametrize("shape", [GROUPED, PLAIN], ids=["group 2", "no group"])
@pytest.mark.parametrize("query_node", [[1, 2], [2, 1]], ids=["in order", "swapped"])
def test_a_copy_into_the_callers_buffer_is_counted(
    kernel: type[Baseline],
    shape: HeadShape,
    query_node: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = DecodeTree(SMALL.parent, SMALL.node_len, query_node)
    inputs = make_inputs(tree, shape)
    made, out = kernel(), torch.empty_like(inputs.q)  # type: ignore[call-arg]
    made.plan(tree, make_cache(tree, shape, inputs))
    copies = []

    def watch(name: str) -> None:
        copy = getattr(torch.Tensor, name)

        def watched(target: torch.Tensor, *rest: Any) -> Any:
            copies.append(target.data_ptr() == out.data_ptr())
            return copy(target, *rest)

        monkeypatch.setattr(torch.Tensor, name, watched)

    watch("copy_")
    watch("index_copy_")
    made.run(inputs.q, out=out)
    monkeypatch.undo()
    assert sum(copies) == 1
    # The method's own tensor is written, read again, and written to the caller's.
    assert made.io(tree, shape, 1).out == 3 * tree.num_qo * shape.q_token_bytes


@pytest.mark.parametrize(
    ("options", "splits"),
    [
        ({"split_len": "auto", "max_splits": 8}, 8),  # radix_attention: 1,024 tokens a split
        ({"split_len": "auto", "max_splits": 1}, 1),
        ({"split_len": 512}, 16),  # paged_attention
        ({"split_len": None}, 1),
        ({"split_len": "auto"}, 64),  # flash_decoding: the GPU is not full before 128 tokens
    ],
    ids=str,
)
def test_sequences_read_every_path_and_write_partials_of_its_splits(
    options: dict[str, Any], splits: int
) -> None:
    tree = few_shot(8000, 2, 192)  # two paths of 8,192 tokens
    io = plan_tree(tree, GROUPED, "sequence", partial_dtype="float16", **options).io()
    assert io.kv == 2 * 8192 * 64
    slots = 0 if splits == 1 else splits
    assert io.partial == 2 * 2 * slots * 4 * (8 * 2 + 4)  # fp16 rows of 8 and an fp32 LSE
    assert (io.q, io.out) == (2 * splits * 64, 2 * 64)
