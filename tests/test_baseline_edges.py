"""Baselines at the edges: logits that are all -inf."""

from __future__ import annotations

import pytest
import torch

from baselines.cudnn_prefix import CudnnPrefixAttention, _weighted
from deft.reference import reference_attention
from deft.shape import HeadShape
from deft.testing import Inputs, assert_close, assert_lse_close, make_cache, make_inputs
from deft.tree import DecodeTree

SMALL = DecodeTree([-1, 0, 0], [3, 2, 1], [1, 2])
SHAPE = HeadShape(4, 2, 16, "float32")


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
