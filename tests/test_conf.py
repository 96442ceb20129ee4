"""conf/: every file composes, presets run, and misspelt keys are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import bench
from experiments.config import CONF_DIR, compose_job, kernel_names
from experiments.recordings import shared_folder

PRESETS = sorted(path.stem for path in (CONF_DIR / "experiment").glob("*.yaml"))
NEEDS_INPUT = {"file": "workload.path", "suite": "workload.trees"}


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


@pytest.mark.parametrize("kernel", kernel_names())
def test_kernel_files_name_their_own_package(kernel: str) -> None:
    first = (CONF_DIR / "kernel" / f"{kernel}.yaml").read_text().splitlines()[0]
    assert first == f"# @package kernel.{kernel}"
    job = compose_job([f"kernel=[{kernel}]"])
    assert list(job.kernels) == [kernel]
    assert job.make_kernel(kernel).name == kernel


def test_kernels_and_models_live_side_by_side() -> None:
    job = compose_job(
        [f"kernel=[{','.join(kernel_names())}]", f"model=[{','.join(choices('model'))}]"]
    )
    assert sorted(job.kernels) == kernel_names()
    assert sorted(job.models) == choices("model")
    layouts = {name: job.shape(name, "float16").group_size for name in job.models}
    assert layouts["llama3_8b"] == 4
    assert layouts["qwen2.5_7b"] == 7
    assert layouts["mqa_16_1"] == 16


@pytest.mark.parametrize("workload", choices("workload"))
def test_workload_files_give_points(workload: str) -> None:
    if (
        workload.split("_")[0] in ("reasoning", "speculative")
        and not (shared_folder() / "workloads").is_dir()
    ):
        pytest.skip(f"no recorded workloads at {shared_folder()}")
    job = compose_job([f"workload={workload}"])
    if workload in NEEDS_INPUT:
        with pytest.raises(ValueError, match=NEEDS_INPUT[workload]):
            list(job.workload.points())
    else:
        assert next(iter(job.workload.points())).tree.num_qo > 0


@pytest.mark.parametrize("timing", choices("timing"))
def test_timing_files_compose(timing: str) -> None:
    assert compose_job([f"timing={timing}"]).timing.repeats >= 1


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_compose_and_list_their_points(
    preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # Every preset in full, without running it; the tiny run of each is in test_bench.py.
    job = compose_job([f"+experiment={preset}", "dry_run=true", "device=cpu"])
    assert job.settings.name == preset
    assert bench.run_job(job) is None
    assert "nothing was run" in capsys.readouterr().out


def test_layered_suite_is_the_published_45_cases() -> None:
    path = shared_folder() / "reference" / "peers_h200.csv"
    if not path.is_file():
        pytest.skip(f"no reference figures at {path}")
    job = compose_job(["+experiment=layered_suite"])
    heads = [(m.num_qo_heads, m.num_kv_heads) for m in job.models.values()]
    ours = {(point.name, *pair) for point in job.workload.points() for pair in heads}
    rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
    assert ours == {(f"layered_{r[0]}_{r[1]}", int(r[2]), int(r[3])) for r in rows}
    assert len(ours) == 45


@pytest.mark.parametrize(
    "override",
    [
        "workload.promt_len=3",
        "+workload.promt_len=3",
        "timing.repeat=3",
        "page_sise=16",
        "+page_sise=16",
        "kernel.deft_flatten.blok_kv=64",
        "+kernel.deft_flatten.blok_kv=64",
        "model.llama3_8b.heads=3",
        "kernel=[deft_flaten]",
        "workload=few_shots",
    ],
)
def test_misspelt_keys_and_choices_are_refused(override: str) -> None:
    with pytest.raises(ValueError, match=r"unknown|has no"):
        compose_job([override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dtype=float8_e4m3fn", "out of scope"),
        ("model.llama3_8b.head_dim=576", "MLA"),
        ("+kernel.deft_flatten.logits_soft_cap=30", "soft-cap"),
        ("+kernel.deft_flatten.sliding_window=128", "sliding-window"),
        ("+kernel.deft_flatten.sinks=4", "sinks"),
        ("kernel=[]", "no kernel chosen"),
        ("page_size=129", "page_size must be"),
        ("timing.timer=wall", "timing.timer must be"),
        ("dtype=[]", "dtype is an empty list"),
        ("page_size=[]", "page_size is an empty list"),
        ("seed=99999999999999999999", "seed must fit in 64 bits"),
        ("kernel_timeout_s=nan", "kernel_timeout_s must be at most"),
        ("kernel_timeout_s=inf", "kernel_timeout_s must be at most"),
        ("measure_max_flops=nan", "measure_max_flops must be a number"),
        ("name=''", "a folder inside results_dir"),
        ("name=/tmp/rows", "a folder inside results_dir"),
        ("name=../rows", "a folder inside results_dir"),
        ("baseline=flash_decodin", "baseline 'flash_decodin' is no kernel"),
        ("+kernel.deft_flaten.block_kv=64", "unknown kernel 'deft_flaten'"),
        ("+kernel.mine=5", "unknown kernel 'mine'"),
        ("+kernel.mine={_target_:tests.broken_kernels.Missing}", "Are you sure that 'Missing' is"),
        ("+kernel.mine={_target_:tests.broken_kernels.FailsSilently}", "mine: ValueError"),
        ("+kernel.mine={_target_:tests.broken_kernels.EndsTheProcess}", "calls sys.exit"),
        ("+kernel.mine={_target_:os.getcwd}", "kernel mine: 'str' object has no attribute"),
    ],
)
def test_what_no_kernel_can_do_is_refused_with_a_reason(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose_job([override])


def test_schemas_reject_a_misspelt_key_in_a_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    from experiments import config

    shutil.copytree(CONF_DIR, tmp_path / "conf")
    preset = tmp_path / "conf" / "experiment" / "typo.yaml"
    preset.write_text("# @package _global_\nworkload: {promt_len: 3}\n")
    monkeypatch.setattr(config, "CONF_DIR", tmp_path / "conf")
    with pytest.raises(ValueError, match="promt_len"):
        compose_job(["+experiment=typo"])
