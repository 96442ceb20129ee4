"""The main job: kernels x trees -> latency, counted IO, figures.

    python -m experiments.bench +experiment=quick
    python -m experiments.bench kernel=[deft_flatten,radix_attention] workload.width=[16,64]

Every kernel of a point runs on the same q, K and V, and is timed only after the gate found its
output right. Rows go to <results_dir>/<name>/<run_id>.parquet as they are made.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import hydra
import pandas as pd
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from deft.tree import DecodeTree
from experiments.command_line import USER_ERRORS, WANTS_TRACEBACK, print_error, run_command
from experiments.config import CONF_DIR, Job, compose_job, job_of
from experiments.measurement import StickyCudaError
from experiments.results import ResultsError, latest, load_rows
from experiments.row_file import RowFile
from experiments.schema import checked_row, to_table
from experiments.sweep import Sweep, Task
from experiments.variants import kernel_id
from experiments.workload import Point, Workload

LOST_DEVICE = 3  # exit code
BAD_ROWS = 4  # exit code: rows are there, some of them `incorrect` or `error`
CONSOLE = Console(highlight=False, markup=False, emoji=False)  # names and errors hold brackets
if not CONSOLE.is_terminal:
    CONSOLE = Console(highlight=False, markup=False, emoji=False, width=140)  # a log has no width


_failures: list[Exception] = []
_bad_rows: list[int] = []  # of each job of this process


def new_run_id() -> str:
    """UTC time and a random tail: sorts by time, unique across jobs."""
    now = datetime.now(timezone.utc)
    return f"{now:%Y%m%dT%H%M%S}_{uuid.uuid4().hex[:6]}"


@contextmanager
def _progress(sweep: Sweep) -> Iterator[Any]:
    """A bar with the time left; yields the `advance` callback of Sweep.run."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=CONSOLE, transient=True) as bar:
        bar_task = bar.add_task("rows", total=sweep.num_rows)

        def advance(task: Task, rows: int) -> None:
            bar.update(bar_task, advance=rows, description=f"{task.model} {task.point.name}")

        yield advance


def dry_run(sweep: Sweep) -> None:
    """Print the points, unsupported reasons and the estimated minutes."""
    table = Table(title="dry run: nothing was run", title_justify="left")
    for name in ("workload", "step", "model", "dtype", "page", "queries", "nodes", "tokens", "how"):
        table.add_column(name, overflow="fold")
    table.add_column("seconds", justify="right")
    table.add_column("unsupported", overflow="fold")
    total = 0.0
    for task in sweep.tasks:
        seconds, tree = sweep.estimated_s(task), task.point.tree
        total += seconds
        reasons = sweep.unsupported_reasons(task) if task.is_measured else {}
        table.add_row(
            task.point.name,
            *map(str, (task.point.step, task.model, task.shape.dtype, task.page_size)),
            *map(str, (tree.num_qo, tree.num_nodes, tree.num_tokens)),
            "measured" if task.is_measured else "counted",
            f"{seconds:.1f}",
            "; ".join(f"{name}: {reason}" for name, reason in reasons.items()),
        )
    CONSOLE.print(table)
    CONSOLE.print(
        f"{len(sweep.tasks)} points x {len(sweep.job.kernels)} kernels = {sweep.num_rows} rows, "
        f"about {total / 60:.1f} minutes on {sweep.device.type}"
    )


def dump_trees(sweep: Sweep, folder: Path) -> None:
    """Write each point's tree as JSON, in the form that workload=file reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in sweep.tasks:
        task.point.tree.save(folder / f"{task.point.name}_step{task.point.step}.json")
    CONSOLE.print(f"trees: {folder}/")


def _done_keys(folder: Path) -> frozenset[str]:
    try:
        return frozenset(load_rows(folder)["resume_key"].dropna())
    except ResultsError:  # no rows yet: everything is still to be done
        return frozenset()


def _pick_baseline(df: pd.DataFrame, wanted: str, entries: Iterable[str]) -> str:
    """The wanted kernel, or without a row of it the job's first kernel that has a usable one."""
    usable = set(df["kernel"][df["status"].isin(["ok", "counted"])])
    chosen = next((k for k in map(kernel_id, entries) if k in usable), wanted)
    if wanted in set(df["kernel"]) or chosen == wanted:
        return wanted
    CONSOLE.print(f"no {wanted} rows: speed-ups are against {chosen} (baseline=NAME chooses)")
    return chosen


def report(df: pd.DataFrame, job: Job, folder: Path) -> None:
    """Closing tables, rows that are neither measured nor counted, and figures."""
    from experiments.summary import summary_tables

    baseline = _pick_baseline(df, job.settings.baseline, job.kernels)
    for table in summary_tables(df, baseline):
        CONSOLE.print(table)
    counts = df["status"].value_counts()
    CONSOLE.print("rows: " + ", ".join(f"{count} {status}" for status, count in counts.items()))
    _bad_rows.append(int(df["status"].isin(["incorrect", "error"]).sum()))
    bad = df[~df["status"].isin(["ok", "counted"])]
    for (kernel, status), rows in bad.groupby(["kernel", "status"], sort=False):
        detail = rows["status_detail"].iloc[0]
        CONSOLE.print(f"  {kernel}: {status} at {len(rows)} points, first: {detail}", style="red")
    if job.settings.walkthrough:
        from experiments import walkthrough

        CONSOLE.print(walkthrough.table(walkthrough.run_walkthrough(folder / "walkthrough")))
        CONSOLE.print(f"walkthrough: {folder / 'walkthrough'}/")
    if job.settings.figures:
        from experiments.figures import make_figures

        paths = make_figures(df, folder / "figures")
        CONSOLE.print(f"figures: {len(paths)} files in {folder / 'figures'}/")


