"""Every group x head_dim x page size x strategy x dtype on one GPU against the fp64 oracle.

    python scripts/device/full_product.py --out DIR [--workers 12] [--dtypes bfloat16]

Groups 1-8, 12, 16; head_dim 64-256; pages 1, 16, 64; fp16, bf16; a tree with tile-edge lengths,
empty nodes, inner queries, in a shuffled pool whose free slots are NaN. Row error and the q = 0
mass check. Workers share the GPU; most of the time is compilation.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import multiprocessing
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from deft.attention import TreeAttention
from deft.reference import reference_attention
from deft.shape import HeadShape
from deft.testing import (
    LIMITS,
    assert_mass,
    make_cache,
    make_inputs,
    row_rms_error,
)
from deft.topologies import forest, layered
from tests.test_kernels import GROUPS, HEAD_DIMS, PAGES
from tests.trees import CAUSAL, ODD, STRATEGIES

DTYPES = ("float16", "bfloat16")
TREE = forest([ODD, layered([1, 3, 40], [130, 63, 5])])


def check_layout(layout: tuple[int, int, str]) -> list[list[object]]:
    """Rows of every page size and strategy for one (group, head_dim, dtype)."""
    group, head_dim, dtype = layout
    shape = HeadShape(group * 2, 2, head_dim, dtype)
    rows: list[list[object]] = []
    for tree_name, tree in (("forest", TREE), ("causal", CAUSAL)):
        inputs = make_inputs(tree, shape, seed=group * 1000 + head_dim, device="cuda")
        ref, _ = reference_attention(inputs.q, inputs.k, inputs.v, tree)
        for page in PAGES:
            cache = make_cache(
                tree,
                shape,
                inputs,
                page,
                device="cuda",
                poison=True,
                spare_pages=3,
                scatter_seed=page,
            )
            for strategy, (name, options) in STRATEGIES.items():
                kernel = TreeAttention(name, backend="triton", **options)
                kernel.plan(tree, cache)
                out = torch.full_like(inputs.q, float("nan"))
                lse = torch.full(out.shape[:2], float("nan"), device="cuda")
                kernel.run(inputs.q, out=out, lse=lse)
                error, mass = row_rms_error(out, ref), "ok"
                kernel.run(torch.zeros_like(inputs.q), out=out, lse=lse)
                try:
                    assert_mass(out, lse, inputs.k, inputs.v, tree, dtype)
                except AssertionError as problem:
                    mass = str(problem)
                is_right = error <= LIMITS[dtype] and mass == "ok"
                rows.append(
                    [group, head_dim, page, dtype, tree_name, strategy, error, mass, is_right]
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    args = parser.parse_args()
    begin = time.time()
    # Large head dims compile longest: they go first.
    layouts = sorted(itertools.product(GROUPS, HEAD_DIMS, args.dtypes), key=lambda x: -x[1])
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        rows = [row for part in pool.imap_unordered(check_layout, layouts, 1) for row in part]
    Path(args.out).mkdir(parents=True, exist_ok=True)
    with open(Path(args.out) / "full_product.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["group", "head_dim", "page", "dtype", "tree", "strategy", "row_rms", "mass", "right"]
        )
        writer.writerows(rows)
    for dtype in args.dtypes:
        mine = [row for row in rows if row[3] == dtype]
        worst = max(float(row[6]) for row in mine)
        right = sum(bool(row[-1]) for row in mine)
        limit = LIMITS[dtype]
        print(f"{dtype}: {right} of {len(mine)} right, worst row RMS {worst:.2e} (limit {limit})")
    wrong = [row for row in rows if not row[-1]]
    for row in wrong[:20]:
        print("WRONG", row)
    print(f"{time.time() - begin:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
