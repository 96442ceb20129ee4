"""Kernels that go wrong on purpose, for the tests of the gate and of the sweep."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deft import TreeAttention
from deft.kv_cache import PagedKVCache
from deft.reference import reference_attention
from deft.shape import HeadShape
from deft.tree import DecodeTree


class DropsOneToken(TreeAttention):
    """Attends to every token but the first of the first node, as an off-by-one kernel does."""

    def plan(self, tree: DecodeTree, cache: PagedKVCache, nodes: Any = None) -> None:
        """Remember where the tokens lie."""
        super().plan(tree, cache, nodes)
        self._slots = torch.from_numpy(cache.slots(np.arange(tree.num_nodes))[1][1:])
        lengths = tree.node_len.copy()
        lengths[0] -= 1
        self._tree = tree.with_lengths(lengths)

    def run(
        self, q: Tensor, layer: int = 0, *, out: Tensor | None = None, lse: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Exact attention over one token too few."""
        cache = self.bound.cache
        k, v = (pool[layer].flatten(0, 1)[self._slots] for pool in (cache.k_cache, cache.v_cache))
        o, lse_out = reference_attention(q, k, v, self._tree)
        return o.to(q.dtype), lse_out.float()


class WritesNothing(TreeAttention):
    """Leaves the output buffer as it was."""

    def run(
        self, q: Tensor, layer: int = 0, *, out: Tensor | None = None, lse: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the buffers untouched."""
        return (torch.zeros_like(q) if out is None else out), lse


class TurnsWrong(TreeAttention):
    """Right for its first runs, wrong from the fifth on, as a kernel with stale state is."""

    runs = 0

    def run(self, q: Tensor, layer: int = 0, **buffers: Any) -> tuple[Tensor, Tensor | None]:
        """Run, and spoil the output later on."""
        self.runs += 1
        o, lse = super().run(q, layer, **buffers)
        return (o.mul_(1.1) if self.runs >= 5 else o), lse


class Raises(TreeAttention):
    """Fails in run(), with the error named by `kind`."""

    def __init__(self, kind: str = "RuntimeError", **options: Any) -> None:
        super().__init__(**options)
        self.kind = kind

    def run(self, q: Tensor, layer: int = 0, **buffers: Any) -> tuple[Tensor, Tensor | None]:
        """Raise."""
        errors = {"oom": torch.OutOfMemoryError, "exit": SystemExit}
        raise errors.get(self.kind, RuntimeError)(f"{self.kind} on purpose\nsecond line")


class TellsNonsense(TreeAttention):
    """Runs right and tells a time that no column can hold."""

    layout_us: Any = "long"


class CannotSay(TreeAttention):
    """Fails before it says whether it fits."""

    def unsupported(
        self, shape: HeadShape, tree: DecodeTree, page_size: int, device: Any
    ) -> str | None:
        """Raise what is no user error."""
        raise KeyError("arch")


class EndsTheProcess(TreeAttention):
    """Leaves the process when it is made."""

    def __init__(self, **options: Any) -> None:
        raise SystemExit(0)


class FailsSilently(TreeAttention):
    """Raises an error without a text when it is made."""

    def __init__(self, **options: Any) -> None:
        raise ValueError


class LosesTheDevice(TreeAttention):
    """Makes a device-side assertion fail, after which CUDA answers no call of this process."""

    def run(self, q: Tensor, layer: int = 0, **buffers: Any) -> tuple[Tensor, Tensor | None]:
        """Index out of bounds on the GPU."""
        beyond = torch.tensor([10], device=q.device)
        torch.zeros(4, device=q.device)[beyond]
        torch.cuda.synchronize()
        raise AssertionError("the device survived")


class Sleeps(TreeAttention):
    """Takes forever in run()."""

    def run(self, q: Tensor, layer: int = 0, **buffers: Any) -> tuple[Tensor, Tensor | None]:
        """Sleep in short naps, as a long Python loop would return to the interpreter."""
        for _ in range(1000):
            time.sleep(0.01)
        return super().run(q, layer, **buffers)


class NeverFits(TreeAttention):
    """Refuses every tree."""

    def unsupported(
        self, shape: HeadShape, tree: DecodeTree, page_size: int, device: Any
    ) -> str | None:
        """A reason."""
        return f"{np.int64(tree.num_qo)} queries are too many"
