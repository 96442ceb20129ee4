"""The loop of a job: (model x dtype x page size x tree), and every kernel on the same inputs."""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch

from deft.device_model import DeviceModel
from deft.shape import HeadShape
from experiments import environment
from experiments.config import ConfigError, Job, timing_key
from experiments.gate import Case, make_case
from experiments.measurement import (
    StickyCudaError,
    counted_columns,
    failed_columns,
    is_device_lost,
    measured_columns,
    time_limit,
)
from experiments.results import code_hash, resume_key
from experiments.schema import checked_row, to_table
from experiments.variants import kernel_id, variant_of
from experiments.workload import Point

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One point at one head layout: what all kernels of the job are compared on."""

    model: str
    shape: HeadShape
    page_size: int
    point: Point
    is_measured: bool


class Sweep:
    """A job on this machine.

    Args:
        job: what to run.
        run_id: names the job in its rows.
        repro_command: what makes the rows again; default: the bench with the job's overrides.

    Raises:
        ValueError: an unknown device or device model, or a workload parameter out of range.
    """

    def __init__(self, job: Job, run_id: str, repro_command: str | None = None) -> None:
        self.job = job
        self.device = environment.pick_device(job.settings.device)
        if self.device.type == "cuda" and job.timing.timer == "cpu":
            raise ConfigError("timing=cpu times on the CPU: add device=cpu, or use timing=graph")
        self.device_model = self._pick_device_model()
        self.tasks = list(self._tasks())
        self._last_error: BaseException | None = None
        command = ["python", "-m", "experiments.bench", *job.overrides]
        self._environment: Row = {
            **environment.device_columns(self.device),
            **environment.code_columns(),
            **environment.ceiling_columns(self.device_model),
            "overrides": list(job.overrides),
            "repro_command": repro_command or shlex.join(command),
            "seed": job.settings.seed,
            "run_id": run_id,
            "code_hash": code_hash(),
        }

    def _pick_device_model(self) -> DeviceModel | None:
        """Floors of measured rows are of this GPU; without one, of the device asked for."""
        if self.device.type == "cuda":
            return environment.matching_model(torch.cuda.get_device_name(self.device))
        return DeviceModel.load(self.job.settings.device_model)

    def _tasks(self) -> Iterator[Task]:
        job, settings = self.job, self.job.settings
        points = list(job.workload.points())
        for model in job.models:
            for dtype in job.dtypes:
                shape = job.shape(model, dtype)
                for page_size in job.page_sizes:
                    for point in points:
                        is_small = (
                            point.tree.flops(shape) <= settings.measure_max_flops
                            and point.tree.num_tokens <= settings.measure_max_tokens
                        )
                        is_measured = self.device.type == "cuda" or is_small
                        yield Task(model, shape, page_size, point, is_measured)

    @property
    def num_rows(self) -> int:
        """Rows of the whole job."""
        return len(self.tasks) * len(self.job.kernels)

    def key(self, task: Task, kernel: str) -> str:
        """The resume key of one row."""
        shape, model = task.shape, self.device_model
        return resume_key(
            kernel=kernel_id(kernel),
            kernel_config=self.job.kernels[kernel],
            workload=task.point.name,
            step=task.point.step,
            num_qo_heads=shape.num_qo_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            page_size=task.page_size,
            timing=timing_key(self.job),
            gpu=self._environment["gpu"],
            code_hash=self._environment["code_hash"],
            device_model=repr(model) if model else None,
            model=task.model,
        )

    def kernel_order(self, task: Task) -> list[str]:
        """Kernels of a task, shuffled by seed and point: no kernel always runs on a warm clock."""
        order = sorted(self.job.kernels)
        place = f"{self.job.settings.seed} {task.model} {task.point.name} {task.point.step}"
        random.Random(place).shuffle(order)
        return order

    def run(
        self,
        keep: Callable[[Row], None],
        done: frozenset[str] = frozenset(),
        advance: Callable[[Task, int], None] = lambda task, rows: None,
    ) -> None:
        """Make every row whose key is not in `done`.

        Args:
            keep: receives each row as it is made.
            advance: receives the task and how many of its rows were made or skipped.

        Raises:
            StickyCudaError: the GPU no longer answers; the row that met it was kept.
        """
        with environment.one_thread() if self.device.type == "cpu" else nullcontext():
            self._run(keep, done, advance)

    def _run(
        self,
        keep: Callable[[Row], None],
        done: frozenset[str],
        advance: Callable[[Task, int], None],
    ) -> None:
        for task in self.tasks:
            todo = [name for name in self.kernel_order(task) if self.key(task, name) not in done]
            advance(task, len(self.job.kernels) - len(todo))
            case = self._case(task) if task.is_measured and todo else None
            for name in todo:
                row = self._row(task, name, case)
                keep(row)
                advance(task, 1)
                if self._last_error is not None:
                    raise StickyCudaError(
                        f"{name} at {task.point.name}: {row['status_detail']}; the GPU context is "
                        "lost. Rows so far are kept; go on with resume=true (and without this "
                        "kernel if it happens again)"
                    )
            del case  # free this pool before the next one is made

    def _case(self, task: Task) -> Case | Row:
        """Inputs and oracle of a task, or the status columns that tell why there are none."""
        try:
            case = make_case(
                task.point.tree,
                task.shape,
                task.page_size,
                self.job.settings.seed,
                self.device,
            )
            _ = case.reference, case.census
        except (MemoryError, RuntimeError) as error:
            columns = failed_columns(error)
            return {**columns, "status_detail": f"inputs: {columns['status_detail']}"}
        return case

    def _identity(self, task: Task, kernel: str) -> Row:
        shape, tree = task.shape, task.point.tree
        return {
            "kernel": kernel_id(kernel),
            "variant": variant_of(kernel) or None,
            "kernel_config": self.job.kernels[kernel],
            "workload": task.point.name,
            "step": task.point.step,
            "model": task.model,
            "num_qo_heads": shape.num_qo_heads,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "page_size": task.page_size,
            "dtype": shape.dtype,
            "num_qo": tree.num_qo,
            "num_nodes": tree.num_nodes,
            "num_tokens": tree.num_tokens,
            "sharing_factor": tree.sharing_factor,
        }

    def _row(self, task: Task, name: str, case: Case | Row | None) -> Row:
        row = {**self._identity(task, name), **self._environment}
        try:
            with time_limit(self.job.settings.kernel_timeout_s):
                outcome = self._outcome(task, name, case)
            to_table([checked_row({**row, **outcome})])  # what no file can hold is an error here
            row.update(outcome)
        # Whatever a kernel raises is its row, and the sweep goes on; so does what calls sys.exit.
        except (Exception, SystemExit) as error:
            row.update(failed_columns(error))
            if is_device_lost():
                self._last_error = error  # freeing the tensors of its frames would abort now
        row["resume_key"] = self.key(task, name)
        row["timestamp_utc"] = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        return row

    def _outcome(self, task: Task, name: str, case: Case | Row | None) -> Row:
        kernel = self.job.make_kernel(name)
        tree, shape = task.point.tree, task.shape
        if case is not None:
            reason = kernel.unsupported(shape, tree, task.page_size, self.device)
            if reason:
                return {"status": "unsupported", "status_detail": reason}
        columns = counted_columns(kernel, tree, shape, task.page_size, self.device_model)
        if isinstance(case, Case):
            detail = columns.get("status_detail")
            columns.update(measured_columns(kernel, case, self.job.timing))
            columns["status_detail"] = columns["status_detail"] or detail
            columns.update(environment.clock_columns(self.device))
        else:
            columns.update(case or {"status": "counted"})
        return columns

    def unsupported_reasons(self, task: Task) -> dict[str, str]:
        """Kernel -> reason, for kernels that cannot run a task."""
        reasons = {}
        for name in self.job.kernels:
            kernel, tree = self.job.make_kernel(name), task.point.tree
            try:
                reason = kernel.unsupported(task.shape, tree, task.page_size, self.device)
            except (Exception, SystemExit) as error:  # the run would give it an error row
                reason = failed_columns(error)["status_detail"]
            if reason:
                reasons[name] = reason
        return reasons

    def estimated_s(self, task: Task) -> float:
        """Rough seconds that a task takes, from its FLOPs and what a row costs beside them."""
        flops, kernels = task.point.tree.flops(task.shape), len(self.job.kernels)
        if not task.is_measured:
            return 0.05 * kernels
        if self.device.type == "cuda":
            return 2.0 + 1.0 * kernels
        # fp64 oracle once, then gate and samples at a few GFLOP/s of a CPU core.
        runs = 3 + self.job.timing.repeats
        return flops / 1e9 + kernels * (0.3 + min(runs * flops / 3e9, self.job.timing.budget_s * 2))
