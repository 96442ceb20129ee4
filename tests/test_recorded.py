"""Recorded workloads: replays against a literal simulation, and loaders against bad files.

What needs the recordings themselves skips where they are absent; the paper's totals are in
test_paper_runs.py.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deft.paper_io import StepCounts, count_tree, paper_kv_bytes, paper_mask_bytes
from deft.shape import HeadShape
from deft.topologies import few_shot
from deft.tree import DecodeTree
from experiments.recorded import (
    FewShotReplay,
    ReasoningReplay,
    Replay,
    SpeculativeReplay,
    accepted_lengths,
)
from experiments.recordings import (
    REASONING_TASKS,
    SPECULATIVE_SIZES,
    ReasoningTree,
    SpeculativeRecording,
    load_reasoning,
    load_speculative,
    shared_folder,
)
from tests.trees import CAUSAL, ODD

needs_recordings = pytest.mark.skipif(
    not (shared_folder() / "workloads").is_dir(),
    reason="recorded workloads absent: put the shared folder beside the repository",
)
# (id, parent, first_step, last_step): leaves that end at different steps, one that branches late,
# an inner node that outlives its own branch, and a node recorded without a token.
SMALL = [(0, -1, -4, 0), (1, 0, 1, 3), (2, 0, 1, 6), (3, 1, 4, 5), (4, 1, 4, 9), (5, 2, 7, 6)]
SPECULATIVE = SpeculativeRecording(6, ((0,), (1,), (0, 0), (0, 1), (0, 0, 0)), ((2, 5, 1, 3),))


def record_of(rows: list[tuple[int, int, int, int]], is_complete: bool = True) -> dict[str, Any]:
    keys = ("id", "parent", "first_step", "last_step")
    nodes = [{**dict(zip(keys, row, strict=True)), "tokens": row[3] - row[2] + 1} for row in rows]
    return {"tree": 3, "complete": is_complete, "nodes": nodes}


def small_tree() -> ReasoningTree:
    _, parent, first, last = np.array(SMALL, np.int64).T
    return ReasoningTree("small", 3, True, parent, first, last, last - first + 1)


def simulate(recorded: ReasoningTree, prompt_len: int) -> list[dict[int, tuple[int, bool]]]:
    """Every step's {node: (tokens, decodes)}, moved on event by event."""
    every = range(len(recorded.parent))
    children = {node: np.flatnonzero(recorded.parent == node).tolist() for node in every}
    lengths = {0: prompt_len, **dict.fromkeys(children[0], 0)}
    live = set(children[0])
    steps = []
    for step in range(1, 10**6):
        for node in live:
            lengths[node] += 1
        steps.append({node: (tokens, node in live) for node, tokens in lengths.items()})
        for node in sorted(live):
            if recorded.last_step[node] > step:
                continue
            live.remove(node)
            starting = [child for child in children[node] if recorded.tokens[child] > 0]
            live |= set(starting)
            lengths |= dict.fromkeys(starting, 0)
            while node >= 0 and not any(child in lengths for child in children[node]):
                del lengths[node]
                node = int(recorded.parent[node])
        if not lengths:
            return steps
    raise AssertionError("the tree never dies")


def as_tree(state: dict[int, tuple[int, bool]], recorded: ReasoningTree) -> DecodeTree:
    nodes = sorted(state)
    parent = [nodes.index(up) if (up := recorded.parent[node]) >= 0 else -1 for node in nodes]
    live = [place for place, node in enumerate(nodes) if state[node][1]]
    return DecodeTree(parent, [state[node][0] for node in nodes], live)


def assert_counts_are_those_of_its_trees(replay: Replay, steps: list[int]) -> None:
    assert replay.counts.num_steps == replay.num_steps
    for step in steps:
        one = count_tree(replay.tree(step))
        for name in StepCounts.__dataclass_fields__:
            assert getattr(one, name)[0] == getattr(replay.counts, name)[step - 1], (step, name)


# ---- the counter -------------------------------------------------------------------------------
def test_the_paper_counter_on_a_tree_done_by_hand() -> None:
    tree = few_shot(100, 40, 3)  # 40 queries: the prompt is loaded twice by the node kernel
    shape = HeadShape(num_qo_heads=8, num_kv_heads=2, head_dim=64)
    token = 8 * 64 * 4
    assert paper_kv_bytes("flatten", tree, shape) == (100 + 120) * token
    assert paper_kv_bytes("node", tree, shape, 3) == (200 + 120) * token * 3
    assert paper_kv_bytes("node_chunk", tree, shape) == (200 + 120) * token
    assert paper_kv_bytes("sequence", tree, shape) == 40 * 103 * token
    assert paper_mask_bytes("flatten", tree, 2) == 220 * 8 * 2
    assert paper_mask_bytes("node", tree, 2) == 0
    for count in (
        lambda: paper_kv_bytes("dense", tree, shape),
        lambda: paper_mask_bytes("x", tree),
    ):
        with pytest.raises(ValueError, match="paper IO counts flatten"):
            count()


