"""Workload families: names, sweeps, batches and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from deft import DecodeTree
from experiments.replays import (
    REASONING_TASKS,
    ReasoningReplay,
    SpeculativeReplay,
    accepted_lengths,
    recorded_dir,
)
from experiments.results import workload_axes
from experiments.workloads import families, workload_of

RECORDED = ("reasoning", "speculative_tree", "speculative_flat")
needs_recordings = pytest.mark.skipif(
    not recorded_dir().is_dir(), reason=f"no recorded workloads at {recorded_dir()}"
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
    if family in RECORDED and not recorded_dir().is_dir():
        pytest.skip(f"no recorded workloads at {recorded_dir()}")
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
        ({"family": "suite"}, "workload.trees"),
        ({"family": "from_choices", "choices": [[0, 1]]}, "no parent path"),
    ],
)
def test_refusals_say_what_is_wanted(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(workload_of(config).points())


# The published counter's KV bytes per tree token and step: 32 layers x 32 heads x 128 x 4.
TOKEN_BYTES = 524_288


@needs_recordings
@pytest.mark.parametrize(
    ("task", "flatten_bytes", "sequence_bytes"),
    [
        ("sorting128", 4_970_801_266_688, 22_838_040_330_240),
        ("docmerge", 5_559_063_937_024, 21_610_823_155_712),
        ("keyword", 505_314_541_568, 3_786_854_105_088),
        ("set128", 251_655_618_560, 1_692_767_617_024),
    ],
)
def test_reasoning_replay_reproduces_the_recorded_counters(
    task: str, flatten_bytes: int, sequence_bytes: int
) -> None:
    replay = ReasoningReplay(task, 0, 1000, 3000)
    trees = [replay.tree(step) for step in range(1, replay.num_steps + 1)]
    assert sum(tree.num_tokens for tree in trees) * TOKEN_BYTES == flatten_bytes
    assert sum(int(tree.query_kv_len.sum()) for tree in trees) * TOKEN_BYTES == sequence_bytes


@needs_recordings
@pytest.mark.parametrize(
    ("size", "flatten_bytes"),
    [
        (32, 2_953_726_394_368),
        (64, 2_979_009_658_880),
        (128, 3_029_576_187_904),
        (256, 3_130_709_245_952),
    ],
)
def test_flat_replay_reproduces_the_recorded_counters(size: int, flatten_bytes: int) -> None:
    replay = SpeculativeReplay(size, 0, 1016, 6000, flat=True)
    assert replay.num_steps == 1507
    tokens = [replay.tree(step).num_tokens for step in range(1, replay.num_steps + 1)]
    assert sum(tokens) * TOKEN_BYTES == flatten_bytes


@needs_recordings
def test_tree_replay_accepts_at_most_its_depth() -> None:
    replay = SpeculativeReplay(5, 0, 100, 400)
    deepest = max(map(len, replay.choices)) + 1
    assert np.diff(replay.root_len).max() <= deepest
    assert replay.tree(1).num_qo == len(replay.choices) + 1


def test_accepted_lengths_add_up() -> None:
    assert accepted_lengths([2, 3, 4], 5).tolist() == [2, 3]
    drawn = accepted_lengths([2, 3, 4], 100)
    assert drawn[:3].tolist() == [2, 3, 4]
    assert drawn.sum() == 100
    assert set(drawn[3:-1].tolist()) <= {2, 3, 4}


@needs_recordings
@pytest.mark.parametrize("task", REASONING_TASKS)
def test_an_unknown_tree_names_the_range(task: str) -> None:
    with pytest.raises(ValueError, match="complete trees 0"):
        ReasoningReplay(task, 10_000)
