"""Timers: sample counts, budgets, statistics."""

from __future__ import annotations

import time

import numpy as np
import pytest

from experiments.config import TimingConfig
from experiments.timing import Samples, median_interval, time_cpu, time_gpu, time_plan


def test_columns_are_percentiles_of_the_samples() -> None:
    columns = Samples([5.0, 1.0, 2.0, 4.0, 3.0], "cpu", None).as_columns()
    assert columns["latency_us_p50"] == 3.0
    assert columns["latency_us_p20"] == pytest.approx(1.8)
    assert columns["latency_us_ci_low"] <= 3.0 <= columns["latency_us_ci_high"]
    assert columns["latency_samples_us"] == [5.0, 1.0, 2.0, 4.0, 3.0]


def test_the_interval_covers_the_median_about_19_times_in_20() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(60):
        low, high = median_interval(list(rng.exponential(10, 40)))
        hits += low <= 10 * np.log(2) <= high
    assert 50 <= hits <= 60


def test_cpu_samples_measure_the_call() -> None:
    samples = time_cpu(lambda: time.sleep(0.002), TimingConfig(repeats=4))
    assert (samples.timer, samples.cold_l2, len(samples.samples_us)) == ("cpu", None, 4)
    assert min(samples.samples_us) >= 2000


def test_a_spent_budget_ends_the_samples_at_three() -> None:
    samples = time_cpu(lambda: time.sleep(0.005), TimingConfig(repeats=50, budget_s=0.0))
    assert len(samples.samples_us) == 3


def test_plan_time_leaves_the_preparation_out() -> None:
    calls: list[str] = []

    def prepare() -> None:
        calls.append("prepare")
        time.sleep(0.02)

    plan_us = time_plan(lambda: calls.append("plan"), prepare, 2, on_gpu=False)
    assert calls == ["prepare", "plan"] * 3
    assert plan_us < 10_000


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("timer", "capturable"), [("graph", True), ("graph", False), ("eager", True)]
)
def test_gpu_timers_agree_on_a_long_kernel(timer: str, capturable: bool) -> None:
    import torch

    x = torch.randn(4096, 4096, device="cuda")
    y = torch.empty_like(x)
    samples = time_gpu(lambda: torch.mm(x, x, out=y), TimingConfig(timer=timer), capturable)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        torch.mm(x, x, out=y)
    end.record()
    end.synchronize()
    once_us = start.elapsed_time(end) / 20 * 1e3
    assert samples.timer == ("graph" if timer == "graph" and capturable else "eager")
    assert len(samples.samples_us) >= 20
    assert np.median(samples.samples_us) == pytest.approx(once_us, rel=0.3)


@pytest.mark.gpu
def test_a_warm_l2_is_faster_than_a_cold_one() -> None:
    import torch

    x = torch.randn(1 << 21, device="cuda")  # 8 MB: fits in the L2
    y = torch.empty((), device="cuda")

    def run() -> None:
        torch.sum(x, dim=0, out=y)

    cold = time_gpu(run, TimingConfig(), True)
    warm = time_gpu(run, TimingConfig(cold_l2=False), True)
    assert np.median(warm.samples_us) < np.median(cold.samples_us)
