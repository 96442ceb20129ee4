"""Workload families: what conf/workload/*.yaml configures, and the trees that they name.

Replays of recorded runs are in recorded_workloads.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from deft import topologies
from deft.tree import DecodeTree
from experiments.recorded_workloads import Reasoning, SpeculativeFlat, SpeculativeTree
from experiments.workload import Point, Workload, dashed, whole, whole_list


@dataclass
class FewShot(Workload):
    """A shared prompt and `width` suffixes."""

    family: str = "few_shot"
    prompt_len: Any = 1024
    width: Any = 16
    suffix_len: Any = 32

    def name(self) -> str:
        """See Workload."""
        return f"few_shot_{self.prompt_len}_{self.width}_{self.suffix_len}"

    def tree(self) -> DecodeTree:
        """See Workload."""
        return topologies.few_shot(
            whole("prompt_len", self.prompt_len),
            whole("width", self.width, 1),
            whole("suffix_len", self.suffix_len),
        )


@dataclass
class Layered(Workload):
    """Levels of equal nodes; `nodes` and `tokens` are per level and sweep together."""

    family: str = "layered"
    nodes: Any = field(default_factory=lambda: [1, 4, 16])
    tokens: Any = field(default_factory=lambda: [256, 64, 32])

    lists: ClassVar[tuple[str, ...]] = ("nodes", "tokens")
    together: ClassVar[tuple[str, ...]] = ("nodes", "tokens")

    def name(self) -> str:
        """See Workload."""
        nodes, tokens = whole_list("nodes", self.nodes), whole_list("tokens", self.tokens)
        return f"layered_{dashed(nodes)}_{dashed(tokens)}"

    def tree(self) -> DecodeTree:
        """See Workload."""
        return topologies.layered(
            whole_list("nodes", self.nodes), whole_list("tokens", self.tokens)
        )


@dataclass
class Kary(Workload):
    """A complete tree of `depth` levels below a root."""

    family: str = "kary"
    branching: Any = 4
    depth: Any = 3
    node_len: Any = 64
    root_len: Any = 1024

    def name(self) -> str:
        """See Workload."""
        return f"kary_{self.branching}_{self.depth}_{self.node_len}_{self.root_len}"

    def tree(self) -> DecodeTree:
        """See Workload."""
        return topologies.kary(
            whole("branching", self.branching, 1),
            whole("depth", self.depth),
            whole("node_len", self.node_len),
            whole("root_len", self.root_len),
        )


@dataclass
class Skewed(Workload):
    """Lopsided binary splits under a root, seeded."""

    family: str = "skewed"
    num_leaves: Any = 64
    root_len: Any = 1024
    mean_len: Any = 64
    seed: Any = 0

    def name(self) -> str:
        """See Workload."""
        return f"skewed_{self.num_leaves}_{self.root_len}_{self.mean_len}_s{self.seed}"

    def tree(self) -> DecodeTree:
        """See Workload."""
        return topologies.skewed(
            whole("num_leaves", self.num_leaves, 1),
            whole("root_len", self.root_len),
            whole("mean_len", self.mean_len, 1),
            whole("seed", self.seed),
        )


@dataclass
class RandomForest(Workload):
    """A random forest with queries anywhere, seeded."""

    family: str = "random"
    num_nodes: Any = 64
    max_len: Any = 128
    num_roots: Any = 1
    seed: Any = 0

    def name(self) -> str:
        """See Workload."""
        return f"random_{self.num_nodes}_{self.max_len}_{self.num_roots}_s{self.seed}"

    def tree(self) -> DecodeTree:
        """See Workload."""
        return topologies.random_tree(
            whole("num_nodes", self.num_nodes, 1),
            whole("seed", self.seed),
            whole("max_len", self.max_len),
            num_roots=whole("num_roots", self.num_roots, 1),
        )


@dataclass
class Chain(Workload):
    """Nodes one under the other, one query: a request whose prefix has several owners."""

    family: str = "chain"
    lengths: Any = field(default_factory=lambda: [1024, 512, 256, 32])

    lists: ClassVar[tuple[str, ...]] = ("lengths",)

    def name(self) -> str:
        """See Workload."""
        return f"chain_{dashed(whole_list('lengths', self.lengths))}"

    def tree(self) -> DecodeTree:
        """See Workload."""
        return topologies.chain(whole_list("lengths", self.lengths))


@dataclass
class FromChoices(Workload):
    """A token tree for verification, given by Medusa paths."""

    family: str = "from_choices"
    prompt_len: Any = 1024
    choices: Any = field(default_factory=lambda: [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]])

    def _values(self, name: str) -> list[Any] | None:
        return None if name == "choices" else super()._values(name)

    def name(self) -> str:
        """See Workload."""
        digest = hashlib.sha256(repr(self._paths()).encode()).hexdigest()[:6]
        return f"from_choices_{self.prompt_len}_{len(self.choices)}_{digest}"

    def _paths(self) -> list[list[int]]:
        if not isinstance(self.choices, (list, tuple)) or not self.choices:
            raise ValueError(f"workload.choices must be a list of paths, got {self.choices!r}")
        return [whole_list("choices", path) for path in self.choices]

    def tree(self) -> DecodeTree:
        """See Workload."""
        return topologies.from_choices(self._paths(), whole("prompt_len", self.prompt_len))


@dataclass
class Thought(Workload):
    """Tree of thoughts with random lengths, seeded; `branching` may be one number per level."""

    family: str = "thought"
    prompt_len: Any = 1024
    branching: Any = field(default_factory=lambda: [4, 4])
    thought_len: Any = 64
    seed: Any = 0

    lists: ClassVar[tuple[str, ...]] = ("branching",)

    def name(self) -> str:
        """See Workload."""
        levels = dashed(whole_list("branching", self.branching))
        return f"thought_{self.prompt_len}_{levels}_{self.thought_len}_s{self.seed}"

    def tree(self) -> DecodeTree:
        """See Workload."""
        levels = whole_list("branching", self.branching)
        return topologies.thought(
            whole("prompt_len", self.prompt_len),
            levels,
            len(levels),
            whole("thought_len", self.thought_len, 1),
            whole("seed", self.seed),
        )


@dataclass
class Beam(Workload):
    """What beam search leaves after `search_steps` steps, seeded."""

    family: str = "beam"
    prompt_len: Any = 1024
    width: Any = 16
    search_steps: Any = 64
    seed: Any = 0

    def name(self) -> str:
        """See Workload."""
        return f"beam_{self.prompt_len}_{self.width}_{self.search_steps}_s{self.seed}"

    def tree(self) -> DecodeTree:
        """See Workload."""
        return topologies.beam(
            whole("prompt_len", self.prompt_len),
            whole("width", self.width, 1),
            whole("search_steps", self.search_steps),
            whole("seed", self.seed),
        )


@dataclass
class TreeFile(Workload):
    """A tree of your own: `path` names a .json or .npz file, see DecodeTree.load."""

    family: str = "file"
    path: Any = None

    def name(self) -> str:
        """See Workload."""
        # The same file name may hold another tree tomorrow: the digest keeps their rows apart.
        digest = hashlib.sha256(Path(self._file()).read_bytes()).hexdigest()[:6]
        return f"file_{Path(self._file()).stem}_{digest}"

    def _file(self) -> str:
        if not isinstance(self.path, str) or not self.path:
            raise ValueError("workload=file needs workload.path=TREE.json (or .npz)")
        if not Path(self.path).is_file():
            raise ValueError(f"workload.path: no tree file at {self.path}")
        return str(self.path)

    def tree(self) -> DecodeTree:
        """See Workload."""
        return DecodeTree.load(self._file())


@dataclass
class Suite(Workload):
    """A list of other workloads, each a mapping with its `family` and parameters."""

    family: str = "suite"
    trees: Any = field(default_factory=list)

    def points(self) -> Iterator[Point]:
        """See Workload; `batch` of the suite multiplies nothing, its entries have their own."""
        if not isinstance(self.trees, (list, tuple)) or not self.trees:
            raise ValueError("workload=suite needs workload.trees, a list of {family: ..., ...}")
        for entry in self.trees:
            yield from workload_of(entry).points()


def families() -> dict[str, type[Workload]]:
    """Every workload family by name."""
    plain = (FewShot, Layered, Kary, Skewed, RandomForest, Chain, FromChoices, Thought, Beam)
    recorded = (Reasoning, SpeculativeTree, SpeculativeFlat)
    return {kind().family: kind for kind in (*plain, *recorded, TreeFile, Suite)}


def workload_of(config: Mapping[str, Any]) -> Workload:
    """A workload from its configuration.

    Raises:
        ValueError: an unknown family or parameter.
    """
    known = families()
    family = config.get("family") if isinstance(config, Mapping) else config
    if not isinstance(config, Mapping) or not isinstance(family, str) or family not in known:
        raise ValueError(f"workload family must be one of {sorted(known)}, got {family!r}")
    kind = known[family]
    parameters = {parameter.name for parameter in fields(kind)}
    if unknown := sorted(map(str, set(config) - parameters)):
        raise ValueError(
            f"workload {family} has no parameter {unknown}; it has {sorted(parameters)}"
        )
    return kind(**config)