def run_job(job: Job) -> Path | None:
    """Run a job: rows to disk, tables to the terminal, figures.

    Returns:
        The parquet file, None when nothing was to be done.

    Raises:
        ValueError: a configuration or results folder that cannot be used.
        StickyCudaError: the GPU was lost on the way; rows so far are on disk.
    """
    settings = job.settings
    run_id = new_run_id()
    sweep = Sweep(job, run_id)
    folder = Path(settings.results_dir) / settings.name
    if settings.dry_run:
        dry_run(sweep)
        if settings.dump_tree:
            dump_trees(sweep, folder / "trees")
        return None
    rows = RowFile(folder / f"{run_id}.parquet")
    if settings.dump_tree:
        dump_trees(sweep, folder / "trees")
    done = _done_keys(folder) if settings.resume else frozenset()
    try:
        with _progress(sweep) as advance:
            sweep.run(rows.add, done, advance)
    except KeyboardInterrupt:
        kept = f"{len(rows.rows)} rows are in {rows.path}"
        CONSOLE.print(f"interrupted: {kept}; the same command with resume=true goes on")
        raise
    finally:
        rows.write()
    if not rows.rows and not done:
        return None
    if not rows.rows:
        CONSOLE.print(f"nothing to do: all {sweep.num_rows} rows are in {folder} already")
    df = latest(load_rows(folder)) if settings.resume else load_rows(rows.path)
    report(df, job, folder)
    if rows.rows:
        CONSOLE.print(f"table: {rows.path}", soft_wrap=True)
    return rows.path if rows.rows else None


class _GivenTree(Workload):
    """A tree that the caller holds."""

    def __init__(self, tree: DecodeTree, name: str) -> None:
        super().__init__()
        self._point = Point(name, 0, tree)

    def points(self) -> Iterator[Point]:
        """See Workload."""
        yield self._point


def bench_tree(
    tree: DecodeTree,
    kernels: str | Sequence[str],
    model: str = "llama3_8b",
    *,
    name: str | None = None,
    overrides: Sequence[str] = (),
    **options: Any,
) -> pd.DataFrame:
    """Compare kernels on one tree from Python; nothing is written to disk.

    On a CPU a tree above measure_max_flops or measure_max_tokens is counted, not timed.

    Args:
        tree: who attends to what.
        kernels: kernel ids of conf/kernel/, or one of them.
        model: a name of conf/model/.
        name: workload column of the rows.
        overrides: more command-line overrides, such as "kernel.deft_flatten.block_kv=64".
        options: top-level keys of conf/bench.yaml or a timing choice, such as page_size=16,
            dtype="bfloat16", timing="eager", device="cpu".

    Returns:
        One row per kernel, columns as experiments.schema.COLUMNS.

    Raises:
        ValueError: an unknown kernel, model or option, or a shape that no kernel can run.
    """
    if not isinstance(tree, DecodeTree):
        raise ValueError(f"tree must be a DecodeTree, got {type(tree).__name__}")
    kernels = [kernels] if isinstance(kernels, str) else list(kernels)
    chosen = [f"kernel=[{','.join(kernels)}]", f"model={model}"]
    given = [f"{key}={'null' if value is None else value}" for key, value in options.items()]
    composed = compose_job([*chosen, *given, *overrides])
    workload = _GivenTree(tree, name or f"tree_{tree.num_nodes}_{tree.num_qo}_{tree.num_tokens}")
    job = Job(composed.kernels, composed.models, workload, composed.settings, composed.overrides)
    rows: list[dict[str, Any]] = []
    call = f"experiments.bench_tree(tree, {kernels}, {model!r}, overrides={[*given, *overrides]})"
    Sweep(job, new_run_id(), call).run(lambda row: rows.append(checked_row(row)))
    frame: pd.DataFrame = to_table(rows).to_pandas()
    return frame


@hydra.main(config_path=str(CONF_DIR), config_name="bench", version_base="1.3")
def _hydra_main(cfg: DictConfig) -> None:
    # Errors are told here, not by Hydra, and the other jobs of a --multirun still run.
    try:
        run_job(job_of(cfg, HydraConfig.get().overrides.task))
    except StickyCudaError as error:
        print_error(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(LOST_DEVICE)  # destructors that call CUDA could hang or abort
    except USER_ERRORS as error:
        if WANTS_TRACEBACK:
            raise
        print_error(error)
        _failures.append(error)


def main() -> int:
    """The command; returns its exit code."""
    _failures.clear()
    _bad_rows.clear()
    code = run_command(_hydra_main) or int(bool(_failures))
    return code or (BAD_ROWS if any(_bad_rows) else 0)


if __name__ == "__main__":
    sys.exit(main())
