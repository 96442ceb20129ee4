"""Rates, savings and speed-ups keep to their own source and point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments.derived import derive, is_gpu, is_measured, is_predicted
from experiments.results import load_rows, write_rows
from tests.synthetic import counted, synthetic_row


def frame_of(rows: list[dict[str, Any]], folder: Path) -> pd.DataFrame:
    write_rows(rows, folder / "run.parquet")
    return load_rows(folder)


def test_a_wrong_output_is_neither_measured_nor_predicted(tmp_path: Path) -> None:
    wrong = counted(synthetic_row("deft_flatten")) | {"status": "incorrect"}
    df = frame_of([synthetic_row("deft_node"), wrong, counted(synthetic_row("dense"))], tmp_path)
    assert is_measured(df).tolist() == [True, False, False]
    assert is_predicted(df).tolist() == [True, False, True]
    assert pd.isna(derive(df)["io_saved"][1])


def test_a_gpu_is_neither_null_nor_cpu(tmp_path: Path) -> None:
    rows = [synthetic_row("dense", gpu=name) for name in ("NVIDIA H200", "cpu", None, "")]
    assert is_gpu(frame_of(rows, tmp_path)).tolist() == [True, False, False, False]


def test_no_ratio_to_a_prediction_of_nothing(tmp_path: Path) -> None:
    rows = [counted(synthetic_row(name)) for name in ("flash_decoding", "deft_flatten")]
    df = derive(frame_of([row | {"predicted_us": 0.0} for row in rows], tmp_path))
    assert df[["predicted_fraction_of_floor", "predicted_speed_up"]].isna().all(axis=None)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("dtype", "bfloat16"),
        ("page_size", 16),
        ("gpu", "Other GPU"),
        ("cold_l2", False),
        ("step", 1),
    ],
)
def test_speed_up_never_crosses_settings(tmp_path: Path, column: str, value: object) -> None:
    base = synthetic_row("flash_decoding", **{column: value})
    row = derive(frame_of([base, synthetic_row("deft_flatten")], tmp_path)).iloc[1]
    assert pd.isna(row["speed_up"])


def test_the_baseline_is_a_choice(tmp_path: Path) -> None:
    df = frame_of([synthetic_row("radix_attention"), synthetic_row("deft_flatten")], tmp_path)
    assert derive(df)["speed_up"].isna().all()
    chosen = derive(df, baseline="radix_attention")["speed_up"].tolist()
    assert chosen == pytest.approx([1.0, 1.6 / 0.25])


def test_two_predictions_for_other_devices_do_not_meet(tmp_path: Path) -> None:
    rows = [counted(synthetic_row(k)) for k in ("flash_decoding", "deft_flatten")]
    rows[1]["predicted_for"] = "a100"
    assert pd.isna(derive(frame_of(rows, tmp_path))["predicted_speed_up"][1])
