"""Workload families that replay recorded runs; `num_steps` evenly spaced steps become points."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from experiments.replays import ReasoningReplay, SpeculativeReplay
from experiments.workload import Point, Workload, whole


@dataclass
class _Recorded(Workload):
    num_steps: Any = 8
    max_length: Any = 3000

    def replay(self) -> ReasoningReplay | SpeculativeReplay:
        """The recorded run."""
        raise NotImplementedError

    def points(self) -> Iterator[Point]:
        """See Workload; the first and the last step are always among them."""
        for one in cast("Iterator[_Recorded]", self.variants()):
            replay = one.replay()
            if replay.num_steps < 1:
                raise ValueError("workload.max_length leaves no step after the prompt")
            wanted = min(whole("num_steps", one.num_steps, 1), replay.num_steps)
            for step in np.unique(np.linspace(1, replay.num_steps, wanted).round().astype(int)):
                yield from one.batched(Point(one.name(), int(step), replay.tree(int(step))))


@dataclass
class Reasoning(_Recorded):
    """Tree-of-thought decoding; `prompt_len` null keeps the recorded prompt."""

    family: str = "reasoning"
    task: Any = "sorting128"
    tree_index: Any = 0
    prompt_len: Any = None

    def replay(self) -> ReasoningReplay:
        """See _Recorded."""
        prompt = None if self.prompt_len is None else whole("prompt_len", self.prompt_len)
        index, longest = whole("tree_index", self.tree_index), whole("max_length", self.max_length)
        return ReasoningReplay(str(self.task), index, prompt, longest)

    def name(self) -> str:
        """See Workload."""
        prompt = "" if self.prompt_len is None else f"_p{self.prompt_len}"
        return f"reasoning_{self.task}_{self.tree_index}{prompt}"


@dataclass
class SpeculativeTree(_Recorded):
    """Speculative decoding where candidates see their ancestors."""

    family: str = "speculative_tree"
    size: Any = 64
    record: Any = 0
    prompt_len: Any = 1016
    max_length: Any = 6000

    flat: ClassVar[bool] = False

    def replay(self) -> SpeculativeReplay:
        """See _Recorded."""
        return SpeculativeReplay(
            whole("size", self.size, 1),
            whole("record", self.record),
            whole("prompt_len", self.prompt_len),
            whole("max_length", self.max_length),
            self.flat,
        )

    def name(self) -> str:
        """See Workload."""
        numbers = (self.size, self.record, self.prompt_len, self.max_length)
        return f"{self.family}_{'_'.join(map(str, numbers))}"


@dataclass
class SpeculativeFlat(SpeculativeTree):
    """Speculative decoding as the paper's runner did it: candidates straight under the root."""

    family: str = "speculative_flat"

    flat: ClassVar[bool] = True
