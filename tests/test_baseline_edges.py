"""Baselines at the edges: odd trees and head layouts when counted, logits that are all -inf."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from baselines.cudnn_prefix import CudnnPrefixAttention, _weighted
from deft.device_model import DeviceModel
from deft.reference import reference_attention
from deft.shape import HeadShape
from deft.testing import Inputs, assert_close, assert_lse_close, make_cache, make_inputs
from deft.tree import DecodeTree
from experiments.config import compose_job, kernel_names
from tests.trees import NAMED

SMALL = DecodeTree([-1, 0, 0], [3, 2, 1], [1, 2])
SHAPE = HeadShape(4, 2, 16, "float32")
TREES = {
    **NAMED,
    "one_query": DecodeTree([-1], [17], [0]),
    "sees_nothing": DecodeTree([-1, 0, -1], [0, 4, 7], [0, 1, 2]),
    "no_node": DecodeTree([], [], []),
}
LAYOUTS = [(3, 64), (5, 96), (7, 256)]  # group, head_dim
JOB = compose_job([f"kernel=[{','.join(kernel_names())}]", "variants=libraries"])
BASELINES = [
    entry for entry, conf in JOB.kernels.items() if conf["_target_"].startswith("baselines.")
]


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("entry", BASELINES)
def test_io_and_prediction_of_odd_trees_and_heads(entry: str, tree: DecodeTree) -> None:
    kernel: Any = JOB.make_kernel(entry)
    for group, head_dim in LAYOUTS:
        for dtype in ("float16", "float32"):
            shape = HeadShape(2 * group, 2, head_dim, dtype)
            for page_size in (16, 64):
                kernel.unsupported(shape, tree, page_size, "cuda")  # a reason or None, no error
                io = kernel.io(tree, shape, page_size)
                assert min(io.as_columns().values()) >= 0
                assert io.kv >= io.kv_unique >= tree.attended_tokens * shape.kv_token_bytes
            predicted = kernel.predict_us(tree, shape, 16, DeviceModel.load("h200"))
            assert math.isfinite(predicted) and predicted >= 0


@pytest.mark.parametrize("entry", BASELINES)
def test_float32_on_a_gpu_runs_or_has_a_reason(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baselines.flashinfer_library.library_reason", lambda: None)
    kernel: Any = JOB.make_kernel(entry)
    monkeypatch.setattr(type(kernel), "_missing", lambda self: None, raising=False)
    reason = kernel.unsupported(HeadShape(6, 2, 64, "float32"), SMALL, 16, "cuda")
    runs = entry in ("dense", "medusa_dense", "flex_attention")
    assert (reason is None) == runs and (runs or "float16" in reason or "bfloat16" in reason)


def inputs_with_no_weight_on(tokens: list[int]) -> Inputs:
    """Inputs whose logits are -inf at some tokens, for every query."""
    inputs = make_inputs(SMALL, SHAPE)
    k = inputs.k.clone()
    k[tokens] = -torch.inf
    return Inputs(inputs.q.abs(), k, inputs.v)


def run_cudnn_prefix(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    kernel, lse = CudnnPrefixAttention(), torch.empty(2, 4)
    kernel.plan(SMALL, make_cache(SMALL, SHAPE, inputs))
    return kernel.run(inputs.q, lse=lse)[0], lse


@pytest.mark.parametrize("tokens", [[0, 1, 2], [0, 2]], ids=["whole prefix", "part of it"])
def test_a_prefix_without_weight_leaves_the_rest_as_it_is(tokens: list[int]) -> None:
    inputs = inputs_with_no_weight_on(tokens)
    o, lse = run_cudnn_prefix(inputs)
    want, want_lse = reference_attention(inputs.q, inputs.k, inputs.v, SMALL)
    assert_close(o, want, "float32")
    assert_lse_close(lse, want_lse, "float32")


def test_a_prefix_token_with_logit_0_and_value_0_keeps_its_weight() -> None:
    tree = DecodeTree([-1, 0], [1, 2], [1])
    inputs = make_inputs(tree, SHAPE)
    k, v = inputs.k.clone(), inputs.v.clone()
    k[0], v[0] = 0, 0  # o = 0 and lse = 0 above, as the CPU's kernel has for logits of -inf
    kernel = CudnnPrefixAttention()
    kernel.plan(tree, make_cache(tree, SHAPE, Inputs(inputs.q, k, v)))
    want, _ = reference_attention(inputs.q, k, v, tree)
    assert_close(kernel.run(inputs.q)[0], want, "float32")


def test_a_query_without_weight_anywhere_gets_zeros() -> None:
    o, lse = run_cudnn_prefix(inputs_with_no_weight_on([0, 1, 2, 5]))  # query 1 sees 0-2 and 5
    assert not o[1].any() and (lse[1] == -torch.inf).all()
    assert o[0].all() and lse[0].isfinite().all()


def test_the_merge_reads_flash_attentions_plus_infinity_as_no_weight() -> None:
    above, below = torch.zeros(1, 1, 8), torch.ones(1, 1, 8)
    o, lse = _weighted(above, torch.full((1, 1), torch.inf), below, torch.full((1, 1), 2.0))
    assert (o == 1).all() and (lse == 2).all()