def test_the_node_kernel_loads_a_prompt_again_from_the_33rd_query_on() -> None:
    loads = [int(count_tree(few_shot(100, width, 0)).capped_tokens[0]) for width in (1, 32, 33, 65)]
    assert loads == [100, 100, 200, 300]


@pytest.mark.parametrize("tree", [ODD, CAUSAL], ids=["odd", "causal"])
def test_counts_of_odd_trees(tree: DecodeTree) -> None:
    counts = count_tree(tree)
    assert counts.tree_tokens.tolist() == counts.capped_tokens.tolist() == [tree.attended_tokens]
    assert counts.path_tokens.tolist() == [tree.query_kv_len.sum()]


# ---- replays -----------------------------------------------------------------------------------
def test_few_shot_replay() -> None:
    replay = FewShotReplay(50, 40, 12)
    assert replay.tree(3) == few_shot(50, 40, 3)
    assert_counts_are_those_of_its_trees(replay, list(range(1, 13)))
    with pytest.raises(ValueError, match=r"has steps 1\.\.12, got 0"):
        replay.tree(0)
    with pytest.raises(ValueError, match="width and steps >= 1"):
        FewShotReplay(50, 0, 12)


@pytest.mark.parametrize("prompt_len", [5, 100])
def test_a_reasoning_replay_is_what_the_rules_say(prompt_len: int) -> None:
    recorded = small_tree()
    replay = ReasoningReplay(recorded, None if prompt_len == 5 else prompt_len)
    states = simulate(recorded, prompt_len)
    assert replay.num_steps == len(states) == 9
    for step, state in enumerate(states, start=1):
        assert replay.tree(step) == as_tree(state, recorded), step
    assert_counts_are_those_of_its_trees(replay, list(range(1, 10)))


def test_a_reasoning_replay_stops_at_the_generation_limit() -> None:
    assert ReasoningReplay(small_tree(), 100, 106).num_steps == 5
    assert ReasoningReplay(small_tree(), 100, 900).num_steps == 9
    with pytest.raises(ValueError, match="want 1 <= prompt < max length"):
        ReasoningReplay(small_tree(), 100, 100)
    with pytest.raises(ValueError, match="leave no step"):
        ReasoningReplay(small_tree(), 100, 101)


def test_accepted_lengths_continue_the_record_at_random() -> None:
    rng = random.Random(0)
    lengths = accepted_lengths([2, 5, 1, 3], 40, most=9)
    assert lengths[:4] == [2, 5, 1, 3]
    drawn = [rng.randint(1, 5) for _ in lengths[4:]]
    assert lengths[4:-1] == drawn[:-1]
    assert 1 <= lengths[-1] <= drawn[-1]
    assert sum(lengths) == 40
    assert accepted_lengths([2, 5, 1], 7, most=9) == [2, 5]
    assert max(accepted_lengths([2, 5, 1], 30, most=3)) == 3


@pytest.mark.parametrize("mode", ["flat", "tree"])
def test_a_speculative_replay_step_by_step(mode: str) -> None:
    replay = SpeculativeReplay(SPECULATIVE, mode, prompt_len=20, max_len=60)
    root = 20
    for step in range(1, replay.num_steps + 1):
        tree = replay.tree(step)
        assert tree.num_qo == 6
        assert tree.node_len.tolist() == [root] + [1] * 6
        if step < replay.num_steps:
            root += replay.accepted[step]  # the first length is skipped
    assert sum(replay.accepted) == 40
    assert_counts_are_those_of_its_trees(replay, [1, 2, replay.num_steps])


def test_flat_and_tree_replays_differ_where_they_should() -> None:
    flat = SpeculativeReplay(SPECULATIVE, "flat", 20, 60, num_candidates=70)
    tree = SpeculativeReplay(SPECULATIVE, "tree", 20, 60)
    assert set(flat.tree(1).depth.tolist()) == {0, 1}
    assert flat.counts.capped_tokens[0] == 3 * 20 + 70  # 70 queries: three tiles of 32
    assert tree.tree(1).depth.tolist() == [0, 1, 2, 2, 3, 3, 4]
    assert flat.accepted[1] == 5
    assert max(tree.accepted) == 4  # depth 3 and the root token


