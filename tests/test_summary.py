"""The table names the fastest right kernel of each point and never mixes sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console
from rich.table import Table

from experiments.measurement import BYTES_ONLY
from experiments.results import load_rows, write_rows
from experiments.summary import summary_frame, summary_table, summary_tables
from tests.synthetic import counted, synthetic_row, synthetic_sweep


def frame_of(rows: list[dict[str, Any]], folder: Path) -> pd.DataFrame:
    write_rows(rows, folder / "run.parquet")
    return load_rows(folder)


def text_of(table: Table) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_winner_speed_up_and_savings_of_a_measured_point(tmp_path: Path) -> None:
    df = frame_of(synthetic_sweep(prefixes=(1024,), widths=(16,)), tmp_path)
    (line,) = summary_frame(df).to_dict("records")
    flat, base = synthetic_row("deft_flatten"), synthetic_row("flash_decoding")
    assert (line["source"], line["device"]) == ("measured", "Imaginary GPU")
    assert (line["winner"], line["num_kernels"]) == ("deft_flatten", 4)
    assert line["speed_up"] == pytest.approx(base["latency_us_p50"] / flat["latency_us_p50"])
    assert line["io_saved"] == pytest.approx(1 - flat["kv_bytes"] / base["kv_bytes"])
    assert line["fraction_of_floor"] == pytest.approx(flat["floor_us"] / flat["latency_us_p50"])
    against_radix = summary_frame(df, baseline="radix_attention").iloc[0]
    assert against_radix["speed_up"] == pytest.approx(6.4)


def test_wrong_and_counted_rows_never_win_a_measured_point(tmp_path: Path) -> None:
    wrong = counted(synthetic_row("deft_flatten")) | {"status": "incorrect", "gpu": "Imaginary GPU"}
    forecast = counted(synthetic_row("deft_node", predicted_us=0.01))
    df = frame_of([synthetic_row("flash_decoding"), wrong, forecast], tmp_path)
    frame = summary_frame(df)
    assert frame["winner"].tolist() == ["flash_decoding"]
    assert "deft" not in text_of(summary_table(df))


def test_without_measurements_the_table_says_predicted(tmp_path: Path) -> None:
    df = frame_of([counted(row) for row in synthetic_sweep()], tmp_path)
    table = summary_table(df)
    assert table.title == "predicted (device model h200), not measured"
    assert table.row_count == 6
    assert summary_frame(df)["speed_up"].tolist() == pytest.approx([4.0] * 6)


def test_cpu_latencies_and_predictions_stand_in_separate_tables(tmp_path: Path) -> None:
    on_cpu = [
        synthetic_row(kernel, gpu=None, timer="cpu", cold_l2=None, latency_us_p50=latency)
        for kernel, latency in (("flash_decoding", 900.0), ("deft_flatten", 1800.0))
    ]
    large = [counted(row) for row in synthetic_sweep(prefixes=(4096,), widths=(16,))]
    tables = summary_tables(frame_of(on_cpu + large, tmp_path))
    titles = [table.title for table in tables]
    assert titles == [
        "measured on a CPU (torch, no GPU kernel)",
        "predicted (device model h200), not measured",
    ]
    assert [table.row_count for table in tables] == [1, 2]
    assert "flash_decoding (of 2)" in text_of(tables[0]), "the CPU's own winner"
    assert "deft_flatten (of 2)" in text_of(tables[1])


def test_a_prediction_of_bytes_alone_is_not_ranked(tmp_path: Path) -> None:
    rows = [counted(row) for row in synthetic_sweep(prefixes=(4096,), widths=(16,))]
    bound = counted(synthetic_row("mine", workload=rows[0]["workload"]))
    bound |= {"predicted_us": 0.1, "status_detail": BYTES_ONLY}
    among_others = frame_of([*rows, bound], tmp_path / "others")
    assert "mine" not in summary_frame(among_others)["winner"].tolist()
    assert summary_frame(frame_of([bound], tmp_path / "alone"))["winner"].tolist() == ["mine"]


def test_a_point_without_the_baseline_shows_a_dash_and_why(tmp_path: Path) -> None:
    df = frame_of([synthetic_row("deft_node")], tmp_path)
    assert summary_frame(df)["speed_up"].isna().all()
    assert "no flash_decoding row" in text_of(summary_table(df))


def test_a_long_table_says_what_it_leaves_out(tmp_path: Path) -> None:
    df = frame_of(synthetic_sweep(), tmp_path)
    table = summary_table(df, max_rows=4)
    assert table.row_count == 4 and "2 more points" in str(table.caption)


def test_failures_alone_give_an_empty_table_that_says_so(tmp_path: Path) -> None:
    failed = counted(synthetic_row("deft_node")) | {"status": "oom", "predicted_us": None}
    table = summary_table(frame_of([failed], tmp_path))
    assert table.row_count == 0 and "no measured" in str(table.title)
