"""Files on disk, what is skipped, and one-line errors of the command."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread

from experiments import figures
from experiments.figures import FIGURES, make_figures
from experiments.results import load_rows, write_rows
from tests.synthetic import counted, synthetic_row, synthetic_sweep

ROOT = Path(__file__).resolve().parents[1]


def cpu_quick_rows(folder: Path) -> pd.DataFrame:
    """What a sweep without a GPU leaves: counted rows at full size, a few measured small ones."""
    large = [counted(row) for row in synthetic_sweep(widths=(16, 64, 256))]
    small = [
        synthetic_row(kernel, prefix, 2, 8, gpu=None, timer="cpu", cold_l2=None)
        for kernel in ("flash_decoding", "deft_flatten")
        for prefix in (64, 128)
    ]
    write_rows(large + small, folder / "run.parquet")
    return load_rows(folder)


def test_a_cpu_sweep_gives_at_least_six_figures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    df = cpu_quick_rows(tmp_path)
    before = df.copy()
    with caplog.at_level(logging.INFO):
        paths = make_figures(df, tmp_path / "figures")
    assert all(path.stat().st_size > 0 for path in paths)
    stems = {path.stem for path in paths}
    assert len(paths) == 3 * len(stems) and len(stems) >= 6
    assert {path.suffix for path in paths} == {".pdf", ".png", ".csv"}
    full_size = {"latency_by_prefix", "latency_by_queries", "speed_up_map", "fraction_of_floor"}
    assert {f"{name}_predicted" for name in full_size} <= stems
    assert "fraction_of_floor" not in stems, "a CPU latency against a GPU's floor"
    assert {"io_terms", "kv_rereads", "latency_by_prefix"} <= stems
    skipped = [message for message in caplog.messages if message.startswith("skipped")]
    assert any("plan_time" in message and "plan_us" in message for message in skipped)
    assert all("\n" not in message for message in skipped)
    pd.testing.assert_frame_equal(df, before)
    for path in paths:
        if path.suffix == ".csv":
            sources = pd.read_csv(path)["source"].unique().tolist()
            expected = "predicted" if path.stem.endswith("_predicted") else "measured"
            assert sources == (
                ["counted"] if path.stem in ("io_terms", "kv_rereads") else [expected]
            )
        if path.suffix == ".png":
            pixels = imread(path)
            assert min(pixels.shape[:2]) > 300 and np.ptp(pixels[..., :3]) > 0.9


def test_the_csv_holds_what_is_drawn(tmp_path: Path) -> None:
    write_rows(synthetic_sweep(), tmp_path / "run.parquet")
    paths = make_figures(load_rows(tmp_path), tmp_path / "figures", ["latency_by_prefix"])
    table = pd.read_csv(paths[2]).set_index(["label", "panel_order", "prefix_len"])["latency_us"]
    want = synthetic_row("deft_node", 4096, 64)["latency_us_p50"]
    assert table["deft_node", 64, 4096] == pytest.approx(want, rel=1e-5)
    assert len(table) == len(synthetic_sweep())


def test_equal_rows_give_equal_files(tmp_path: Path) -> None:
    write_rows(synthetic_sweep((1024, 4096), (16,)), tmp_path / "run.parquet")
    df = load_rows(tmp_path)
    one, two = (make_figures(df, tmp_path / n, ["latency_by_prefix"]) for n in ("one", "two"))
    for left, right in zip(one, two, strict=True):
        assert left.read_bytes() == right.read_bytes(), left.suffix


def test_head_layouts_get_files_of_their_own(tmp_path: Path) -> None:
    rows = [
        synthetic_row(k, p, num_kv_heads=kv)
        for kv in (8, 32)
        for p in (1024, 4096)
        for k in ("flash_decoding", "deft_node")
    ]
    write_rows(rows, tmp_path / "run.parquet")
    paths = make_figures(load_rows(tmp_path), tmp_path / "figures", ["latency_by_prefix"])
    want = {f"latency_by_prefix_q32-kv{kv}-d128" for kv in (8, 32)}
    assert {path.stem for path in paths} == want


def test_rows_that_failed_give_no_figure(tmp_path: Path) -> None:
    failed = counted(synthetic_row("deft_node")) | {"status": "error", "predicted_us": None}
    write_rows([failed], tmp_path / "run.parquet")
    assert make_figures(load_rows(tmp_path), tmp_path / "figures") == []
    assert not (tmp_path / "figures").exists()


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    df = cpu_quick_rows(tmp_path)
    with pytest.raises(ValueError, match="unknown figure pie; choose from latency_by_prefix"):
        make_figures(df, tmp_path / "figures", ["pie"])
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ValueError, match=r"cannot write figures to .*name another folder"):
        make_figures(df, tmp_path / "file" / "figures", ["io_terms"])
    with pytest.raises(ValueError, match="no peers' figures"):
        make_figures(df, tmp_path / "figures", ["peers"], peers_csv=tmp_path / "absent.csv")


def run_command(*overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "experiments.figures", *overrides],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def call_main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *overrides: str
) -> str:
    """Run the Hydra entry point in this process and return its error."""
    monkeypatch.setattr(sys, "argv", ["figures", *overrides])
    # A command that ran earlier in this process left its handler, on a stream closed since.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    assert figures.main() == 1
    (line,) = (
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("skipped")
    )
    return line


@pytest.mark.parametrize(
    "kind", ["empty", "absent", "corrupt", "foreign", "unwritable", "unknown", "misspelt"]
)
def test_errors_are_one_line_that_says_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    overrides, want = [f"results={folder}"], "python -m experiments.bench"
    if kind == "absent":
        overrides = [f"results={tmp_path / 'nowhere'}"]
    elif kind == "corrupt":
        (folder / "a.parquet").write_bytes(b"junk")
    elif kind == "foreign":
        pd.DataFrame({"price": [1.0]}).to_parquet(folder / "a.parquet")
    elif kind == "misspelt":
        overrides, want = ["figur=all"], "figur"
    elif kind in ("unwritable", "unknown"):
        write_rows(synthetic_sweep((1024, 4096), (16,)), folder / "a.parquet")
        (tmp_path / "file").write_text("not a folder")
        overrides += [f"out={tmp_path / 'file' / 'figures'}", "figure=latency_by_prefix"]
        want = "name another folder with out="
        if kind == "unknown":
            overrides[-1], want = "figure=pie", "choose from"
    error = call_main(monkeypatch, capsys, *overrides)
    assert error.startswith("error: ") and want in error
    assert "Traceback" not in error


def test_the_command_draws_and_says_where(tmp_path: Path) -> None:
    cpu_quick_rows(tmp_path)
    done = run_command(f"results={tmp_path}", "figure=[io_terms,speed_up_map]")
    assert done.returncode == 0, done.stderr
    assert "io_terms, speed_up_map" in done.stdout and str(tmp_path) in done.stdout
    assert (tmp_path / "figures" / "io_terms.pdf").exists()
    assert len(done.stderr.splitlines()) <= 2, "no chatter of other libraries"


def test_every_figure_is_known_to_the_list() -> None:
    assert len(set(FIGURES)) == len(FIGURES) >= 9
    assert set(figures.KINDS) | set(figures.PEER_KINDS) == set(FIGURES)