def test_bad_replay_arguments_are_refused() -> None:
    for mode, options, message in (
        ("linear", {}, 'mode must be "flat" or "tree"'),
        ("tree", {"num_candidates": 5}, "num_candidates is for the flat replay"),
        ("flat", {"num_candidates": 0}, "num_candidates must be >= 1"),
        ("flat", {"record": 1}, r"record must be 0\.\.0, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            SpeculativeReplay(SPECULATIVE, mode, 20, 60, **options)


# ---- loaders -----------------------------------------------------------------------------------
@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREE_BENCH_SHARED", str(tmp_path))
    for folder in ("reasoning", "speculative"):
        (tmp_path / "workloads" / folder).mkdir(parents=True)
    return tmp_path / "workloads"


def test_incomplete_trees_are_left_out_unless_asked_for(shared: Path) -> None:
    lines = [json.dumps(record_of(SMALL, is_complete)) for is_complete in (False, True)]
    (shared / "reasoning" / "keyword.jsonl").write_text("\n".join(lines))
    assert [tree.is_complete for tree in load_reasoning("keyword")] == [True]
    assert len(load_reasoning("keyword", only_complete=False)) == 2
    assert load_reasoning("keyword")[0].tokens.tolist() == small_tree().tokens.tolist()


BAD_REASONING: dict[str, tuple[str, str]] = {
    "not JSON": ("{", "JSONDecodeError"),
    "no nodes key": ('{"tree": 0, "complete": true}', "KeyError('nodes')"),
    "no nodes": (json.dumps(record_of([])), "a complete tree without nodes"),
    "sparse ids": (json.dumps(record_of([(1, -1, 0, 0)])), "ids must be dense"),
    "two roots": (json.dumps(record_of([(0, -1, 0, 0), (1, -1, 1, 2)])), "only root"),
    "a gap": (json.dumps(record_of([(0, -1, 0, 0), (1, 0, 3, 4)])), "one step after its parent"),
    "text": (json.dumps({"tree": 0, "complete": True, "nodes": "abc"}), "not a recorded tree"),
    "wrong tokens": (
        '{"tree": 0, "complete": true, "nodes": '
        '[{"id": 0, "parent": -1, "first_step": 0, "last_step": 0, "tokens": 7}]}',
        "tokens must be last_step - first_step + 1",
    ),
}


@pytest.mark.parametrize("name", BAD_REASONING)
def test_a_malformed_reasoning_line_is_named(name: str, shared: Path) -> None:
    line, message = BAD_REASONING[name]
    path = shared / "reasoning" / "set128.jsonl"
    path.write_text(json.dumps(record_of(SMALL)) + "\n" + line)
    with pytest.raises(ValueError) as caught:
        load_reasoning("set128")
    assert f"{path}, line 2: " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        '{"choices": [[0, 0]], "records": [{"accept_lengths": [1]}]}',
        '{"choices": [[0]], "records": []}',
        '{"choices": [[0]], "records": [{"accept_lengths": [0]}]}',
        '{"choices": [["x"]], "records": [{"accept_lengths": [1]}]}',
    ],
)
def test_a_malformed_speculative_file_is_named(content: str, shared: Path) -> None:
    path = shared / "speculative" / "apps_tree32.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="not a speculative recording"):
        load_speculative(32)


def test_absent_data_and_unknown_names_are_said(shared: Path) -> None:
    with pytest.raises(ValueError, match=r"recorded data not found: .*TREE_BENCH_SHARED"):
        load_reasoning("docmerge")
    with pytest.raises(ValueError, match="recorded data not found"):
        load_speculative(64)
    with pytest.raises(ValueError, match="task must be one of sorting128"):
        load_reasoning("chess")
    with pytest.raises(ValueError, match="size must be one of"):
        load_speculative(7)


# ---- the recordings themselves -----------------------------------------------------------------
@needs_recordings
@pytest.mark.parametrize("task", REASONING_TASKS)
def test_every_recorded_tree_loads_and_replays(task: str) -> None:
    trees = load_reasoning(task)
    assert len(load_reasoning(task, only_complete=False)) >= len(trees) >= 20
    for recorded in trees[::8]:
        replay = ReasoningReplay(recorded)
        assert_counts_are_those_of_its_trees(replay, [1, replay.num_steps // 2, replay.num_steps])


@needs_recordings
def test_a_recorded_tree_follows_the_rules() -> None:
    recorded = load_reasoning("set128")[0]
    replay = ReasoningReplay(recorded)
    states = simulate(recorded, replay.prompt_len)
    assert replay.num_steps == len(states)
    for step in range(1, len(states) + 1, 7):
        assert replay.tree(step) == as_tree(states[step - 1], recorded), step


@needs_recordings
@pytest.mark.parametrize("size", SPECULATIVE_SIZES)
def test_every_speculative_tree_loads_and_replays(size: int) -> None:
    recording = load_speculative(size)
    for mode in ("flat", "tree"):
        replay = SpeculativeReplay(recording, mode, 1000, 2000)
        assert sum(replay.accepted) == 1000
        assert_counts_are_those_of_its_trees(replay, [1, replay.num_steps])
    assert max(replay.accepted) <= recording.depth + 1
    # The known defects: size 10 carries 31 nodes, size 5 has 6 candidates.
    assert len(recording.choices) + 1 == {5: 6, 10: 32}.get(size, size)
