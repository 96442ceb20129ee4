"""Workload: what every workload family shares: a name, a tree, and sweeps over parameters.

A family is a dataclass whose fields are the parameters. Any scalar parameter may be a list, which
sweeps it inside the job (the product of all lists); parameters that are lists by nature (nodes,
tokens, lengths) sweep as lists of lists.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from deft import topologies
from deft.tree import DecodeTree

MAX_BATCH = 256


@dataclass(frozen=True)
class Point:
    """One tree to attend over: the workload's name, the step of its replay, the tree."""

    name: str
    step: int
    tree: DecodeTree


def whole(name: str, value: Any, minimum: int = 0) -> int:
    """A whole number of at least `minimum`.

    Raises:
        ValueError: anything else, naming the parameter.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"workload.{name} must be a whole number >= {minimum}, got {value!r}")
    return value


def whole_list(name: str, value: Any) -> list[int]:
    """A non-empty list of whole numbers.

    Raises:
        ValueError: anything else, naming the parameter.
    """
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"workload.{name} must be a list of whole numbers, got {value!r}")
    return [whole(name, item) for item in value]


def dashed(values: Sequence[int]) -> str:
    """`[8, 256, 32]` as `8-256-32`, the way names spell levels."""
    return "-".join(str(value) for value in values)


@dataclass
class Workload:
    """What every family has: how many copies of the tree are in the batch.

    Args:
        batch: trees of the forest, 1..256; nothing is shared between them.
    """

    batch: Any = 1
    family: str = "workload"

    # Parameters that are a list by nature, so that only a list of lists sweeps them.
    lists: ClassVar[tuple[str, ...]] = ()
    # Parameters that sweep together (one tree takes entry i of each) instead of as a product.
    together: ClassVar[tuple[str, ...]] = ()

    def name(self) -> str:
        """The name in result rows; equal names mean equal trees."""
        raise NotImplementedError

    def tree(self) -> DecodeTree:
        """One request's tree."""
        raise NotImplementedError

    def variants(self) -> Iterator[Workload]:
        """This workload with every swept parameter fixed."""
        swept: dict[str, list[Any]] = {}
        for parameter in fields(self):
            values = self._values(parameter.name)
            if values is not None:
                swept[parameter.name] = values
        joint = {name: swept.pop(name) for name in self.together if name in swept}
        if joint:
            lengths = {name: len(values) for name, values in joint.items()}
            if set(joint) != set(self.together) or len(set(lengths.values())) > 1:
                raise ValueError(
                    f"workload.{' and workload.'.join(self.together)} sweep together: "
                    f"give each the same number of lists, got {lengths}"
                )
        choices: list[list[dict[str, Any]]] = [
            [{name: value} for value in values] for name, values in swept.items()
        ]
        if joint:
            rows = zip(*joint.values(), strict=True)
            choices.append([dict(zip(joint, row, strict=True)) for row in rows])
        for combination in itertools.product(*choices):
            yield replace(self, **{k: v for part in combination for k, v in part.items()})

    def _values(self, name: str) -> list[Any] | None:
        """The values that a parameter sweeps over, None when it is fixed."""
        value = getattr(self, name)
        if not isinstance(value, (list, tuple)):
            return None
        if name in self.lists and not (value and isinstance(value[0], (list, tuple))):
            return None
        if not value:
            raise ValueError(f"workload.{name} is an empty list; give at least one value")
        return list(value)

    def points(self) -> Iterator[Point]:
        """Every tree of this workload, swept parameters in the order of the lists.

        Raises:
            ValueError: a parameter out of range.
        """
        for one in self.variants():
            yield from one.batched(Point(one.name(), 0, one.tree()))

    def batched(self, point: Point) -> Iterator[Point]:
        """The point as it is, or a forest of `batch` copies of it with the batch in its name."""
        copies = whole("batch", self.batch, 1)
        if copies > MAX_BATCH:
            raise ValueError(f"workload.batch must be in 1..{MAX_BATCH}, got {copies}")
        if copies == 1:
            yield point
        else:
            tree = topologies.replicate(point.tree, copies)
            yield Point(f"{point.name}_batch{copies}", point.step, tree)
