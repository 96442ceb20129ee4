"""The paper-convention counter against the totals and runs that the paper's authors recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from deft.paper_io import paper_kv_bytes
from deft.shape import HeadShape
from experiments import paper_check
from experiments.paper_runs import METHODS, Oracle, PaperRun, load_paper_runs, oracles
from experiments.recorded import FewShotReplay, ReasoningReplay
from experiments.recordings import load_reasoning, shared_folder

ABSENT = "recorded runs absent: put the shared folder beside the repository"
IS_PRESENT = (shared_folder() / "reference" / "paper_recorded_runs.csv").is_file()
needs_recordings = pytest.mark.skipif(not IS_PRESENT, reason=ABSENT)
RUNS = load_paper_runs() if IS_PRESENT else []
ORACLES = list(oracles()) if IS_PRESENT else []


def is_known_mismatch(run: PaperRun) -> bool:
    """Rows recorded at other lengths than their names say; explained by the tests at the end."""
    return run.folder == "ablation/prompt_len/0" or run.name == "few_shot_flatten_paged_16"


MATCHING = [run for run in RUNS if not is_known_mismatch(run)]


def run_id(run: PaperRun) -> str:
    return f"{run.folder.replace('/raw_data', '')}-{run.name}"


@needs_recordings
@pytest.mark.parametrize("oracle", ORACLES, ids=lambda one: f"{one.replay}-{one.method}")
def test_exact_total(oracle: Oracle) -> None:
    assert oracle.got == oracle.want


@needs_recordings
@pytest.mark.parametrize("run", MATCHING, ids=run_id)
def test_recorded_run(run: PaperRun) -> None:
    assert run.replay().num_steps == run.steps
    assert run.counted_kv_bytes() == run.kv_bytes
    if run.method != "tree":  # the dense tree's mask is no bit mask
        assert run.counted_mask_bytes() == run.mask_bytes


@needs_recordings
def test_how_many_runs_match() -> None:
    assert len(ORACLES) == 22
    assert (len(RUNS), len(MATCHING)) == (254, 238)
    mismatches = [run for run in RUNS if is_known_mismatch(run)]
    assert all(run.counted_kv_bytes() != run.kv_bytes for run in mismatches)


@needs_recordings
def test_the_few_shot_mismatch_has_another_prompt_and_fewer_steps() -> None:
    run = next(run for run in RUNS if run.name == "few_shot_flatten_paged_16")
    counts = FewShotReplay(3000, 16, run.steps).counts
    assert paper_kv_bytes("flatten", counts, HeadShape(32, 8, 128), 32) == run.kv_bytes


@needs_recordings
def test_the_ablation_mismatches_hold_a_root_of_19_tokens_more() -> None:
    trees = load_reasoning("sorting128")
    runs = [run for run in RUNS if run.folder == "ablation/prompt_len/0"]
    assert len(runs) == 15
    for run in runs:
        recorded = trees[run.size or 0]
        counts = ReasoningReplay(recorded, int(recorded.tokens[0]) + 19).counts
        shape = HeadShape(num_qo_heads=64, num_kv_heads=8, head_dim=128)
        assert paper_kv_bytes(METHODS[run.method], counts, shape, 48) == run.kv_bytes, run.name


@needs_recordings
def test_the_command_prints_every_row_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert paper_check.main([]) == 0
    shown = capsys.readouterr().out
    assert "22 of 22 exact totals reproduced" in shown
    assert "224 of 240 rows of flatten, node, node_chunk, seq match to the byte" in shown
    assert shown.count("NO, counted / recorded = ") == 16
    paper_check.main(["--mismatches"])
    assert len(capsys.readouterr().out.splitlines()) == len(shown.splitlines()) - 238


def test_a_missed_total_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paper_check, "oracles", lambda: [Oracle("few-shot", "flatten", 10, 11)])
    monkeypatch.setattr(paper_check, "load_paper_runs", list)
    assert paper_check.main([]) == 1
    assert "0 of 1 exact totals" in capsys.readouterr().out


def test_absent_data_is_one_line_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from experiments import paper_runs

    paper_runs._replay.cache_clear()
    monkeypatch.setenv("TREE_BENCH_SHARED", str(tmp_path))
    assert paper_check.main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("paper_check: recorded data not found: ")
    assert error.count("\n") == 1


HEADER = "folder,run,KV_IO,Mask_IO,steps\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("folder,run\n", "missing columns ['KV_IO', 'Mask_IO', 'steps']"),
        (HEADER + "f,chess_flatten_paged_3,1,1,1\n", "line 2: cannot read the run name"),
        (HEADER + "f,few_shot_seq_paged_3,many,1,1\n", "want integers"),
    ],
)
def test_a_malformed_csv_is_said(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(content)
    with pytest.raises(ValueError) as caught:
        load_paper_runs(path)
    assert message in str(caught.value)


def test_a_run_name_is_read(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    rows = ("x,docmergeToT_node_chunk_paged_2_p4000_s6000", "a/prompt_len/5000,s1ToT_seq_paged_0")
    path.write_text(HEADER + "".join(f"{row},5,6,7\n" for row in rows))
    first, second = load_paper_runs(path)
    assert (first.task, first.method, first.size) == ("docmerge", "node_chunk", 2)
    assert (first.prompt_len, first.max_len) == (4000, 6000)
    assert (first.kv_bytes, first.mask_bytes, first.steps) == (5, 6, 7)
    assert (second.prompt_len, second.max_len) == (5000, None)
