"""doctor: every kernel is listed with the reason that keeps it from running; nothing fails."""

from __future__ import annotations

import sys

import pytest
import torch

from experiments.config import compose_job, kernel_names
from experiments.doctor import diagnose, main, package_table


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["doctor", *arguments])
    return main()


def test_every_kernel_is_listed_and_the_exit_code_is_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "device=cpu") == 0
    text = capsys.readouterr().out
    assert all(f" {name} " in text for name in kernel_names())
    assert "FlashAttention-2 needs a CUDA GPU" in text
    assert torch.__version__ in text


def test_a_wrong_override_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "model=llama9") == 1
    assert capsys.readouterr().err.startswith("error: unknown model 'llama9'")


def test_reasons_are_the_kernels_own() -> None:
    job = compose_job(["kernel=[flash_attention2,deft_flatten,dense]", "dtype=float64"])
    on_gpu = {found.kernel: found for found in diagnose(job, torch.device("cuda"))}
    assert on_gpu["flash_attention2"].reason == (
        "FlashAttention-2 takes float16 and bfloat16, not float64"
    )
    assert on_gpu["dense"].reason is None
    assert all(found.counted for found in on_gpu.values())


def test_a_kernel_that_raises_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    job = compose_job(["kernel=[dense]"])

    def fails(*arguments: object) -> None:
        raise RuntimeError("no such library")

    monkeypatch.setattr("baselines.dense.DenseAttention.unsupported", fails)
    monkeypatch.setattr("baselines.dense.DenseAttention.io", fails)
    (found,) = diagnose(job, torch.device("cpu"))
    assert (found.reason, found.counted) == ("RuntimeError: no such library", False)


def test_missing_packages_come_with_the_line_that_installs_them() -> None:
    table = package_table()
    versions, lines = list(table.columns[1].cells), list(table.columns[3].cells)
    assert all(
        (version == "-") == bool(line) for version, line in zip(versions, lines, strict=True)
    )
    assert versions[0] == torch.__version__
