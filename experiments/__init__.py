"""Entry points of the benchmark, and `bench_tree`, its door from Python (imported on first use)."""

from __future__ import annotations

from typing import Any

__all__ = ["bench_tree"]


def __getattr__(name: str) -> Any:
    if name == "bench_tree":
        from experiments.bench import bench_tree

        return bench_tree
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
