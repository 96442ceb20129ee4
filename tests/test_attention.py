"""tree_attention and TreeAttention: results, and refusals in one line that say what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from deft import DecodeTree, HeadShape, PagedKVCache, TreeAttention, tree_attention
from deft.attention import AttentionKernel
from deft.planners import PLANNERS
from deft.reference import reference_attention
from deft.testing import assert_close, make_cache, make_inputs
from tests.trees import CAUSAL, NAMED, ODD

SHAPE = HeadShape(4, 2, 64)


@pytest.mark.parametrize("tree", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("strategy", PLANNERS)
def test_tree_attention_equals_the_oracle(tree, strategy):
    inputs = make_inputs(tree, HeadShape(6, 2, 80, "float32"))
    o, lse = tree_attention(
        inputs.q, inputs.k, inputs.v, tree, strategy=strategy, backend="torch", return_lse=True
    )
    ref, ref_lse = reference_attention(inputs.q, inputs.k, inputs.v, tree)
    assert_close(o, ref, "float32")
    assert torch.allclose(lse.double(), ref_lse, atol=1e-5)


def test_sm_scale_and_default_strategy():
    inputs = make_inputs(CAUSAL, SHAPE)
    o = tree_attention(inputs.q, inputs.k, inputs.v, CAUSAL, sm_scale=0.5)
    assert_close(o, reference_attention(inputs.q, inputs.k, inputs.v, CAUSAL, 0.5)[0], "float16")


def test_non_contiguous_inputs_give_the_same_output():
    inputs = make_inputs(ODD, SHAPE)
    q, k, v = (
        x.transpose(0, 1).contiguous().transpose(0, 1) for x in (inputs.q, inputs.k, inputs.v)
    )
    assert not q.is_contiguous()
    same = tree_attention(inputs.q, inputs.k, inputs.v, ODD)
    assert torch.equal(tree_attention(q, k, v, ODD), same)


def test_kernel_satisfies_the_protocol():
    assert isinstance(TreeAttention("node"), AttentionKernel)


GOOD = make_inputs(ODD, SHAPE)
BAD_CALLS = {
    "rows of q": ((GOOD.q[:-1], GOOD.k, GOOD.v), {}, r"q must have shape \[8, 4, 64\], got \[7"),
    "rows of k": ((GOOD.q, GOOD.k[:-1], GOOD.v), {}, r"k must have shape"),
    "v heads": ((GOOD.q, GOOD.k, GOOD.v[:, :1]), {}, r"v must have shape"),
    "rank": ((GOOD.q[0], GOOD.k, GOOD.v), {}, r"q must be a tensor \[rows, heads, head_dim\]"),
    "not a tensor": ((GOOD.q.tolist(), GOOD.k, GOOD.v), {}, "got list"),
    "dtype": (
        (GOOD.q.float(), GOOD.k, GOOD.v),
        {},
        "k must be torch.float32 on cpu, got torch.float16",
    ),
    "device": ((GOOD.q, GOOD.k.to("meta"), GOOD.v), {}, "k must be torch.float16 on cpu"),
    "int": ((GOOD.q.int(), GOOD.k.int(), GOOD.v.int()), {}, "dtype must be one of"),
    "fp8": (tuple(x.to(torch.float8_e4m3fn) for x in (GOOD.q, GOOD.k, GOOD.v)), {}, "out of scope"),
    "heads": ((GOOD.q[:, :3], GOOD.k, GOOD.v), {}, "multiple of num_kv_heads"),
    "strategy": ((GOOD.q, GOOD.k, GOOD.v), {"strategy": "tree"}, "unknown strategy"),
    "backend": ((GOOD.q, GOOD.k, GOOD.v), {"backend": "cuda"}, "backend must be one of"),
    "sm_scale": ((GOOD.q, GOOD.k, GOOD.v), {"sm_scale": 0.0}, "sm_scale must be a positive"),
    "text sm_scale": ((GOOD.q, GOOD.k, GOOD.v), {"sm_scale": "1"}, "sm_scale must be"),
    "headroom": ((GOOD.q, GOOD.k, GOOD.v), {"headroom": 1.5}, "headroom must be an integer"),
    "nan sm_scale": ((GOOD.q, GOOD.k, GOOD.v), {"sm_scale": float("nan")}, "sm_scale must be"),
    "soft cap": ((GOOD.q, GOOD.k, GOOD.v), {"logits_soft_cap": 30.0}, "soft-cap is out of scope"),
    "window": (
        (GOOD.q, GOOD.k, GOOD.v),
        {"sliding_window": 128},
        "sliding-window attention is out",
    ),
    "sinks": ((GOOD.q, GOOD.k, GOOD.v), {"sinks": GOOD.q}, "sinks is out of scope"),
    "option": ((GOOD.q, GOOD.k, GOOD.v), {"block": 3}, "has no option"),
}


@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_calls_are_refused(call):
    tensors, options, message = call
    with pytest.raises(ValueError, match=message) as error:
        tree_attention(*tensors, ODD, **options)
    assert "\n" not in str(error.value)


def test_a_tree_must_be_a_tree():
    with pytest.raises(ValueError, match="tree must be a DecodeTree"):
        tree_attention(GOOD.q, GOOD.k, GOOD.v, [-1, 0])


def test_mla_is_refused():
    wide = torch.zeros((8, 1, 576), dtype=torch.float16)
    with pytest.raises(ValueError, match="MLA"):
        tree_attention(wide, torch.zeros((ODD.num_tokens, 1, 576)).half(), wide, ODD)


def test_triton_on_cpu_without_the_interpreter_says_what_to_do(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        tree_attention(GOOD.q, GOOD.k, GOOD.v, ODD, backend="triton")
    assert tree_attention(GOOD.q, GOOD.k, GOOD.v, ODD).shape == GOOD.q.shape


def test_bfloat16_is_refused_under_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q, k, v = (x.bfloat16() for x in (GOOD.q, GOOD.k, GOOD.v))
    with pytest.raises(ValueError, match="interpreter computes bfloat16 wrongly"):
        tree_attention(q, k, v, ODD, backend="triton")


def test_run_refuses_what_plan_did_not_see():
    kernel = TreeAttention("flatten", backend="torch")
    with pytest.raises(ValueError, match="call plan"):
        kernel.run(GOOD.q)
    kernel.plan(ODD, make_cache(ODD, SHAPE, GOOD))
    for q, message in (
        (GOOD.q[:3], "q must have shape"),
        (GOOD.q.float(), "q must be torch.float16"),
        (GOOD.q.transpose(0, 2).contiguous().transpose(0, 2), "contiguous in head_dim"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel.run(q)
    for layer in (1, 0.0, "0", None):
        with pytest.raises(ValueError, match=r"layer must be in 0\.\.0"):
            kernel.run(GOOD.q, layer=layer)
    with pytest.raises(ValueError, match="q must be a tensor, got list"):
        kernel.run([1.0])
    with pytest.raises(ValueError, match="out must not share elements"):
        kernel.run(GOOD.q, out=torch.empty_like(GOOD.q[:1]).expand_as(GOOD.q))
    with pytest.raises(ValueError, match="lse must be"):
        kernel.run(GOOD.q, lse=torch.zeros(8, 4, dtype=torch.float64))


def test_a_refused_run_leaves_the_kept_output_alone():
    kernel = TreeAttention("flatten", backend="torch")
    kernel.plan(ODD, make_cache(ODD, SHAPE, GOOD))
    kept, _ = kernel.run(GOOD.q)
    with pytest.raises(ValueError, match="q must have shape"):
        kernel.run(GOOD.q[:3])
    assert kernel.run(GOOD.q)[0] is kept


def test_keys_and_values_that_require_grad():
    q, k, v = GOOD.q, GOOD.k.clone().requires_grad_(), GOOD.v.clone().requires_grad_()
    o = tree_attention(q, k, v, ODD)
    assert torch.equal(o, tree_attention(GOOD.q, GOOD.k, GOOD.v, ODD))


def test_a_q_with_a_gradient_leaves_no_graph_in_the_kept_output():
    kernel = TreeAttention("flatten", backend="torch")
    kernel.plan(ODD, make_cache(ODD, SHAPE, GOOD))
    want = kernel.run(GOOD.q)[0].clone()
    o, _ = kernel.run(GOOD.q.clone().requires_grad_())
    assert torch.equal(o, want) and not o.requires_grad


def test_plan_refuses_a_cache_that_holds_another_tree():
    kernel = TreeAttention("node", backend="torch")
    cache = PagedKVCache(SHAPE, 300, 1)
    cache.insert_tree(DecodeTree([-1, 0], [5, 6], []))
    with pytest.raises(ValueError):
        kernel.plan(ODD, cache)
    other = PagedKVCache(SHAPE, 300, 1)
    other.insert_tree(ODD.with_lengths(ODD.node_len + 1))
    with pytest.raises(ValueError, match="plan again"):
        kernel.plan(ODD, other)


def test_importing_deft_needs_neither_triton_nor_hydra():
    code = "import sys, deft; print(sorted({'triton', 'hydra', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
