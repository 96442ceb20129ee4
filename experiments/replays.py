"""Replays of recorded decoding runs: which tree a recorded run attends over at each step.

The data is read from `../shared/workloads` beside the repository (or TREE_BENCH_SHARED) and is no
part of it. Known defects of the speculative recordings: the file of size 10 carries a 31-node
tree, all records of a file hold the same accepted lengths, and these were recorded with the
256-node tree, so a small tree clamps them to its depth + 1.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deft import topologies
from deft.tree import DecodeTree

REASONING_TASKS = ("sorting128", "docmerge", "keyword", "set128")
SPECULATIVE_SIZES = (5, 10, 32, 64, 96, 128, 256)
_SEED = 0  # what the recorded runs drew their continuation with


def recorded_dir() -> Path:
    """Folder of the recorded workloads; it may not exist."""
    beside = Path(__file__).resolve().parent.parent.parent / "shared"
    return Path(os.environ.get("TREE_BENCH_SHARED", beside)) / "workloads"


def _text(*parts: str) -> str:
    path = recorded_dir().joinpath(*parts)
    if not path.is_file():
        raise ValueError(
            f"no recorded workload at {path}; put the folder `shared` beside the repository or "
            "name it in the environment variable TREE_BENCH_SHARED"
        )
    return path.read_text()


class ReasoningReplay:
    """A tree of thoughts that grows by one token per live leaf and step, branches and is pruned.

    At step t a node holds the tokens that it was given so far, and it is there while it or a
    descendant is being decoded (first_step <= t <= last_step).

    Args:
        task: one of REASONING_TASKS.
        index: which complete tree of the file.
        prompt_len: tokens of the root; None as recorded.
        max_length: the longest sequence, prompt included.

    Raises:
        ValueError: no such recording.
    """

    def __init__(
        self, task: str, index: int = 0, prompt_len: int | None = None, max_length: int = 3000
    ) -> None:
        trees = _complete_trees(task)
        if not 0 <= index < len(trees):
            raise ValueError(f"{task} holds complete trees 0..{len(trees) - 1}, got {index}")
        nodes = trees[index]
        self.parent = np.array([node["parent"] for node in nodes])
        self.first = np.array([node["first_step"] for node in nodes])
        self.last = np.array([node["last_step"] for node in nodes])
        recorded = int(self.last[0] - self.first[0] + 1)
        self.prompt_len = recorded if prompt_len is None else prompt_len
        self.num_steps = min(int(self.last.max()), max(max_length - self.prompt_len - 1, 0))

    def tree(self, step: int) -> DecodeTree:
        """The tree that step 1 .. num_steps attends over, one query per leaf being decoded."""
        decoding = (self.first <= step) & (step <= self.last)
        decoding[0] = False
        alive = decoding.copy()
        for node in range(len(alive) - 1, 0, -1):
            if alive[node]:
                alive[self.parent[node]] = True
        kept = np.flatnonzero(alive)
        new_id = np.cumsum(alive) - 1
        length = np.minimum(self.last, step) - self.first + 1
        length[0] = self.prompt_len
        parent = np.where(self.parent[kept] < 0, -1, new_id[self.parent[kept]])
        return DecodeTree(
            *(array.astype(np.int32) for array in (parent, length[kept], new_id[decoding]))
        )


@cache
def _complete_trees(task: str) -> list[list[dict[str, Any]]]:
    if task not in REASONING_TASKS:
        raise ValueError(f"workload.task must be one of {REASONING_TASKS}, got {task!r}")
    lines = map(json.loads, _text("reasoning", f"{task}.jsonl").splitlines())
    return [line["nodes"] for line in lines if line["complete"]]


class SpeculativeReplay:
    """Speculative decoding: every step verifies candidate tokens, then the accepted ones stay.

    Args:
        size: one of SPECULATIVE_SIZES, or with `flat` any number of candidates.
        record: which record of the file.
        prompt_len: tokens before the first step.
        max_length: tokens at the end.
        flat: every candidate straight under the root, as the paper's runner did; False: candidates
            see their ancestors.

    Raises:
        ValueError: no such recording.
    """

    def __init__(
        self,
        size: int = 64,
        record: int = 0,
        prompt_len: int = 1016,
        max_length: int = 6000,
        flat: bool = False,
    ) -> None:
        self.size, self.flat = size, flat
        data = _speculative_file(64 if flat and size not in SPECULATIVE_SIZES else size)
        if not 0 <= record < len(data["records"]):
            raise ValueError(f"there are records 0..{len(data['records']) - 1}, got {record}")
        lengths = data["records"][record]["accept_lengths"]
        accepted = accepted_lengths(lengths, max_length - prompt_len)
        self.choices: list[list[int]] = data["choices"]
        if not flat:
            deepest = max(map(len, self.choices))
            accepted = np.minimum(accepted, deepest + 1)
        self.num_steps = len(accepted)
        # Entry 0 is skipped and nothing joins the root after the last step.
        self.root_len = prompt_len + np.concatenate([[0], np.cumsum(accepted[1:])])

    def tree(self, step: int) -> DecodeTree:
        """The tree that step 1 .. num_steps attends over, one query per candidate."""
        root = int(self.root_len[step - 1])
        if self.flat:
            return topologies.few_shot(root, self.size, 1)
        return topologies.from_choices(self.choices, root)


@cache
def _speculative_file(size: int) -> dict[str, Any]:
    if size not in SPECULATIVE_SIZES:
        raise ValueError(f"workload.size must be one of {SPECULATIVE_SIZES}, got {size!r}")
    data: dict[str, Any] = json.loads(_text("speculative", f"apps_tree{size}.json"))
    return data


def accepted_lengths(recorded: Sequence[int], num_tokens: int) -> npt.NDArray[np.int64]:
    """Accepted tokens of each step of a run that generates num_tokens.

    Recorded lengths are taken while their sum stays within num_tokens; then lengths are drawn from
    the record's range, and the last one is cut so that the sum is num_tokens.
    """
    fits = int(np.searchsorted(np.cumsum(recorded), num_tokens, side="right"))
    lengths = list(recorded[:fits])
    left = num_tokens - sum(lengths)
    draw = random.Random(_SEED)
    while left > 0:
        lengths.append(min(draw.randint(min(recorded), max(recorded)), left))
        left -= lengths[-1]
    return np.asarray(lengths, np.int64)
