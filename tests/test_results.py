"""Rows survive the disk, bad files are named, derived values follow from what was stored."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments import results
from experiments.results import (
    COLUMNS,
    ResultsError,
    code_hash,
    derive,
    latest,
    load_rows,
    resume_key,
    workload_axes,
    write_rows,
)
from tests.synthetic import counted, synthetic_row, synthetic_sweep

KEY = {
    "kernel": "deft_flatten",
    "kernel_config": {"block_kv": 64, "query_cap": None},
    "workload": "few_shot_1024_16_32",
    "step": 0,
    "num_qo_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "dtype": "float16",
    "page_size": 1,
    "timing": {"timer": "graph", "cold_l2": True},
    "gpu": "Imaginary GPU",
    "code_hash": "c0de",
    "device_model": "h200",
}


def test_rows_round_trip_with_every_column(tmp_path: Path) -> None:
    rows = [synthetic_row("deft_flatten"), counted(synthetic_row("deft_node"))]
    write_rows(rows, tmp_path / "a" / "run.parquet")
    frame = load_rows(tmp_path)
    assert tuple(frame.columns) == COLUMNS
    assert frame["kernel_config"][0] == '{"_target_": "deft.TreeAttention", "block_kv": 64}'
    assert frame["kv_bytes"].tolist() == [row["kv_bytes"] for row in rows]
    assert list(frame["latency_samples_us"][0]) == rows[0]["latency_samples_us"]
    assert frame["latency_us_p50"].isna().tolist() == [False, True]
    assert (frame["schema_version"] == results.SCHEMA_VERSION).all()
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["run.parquet"]
    assert len(load_rows(str(tmp_path / "*" / "*.parquet"))) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latencey_us": 3.0}, "unknown columns"),
        ({"status": "fine"}, "status 'fine'"),
        ({"status": "incorrect"}, "has a latency"),
        ({"status": "counted"}, "has a latency"),
        ({"workload": None}, r"lacks \['workload'\]"),
        ({"num_qo": "many"}, "column 'num_qo'"),
        ({"path": "\ud800"}, "column 'path'"),
    ],
)
def test_rows_that_would_lie_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = tmp_path / "run.parquet"
    with pytest.raises(ResultsError, match=message):
        write_rows([{**synthetic_row("deft_node"), **changes}], path)
    assert not list(tmp_path.iterdir())


def test_history_is_never_overwritten(tmp_path: Path) -> None:
    path = write_rows([synthetic_row("deft_node")], tmp_path / "run.parquet")
    before = path.read_bytes()
    with pytest.raises(ResultsError, match="never overwritten"):
        write_rows([synthetic_row("deft_flatten")], path)
    assert path.read_bytes() == before


def test_an_interrupted_write_leaves_neither_file_nor_scraps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(table: pa.Table, where: Path, **_: object) -> None:
        Path(where).write_bytes(b"half a file")
        raise KeyboardInterrupt

    monkeypatch.setattr(pq, "write_table", killed)
    with pytest.raises(KeyboardInterrupt):
        write_rows([synthetic_row("deft_node")], tmp_path / "run.parquet")
    assert not list(tmp_path.iterdir())


def test_an_unwritable_folder_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file where the folder should be")
    with pytest.raises(ResultsError, match="name another folder or make this one writable"):
        write_rows([synthetic_row("deft_node")], tmp_path / "results" / "run.parquet")


@pytest.mark.parametrize("kind", ["corrupt", "foreign", "newer"])
def test_bad_files_are_named_and_skipped_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    write_rows([synthetic_row("deft_node")], tmp_path / "good.parquet")
    bad = tmp_path / "sub" / "bad.parquet"
    bad.parent.mkdir()
    if kind == "corrupt":
        bad.write_bytes((tmp_path / "good.parquet").read_bytes()[:-100])
    elif kind == "foreign":
        pd.DataFrame({"price": [1.0]}).to_parquet(bad)
    else:
        table = pq.read_table(tmp_path / "good.parquet")
        at = table.column_names.index("schema_version")
        pq.write_table(table.set_column(at, "schema_version", pa.array([99])), bad)
    with caplog.at_level(logging.WARNING):
        assert len(load_rows(tmp_path)) == 1
    assert len(caplog.messages) == 1
    assert "bad.parquet" in caplog.messages[0] and "\n" not in caplog.messages[0]
    with pytest.raises(ValueError, match=r"bad\.parquet"):
        load_rows(tmp_path, strict=True)


def test_a_file_of_an_older_schema_loads_with_nulls(tmp_path: Path) -> None:
    write_rows([synthetic_row("deft_node")], tmp_path / "new.parquet")
    table = pq.read_table(tmp_path / "new.parquet").drop_columns(["ceiling_source", "model"])
    (tmp_path / "new.parquet").unlink()
    pq.write_table(table, tmp_path / "old.parquet")
    frame = load_rows(tmp_path)
    assert tuple(frame.columns) == COLUMNS and frame["ceiling_source"].isna().all()


def test_an_empty_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no parquet file; run `python -m experiments\.bench`"):
        load_rows(tmp_path)
    with pytest.raises(ValueError, match="no parquet file"):
        load_rows(tmp_path / "absent")


def test_latest_keeps_the_newest_row_of_each_point(tmp_path: Path) -> None:
    old = synthetic_row("deft_node", timestamp_utc="2026-01-01T00:00:00Z")
    new = {**old, "latency_us_p50": 1.0, "timestamp_utc": "2026-01-02T00:00:00Z"}
    other = synthetic_row("deft_flatten")
    write_rows([new, other], tmp_path / "a_newer.parquet")  # file order must not decide
    write_rows([old], tmp_path / "b_older.parquet")
    frame = load_rows(tmp_path)
    assert len(frame) == 3
    kept = latest(frame)
    assert sorted(kept["kernel"]) == ["deft_flatten", "deft_node"]
    assert kept.loc[kept["kernel"] == "deft_node", "latency_us_p50"].tolist() == [1.0]


def test_resume_key_ignores_order_and_sees_every_argument() -> None:
    key = resume_key(**KEY)
    assert key == resume_key(**{**KEY, "kernel_config": '{"query_cap": null, "block_kv": 64}'})
    assert key == resume_key(**{**KEY, "timing": {"cold_l2": True, "timer": "graph"}})
    changed = {
        "kernel": "deft_node",
        "kernel_config": {"block_kv": 32, "query_cap": None},
        "workload": "few_shot_1024_16_33",
        "step": 1,
        "num_qo_heads": 16,
        "num_kv_heads": 4,
        "head_dim": 64,
        "dtype": "bfloat16",
        "page_size": 16,
        "timing": {"timer": "eager", "cold_l2": True},
        "gpu": None,
        "code_hash": "beef",
        "device_model": "a100",
    }
    assert set(changed) == set(KEY)
    keys = {resume_key(**{**KEY, name: value}) for name, value in changed.items()}
    assert len(keys | {key}) == len(changed) + 1


def test_code_hash_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import baselines
    import deft

    before = code_hash()
    assert before == code_hash.__wrapped__()
    for module in (deft, baselines):
        copy = tmp_path / module.__name__
        shutil.copytree(Path(str(module.__file__)).parent, copy)
        monkeypatch.setattr(module, "__file__", str(copy / "__init__.py"))
    assert code_hash.__wrapped__() == before, "the place of the installation must not matter"
    (tmp_path / "baselines" / "__init__.py").write_text("changed = True\n")
    assert code_hash.__wrapped__() != before


def test_workload_axes_reads_the_names() -> None:
    few_shot = {"family": "few_shot", "prefix_len": 4000, "width": 50, "suffix_len": 400}
    layered = {"family": "layered", "prefix_len": 264, "width": 64, "suffix_len": 32}
    unknown = {"family": "reasoning", "prefix_len": None, "width": None, "suffix_len": None}
    assert workload_axes("few_shot_4000_50_400") == few_shot
    assert workload_axes("layered_1-1-64_8-256-32") == layered
    assert workload_axes("layered_64_32")["prefix_len"] == 0
    assert workload_axes("reasoning_12") == unknown
    assert workload_axes("few_shot")["family"] == "few_shot"


def test_derived_values_follow_from_the_row(tmp_path: Path) -> None:
    write_rows(synthetic_sweep(prefixes=(1024,), widths=(16,)), tmp_path / "run.parquet")
    raw = load_rows(tmp_path)
    frame = derive(raw).set_index("kernel")
    assert "hbm_gb_s" not in raw.columns
    row, base = frame.loc["deft_flatten"], frame.loc["flash_decoding"]
    assert row["speed_up"] == pytest.approx(base["latency_us_p50"] / row["latency_us_p50"])
    assert row["hbm_gb_s"] * 1e9 * row["latency_us_p50"] * 1e-6 == pytest.approx(row["hbm_bytes"])
    assert row["fraction_of_floor"] == pytest.approx(row["floor_us"] / row["latency_us_p50"])
    assert row["io_saved"] == pytest.approx(1 - (1024 + 16 * 32) / (16 * (1024 + 32)))
    assert (row["prefix_len"], row["width"], row["suffix_len"]) == (1024, 16, 32)


def test_measured_and_predicted_never_meet(tmp_path: Path) -> None:
    measured = synthetic_row("deft_flatten")
    write_rows([measured, counted(synthetic_row("flash_decoding"))], tmp_path / "run.parquet")
    row = derive(load_rows(tmp_path)).set_index("kernel").loc["deft_flatten"]
    assert pd.isna(row["speed_up"]), "a measured latency was divided into a predicted one"
    assert row["predicted_speed_up"] == pytest.approx(4.0)
    rows = [synthetic_row("flash_decoding", gpu=None), synthetic_row("deft_flatten", gpu=None)]
    write_rows(rows, tmp_path / "cpu" / "run.parquet")
    on_cpu = derive(load_rows(tmp_path / "cpu"))
    assert on_cpu["fraction_of_floor"].isna().all(), "a CPU latency against a GPU's floor"
    assert on_cpu["speed_up"].tolist() == pytest.approx([1.0, 4.0]), "null gpu is one machine"


def test_labels_tell_configurations_and_odd_timers_apart(tmp_path: Path) -> None:
    rows = [
        synthetic_row("deft_flatten", kernel_config={"block_kv": 64, "query_cap": None}),
        synthetic_row("deft_flatten", kernel_config={"block_kv": 128, "query_cap": None}),
        synthetic_row("flash_decoding"),
        synthetic_row("radix_attention", timer="eager"),
    ]
    write_rows(rows, tmp_path / "run.parquet")
    assert derive(load_rows(tmp_path))["label"].tolist() == [
        "deft_flatten block_kv=64",
        "deft_flatten block_kv=128",
        "flash_decoding",
        "radix_attention (eager)",
    ]
