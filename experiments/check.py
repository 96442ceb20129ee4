"""The gate alone: is a kernel right on small odd trees?

    python -m experiments.check kernel=deft_flatten
    python -m experiments.check all device=cpu dtype=float32

Takes the overrides of experiments.bench that choose kernels, models, dtype, page size and device.
The exit code is 1 when a kernel is wrong or raises.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from deft import topologies
from deft.shape import HeadShape
from deft.tree import DecodeTree
from experiments.command_line import run_command
from experiments.config import ConfigError, Job, compose_job, kernel_names
from experiments.environment import one_thread, pick_device
from experiments.gate import check_kernel, make_case
from experiments.measurement import failed_columns

# Small odd head layouts: a group that is no power of two, no group, one KV head.
CHECK_MODELS = "model=[tiny_4_2]"
GOOD = ("ok", "unsupported")


def odd_trees() -> dict[str, DecodeTree]:
    """Few small trees with the cases that break kernels."""
    return {
        "few_shot": topologies.few_shot(37, 3, 5),
        "tile borders": topologies.layered([1, 2, 5], [64, 17, 1]),
        "one query": topologies.chain([130]),
        "token tree": topologies.from_choices([[0], [1], [0, 0], [0, 1]], 33),
        "empty nodes": DecodeTree(
            np.array([-1, 0, 1, 1, 3]), np.array([19, 0, 3, 0, 2]), np.array([2, 3, 4, 1])
        ),
        "query sees nothing": DecodeTree(
            np.array([-1, 0, -1]), np.array([0, 0, 7]), np.array([1, 2])
        ),
        "strict prefix": DecodeTree(np.array([-1, 0]), np.array([21, 9]), np.array([0, 1, 0])),
        "cut nodes": DecodeTree(
            np.array([-1, 0]), np.array([11, 9]), np.array([1, 1, 0]), np.array([9, 3, 5])
        ),
        "70 queries": topologies.few_shot(16, 70, 1),
        "forest": topologies.random_tree(12, 3, 20, num_roots=3),
    }


@dataclass(frozen=True)
class Finding:
    """How one kernel did on one tree."""

    kernel: str
    tree: str
    shape: HeadShape
    page_size: int
    status: str
    detail: str
    row_rms_err: float | None


def check_one(
    kernel: Any, tree: DecodeTree, shape: HeadShape, page_size: int, device: torch.device
) -> tuple[str, str, float | None]:
    """(status, detail, row RMS error) of a kernel on a tree with scattered pages."""
    try:
        reason = kernel.unsupported(shape, tree, page_size, device)
        if reason:
            return "unsupported", reason, None
        case = make_case(tree, shape, page_size, device=device, scatter_seed=1)
        kernel.plan(tree, case.cache)
        verdict = check_kernel(kernel, case)
    except (Exception, SystemExit) as error:  # a kernel may raise anything: that is its finding
        columns = failed_columns(error)
        return columns["status"], columns["status_detail"], None
    return "incorrect" if verdict.reason else "ok", verdict.reason or "", verdict.row_rms_err


def check_job(job: Job, trees: dict[str, DecodeTree] | None = None) -> list[Finding]:
    """Every kernel of a job on every tree (odd_trees()), at the job's heads, dtypes and pages."""
    trees = odd_trees() if trees is None else trees
    device = pick_device(job.settings.device)
    with one_thread() if device.type == "cpu" else nullcontext():
        return list(_findings(job, trees, device))


def _findings(job: Job, trees: dict[str, DecodeTree], device: torch.device) -> Iterator[Finding]:
    for kernel in job.kernels:
        for model in job.models:
            for dtype in job.dtypes:
                shape = job.shape(model, dtype)
                for page_size in job.page_sizes:
                    for name, tree in trees.items():
                        made = job.make_kernel(kernel)
                        outcome = check_one(made, tree, shape, page_size, device)
                        yield Finding(kernel, name, shape, page_size, *outcome)


def table_of(findings: list[Finding]) -> Table:
    """One line per kernel, head layout, dtype and page size; failures named."""
    table = Table(title="gate: fp64 oracle and census on small odd trees", title_justify="left")
    for name in ("kernel", "heads", "page", "right", "worst row RMS", "what is wrong"):
        table.add_column(name, overflow="fold")
    groups: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in findings:
        key = (finding.kernel, finding.shape, finding.page_size)
        groups.setdefault(key, []).append(finding)
    for (kernel, shape, page_size), group in groups.items():
        heads = f"{shape.num_qo_heads}/{shape.num_kv_heads} x {shape.head_dim} {shape.dtype}"
        errors = [f.row_rms_err for f in group if f.row_rms_err is not None]
        notes = [f"{f.tree}: {f.status}, {f.detail}" for f in group if f.status != "ok"]
        ran = sum(f.status != "unsupported" for f in group)
        right = sum(f.status == "ok" for f in group)
        worst = f"{max(errors):.1e}" if errors else "-"
        is_bad = any(f.status not in GOOD for f in group)
        cells = (
            kernel,
            heads,
            str(page_size),
            f"{right} of {ran}" if ran else "none ran",
            worst,
            "\n".join(notes),
        )
        table.add_row(*cells, style="red" if is_bad else None)
    return table


def check(arguments: list[str]) -> int:
    """Run the command with its arguments; returns the number of failures.

    Raises:
        ConfigError: no kernel was named.
    """
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    overrides = [argument for argument in arguments if argument != "all"]
    if "all" in arguments:
        overrides.append(f"kernel=[{','.join(kernel_names())}]")
    if not any(override.startswith("kernel=") for override in overrides):
        raise ConfigError(f"name a kernel: kernel=NAME or all; there are {kernel_names()}")
    if not any(override.startswith("model=") for override in overrides):
        overrides.insert(0, CHECK_MODELS)
    findings = check_job(compose_job(overrides))
    width = None if sys.stdout.isatty() else 140
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    console.print(table_of(findings))
    return sum(finding.status not in GOOD for finding in findings)


def main() -> int:
    """The command; returns its exit code."""
    failures = 0

    def run() -> None:
        nonlocal failures
        failures = check(sys.argv[1:])

    return run_command(run) or int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
