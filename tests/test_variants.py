"""Variants of a kernel: which are taken, and which are refused."""

from __future__ import annotations

import pytest

from experiments.variants import ConfigError, expand_variants

KERNELS = {"flatten": {"_target_": "deft.TreeAttention", "name": "flatten", "block_kv": None}}


def test_equal_knobs_in_another_order_are_one_variant() -> None:
    listed = [{"block_kv": 64, "query_cap": 8}, {"query_cap": 8, "block_kv": 64}, {"block_kv": 32}]
    found = expand_variants({"flatten": listed}, KERNELS, KERNELS)
    assert list(found) == ["flatten block_kv=64 query_cap=8", "flatten block_kv=32"]
    assert found["flatten block_kv=32"] == {**KERNELS["flatten"], "block_kv": 32}


@pytest.mark.parametrize("key", ["_target_", "name"])
def test_a_class_or_a_name_is_no_knob(key: str) -> None:
    with pytest.raises(ConfigError, match="no knob"):
        expand_variants({"flatten": [{key: "other"}]}, KERNELS, KERNELS)
