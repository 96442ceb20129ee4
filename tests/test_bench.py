"""The main job: rows, statuses, resume, interruptions, and its errors at the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hydra.core.global_hydra import GlobalHydra

from deft import DecodeTree, topologies
from deft.device_model import MODEL_DIR
from experiments import bench, bench_tree
from experiments.config import CONF_DIR, compose_job
from experiments.measurement import failed_columns
from experiments.results import latest, load_rows
from experiments.schema import COLUMNS
from experiments.variants import kernel_id

REPO = CONF_DIR.parent
TINY = ["model=tiny_4_2", "workload=smoke", "figures=false", "device=cpu", "timing=cpu"]


def run(tmp_path: Path, *overrides: str) -> pd.DataFrame:
    path = bench.run_job(compose_job([*TINY, f"results_dir={tmp_path}", *overrides]))
    assert path is not None
    return load_rows(path, strict=True)


def broken(name: str, kernel: str = "deft_node") -> str:
    return f"kernel.{kernel}._target_=tests.broken_kernels.{name}"


def test_measured_rows_are_complete(tmp_path: Path) -> None:
    df = run(tmp_path, "kernel=[deft_flatten,radix_attention]")
    assert df["status"].tolist() == ["ok"] * 4
    per_row = ["latency_us_p50", "plan_us", "row_rms_err", "max_abs_err", "kv_bytes", "floor_us"]
    per_row += ["predicted_us", "predicted_for", "path", "kv_layout", "kernel_config", "model"]
    per_row += ["resume_key", "code_hash", "run_id", "timestamp_utc", "seed", "torch_version"]
    per_row += ["repro_command", "overrides", "ceiling_source", "workspace_bytes", "sharing_factor"]
    assert df[per_row].notna().all(axis=None)
    assert set(df["timer"]) == {"cpu"}
    assert df["cold_l2"].isna().all()
    assert json.loads(df["kernel_config"][0])["_target_"] == "deft.TreeAttention"
    assert set(df["workload"]) == {"few_shot_33_3_5", "random_9_12_2_s0"}


def test_full_size_points_are_counted_on_a_cpu(tmp_path: Path) -> None:
    wide = ["workload=few_shot", "workload.prompt_len=[1024,32768]", "workload.width=256"]
    df = run(tmp_path, "model=llama3_8b", *wide, "device_model=a100", "measure_max_flops=0")
    assert set(df["status"]) == {"counted"}
    assert df["latency_us_p50"].isna().all()
    assert df["predicted_us"].gt(0).all()
    assert set(df["predicted_for"]) == {"a100"}
    flat = df[(df["kernel"] == "deft_flatten") & df["workload"].str.contains("32768")].iloc[0]
    unique = (32768 + 256 * 32) * 4096
    assert flat["kv_unique_bytes"] == unique
    radix = df[(df["kernel"] == "radix_attention") & df["workload"].str.contains("32768")].iloc[0]
    assert radix["kv_bytes"] == 256 * (32768 + 32) * 4096


def test_page_sizes_and_dtypes_sweep_inside_a_job(tmp_path: Path) -> None:
    df = run(tmp_path, "kernel=deft_flatten", "page_size=[1,16]", "dtype=[float16,float32]")
    assert len(df) == 8
    assert (df["status"] == "ok").all()
    assert len(df[["page_size", "dtype"]].drop_duplicates()) == 4


@pytest.mark.parametrize("name", ["DropsOneToken", "WritesNothing", "TurnsWrong"])
def test_a_wrong_kernel_gets_no_latency_and_the_sweep_goes_on(tmp_path: Path, name: str) -> None:
    df = run(tmp_path, "kernel=[deft_node,deft_flatten]", broken(name))
    by_kernel = df.groupby("kernel")
    assert set(by_kernel.get_group("deft_node")["status"]) == {"incorrect"}
    assert by_kernel.get_group("deft_node")["latency_us_p50"].isna().all()
    assert by_kernel.get_group("deft_node")["status_detail"].str.len().gt(10).all()
    assert set(by_kernel.get_group("deft_flatten")["status"]) == {"ok"}


@pytest.mark.parametrize(
    ("overrides", "status", "detail"),
    [
        ([broken("Raises")], "error", "RuntimeError: RuntimeError on purpose"),
        ([broken("Raises"), "+kernel.deft_node.kind=oom"], "oom", "oom on purpose"),
        ([broken("Sleeps"), "kernel_timeout_s=0.2"], "timeout", "kernel_timeout_s=0.2"),
        ([broken("NeverFits")], "unsupported", "too many"),
        ([broken("Raises"), "+kernel.deft_node.kind=exit"], "error", "SystemExit: exit"),
        ([broken("Raises"), "+kernel.deft_node.kind='[/red]'"], "error", "[/red] on purpose"),
        ([broken("TellsNonsense")], "error", "column 'layout_us' wants double"),
        ([broken("CannotSay")], "error", "KeyError: 'arch'"),
    ],
)
def test_what_a_kernel_does_is_its_status(
    tmp_path: Path, overrides: list[str], status: str, detail: str
) -> None:
    df = run(tmp_path, "kernel=[deft_node,deft_flatten]", *overrides)
    bad = df[df["kernel"] == "deft_node"]
    assert set(bad["status"]) == {status}
    assert bad["status_detail"].str.contains(detail, regex=False).all()
    assert set(df[df["kernel"] == "deft_flatten"]["status"]) == {"ok"}


@pytest.mark.parametrize(("kind", "code"), [("Raises", bench.BAD_ROWS), ("NeverFits", 0)])
def test_the_exit_code_tells_of_bad_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, code: int
) -> None:
    words = ["kernel=[deft_node,deft_flatten]", *TINY, broken(kind), f"results_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    assert bench.main() == code
    assert len(load_rows(tmp_path / "adhoc")) == 4


def test_an_error_with_an_odd_text_fits_a_row() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise TypeError

    assert failed_columns(Mute())["status_detail"] == "Mute"
    assert failed_columns(RuntimeError("\ud800"))["status_detail"] == "RuntimeError: \\ud800"


def test_resume_makes_only_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(tmp_path, "kernel=deft_flatten", "resume=true")
    second = run(tmp_path, "kernel=[deft_flatten,deft_node]", "resume=true")
    assert set(second["kernel"]) == {"deft_node"}
    job = compose_job([*TINY, f"results_dir={tmp_path}", "kernel=deft_flatten", "resume=true"])
    assert bench.run_job(job) is None
    assert "nothing to do" in capsys.readouterr().out
    assert len(latest(load_rows(tmp_path))) == len(first) + len(second)
    changed = run(tmp_path, "kernel=deft_flatten", "kernel.deft_flatten.block_kv=32", "resume=true")
    assert len(changed) == len(first)


def test_resume_tells_models_with_equal_heads_apart(tmp_path: Path) -> None:
    counted = ["kernel=deft_flatten", "resume=true", "measure_max_flops=0"]
    run(tmp_path, *counted, "model=llama2_7b")
    again = run(tmp_path, *counted, "model=[llama2_7b,codellama_7b]")
    assert set(again["model"]) == {"codellama_7b"}
    assert set(latest(load_rows(tmp_path))["model"]) == {"llama2_7b", "codellama_7b"}


def test_resume_sees_the_figures_of_a_device_model(tmp_path: Path) -> None:
    figures = json.loads((MODEL_DIR / "a100.json").read_text())
    mine = tmp_path / "mine.json"
    latencies = []
    for launch_us in (2.0, 500.0):
        mine.write_text(json.dumps({**figures, "launch_us": launch_us}))
        df = run(tmp_path, "kernel=deft_flatten", "resume=true", f"device_model={mine}")
        latencies.append(df["predicted_us"].iloc[0])
    assert latencies[1] > latencies[0] + 100


def test_resume_steps_over_a_corrupt_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "adhoc").mkdir()
    (tmp_path / "adhoc" / "broken.parquet").write_text("not parquet")
    assert len(run(tmp_path, "kernel=deft_flatten", "resume=true")) == 2
    assert "broken.parquet" in caplog.text


def test_kernel_order_is_shuffled_by_the_seed() -> None:
    from experiments.sweep import Sweep

    orders = {}
    for seed in (0, 0, 1):
        sweep = Sweep(compose_job(["+experiment=smoke", "device=cpu", f"seed={seed}"]), "run")
        orders.setdefault(seed, []).append([sweep.kernel_order(task) for task in sweep.tasks])
    assert orders[0][0] == orders[0][1] != orders[1][0]


@pytest.mark.parametrize(
    "preset", sorted(path.stem for path in (CONF_DIR / "experiment").glob("*.yaml"))
)
def test_every_preset_runs_in_smoke_mode(tmp_path: Path, preset: str) -> None:
    tiny = ["workload=smoke", "model=[tiny_4_2]", "figures=false", "walkthrough=false"]
    if preset in ("prefix_length", "tree_size", "batch"):
        tiny[0] = "workload.prompt_len=16"
        tiny += ["workload.width=2", "workload.batch=[1,2]"]
    elif preset == "io_walkthrough":
        tiny[0] = "workload.prompt_len=16"
    fast = ["device=cpu", "timing=cpu", "timing.repeats=1", "timing.plan_repeats=1"]
    job = compose_job([f"+experiment={preset}", *tiny, *fast, f"results_dir={tmp_path}"])
    path = bench.run_job(job)
    assert path is not None
    assert path.parent.name == preset
    df = load_rows(path)
    missing = df[df["status"] != "ok"]
    assert set(missing["status"]) <= {"unsupported"}
    assert missing["status_detail"].str.endswith("needs a CUDA GPU").all()
    assert set(df["kernel"]) - set(missing["kernel"]) >= {"radix_attention", "deft_flatten"}
    assert set(df["kernel"]) == {kernel_id(entry) for entry in job.kernels}


def test_dump_tree_writes_what_a_file_workload_reads(tmp_path: Path) -> None:
    df = run(tmp_path, "kernel=deft_flatten", "dump_tree=true")
    trees = sorted((tmp_path / "adhoc" / "trees").glob("*.json"))
    assert len(trees) == 2
    again = run(tmp_path, "kernel=deft_flatten", "workload=file", f"workload.path={trees[0]}")
    same = df[df["workload"] == trees[0].stem.removesuffix("_step0")].iloc[0]
    assert again["kv_bytes"][0] == same["kv_bytes"]


def test_dry_run_dumps_trees_and_tells_what_a_kernel_raises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["kernel=deft_node", broken("CannotSay"), "dry_run=true", "dump_tree=true"]
    assert bench.run_job(compose_job([*TINY, *options, f"results_dir={tmp_path}"])) is None
    assert "KeyError" in capsys.readouterr().out
    assert len(list((tmp_path / "adhoc" / "trees").glob("*.json"))) == 2
    assert not list(tmp_path.rglob("*.parquet"))


def test_bench_tree_from_python() -> None:
    tree = topologies.few_shot(40, 3, 4)
    df = bench_tree(tree, ["deft_flatten", "dense"], model="tiny_4_2", timing="cpu", device="cpu")
    assert list(df.columns) == list(COLUMNS)
    assert df["status"].tolist() == ["ok", "ok"]
    assert set(df["num_tokens"]) == {tree.num_tokens}
    assert df["repro_command"].str.startswith("experiments.bench_tree(").all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], "dense", "tiny_4_2"), "DecodeTree"),
        ((topologies.chain([3]), ["dence"], "tiny_4_2"), "did you mean dense?"),
        ((topologies.chain([3]), "dense", "tiny"), "unknown model"),
    ],
)
def test_bench_tree_refuses_with_a_reason(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench_tree(*arguments)


def test_bench_tree_takes_a_tree_with_odd_queries() -> None:
    tree = DecodeTree([-1, 0, 0], [9, 0, 4], [2, 0, 2], [3, 9, 4])
    df = bench_tree(tree, ["deft_flatten", "radix_attention"], "tiny_4_2", device="cpu")
    assert set(df["status"]) == {"ok"}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("kernel=[deft_flaten]", "did you mean deft_flatten?"),
        ("workload.promt_len=3", "unknown key 'workload.promt_len'"),
        ("results_dir=/proc/nowhere", "set results_dir=FOLDER"),
        ("dtype=fp8", "out of scope"),
        ("workload.width=abc", "whole number"),
        ("workload.width=99999999999", "Unable to allocate"),
        ("seed=abc", "'abc' of type 'str' could not be converted to Integer"),
    ],
)
def test_errors_are_one_line(
    argument: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", argument, "model=tiny_4_2", "figures=false"])
    monkeypatch.setattr(bench, "_failures", [])
    GlobalHydra.instance().clear()
    assert bench.main() == 1
    err = capsys.readouterr().err
    assert message in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("full_error", ["0", "1"])
def test_a_traceback_only_when_asked_for(full_error: str) -> None:
    words = [sys.executable, "-m", "experiments.bench", "dtype=int8"]
    environ = {**os.environ, "HYDRA_FULL_ERROR": full_error}
    done = subprocess.run(words, cwd=REPO, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "out of scope" in done.stderr
    assert ("Traceback" in done.stderr) == (full_error == "1")


@pytest.mark.gpu
def test_a_lost_gpu_writes_its_row_and_ends_the_process(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "experiments.bench", "kernel=[deft_node]", "model=tiny_4_2"]
    words += [broken("LosesTheDevice"), "workload=smoke", f"results_dir={tmp_path}"]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == bench.LOST_DEVICE, done.stderr[-2000:]
    assert "resume=true" in done.stderr
    assert load_rows(tmp_path)["status"].tolist() == ["error"]


@pytest.mark.gpu
def test_rows_of_a_gpu(tmp_path: Path) -> None:
    overrides = ["workload=smoke", "model=tiny_4_2", "figures=false", f"results_dir={tmp_path}"]
    path = bench.run_job(compose_job([*overrides, "kernel=[deft_flatten,dense]"]))
    assert path is not None
    df = load_rows(path)
    assert (df["status"] == "ok").all()
    assert df["cold_l2"].all()
    assert (df["latency_samples_us"].str.len() >= 20).all()
    assert set(df["timer"]) == {"graph"}


def test_a_killed_job_leaves_its_rows(tmp_path: Path) -> None:
    slow = [
        "timing.budget_s=0.2",
        "workload.width=[1,2,3,4,5,6,7,8,9,10]",
        "workload.prompt_len=64",
    ]
    words = [sys.executable, "-m", "experiments.bench", "model=tiny_4_2", *slow]
    words += [f"results_dir={tmp_path}", "device=cpu", "figures=false"]
    job = subprocess.Popen(words, cwd=REPO, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.rglob("*.parquet")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.5)
    assert job.poll() is None, "the job ended before it could be killed"
    job.send_signal(signal.SIGKILL)
    job.wait()
    df = load_rows(tmp_path, strict=True)
    assert 0 < len(df) < 50
    assert set(df["status"]) == {"ok"}
