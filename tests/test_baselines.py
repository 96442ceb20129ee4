"""The dense baselines against the fp64 oracle on odd trees, and their counted IO by hand."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from baselines.cudnn_prefix import CudnnPrefixAttention
from baselines.dense import DenseAttention
from baselines.flash_attention2 import FlashAttention2
from baselines.flex_attention import FlexAttention
from baselines.medusa_dense import MedusaDenseAttention
from deft.attention import AttentionKernel
from deft.device_model import DeviceModel
from deft.reference import reference_attention
from deft.shape import HeadShape
from deft.testing import (
    Inputs,
    assert_close,
    assert_lse_close,
    assert_mass,
    make_cache,
    make_inputs,
    row_rms_error,
)
from deft.tree import DecodeTree

Kernel = CudnnPrefixAttention | DenseAttention | FlexAttention | MedusaDenseAttention
KERNELS: list[Callable[[], Kernel]] = [
    CudnnPrefixAttention,
    DenseAttention,
    FlexAttention,
    MedusaDenseAttention,
]
SMALL = DecodeTree([-1, 0, 0], [3, 2, 1], [1, 2])
TREES = {
    "small": SMALL,
    "one_query": DecodeTree([-1], [17], [0]),
    # Two requests; empty nodes 2 and 5; node 4 without a query; a query on an inner node; shuffled.
    "forest": DecodeTree(
        [-1, 0, 0, 1, 1, -1, 5, 6], [33, 5, 0, 1, 9, 0, 64, 1], [7, 3, 1, 2, 3, 6]
    ),
    "sees_nothing": DecodeTree([-1, 0, -1], [0, 4, 7], [0, 1, 2]),
    "causal": DecodeTree([-1, 0, 0], [20, 4, 3], [1, 1, 1, 2, 1, 0], [1, 3, 4, 0, 0, 7]),
}
NO_QUERY = DecodeTree([-1, 0], [5, 5], np.zeros(0, np.int32))
SHAPES = [
    HeadShape(4, 4, 64, "float32"),
    HeadShape(6, 2, 80, "float16"),
    HeadShape(7, 1, 96, "bfloat16"),
    HeadShape(5, 1, 33, "float64"),
]


def run_on(
    kernel: Kernel, tree: DecodeTree, shape: HeadShape, inputs: Inputs, **cache_options: Any
) -> tuple[Tensor, Tensor | None]:
    cache = make_cache(tree, shape, inputs, **cache_options)
    kernel.plan(tree, cache)
    lse = torch.empty((tree.num_qo, shape.num_qo_heads), dtype=torch.float32)
    return kernel.run(inputs.q, lse=lse)


@pytest.mark.parametrize("kernel_class", KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.dtype)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_output_equals_the_oracle(
    kernel_class: type[Kernel], shape: HeadShape, tree: DecodeTree
) -> None:
    inputs = make_inputs(tree, shape, seed=3)
    kernel = kernel_class()
    if reason := kernel.unsupported(shape, tree, 4, "cpu"):
        pytest.skip(reason)
    # Scattered pages, and NaN in every slot that the tree does not own.
    o, lse = run_on(
        kernel, tree, shape, inputs, page_size=4, poison=True, spare_pages=3, scatter_seed=1
    )
    ref, ref_lse = reference_attention(inputs.q, inputs.k, inputs.v, tree)
    assert_close(o, ref, shape.dtype)
    if lse is not None:
        assert_lse_close(lse, ref_lse, shape.dtype)


@pytest.mark.parametrize("kernel_class", KERNELS)
def test_a_tree_without_queries_gives_no_rows(kernel_class: type[Kernel]) -> None:
    kernel, shape = kernel_class(), SHAPES[1]
    o, _ = run_on(kernel, NO_QUERY, shape, make_inputs(NO_QUERY, shape))
    assert o.shape == (0, shape.num_qo_heads, shape.head_dim)
    assert kernel.io(NO_QUERY, shape, 1).total == 0


@pytest.mark.parametrize("kernel_class", KERNELS)
def test_mass_check_passes_and_sees_one_lost_token(kernel_class: type[Kernel]) -> None:
    tree, shape = TREES["forest"], HeadShape(6, 2, 64, "float16")
    inputs = make_inputs(tree, shape)
    inputs = Inputs(torch.zeros_like(inputs.q), inputs.k, inputs.v)
    o, lse = run_on(kernel_class(), tree, shape, inputs)
    assert_mass(o, lse, inputs.k, inputs.v, tree, shape.dtype)
    lens = tree.node_len.copy()
    lens[0] -= 1
    short = tree.with_lengths(lens)
    fewer = Inputs(inputs.q, inputs.k[1:], inputs.v[1:])  # the first token of node 0 is lost
    o, lse = run_on(kernel_class(), short, shape, fewer)
    with pytest.raises(AssertionError, match="mass check"):
        assert_mass(o, lse, inputs.k, inputs.v, tree, shape.dtype)


@pytest.mark.parametrize("kernel_class", KERNELS)
def test_large_logits_and_the_scale_are_kept(kernel_class: type[Kernel]) -> None:
    tree, shape = TREES["forest"], HeadShape(4, 2, 64, "float32")
    inputs = make_inputs(tree, shape, q_scale=40.0)
    kernel = kernel_class(sm_scale=0.5)
    o, _ = run_on(kernel, tree, shape, inputs)
    ref, _ = reference_attention(inputs.q, inputs.k, inputs.v, tree, sm_scale=0.5)
    assert row_rms_error(o, ref) < 1e-4
    plain, _ = reference_attention(inputs.q, inputs.k, inputs.v, tree)
    assert row_rms_error(o, plain) > 1e-2


@pytest.mark.parametrize("kernel_class", KERNELS)
def test_layers_out_buffers_and_replans(kernel_class: type[Kernel]) -> None:
    shape = HeadShape(4, 2, 64, "float32")
    kernel = kernel_class()
    for tree in (SMALL, TREES["forest"]):
        inputs = make_inputs(tree, shape)
        cache = make_cache(tree, shape, inputs, num_layers=2, page_size=2)
        cache.v_cache[1].mul_(2)
        kernel.plan(tree, cache)
        ref, _ = reference_attention(inputs.q, inputs.k, inputs.v, tree)
        out = torch.empty_like(inputs.q)
        o, lse = kernel.run(inputs.q, 1, out=out)
        assert o.data_ptr() == out.data_ptr() and lse is None
        assert_close(out, 2 * ref, "float32")
        assert_close(kernel.run(inputs.q)[0], ref, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel_class", KERNELS)
@pytest.mark.parametrize(
    "shape",
    [
        HeadShape(32, 8, 128),
        HeadShape(32, 32, 128, "bfloat16"),
        HeadShape(16, 1, 256),
        HeadShape(14, 2, 80),
        HeadShape(8, 8, 64, "float32"),
    ],
    ids=str,
)
def test_graph_replay_equals_the_oracle(kernel_class: type[Kernel], shape: HeadShape) -> None:
    for tree in (TREES["forest"], TREES["sees_nothing"], DecodeTree([-1, 0], [300, 70], [1] * 70)):
        inputs = make_inputs(tree, shape, device="cuda")
        kernel = kernel_class()
        assert kernel.unsupported(shape, tree, 16, "cuda") is None
        kernel.plan(tree, make_cache(tree, shape, inputs, page_size=16, device="cuda"))
        assert kernel.capturable
        q, out = torch.zeros_like(inputs.q), torch.empty_like(inputs.q)
        kernel.run(q, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel.run(q, out=out)
        q.copy_(inputs.q)  # the replay must read q anew, and synchronise with nothing
        graph.replay()
        ref, _ = reference_attention(inputs.q, inputs.k, inputs.v, tree)
        assert_close(out, ref, shape.dtype)


class BytesMoved(TorchDispatchMode):
    """Bytes that every tensor operation reads and writes, views left out."""

    VIEWS = ("view", "slice", "permute", "transpose", "select", "split_with_sizes", "expand")

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in self.VIEWS:
            return result
        read = [x for x in args if isinstance(x, Tensor)]
        if name == "index_select":
            read = [result, read[1]]  # only the chosen rows of the pool
        elif name in ("copy_", "zero_", "fill_"):
            read = read[1:]  # the target is written, not read
        self.total += sum(x.numel() * x.element_size() for x in (*read, result))
        return result


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.dtype)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_dense_counts_what_its_operations_move(shape: HeadShape, tree: DecodeTree) -> None:
    inputs = make_inputs(tree, shape)
    kernel = DenseAttention()
    kernel.plan(tree, make_cache(tree, shape, inputs))
    with BytesMoved() as moved:
        kernel.run(inputs.q)
    assert moved.total == kernel.io(tree, shape, 1).total


def test_dense_io_by_hand() -> None:
    # 9 visible tokens, 2 KV heads x 8: 288 elements of K and V, 64 of q; fp16 in, fp32 inside.
    io = DenseAttention().io(SMALL, HeadShape(4, 2, 8), 16)
    assert io.kv == 288 * (2 + 2 + 2 + 4 + 4)
    assert io.kv_unique == 6 * 2 * 2 * 8 * 2
    assert io.q == 64 * (2 + 4 + 4 + 4 + 4) and io.q_unique == 64 * 2
    assert io.out == 64 * (4 + 4 + 4 + 4 + 2)
    assert io.index == 2 * 9 * 4
    assert io.logits == (8 * 4 * 9 + 4 * 2 * 4) * 4
    assert io.partial == io.mask == 0


def test_medusa_dense_io_by_hand() -> None:
    kernel = MedusaDenseAttention()
    io = kernel.io(SMALL, HeadShape(4, 2, 8), 16)
    assert io.kv == 4 * 6 * 2 * 8 * 2  # each query head reads the whole tree
    assert io.kv_unique == 6 * 2 * 2 * 8 * 2
    assert io.mask == 4 * 2 * 6 * 2
    assert (io.q, io.out) == (128, 3 * 128)
    # Without a group too: SDPA writes o, which is read again and written to the caller's buffer.
    assert kernel.io(SMALL, HeadShape(4, 4, 8), 16).out == 3 * 128
    wide = DecodeTree([-1], [10], [0] * 65)
    assert kernel.io(wide, HeadShape(1, 1, 64), 1).kv == 2 * 10 * 2 * 64 * 2
    assert kernel.io(wide, HeadShape(1, 1, 256), 1).kv == 3 * 10 * 2 * 256 * 2
    assert MedusaDenseAttention(backend="cudnn").io(wide, HeadShape(1, 1, 64), 1).kv == 2560


def test_medusa_dense_copies_only_a_scattered_pool() -> None:
    tree, shape = TREES["forest"], HeadShape(4, 2, 64)
    inputs = make_inputs(tree, shape)
    kernel = MedusaDenseAttention()
    kernel.plan(tree, make_cache(tree, shape, inputs))
    assert (kernel.kv_layout, kernel.layout_bytes, kernel.layout_us) == ("shared", 0, 0)
    kernel.plan(tree, make_cache(tree, shape, inputs, page_size=16, num_layers=3))
    assert kernel.kv_layout == "own_copy" and kernel.layout_us > 0
    assert kernel.layout_bytes == 2 * 3 * tree.num_tokens * shape.kv_token_bytes


def test_unsupported_names_the_memory_and_the_shape() -> None:
    shape = HeadShape(32, 8, 128)
    tree = DecodeTree([-1], [2_000_000], [0] * 8192)
    kernel = MedusaDenseAttention()
    assert "ancestor mask would take 30.5 GiB" in str(kernel.unsupported(shape, tree, 1, "cuda"))
    assert "would take" in str(DenseAttention().unsupported(shape, tree, 1, "cuda"))
    for ok in (kernel, DenseAttention(), MedusaDenseAttention(backend="cudnn")):
        assert ok.unsupported(shape, SMALL, 1, "cuda") is None
    assert "not float64" in str(kernel.unsupported(SHAPES[3], SMALL, 1, "cuda"))
    odd = HeadShape(4, 4, 36)
    assert "multiples of 8" in str(kernel.unsupported(odd, SMALL, 1, "cuda"))
    assert kernel.unsupported(odd, SMALL, 1, "cpu") is None
    with pytest.raises(ValueError, match="backend must be one of"):
        MedusaDenseAttention(backend="flash")


@pytest.mark.parametrize("kernel_class", KERNELS)
def test_a_q_with_a_gradient_leaves_no_graph_behind(kernel_class: type[Kernel]) -> None:
    shape = HeadShape(4, 2, 64)
    inputs = make_inputs(SMALL, shape)
    kernel = kernel_class()
    kernel.plan(SMALL, make_cache(SMALL, shape, inputs))
    want = kernel.run(inputs.q)[0].clone()
    o, _ = kernel.run(inputs.q.clone().requires_grad_())
    assert torch.equal(o, want) and not o.requires_grad


@pytest.mark.parametrize("kernel_class", KERNELS)
def test_bad_calls_say_what_is_wanted(kernel_class: type[Kernel]) -> None:
    shape = HeadShape(4, 2, 64)
    inputs = make_inputs(SMALL, shape)
    cache = make_cache(SMALL, shape, inputs)
    kernel = kernel_class()
    with pytest.raises(ValueError, match=r"call plan\(tree, cache\) before run"):
        kernel.run(inputs.q)
    with pytest.raises(ValueError, match="node 2 holds 1 tokens in the cache and 5 in the tree"):
        kernel.plan(SMALL.with_lengths([3, 2, 5]), cache)
    with pytest.raises(ValueError, match="nodes has 2 handles for 3 nodes"):
        kernel.plan(SMALL, cache, np.arange(2))
    kernel.plan(SMALL, cache)
    with pytest.raises(ValueError, match=r"q must be torch.float16 on cpu, got torch\.float32"):
        kernel.run(inputs.q.float())
    with pytest.raises(ValueError, match="q must be contiguous"):
        kernel.run(inputs.q.transpose(0, 1).contiguous().transpose(0, 1))
    with pytest.raises(ValueError, match=r"layer must be in 0\.\.0"):
        kernel.run(inputs.q, 1)
    with pytest.raises(ValueError, match=r"lse must be torch\.float32"):
        kernel.run(inputs.q, lse=torch.empty(2, 4, dtype=torch.float16))


@pytest.mark.parametrize("kernel_class", [*KERNELS, FlashAttention2])
@pytest.mark.parametrize("sm_scale", [0.0, -1.0, float("nan"), "1"])
def test_a_scale_that_is_no_positive_number_is_refused(
    kernel_class: Callable[..., object], sm_scale: Any
) -> None:
    with pytest.raises(ValueError, match="sm_scale must be a positive number"):
        kernel_class(sm_scale=sm_scale)


@pytest.mark.parametrize("kernel_class", KERNELS)
def test_prediction_and_protocol(kernel_class: type[Kernel]) -> None:
    kernel, h200 = kernel_class(), DeviceModel.load("h200")
    assert isinstance(kernel, AttentionKernel)
    shape = HeadShape(32, 8, 128)
    few, many = (DecodeTree([-1], [4096], [0] * n) for n in (1, 256))
    assert 0 < kernel.predict_us(few, shape, 1, h200) < kernel.predict_us(many, shape, 1, h200)


def test_baselines_import_without_optional_libraries() -> None:
    code = (
        "import sys, importlib, pkgutil, baselines\n"
        "absent = ('flash_attn', 'flashinfer', 'xformers', 'hydra', 'pandas', 'triton')\n"
        "for name in absent: sys.modules[name] = None\n"
        "for module in pkgutil.iter_modules(baselines.__path__):\n"
        "    importlib.import_module('baselines.' + module.name)\n"
        "print('imported')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "imported", done.stderr


def test_node_handles_that_are_no_integers_are_refused() -> None:
    tree = DecodeTree([-1, 0], [3, 2], [0, 1])
    shape = HeadShape(2, 1, 16, "float32")
    cache = make_cache(tree, shape, make_inputs(tree, shape))
    with pytest.raises(ValueError, match="must be integers"):
        DenseAttention().plan(tree, cache, nodes=np.array([0.0, 1.7]))
