"""Where a row was made: device, driver, clocks, versions, commit. One dict of row columns.

Clocks and throttle flags come from NVML when the `gpu` extra (nvidia-ml-py) is installed, else from
nvidia-smi; where neither answers they stay null.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deft.device_model import DeviceModel, available

REPO_DIR = Path(__file__).resolve().parent.parent
SMI_PERIOD_S = 10
# NVML's reasons that mean "slower than asked for"; idle and application clocks are not among them.
THROTTLE_BITS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}


def pick_device(wanted: str) -> torch.device:
    """The device of `device=auto|cpu|cuda`.

    Raises:
        ValueError: cuda was asked for and torch sees none.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: torch sees no CUDA GPU here; use device=cpu or device=auto")
    use_gpu = wanted != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one CPU thread: on several, small operations wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def installed_version(package: str) -> str | None:
    """Version of a distribution, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _command(*words: str) -> str | None:
    try:
        done = subprocess.run(words, cwd=REPO_DIR, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def code_columns() -> dict[str, Any]:
    """Versions, commit and whether tracked files differ from it (null outside a git checkout).

    TREE_BENCH_COMMIT names the commit of a copy that has no history; it then counts as clean.
    """
    status = _command("git", "status", "--porcelain", "--untracked-files=no")
    commit = _command("git", "rev-parse", "HEAD")
    named = os.environ.get("TREE_BENCH_COMMIT") or None
    if commit is None:
        status = "" if named else None
    return {
        "torch_version": torch.__version__,
        "triton_version": installed_version("triton"),
        "python_version": platform.python_version(),
        "commit": commit or named,
        "dirty": None if status is None else bool(status),
    }


def device_columns(device: torch.device) -> dict[str, Any]:
    """GPU name, SMs and driver; on a CPU the name is "cpu"."""
    if device.type != "cuda":
        return {"gpu": "cpu", "num_sms": None, "driver": None}
    properties = torch.cuda.get_device_properties(device)
    driver = _smi(device, "driver_version")
    return {
        "gpu": properties.name,
        "num_sms": properties.multi_processor_count,
        "driver": driver[0] if driver else None,
    }


def _uuid(device: torch.device) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


@cache
def _smi_lately(device: torch.device, period: int) -> list[str] | None:
    """Clock and reasons by nvidia-smi, whose start takes longer than most rows: once a period."""
    return _smi(device, "clocks.sm", "clocks_throttle_reasons.active")


def _smi(device: torch.device, *fields: str) -> list[str] | None:
    query = f"--query-gpu={','.join(fields)}"
    answer = _command("nvidia-smi", f"--id={_uuid(device)}", query, "--format=csv,noheader,nounits")
    return [part.strip() for part in answer.split(",")] if answer else None


def clock_columns(device: torch.device) -> dict[str, Any]:
    """SM clock in MHz and the active reasons for slowing down, read now ("" = none)."""
    if device.type != "cuda":
        return {}
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(_uuid(device))
        clock: Any = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        reasons: Any = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except Exception:  # no package, no permission, no such counter: ask the command line tool
        answer = _smi_lately(device, int(time.monotonic() / SMI_PERIOD_S))
        if not answer or len(answer) < 2 or not answer[0].isdigit():
            return {}
        clock, reasons = answer[0], int(answer[1], 16)
    active = [name for bit, name in THROTTLE_BITS.items() if reasons & bit]
    return {"sm_clock_mhz": float(clock), "throttle": "+".join(active)}


def matching_model(gpu_name: str) -> DeviceModel | None:
    """The device model whose name is a word of the GPU's name ("NVIDIA H200" -> h200)."""
    words = gpu_name.lower().replace("-", " ").split()
    return next((DeviceModel.load(name) for name in available() if name in words), None)


def ceiling_columns(model: DeviceModel | None) -> dict[str, Any]:
    """The ceilings that floors and predictions of a row use."""
    if model is None:
        return {}
    return {
        "ceiling_hbm_gb_s": model.hbm_gb_s,
        "ceiling_l2_gb_s": model.l2_gb_s,
        "ceiling_l2_bytes": int(model.l2_bytes),
        "ceiling_matmul_tflop_s": model.matmul_tflop_s,
        "ceiling_launch_us": model.launch_us,
        "ceiling_source": f"device model {model.name}",
    }
