"""The gate passes right kernels and fails each kind of wrong one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deft import DecodeTree, TreeAttention, topologies
from deft.reference import visible_tokens
from deft.shape import HeadShape
from experiments.gate import CENSUS_LAYER, check_kernel, make_case
from tests.broken_kernels import DropsOneToken, WritesNothing

SHAPE = HeadShape(4, 2, 64, "float16")
TREE = topologies.layered([1, 2, 5], [300, 40, 3])


def verdict_of(kernel: TreeAttention, tree: DecodeTree = TREE, shape: HeadShape = SHAPE):
    case = make_case(tree, shape)
    kernel.plan(tree, case.cache)
    return check_kernel(kernel, case)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_right_kernel_passes(dtype: str) -> None:
    verdict = verdict_of(
        TreeAttention("flatten", backend="torch"), TREE, HeadShape(4, 2, 64, dtype)
    )
    assert verdict.reason is None
    assert 0 < verdict.row_rms_err < 4e-3


def test_untouched_output_is_wrong() -> None:
    assert "row RMS" in verdict_of(WritesNothing("flatten", backend="torch")).reason


def test_one_token_lost_among_many_is_wrong() -> None:
    assert verdict_of(DropsOneToken("flatten", backend="torch")).reason is not None


def test_the_census_alone_catches_one_token_of_twenty_thousand() -> None:
    # Far below what a comparison of random values can show: 1 / 20,000 of a mean.
    tree = topologies.few_shot(20_000, 2, 1)
    shape = HeadShape(1, 1, 64, "float16")
    case = make_case(tree, shape)
    zeros = torch.zeros_like(case.inputs.q)
    found = {}
    for kernel in (TreeAttention("node", backend="torch"), DropsOneToken("node", backend="torch")):
        kernel.plan(tree, case.cache)
        o, _ = kernel.run(zeros, CENSUS_LAYER)
        from experiments.gate import _census_reason

        found[type(kernel).__name__] = _census_reason(o, None, case)
    assert found["TreeAttention"] is None
    assert "census" in found["DropsOneToken"]


@pytest.mark.parametrize("with_query_len", [False, True])
def test_census_counts_match_a_token_by_token_count(with_query_len: bool) -> None:
    tree = topologies.random_tree(20, 5, 90, num_roots=2, with_query_len=with_query_len)
    case = make_case(tree, HeadShape(2, 1, 32, "float32"))
    for query in range(tree.num_qo):
        expected = np.bincount(visible_tokens(tree, query) % 32, minlength=32)
        assert case.census[query].tolist() == expected.tolist()


def test_slots_outside_the_tree_hold_nan() -> None:
    case = make_case(TREE, SHAPE, page_size=16)
    pool = case.cache.k_cache[0].reshape(-1, 2, 64)
    assert int(torch.isnan(pool[:, 0, 0]).sum()) == len(pool) - TREE.num_tokens


class ScalesQ(TreeAttention):
    def run(self, q, layer=0, **keywords):
        result = super().run(q, layer, **keywords)
        q.mul_(2)
        return result


class FreshOut(TreeAttention):
    def run(self, q, layer=0, *, out=None, lse=None):
        return super().run(q, layer, lse=lse)


class FreshLse(TreeAttention):
    def run(self, q, layer=0, *, out=None, lse=None):
        return super().run(q, layer, out=out, lse=lse.clone())


@pytest.mark.parametrize(
    ("kernel", "said"), [(ScalesQ, "writes to q"), (FreshOut, "the out"), (FreshLse, "the lse")]
)
def test_misused_buffers_fail_and_spare_the_kernels_after(kernel: type, said: str) -> None:
    case = make_case(TREE, SHAPE)
    wrong = kernel("flatten", backend="torch")
    wrong.plan(TREE, case.cache)
    assert said in check_kernel(wrong, case).reason
    right = TreeAttention("flatten", backend="torch")
    right.plan(TREE, case.cache)
    assert check_kernel(right, case).reason is None
