"""Workload families: names, sweeps, batches and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from deft import DecodeTree
from experiments.recordings import REASONING_TASKS, shared_folder
from experiments.results import workload_axes
from experiments.workloads import families, workload_of

RECORDED = ("reasoning", "speculative_tree", "speculative_flat")
RECORDED_DIR = shared_folder() / "workloads"
needs_recordings = pytest.mark.skipif(
    not RECORDED_DIR.is_dir(), reason=f"no recorded workloads at {RECORDED_DIR}"
)


def names(**config: object) -> list[str]:
    return [point.name for point in workload_of(config).points()]


def test_a_list_sweeps_and_two_lists_multiply() -> None:
    got = names(family="few_shot", prompt_len=[64, 128], width=[2, 4], suffix_len=8)
    assert got == ["few_shot_64_2_8", "few_shot_64_4_8", "few_shot_128_2_8", "few_shot_128_4_8"]


def test_levels_sweep_together() -> None:
    got = names(family="layered", nodes=[[1, 2], [1, 2, 4]], tokens=[[8, 4], [8, 4, 2]])
    assert got == ["layered_1-2_8-4", "layered_1-2-4_8-4-2"]
    with pytest.raises(ValueError, match="sweep together"):
        names(family="layered", nodes=[[1, 2], [1, 4]], tokens=[[8, 4]])


def test_batch_is_a_forest_that_shares_nothing() -> None:
    one, four = workload_of({"family": "few_shot", "prompt_len": 32, "batch": [1, 4]}).points()
    assert four.name == "few_shot_32_16_32_batch4"
    assert four.tree.num_tokens == 4 * one.tree.num_tokens
    assert len(four.tree.roots) == 4
    assert workload_axes(four.name)["prefix_len"] == 32


@pytest.mark.parametrize("family", sorted(set(families()) - {"file", "suite"}))
def test_equal_names_mean_equal_trees(family: str) -> None:
    if family in RECORDED and not RECORDED_DIR.is_dir():
        pytest.skip(f"no recorded workloads at {RECORDED_DIR}")
    first, again = (list(workload_of({"family": family}).points()) for _ in range(2))
    assert [(p.name, p.step) for p in first] == [(p.name, p.step) for p in again]
    assert len({(p.name, p.step) for p in first}) == len(first)
    assert all(a.tree == b.tree for a, b in zip(first, again, strict=True))
    assert all(p.name.startswith(family) for p in first)


def test_a_file_of_your_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"parent": [-1, 0], "node_len": [5, 2], "query_node": [1]}))
    (point,) = workload_of({"family": "file", "path": str(path)}).points()
    assert point.name.startswith("file_mine_")
    assert point.tree == DecodeTree(np.array([-1, 0]), np.array([5, 2]), np.array([1]))
    path.write_text(json.dumps({"parent": [-1, 0], "node_len": [5, 3], "query_node": [1]}))
    (other,) = workload_of({"family": "file", "path": str(path)}).points()
    assert other.name != point.name


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"family": "nope"}, "family must be one of"),
        ({"family": "few_shot", "promt_len": 3}, "no parameter"),
        ({"family": "few_shot", "width": "abc"}, "workload.width must be a whole number"),
        ({"family": "few_shot", "width": 0}, ">= 1"),
        ({"family": "few_shot", "width": []}, "empty list"),
        ({"family": "few_shot", "batch": 257}, "1..256"),
        ({"family": "file"}, "workload.path"),
        ({"family": "file", "path": "/nowhere.json"}, "no tree file"),
        ({"family": "file", "path": 5}, "workload.path=TREE.json"),
        ({"family": "suite"}, "workload.trees"),
        ({"family": "suite", "trees": [{"family": ["few_shot"]}]}, "family must be one of"),
        ({"family": "layered", "lists": ["nodes"]}, r"no parameter \['lists'\]"),
        ({"family": "from_choices", "choices": [[0, 1]]}, "no parent path"),
    ],
)
def test_refusals_say_what_is_wanted(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(workload_of(config).points())


# The published counter's KV bytes per tree token and step: 32 layers x 32 heads x 128 x 4.
TOKEN_BYTES = 524_288


def tokens_of_all_steps(config: dict[str, object]) -> int:
    points = workload_of({**config, "num_steps": 10_000}).points()
    return sum(point.tree.num_tokens for point in points)


@needs_recordings
@pytest.mark.parametrize(
    ("config", "flatten_bytes"),
    [
        ({"task": "sorting128", "family": "reasoning"}, 4_970_801_266_688),
        ({"task": "set128", "family": "reasoning"}, 251_655_618_560),
        ({"size": 32, "family": "speculative_flat"}, 2_953_726_394_368),
        ({"size": 256, "family": "speculative_flat"}, 3_130_709_245_952),
    ],
)
def test_points_are_the_trees_of_the_recorded_counters(
    config: dict[str, object], flatten_bytes: int
) -> None:
    if config["family"] == "reasoning":
        config = {**config, "prompt_len": 1000}
    assert tokens_of_all_steps(config) * TOKEN_BYTES == flatten_bytes


@needs_recordings
def test_a_flat_replay_takes_any_width_and_a_tree_replay_the_recorded_ones() -> None:
    (point,) = workload_of({"family": "speculative_flat", "size": 7, "num_steps": 1}).points()
    assert point.tree.num_qo == 7
    with pytest.raises(ValueError, match="size must be one of"):
        list(workload_of({"family": "speculative_tree", "size": 7}).points())


@needs_recordings
@pytest.mark.parametrize("task", REASONING_TASKS)
def test_an_unknown_tree_names_the_range(task: str) -> None:
    with pytest.raises(ValueError, match="complete trees 0"):
        list(workload_of({"family": "reasoning", "task": task, "tree_index": 10_000}).points())
