"""Recordings: loaders of the shared folder of recorded workloads.

The folder is `../shared` beside the repository, or TREE_BENCH_SHARED. Nothing of it is copied: it
is read when asked for.

Known defects of the speculative recording: the file for size 10 carries the 31-node tree; size 5
holds five paths (six candidates with the root token); every record and every size holds the same
accepted lengths, recorded with the 256-candidate tree, so the tree replay clamps them to its depth.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deft.topologies import from_choices
from deft.tree import LongArray

REASONING_TASKS = ("sorting128", "docmerge", "keyword", "set128")
SPECULATIVE_SIZES = (5, 10, 32, 64, 96, 128, 256)
_NODE_KEYS = ("id", "parent", "first_step", "last_step", "tokens")


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
        raise ValueError(
            f"reasoning task must be one of {', '.join(REASONING_TASKS)}, got {task!r}"
        )
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
