"""Host time of planning and binding, by strategy and tree; needs no GPU.

    python scripts/plan_time.py [--repeats 15]

Columns: plan (tree to Plan), validate, io, bind (slots, tables, upload to the CPU) in ms:
medians after a warm-up, on a fresh tree each time, so nothing that a tree caches is reused.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from deft import PLANNERS, DecodeTree, HeadShape, PagedKVCache, plan_tree
from deft.topologies import from_choices, layered

TREES = {
    "1024 leaves x 9 levels": lambda: layered(
        [1, 2, 4, 8, 16, 32, 64, 128, 1024], [256, 128, 64, 16, 16, 16, 16, 16, 16]
    ),
    "64-token speculative": lambda: from_choices(
        [[i] for i in range(8)] + [[i, j] for i in range(8) for j in range(7)], 1024
    ),
}


def timed_ms(function: Callable[[], object]) -> float:
    """Wall time of one call."""
    since = time.perf_counter()
    function()
    return (time.perf_counter() - since) * 1e3


def one_sample(
    make_tree: Callable[[], DecodeTree], strategy: str, shape: HeadShape, cache: PagedKVCache
) -> list[float]:
    """Milliseconds of plan, validate, io and bind, once."""
    tree = make_tree()
    plan_ms = timed_ms(partial(plan_tree, tree, shape, strategy))
    plan = plan_tree(tree, shape, strategy)
    return [
        plan_ms,
        timed_ms(plan.validate),
        timed_ms(plan.io),
        timed_ms(partial(plan.bind, cache)),
    ]


def measure(
    make_tree: Callable[[], DecodeTree], strategy: str, shape: HeadShape, repeats: int
) -> list[float]:
    """Medians over fresh trees, after two to warm up."""
    cache = PagedKVCache(shape, make_tree().num_tokens, 1)
    cache.insert_tree(make_tree())
    samples = [one_sample(make_tree, strategy, shape, cache) for _ in range(repeats + 2)][2:]
    return [statistics.median(column) for column in zip(*samples, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    shape = HeadShape(32, 8, 128)
    print(f"{'tree':24} {'strategy':12} {'plan':>8} {'validate':>8} {'io':>8} {'bind':>8}  (ms)")
    for name, make_tree in TREES.items():
        for strategy in PLANNERS:
            row = measure(make_tree, strategy, shape, args.repeats)
            print(f"{name:24} {strategy:12} " + " ".join(f"{ms:8.2f}" for ms in row))


if __name__ == "__main__":
    main()
