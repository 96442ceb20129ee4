"""What is installed here, which kernels can run on this machine, and why others cannot.

    python -m experiments.doctor [model=llama3_70b dtype=bfloat16 page_size=16]

Takes the overrides of experiments.bench that choose models, dtype, page size and device. Every
kernel of conf/kernel/ is asked for a small tree at those heads; nothing is run. The exit code is 0
whatever is missing: a missing library is a fact about the machine, not an error.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from deft.topologies import few_shot
from experiments.command_line import run_command
from experiments.config import Job, compose_job, kernel_names
from experiments.environment import installed_version, matching_model, pick_device

SAMPLE = few_shot(1024, 16, 32)
# Package -> what it is for here and how to get it.
PACKAGES = {
    "torch": ("everything", 'pip install "torch>=2.11,<2.14"'),
    "triton": ("our GPU kernels", 'pip install "triton>=3.6,<3.9"'),
    "flashinfer-python": ("flashinfer_* kernels", 'pip install -e ".[flashinfer]"'),
    "flash-attn": (
        "flash_attention2 from its package",
        "pip install flash-attn==2.8.3 --no-build-isolation",
    ),
    "fa3-fwd": ("flash_attention3", 'pip install -e ".[fa3]"'),
    "flash-attn-4": ("flash_attention4", 'pip install -e ".[fa4]" (not beside flash-attn)'),
    "nvidia-ml-py": ("clocks and throttle flags in rows", 'pip install -e ".[gpu]"'),
    "jupyterlab": ("notebooks/", 'pip install -e ".[notebooks]"'),
}


@dataclass(frozen=True)
class Diagnosis:
    """Whether one kernel can run here.

    Args:
        kernel: kernel id.
        reason: why it cannot run, in one line; None when it can.
        counted: its IO can be counted here all the same.
    """

    kernel: str
    reason: str | None
    counted: bool


def diagnose(job: Job, device: torch.device) -> list[Diagnosis]:
    """Ask every kernel of a job for SAMPLE, at the job's first model, dtype and page size."""
    shape = job.shape(next(iter(job.models)), job.dtypes[0])
    page_size = job.page_sizes[0]
    findings = []
    for name in job.kernels:
        kernel: Any = job.make_kernel(name)
        try:
            reason = kernel.unsupported(shape, SAMPLE, page_size, device)
        except Exception as error:  # a plugin may raise anything: that is its reason
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        findings.append(Diagnosis(name, reason, _can_count(kernel, shape, page_size)))
    return findings


def _can_count(kernel: Any, shape: Any, page_size: int) -> bool:
    try:
        kernel.io(SAMPLE, shape, page_size)
    except Exception:  # whatever a plugin raises: it cannot count
        return False
    return True


def machine_lines(device: torch.device) -> list[str]:
    """Python, the GPU and its device model, where recordings are looked for."""
    lines = [f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = f"sm_{properties.major}{properties.minor}"
        memory = properties.total_memory / 2**30
        lines.append(f"GPU: {properties.name}, {capability}, {memory:.0f} GiB, CUDA {_cuda()}")
        model = matching_model(properties.name)
        found = f"{model.name}" if model else "none: rows get no floor (docs/timing.md)"
        lines.append(f"device model: {found}")
    else:
        seen = "none that torch sees" if torch.version.cuda else "torch is a build without CUDA"
        lines.append(f"GPU: {seen}; IO is counted, latencies are predicted, small points run")
        lines.append("with an NVIDIA GPU: make install TORCH=cuda")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        lines.append("TRITON_INTERPRET is set: Triton kernels run in the interpreter, slowly")
    return lines


def _cuda() -> str:
    return str(torch.version.cuda)


def package_table() -> Table:
    """Installed versions, and the line that installs what is missing."""
    table = Table(title="packages", title_justify="left")
    for name in ("package", "version", "for", "to install"):
        table.add_column(name, overflow="fold")
    for package, (purpose, line) in PACKAGES.items():
        version = installed_version(package)
        table.add_row(package, version or "-", purpose, "" if version else line)
    return table


def kernel_table(findings: list[Diagnosis], job: Job, device: torch.device) -> Table:
    """One line per kernel."""
    model = next(iter(job.models))
    title = f"kernels on {device.type}, {model}, {job.dtypes[0]}, page size {job.page_sizes[0]}"
    table = Table(title=title, title_justify="left")
    for name in ("kernel", "here", "why not"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        here = "runs" if finding.reason is None else "counted" if finding.counted else "no"
        table.add_row(finding.kernel, here, finding.reason or "")
    return table


def doctor(arguments: list[str]) -> None:
    """Print what this machine can do."""
    overrides = list(arguments)
    if not any(argument.startswith("kernel=") for argument in overrides):
        overrides.append(f"kernel=[{','.join(kernel_names())}]")
    job = compose_job(overrides)
    device = pick_device(job.settings.device)
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 140)
    for line in machine_lines(device):
        console.print(line)
    console.print(package_table())
    console.print(kernel_table(diagnose(job, device), job, device))


def main() -> int:
    """The command; returns its exit code."""
    return run_command(lambda: doctor(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
