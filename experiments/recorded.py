"""Replays of recorded workloads: what turns a recording into decode steps.

A replay numbers its steps from 1 (step 0 is prefill) and offers two views of each: `tree(step)`, a
DecodeTree for a kernel, and `counts`, vectorised token counts of all steps. Loaders, and the known
defects of the recordings, are in experiments.recordings.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deft.paper_io import StepCounts, count_tree, query_tiles
from deft.topologies import few_shot, from_choices
from deft.tree import DecodeTree, LongArray
from experiments.recordings import ReasoningTree, SpeculativeRecording


class Replay(Protocol):
    """Decode steps 1 .. num_steps of one recorded request."""

    @property
    def name(self) -> str:
        """Replay name in rows and messages."""

    @property
    def num_steps(self) -> int:
        """Decode steps; prefill is not one."""

    def tree(self, step: int) -> DecodeTree:
        """The tree that attention runs over at `step`, 1 .. num_steps."""

    @property
    def counts(self) -> StepCounts:
        """Token counts of all steps, step 1 first."""


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
class ReasoningReplay:
    """A recorded tree of thoughts, step by step.

    At each step every live leaf holds one token more. A leaf that reaches its last step branches,
    or is pruned with every ancestor that then has no live descendant; other inner nodes stay.
    """

    def __init__(
        self, recorded: ReasoningTree, prompt_len: int | None = None, max_len: int | None = None
    ) -> None:
        """Replay one tree.

        Args:
            recorded: the tree.
            prompt_len: tokens of the root; None keeps the recorded ones.
            max_len: prompt + generated tokens at which the run stops; None: when the root is
                pruned.

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
        grids = self._at(np.array([step]))
        lengths, is_leaf = grids[0][:, 0], grids[1][:, 0]
        alive = np.flatnonzero(lengths >= 0)
        number = np.full(len(lengths) + 1, -1)  # the last entry serves parent -1
        number[alive] = np.arange(len(alive))
        parent = number[self.recorded.parent[alive]]
        arrays = (parent, lengths[alive], number[np.flatnonzero(is_leaf)])
        return DecodeTree(*(array.astype(np.int32) for array in arrays))

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
