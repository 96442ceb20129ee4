"""Timers: CUDA-graph replays with an emptied L2, plain launches, and the host clock on a CPU.

On a GPU each sample is: empty the L2, event, replay, event, all in order on one stream and enqueued
ahead of the device, so that neither the flush nor the host is inside the timed region.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from experiments.config import TimingConfig

# Writing less than the L2 holds would leave old lines; the smallest write is what published
# cold-L2 timings use, so that figures compare.
MIN_FLUSH_BYTES = 256 << 20
MIN_GPU_SAMPLES = 20
BOOTSTRAP_DRAWS = 2000


@dataclass(frozen=True)
class Samples:
    """Latency samples of one kernel.

    Args:
        samples_us: in the order taken; none is dropped.
        timer: "graph", "eager" or "cpu".
        cold_l2: the L2 was emptied before each sample; None on a CPU.
        note: why another timer than the one asked for was used.
    """

    samples_us: list[float]
    timer: str
    cold_l2: bool | None
    note: str = ""

    def as_columns(self) -> dict[str, Any]:
        """The latency columns of a row."""
        low, middle, high = np.percentile(self.samples_us, [20, 50, 80])
        ci_low, ci_high = median_interval(self.samples_us)
        return {
            "latency_us_p20": float(low),
            "latency_us_p50": float(middle),
            "latency_us_p80": float(high),
            "latency_us_ci_low": ci_low,
            "latency_us_ci_high": ci_high,
            "latency_samples_us": [float(sample) for sample in self.samples_us],
            "timer": self.timer,
            "cold_l2": self.cold_l2,
        }


def median_interval(samples: list[float], seed: int = 0) -> tuple[float, float]:
    """Bootstrap 95% interval of the median (2000 draws with replacement)."""
    rng = np.random.default_rng(seed)
    draws = rng.choice(np.asarray(samples), (BOOTSTRAP_DRAWS, len(samples)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(low), float(high)


@cache
def _flush_buffer(device: torch.device) -> torch.Tensor:
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(max(4 * l2_bytes, MIN_FLUSH_BYTES), dtype=torch.int8, device=device)


def _captured(run: Callable[[], Any]) -> tuple[Callable[[], Any] | None, str]:
    """(replay, "") of run() as a CUDA graph, or (None, why it cannot be captured)."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        return None, str(error).splitlines()[0]
    return graph.replay, ""


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def time_gpu(
    run: Callable[[], Any],
    timing: TimingConfig,
    capturable: bool,
    before_samples: Callable[[], Any] = lambda: None,
) -> Samples:
    """Time run() on the current CUDA device.

    Args:
        run: enqueues the work; static buffers, no host synchronisation where it is captured.
        capturable: False times plain launches and says so.
        before_samples: called once between warm-up (and capture) and the first sample.

    Raises:
        RuntimeError: what run() raised.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(max(timing.warmup, 1)):
            run()
        stream.synchronize()
        replay, why = None, "the kernel says so"
        if timing.timer == "graph" and capturable:
            replay, why = _captured(run)
        call = replay or run
        before_samples()
        flush = _flush_buffer(device) if timing.cold_l2 else None
        events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        begin = time.perf_counter()
        # The first replay uploads the graph: it is not a sample.
        while len(events) <= MIN_GPU_SAMPLES or (
            len(events) <= timing.repeats and time.perf_counter() - begin < timing.budget_s
        ):
            start, end = _event(), _event()
            if flush is not None:
                flush.zero_()
            start.record()
            call()
            end.record()
            events.append((start, end))
        stream.synchronize()
    samples = [start.elapsed_time(end) * 1e3 for start, end in events[1:]]
    is_marked = timing.timer == "graph" and replay is None
    note = f"timed eager, not captured: {why}" if is_marked else ""
    return Samples(samples, "graph" if replay else "eager", timing.cold_l2, note)


def time_cpu(run: Callable[[], Any], timing: TimingConfig) -> Samples:
    """Host-clock samples of run(): as many as `repeats`, fewer once `budget_s` is spent."""
    run()
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < timing.repeats and (
        len(samples) < 3 or time.perf_counter() - begin < timing.budget_s
    ):
        start = time.perf_counter()
        run()
        samples.append((time.perf_counter() - start) * 1e6)
    return Samples(samples, "cpu", None)


def time_plan(
    plan: Callable[[], Any], prepare: Callable[[], None], repeats: int, on_gpu: bool
) -> float:
    """Median host time of plan() in microseconds, its uploads included, after one warm-up.

    Args:
        prepare: run before each call, outside the timed region.
        on_gpu: wait for what plan() enqueued before the clock stops.
    """
    samples = []
    for _ in range(repeats + 1):
        prepare()
        start = time.perf_counter()
        plan()
        if on_gpu:
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e6)
    return float(np.median(samples[1:]))
