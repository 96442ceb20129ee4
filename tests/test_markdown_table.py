"""The README's table is what the command prints from the committed rows."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from experiments.markdown_table import markdown, peer_summary, reference_table, table_rows
from experiments.peers import agreement
from experiments.recordings import shared_folder
from experiments.reference_rows import REFERENCE
from experiments.schema import checked_row, to_table
from tests.synthetic import synthetic_row

ROOT = Path(__file__).parents[1]
NAME = "layered_1-2-64_8-256-32"


def frame(*rows: dict[str, object]) -> pd.DataFrame:
    return to_table([checked_row({**row, "model": "llama3_8b"}) for row in rows]).to_pandas()


def rows() -> pd.DataFrame:
    change = {"workload": NAME, "gpu": "NVIDIA H200", "floor_us": 6.0}
    fast = synthetic_row("deft_flatten", latency_us_p50=20.0, **change)
    slow = synthetic_row("flash_decoding", latency_us_p50=30.04, **change)
    change |= {"status": "incorrect", "latency_us_p50": None}
    wrong = synthetic_row("deft_paper", **change)
    return frame(slow, fast, wrong)


def test_a_line_holds_medians_the_winner_and_a_dash_for_what_was_wrong() -> None:
    other = synthetic_row("deft_paper", workload="layered_1_9", num_tokens=9, floor_us=4.0)
    df = pd.concat([rows(), frame(other)], ignore_index=True)
    head, *_, last = markdown(table_rows(df, "llama3_8b")).splitlines()
    assert head == "| tree | floor | deft_flatten | flash_decoding | deft_paper | best |"
    assert last == "| 1-2-64 / 8-256-32 | 6.0 | 20.0 | 30.0 | - | deft_flatten 20.0 |"


def varied_decode() -> list[dict[str, object]]:
    """flashinfer_decode as its file has it, and with a knob that makes it faster."""
    change = {"workload": NAME, "gpu": "NVIDIA H200", "floor_us": 6.0}
    made = []
    for cores, us, variant in ((False, 50.0, None), (True, 40.0, "tensor_cores=true")):
        config = {"_target_": "baselines.flashinfer_decode", "tensor_cores": cores}
        row = synthetic_row("flashinfer_decode", latency_us_p50=us, **change)
        made.append({**row, "variant": variant, "kernel_config": config})
    return made


def test_a_default_that_is_not_the_best_stands_in_brackets() -> None:
    last = markdown(table_rows(frame(*varied_decode()), "llama3_8b")).splitlines()[-1]
    assert "| 40.0 (50.0) |" in last and last.endswith("| flashinfer_decode 40.0 |")


def test_agreement_takes_the_best_knob_and_counts_cases_within_15_percent() -> None:
    line = agreement(frame(*varied_decode()), peers_of_one_case()).iloc[0]
    assert line[["peer", "cases", "ratio", "within"]].tolist() == ["flashinfer_decode", 1, 1.0, 1]
    slow = frame(varied_decode()[0])
    assert agreement(slow, peers_of_one_case())["ratio"].tolist() == pytest.approx([1.25])
    assert agreement(slow, peers_of_one_case())["within"].tolist() == [0]
    assert agreement(rows(), peers_of_one_case()).empty


def peers_of_one_case() -> pd.DataFrame:
    peers = pd.DataFrame([{"workload": NAME, "num_qo_heads": 32, "num_kv_heads": 8}])
    names = ("fasttree", "pat", "deft_port", "flashinfer_decode", "flashinfer_batch_nodes")
    peers[[f"{name}_us" for name in names]] = [[22.0, 25.0, 50.0, 40.0, 60.0]]
    peers[["flashinfer_cascade_fa2_us", "flashinfer_cascade_fa3_us"]] = [[48.0, 44.0]]
    return peers


def test_peers_are_ratios_to_flatten() -> None:
    line = table_rows(rows(), "llama3_8b", peers=peers_of_one_case()).iloc[0]
    assert line[["deft_port", "cascade", "best peer"]].tolist() == [2.5, 2.2, 1.1]


def test_the_summary_counts_cases() -> None:
    text = peer_summary(rows(), peers_of_one_case()).splitlines()
    assert text[0].endswith("faster in 1 of 1 cases, 2.50x at worst, 2.50x in the geometric mean")
    assert "best of seven peers: faster in 1 of 1 cases, 1.10x" in text[2]
    slow = rows().assign(latency_us_p50=lambda df: df["latency_us_p50"] * 2)
    assert "faster in 0 of 1 cases, 0.55x" in peer_summary(slow, peers_of_one_case())


def test_a_model_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="no measured rows of model 'mqa_16_1'"):
        table_rows(rows(), "mqa_16_1")


def test_the_readme_shows_the_committed_rows() -> None:
    folder = REFERENCE / "layered_suite"
    if not (shared_folder() / "reference").is_dir():
        pytest.skip(f"no peers' figures in {shared_folder()}")
    assert reference_table(folder, "llama3_8b") in (ROOT / "README.md").read_text()
