"""python -m experiments.check: every kernel of conf/kernel/ on odd trees, on both executors."""

from __future__ import annotations

import pytest

from deft import DecodeTree
from experiments.check import check, check_job, odd_trees
from experiments.config import compose_job, kernel_names

PLANNERS = [
    name
    for name in kernel_names()
    if "TreeAttention" in str(compose_job([f"kernel={name}"]).kernels[name]["_target_"])
]


# What the interpreter has time for: masks, empty nodes and runs that end inside a node.
FEW = {name: odd_trees()[name] for name in ("token tree", "empty nodes", "cut nodes")}


def failures(trees: dict[str, DecodeTree], *overrides: str) -> list[str]:
    findings = check_job(compose_job(["model=tiny_4_2", *overrides]), trees)
    assert len(findings) >= len(trees)
    runs_here = any(finding.status == "ok" for finding in findings)
    assert runs_here or all("needs a CUDA GPU" in finding.detail for finding in findings)
    return [f"{f.tree}: {f.status} {f.detail}" for f in findings if f.status != "ok"]


@pytest.mark.parametrize("kernel", kernel_names())
def test_every_kernel_passes_the_gate(kernel: str) -> None:
    allowed = failures(
        odd_trees(), f"kernel={kernel}", "dtype=[float16,float32]", "page_size=[1,16]"
    )
    assert [line for line in allowed if "unsupported" not in line] == []


@pytest.mark.parametrize("kernel", PLANNERS)
def test_every_planner_passes_on_triton(kernel: str) -> None:
    backend = f"++kernel.{kernel}.backend=triton"  # its file may leave the key out
    assert failures(FEW, f"kernel={kernel}", backend, "page_size=16") == []


def test_a_wrong_kernel_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    target = "kernel.deft_node._target_=tests.broken_kernels.DropsOneToken"
    assert check(["kernel=deft_node", target]) > 0
    assert "incorrect" in capsys.readouterr().out


def test_a_kernel_that_ends_the_process_fails_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = "kernel.deft_node._target_=tests.broken_kernels.Raises"
    assert check(["kernel=deft_node", target, "+kernel.deft_node.kind=exit"]) > 0
    assert check(["kernel=deft_node", target, "+kernel.deft_node.kind='[/red]'"]) > 0
    told = capsys.readouterr().out
    assert "SystemExit" in told and "[/red] on purpose" in told


def test_help_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(["--help"]) == 0
    assert "experiments.check kernel=" in capsys.readouterr().out


def test_no_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="name a kernel"):
        check([])
