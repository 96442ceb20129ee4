"""Workload families that replay recorded runs; `num_steps` evenly spaced steps become points."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, cast

import numpy as np

from experiments.recorded import ReasoningReplay, Replay, SpeculativeReplay
from experiments.recordings import SPECULATIVE_SIZES, load_reasoning, load_speculative
from experiments.workload import Point, Workload, whole

_reasoning_trees = cache(load_reasoning)
_recording = cache(load_speculative)
_FLAT_SIZE = 64  # accepted lengths are the same in every file: this one serves any other width


@dataclass
class _Recorded(Workload):
    num_steps: Any = 8
    max_length: Any = 3000

    def replay(self) -> Replay:
        """The recorded run."""
        raise NotImplementedError

    def points(self) -> Iterator[Point]:
        """See Workload; the first and the last step are always among them."""
        for one in cast("Iterator[_Recorded]", self.variants()):
            replay = one.replay()
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
        trees, index = _reasoning_trees(str(self.task)), whole("tree_index", self.tree_index)
        if index >= len(trees):
            raise ValueError(
                f"workload.tree_index: {self.task} holds complete trees 0..{len(trees) - 1}, "
                f"got {index}"
            )
        prompt = None if self.prompt_len is None else whole("prompt_len", self.prompt_len, 1)
        return ReasoningReplay(trees[index], prompt, whole("max_length", self.max_length, 1))

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
        size = whole("size", self.size, 1)
        file_size = _FLAT_SIZE if self.flat and size not in SPECULATIVE_SIZES else size
        return SpeculativeReplay(
            _recording(file_size),
            "flat" if self.flat else "tree",
            whole("prompt_len", self.prompt_len, 1),
            whole("max_length", self.max_length, 1),
            num_candidates=size if self.flat else None,
            record=whole("record", self.record),
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
