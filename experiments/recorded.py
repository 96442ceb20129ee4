"""Recorded workloads: loaders of the shared folder, and the replays that turn them into decode steps.

The folder is `../shared` beside the repository, or TREE_BENCH_SHARED. Nothing of it is copied: it is
read when asked for. A replay numbers its steps from 1 (step 0 is prefill) and offers two views of
each: `tree(step)`, a DecodeTree for a kernel, and `counts`, vectorised token counts of all steps.

Known defects of the speculative recording: the file for size 10 carries the 31-node tree; size 5 holds
five paths (six candidates with the root token); every record and every size holds the same accepted
lengths, recorded with the 256-candidate tree, so the tree replay clamps them to its own depth.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deft.paper_io import StepCounts, count_tree, query_tiles
from deft.topologies import few_shot, from_choices
from deft.tree import DecodeTree, LongArray

REASONING_TASKS = ("sorting128", "docmerge", "keyword", "set128")
SPECULATIVE_SIZES = (5, 10, 32, 64, 96, 128, 256)
_NODE_KEYS = ("id", "parent", "first_step", "last_step", "tokens")


class Replay(Protocol):
    """Decode steps 1 .. num_steps of one recorded request."""

    name: str

    @property
    def num_steps(self) -> int:
        """Decode steps; prefill is not one."""

    def tree(self, step: int) -> DecodeTree:
        """The tree that attention runs over at `step`, 1 .. num_steps."""

    @property
    def counts(self) -> StepCounts:
        """Token counts of all steps, step 1 first."""


def shared_folder() -> Path:
    """The folder of recorded data: TREE_BENCH_SHARED, or `shared` beside the repository."""
    override = os.environ.get("TREE_BENCH_SHARED")
    return Path(override) if override else Path(__file__).resolve().parents[2] / "shared"


def shared_file(*parts: str) -> Path:
    """A file of the shared folder.

    Raises:
        ValueError: it is not there.
    """
    path = shared_folder().joinpath(*parts)
    if not path.is_file():
        raise ValueError(
            f"recorded data not found: {path}; put the shared folder beside the repository "
            "or name it in TREE_BENCH_SHARED"
        )
    return path


def _check_step(replay: Replay, step: int) -> None:
    if not 1 <= step <= replay.num_steps:
        raise ValueError(f"{replay.name} has steps 1..{replay.num_steps}, got {step}")


def _generated(prompt_len: int, max_len: int) -> int:
    if prompt_len < 1 or max_len <= prompt_len:
        raise ValueError(f"want 1 <= prompt < max length, got {prompt_len} and {max_len}")
    return max_len - prompt_len


# ---- few-shot ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class FewShotReplay:
    """`width` answers to one prompt, each one token longer at every step.

    Args:
        prompt_len: tokens of the shared prompt.
        width: answers decoded side by side.
        num_steps: decode steps; at step i each answer has i tokens.
    """

    prompt_len: int
    width: int
    num_steps: int

    def __post_init__(self) -> None:
        if min(self.prompt_len, self.width, self.num_steps) < 1:
            raise ValueError(f"few-shot replay wants prompt, width and steps >= 1, got {self}")

    @property
    def name(self) -> str:
        """Replay name in rows and messages."""
        return f"few_shot_replay_{self.prompt_len}_{self.width}"

    def tree(self, step: int) -> DecodeTree:
        """The tree at `step`."""
        _check_step(self, step)
        return few_shot(self.prompt_len, self.width, step)

    @cached_property
    def counts(self) -> StepCounts:
        """Token counts of all steps."""
        suffix = np.arange(1, self.num_steps + 1) * self.width
        width = np.full(self.num_steps, self.width)
        return _one_root_counts(np.full(self.num_steps, self.prompt_len), width, suffix)


def _one_root_counts(root_len: LongArray, num_qo: LongArray, leaf_tokens: LongArray) -> StepCounts:
    """Counts of a root that all queries share, with one leaf a query below it."""
    return StepCounts(
        tree_tokens=root_len + leaf_tokens,
        capped_tokens=root_len * query_tiles(num_qo) + leaf_tokens,
        path_tokens=root_len * num_qo + leaf_tokens,
        num_qo=num_qo,
    )


# ---- reasoning ---------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class ReasoningTree:
    """A recorded tree of thoughts: int64 [num_nodes] each, node 0 is the prompt.

    Args:
        task: recording's name.
        index: line of the recording.
        is_complete: False where the recording broke off; the paper's runs skip those.
        parent: -1 for the root; parents come before children.
        first_step, last_step: steps at which the node got its first and last token.
        tokens: KV tokens when finished.
    """

    task: str
    index: int
    is_complete: bool
    parent: LongArray
    first_step: LongArray
    last_step: LongArray
    tokens: LongArray


def load_reasoning(task: str, *, only_complete: bool = True) -> list[ReasoningTree]:
    """Recorded trees of one task, in file order.

    Args:
        task: one of REASONING_TASKS.
        only_complete: leave out the trees whose recording broke off.

    Raises:
        ValueError: unknown task, a missing file, or a line that is no such tree.
    """
    if task not in REASONING_TASKS:
        raise ValueError(f"reasoning task must be one of {', '.join(REASONING_TASKS)}, got {task!r}")
    path = shared_file("workloads", "reasoning", f"{task}.jsonl")
    trees = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            trees.append(_parse_reasoning(task, json.loads(line)))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"{path}, line {number}: not a recorded tree ({error!r})") from error
    return [tree for tree in trees if tree.is_complete or not only_complete]


def _parse_reasoning(task: str, record: dict[str, Any]) -> ReasoningTree:
    rows = [[node[key] for key in _NODE_KEYS] for node in record["nodes"]]
    ids, parent, first, last, tokens = np.array(rows, np.int64).reshape(-1, 5).T
    if record["complete"] and not len(ids):
        raise ValueError("a complete tree without nodes")
    if not np.array_equal(ids, np.arange(len(ids))) or (parent >= ids).any():
        raise ValueError("ids must be dense and parents come first")
    if (parent[:1] != -1).any() or (parent[1:] < 0).any():
        raise ValueError("node 0 must be the only root")
    if (tokens != last - first + 1).any() or (tokens < 0).any():
        raise ValueError("tokens must be last_step - first_step + 1, at least 0")
    if (first[1:] != last[parent[1:]] + 1).any():
        raise ValueError("a child must start one step after its parent ends")
    return ReasoningTree(
        task, int(record["tree"]), bool(record["complete"]), parent, first, last, tokens
    )


class ReasoningReplay:
    """A recorded tree of thoughts, step by step.

    At each step every live leaf holds one token more. A leaf that reaches its last step branches, or
    is pruned with every ancestor that then has no live descendant; other inner nodes stay.
    """

    def __init__(
        self, recorded: ReasoningTree, prompt_len: int | None = None, max_len: int | None = None
    ) -> None:
        """Replay one tree.

        Args:
            recorded: the tree.
            prompt_len: tokens of the root; None keeps the recorded ones.
            max_len: prompt + generated tokens at which the run stops; None: when the root is pruned.

        Raises:
            ValueError: a prompt below 1 token, or one that leaves nothing to generate.
        """
        self.recorded = recorded
        self.name = f"reasoning_{recorded.task}_{recorded.index}"
        self.prompt_len = int(recorded.tokens[0]) if prompt_len is None else prompt_len
        self._death = recorded.last_step.copy()
        for node in range(len(self._death) - 1, 0, -1):
            up = recorded.parent[node]
            self._death[up] = max(self._death[up], self._death[node])
        self.num_steps = int(self._death[0])
        if max_len is not None:
            self.num_steps = min(self.num_steps, _generated(self.prompt_len, max_len) - 1)
        if self.prompt_len < 1 or self.num_steps < 1:
            raise ValueError(
                f"{self.name}: prompt {self.prompt_len} and max length {max_len} leave no step"
            )

    def _at(self, steps: LongArray) -> tuple[LongArray, npt.NDArray[np.bool_]]:
        """(tokens, -1 where the node is not there; decodes here), both [num_nodes, steps]."""
        first, last = self.recorded.first_step[:, None], self.recorded.last_step[:, None]
        lengths = np.minimum(steps - first + 1, self.recorded.tokens[:, None])
        lengths[0] = self.prompt_len
        is_there = (first <= steps) & (steps <= self._death[:, None])
        return np.where(is_there, lengths, -1), is_there & (steps <= last)

    def tree(self, step: int) -> DecodeTree:
        """The tree at `step`: live nodes in recorded order, one query per leaf."""
        _check_step(self, step)
        lengths, is_leaf = (grid[:, 0] for grid in self._at(np.array([step])))
        alive = np.flatnonzero(lengths >= 0)
        number = np.full(len(lengths) + 1, -1)  # the last entry serves parent -1
        number[alive] = np.arange(len(alive))
        parent = number[self.recorded.parent[alive]]
        return DecodeTree(parent, lengths[alive], number[np.flatnonzero(is_leaf)])

    @cached_property
    def counts(self) -> StepCounts:
        """Token counts of all steps."""
        lengths, is_leaf = self._at(np.arange(1, self.num_steps + 1))
        lengths, below = np.maximum(lengths, 0), is_leaf.astype(np.int64)
        for node in range(len(below) - 1, 0, -1):
            below[self.recorded.parent[node]] += below[node]
        return StepCounts(
            tree_tokens=lengths.sum(0),
            capped_tokens=(lengths * query_tiles(below)).sum(0),
            path_tokens=(lengths * below).sum(0),
            num_qo=below[0],
        )


# ---- speculative -------------------------------------------------------------------------------
@dataclass(frozen=True)
class SpeculativeRecording:
    """One recorded token tree and its accepted lengths.

    Args:
        size: tree size that the file is named after.
        choices: Medusa paths of the candidates, the root token left out.
        accept_lengths: accepted tokens of each step, one list per record.
    """

    size: int
    choices: tuple[tuple[int, ...], ...]
    accept_lengths: tuple[tuple[int, ...], ...]

    @property
    def depth(self) -> int:
        """Longest path: candidates below the root token."""
        return max(len(path) for path in self.choices)


def load_speculative(size: int) -> SpeculativeRecording:
    """The recorded token tree of one size.

    Raises:
        ValueError: unknown size, a missing file, or one that is no such recording.
    """
    if size not in SPECULATIVE_SIZES:
        raise ValueError(f"speculative size must be one of {SPECULATIVE_SIZES}, got {size}")
    path = shared_file("workloads", "speculative", f"apps_tree{size}.json")
    try:
        data = json.loads(path.read_text())
        choices = tuple(tuple(int(rank) for rank in choice) for choice in data["choices"])
        accepted = tuple(tuple(map(int, record["accept_lengths"])) for record in data["records"])
        from_choices(choices, 1)
        if not choices or not accepted or min(map(min, accepted)) < 1:
            raise ValueError("want choices and accepted lengths >= 1")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a speculative recording ({error!r})") from error
    return SpeculativeRecording(size, choices, accepted)


def accepted_lengths(recorded: Sequence[int], num_tokens: int, most: int) -> list[int]:
    """Accepted lengths of a run that generates `num_tokens` tokens.

    Recorded lengths are taken while their sum stays within num_tokens; then the recording is
    continued at random between its extremes (Python's generator, seed 0), the last length cut.

    Args:
        recorded: accepted lengths of one record.
        num_tokens: tokens to generate.
        most: longest path that can be accepted; longer ones are clamped.
    """
    clamped = [min(length, most) for length in recorded]
    taken: list[int] = []
    left = num_tokens
    for length in clamped:
        if length > left:
            break
        taken.append(length)
        left -= length
    rng = random.Random(0)
    low, high = min(clamped), max(clamped)
    while left > 0:
        taken.append(min(rng.randint(low, high), left))
        left -= taken[-1]
    return taken


class SpeculativeReplay:
    """Verification steps of speculative decoding over a growing prefix."""

    def __init__(
        self,
        recording: SpeculativeRecording,
        mode: str,
        prompt_len: int,
        max_len: int,
        *,
        num_candidates: int | None = None,
        record: int = 0,
    ) -> None:
        """Replay one record.

        Args:
            recording: token tree and accepted lengths.
            mode: "flat": num_candidates one-token leaves straight under the prefix, as the paper's
                runner did; "tree": the recorded tree, accepted lengths clamped to its depth + 1.
            prompt_len: tokens before the first step.
            max_len: prompt + generated tokens.
            num_candidates: leaves of the flat replay; None means the recording's size.
            record: which record's accepted lengths.

        Raises:
            ValueError: an unknown mode or record, or lengths that leave nothing to generate.
        """
        if mode not in ("flat", "tree"):
            raise ValueError(f'speculative mode must be "flat" or "tree", got {mode!r}')
        if mode == "tree" and num_candidates is not None:
            raise ValueError("num_candidates is for the flat replay; a tree replay takes its paths")
        if num_candidates is not None and num_candidates < 1:
            raise ValueError(f"num_candidates must be >= 1, got {num_candidates}")
        if not 0 <= record < len(recording.accept_lengths):
            raise ValueError(f"record must be 0..{len(recording.accept_lengths) - 1}, got {record}")
        self.recording, self.mode, self.prompt_len = recording, mode, prompt_len
        self.name = f"speculative_{mode}_{recording.size}_{record}"
        flat_size = recording.size if num_candidates is None else num_candidates
        self.num_candidates = flat_size if mode == "flat" else len(recording.choices) + 1
        most = self.num_candidates if mode == "flat" else recording.depth + 1
        lengths = recording.accept_lengths[record]
        self.accepted = accepted_lengths(lengths, _generated(prompt_len, max_len), most)
        self.num_steps = len(self.accepted)

    @cached_property
    def prefix_len(self) -> LongArray:
        """int64 [num_steps]: accepted tokens before each step (the first length is skipped)."""
        grown = np.cumsum(self.accepted, dtype=np.int64) - self.accepted[0]
        return self.prompt_len + grown

    def tree(self, step: int) -> DecodeTree:
        """The tree at `step`: the prefix and every candidate, each a query."""
        _check_step(self, step)
        prefix = int(self.prefix_len[step - 1])
        if self.mode == "flat":
            return few_shot(prefix, self.num_candidates, 1)
        return from_choices(self.recording.choices, prefix)

    @cached_property
    def counts(self) -> StepCounts:
        """Token counts of all steps."""
        num_qo = np.full(self.num_steps, self.num_candidates, np.int64)
        if self.mode == "flat":
            return _one_root_counts(self.prefix_len, num_qo, num_qo)
        below = count_tree(from_choices(self.recording.choices, 0))  # all but the prefix
        return StepCounts(
            tree_tokens=self.prefix_len + below.tree_tokens,
            capped_tokens=self.prefix_len * query_tiles(num_qo) + below.capped_tokens,
            path_tokens=self.prefix_len * num_qo + below.path_tokens,
            num_qo=num_qo,
        )
