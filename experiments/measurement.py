"""What one (kernel, point) gives: counted columns, and measured columns behind the gate."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deft.device_model import DeviceModel, floor_us, predict_us
from deft.shape import HeadShape
from deft.testing import LIMITS, row_rms_error
from deft.tree import DecodeTree
from experiments.config import TimingConfig
from experiments.gate import ORACLE_LAYER, Case, check_kernel
from experiments.timing import time_cpu, time_gpu, time_plan

# Attributes of a planned kernel that go into its row.
TOLD = (
    "path",
    "kv_layout",
    "layout_us",
    "layout_bytes",
    "plan_upload_bytes",
    "workspace_bytes",
)

# status_detail of a prediction that knows nothing of the kernel's thread blocks and launches.
BYTES_ONLY = "predicted from bytes and FLOPs alone"


class KernelTimeout(Exception):
    """A kernel took longer at one point than kernel_timeout_s."""


class StickyCudaError(RuntimeError):
    """The CUDA context is lost: nothing more can run in this process."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise KernelTimeout in the body after `seconds`, as soon as the interpreter has control.

    Only the main thread can be interrupted; elsewhere there is no limit.
    """
    if seconds <= 0 or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(signum: int, frame: Any) -> None:
        raise KernelTimeout(f"took longer than kernel_timeout_s={seconds:g}")

    before = signal.signal(signal.SIGALRM, ring)
    other_timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *other_timer)


def counted_columns(
    kernel: Any,
    tree: DecodeTree,
    shape: HeadShape,
    page_size: int,
    device_model: DeviceModel | None,
) -> dict[str, Any]:
    """Counted IO and, where a device model is given, the floor and the predicted latency.

    Needs no pool, tensor or GPU.
    """
    io = kernel.io(tree, shape, page_size)
    if device_model is None:
        uncached: dict[str, Any] = io.as_columns()
        return uncached
    detail = None
    if hasattr(kernel, "predict_us"):
        predicted = kernel.predict_us(tree, shape, page_size, device_model)
    else:
        predicted, detail = predict_us(io, tree.flops(shape), device_model), BYTES_ONLY
    return {
        **io.as_columns(int(device_model.l2_bytes)),
        "floor_us": floor_us(tree, shape, device_model),
        "predicted_us": predicted,
        "predicted_for": device_model.name,
        "status_detail": detail,
    }


def _planned(kernel: Any, case: Case, repeats: int) -> dict[str, Any]:
    """Plan the kernel, timed, and what it then tells about itself."""
    tree = case.tree

    def prepare() -> None:
        nonlocal tree
        tree = case.fresh_tree()

    on_gpu = case.cache.device.type == "cuda"
    plan_us = time_plan(lambda: kernel.plan(tree, case.cache), prepare, repeats, on_gpu)
    return {"plan_us": plan_us, **{name: getattr(kernel, name, None) for name in TOLD}}


def measured_columns(kernel: Any, case: Case, timing: TimingConfig) -> dict[str, Any]:
    """Plan, gate, then time a kernel; a wrong one gets status `incorrect` and no latency.

    Args:
        kernel: an AttentionKernel that supports the case.

    Raises:
        Exception: whatever the kernel raised.
    """
    columns = _planned(kernel, case, timing.plan_repeats)
    verdict = check_kernel(kernel, case)
    columns.update(row_rms_err=verdict.row_rms_err, max_abs_err=verdict.max_abs_err)
    if verdict.reason:
        return {**columns, "status": "incorrect", "status_detail": verdict.reason}
    q = case.inputs.q
    out = torch.empty_like(q)
    result = out

    def run() -> None:
        nonlocal result
        result = kernel.run(q, ORACLE_LAYER, out=out)[0]

    if q.is_cuda:
        capturable = bool(getattr(kernel, "capturable", False))
        samples = time_gpu(run, timing, capturable, lambda: result.fill_(torch.nan))
    else:
        samples = time_cpu(run, timing)
    # What was timed is what was checked: a captured graph could have frozen something else.
    error = row_rms_error(result, case.reference[0])
    if not error <= LIMITS[case.shape.dtype]:
        detail = f"right before and wrong while timed: worst row RMS error {error:.2e}"
        return {**columns, "row_rms_err": error, "status": "incorrect", "status_detail": detail}
    return {**columns, **samples.as_columns(), "status": "ok", "status_detail": samples.note}


def failed_columns(error: BaseException) -> dict[str, Any]:
    """Status columns of a kernel that raised: timeout, oom or error."""
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:  # its own __str__ fails
        text = ""
    lines = text.strip().splitlines()
    detail = f"{kind}: {lines[0]}" if lines else kind
    detail = detail.encode(errors="backslashreplace").decode()  # lone surrogates fit no file
    if isinstance(error, KernelTimeout):
        return {"status": "timeout", "status_detail": text}
    is_oom = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if is_oom or "can't allocate memory" in text:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
        return {"status": "oom", "status_detail": detail}
    return {"status": "error", "status_detail": detail}


def is_device_lost() -> bool:
    """True when an earlier CUDA error is sticky: every later call fails too."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
