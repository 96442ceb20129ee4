"""`python -m experiments.paper_check`: our paper-convention counter against the paper's records.

Prints every exact total and every recorded run with its KV bytes beside ours. Exit status 1 when an
exact total is missed, 2 when the recorded data cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from experiments.paper_runs import CLAIMED_METHODS, Oracle, PaperRun, load_paper_runs, oracles


def _print_oracles(checked: Sequence[Oracle]) -> None:
    print("Exact totals (bytes, paper convention, 32 layers x 32 query heads x head_dim 128)")
    print(f"{'replay':<22} {'method':<13} {'published':>20} {'counted':>20}  match")
    for one in checked:
        verdict = "yes" if one.is_exact else "NO"
        print(f"{one.replay:<22} {one.method:<13} {one.want:>20,} {one.got:>20,}  {verdict}")


def _print_runs(runs: Sequence[PaperRun], only_mismatches: bool) -> int:
    """Print the runs; return how many of the claimed methods' rows match."""
    print("\nRecorded runs: KV_IO and ours, bytes")
    print(f"{'run':<58} {'recorded':>20} {'counted':>20}  match")
    matched = {True: 0, False: 0}
    for run in runs:
        counted = run.counted_kv_bytes()
        is_exact = counted == run.kv_bytes
        matched[run.method in CLAIMED_METHODS] += is_exact
        if is_exact and only_mismatches:
            continue
        verdict = "yes" if is_exact else f"NO, counted / recorded = {counted / run.kv_bytes:.4f}"
        print(f"{run.name:<58} {run.kv_bytes:>20,} {counted:>20,}  {verdict}")
    claimed = sum(run.method in CLAIMED_METHODS for run in runs)
    print(f"\n{matched[True]} of {claimed} rows of {', '.join(CLAIMED_METHODS)} match to the byte")
    print(f"{matched[False]} of {len(runs) - claimed} rows of tree, tree_index match to the byte")
    masked = [run for run in runs if run.method == "flatten"]
    exact = sum(run.counted_mask_bytes() == run.mask_bytes for run in masked)
    print(f"{exact} of {len(masked)} bit-mask totals (Mask_IO of flatten) match to the byte")
    return matched[True]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m experiments.paper_check", description=__doc__)
    parser.add_argument(
        "--mismatches", action="store_true", help="of the recorded runs, show only what differs"
    )
    options = parser.parse_args(arguments)
    try:
        checked = list(oracles())
        _print_oracles(checked)
        _print_runs(load_paper_runs(), options.mismatches)
    except ValueError as error:
        print(f"paper_check: {error}", file=sys.stderr)
        return 2
    missed = sum(not one.is_exact for one in checked)
    print(f"{len(checked) - missed} of {len(checked)} exact totals reproduced")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
