"""What a row tells about the machine."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from experiments import environment


def test_code_columns_name_versions() -> None:
    columns = environment.code_columns()
    assert columns["torch_version"] == torch.__version__
    assert columns["python_version"].startswith("3.")


def test_a_cpu_has_a_name_and_no_clock() -> None:
    assert environment.device_columns(torch.device("cpu"))["gpu"] == "cpu"
    assert environment.clock_columns(torch.device("cpu")) == {}


@pytest.mark.parametrize(
    ("gpu", "model"),
    [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA L4", None)],
)
def test_a_gpu_finds_its_device_model(gpu: str, model: str | None) -> None:
    found = environment.matching_model(gpu)
    assert (found.name if found else None) == model


def test_asking_for_a_missing_gpu_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match="device=cpu"):
        environment.pick_device("cuda")


@pytest.mark.gpu
def test_gpu_columns_are_filled() -> None:
    device = environment.pick_device("auto")
    columns = {**environment.device_columns(device), **environment.clock_columns(device)}
    assert columns["num_sms"] > 0
    assert columns["driver"]
    assert columns["sm_clock_mhz"] > 0


def test_a_copy_without_history_takes_the_named_commit(monkeypatch) -> None:
    monkeypatch.setattr(environment, "REPO_DIR", Path(tempfile.gettempdir()))
    monkeypatch.setenv("TREE_BENCH_COMMIT", "abc123")
    columns = environment.code_columns()
    assert (columns["commit"], columns["dirty"]) == ("abc123", False)
    monkeypatch.setenv("TREE_BENCH_COMMIT", "")
    columns = environment.code_columns()
    assert (columns["commit"], columns["dirty"]) == (None, None)
