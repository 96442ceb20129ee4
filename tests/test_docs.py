"""The code in README.md and docs/ runs, and the names it mentions exist."""

import inspect
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode

from deft import AttentionKernel, DecodeTree, HeadShape
from deft.planners import PLANNERS
from experiments.check import check_one, odd_trees

ROOT = Path(__file__).parents[1]
DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks(path: Path, language: str) -> list[str]:
    """Fenced blocks of one language in a Markdown file."""
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


def executed(path: Path) -> dict[str, Any]:
    """Names left by running a file's Python blocks in order, but those that start a sweep."""
    scope: dict[str, Any] = {}
    for code in blocks(path, "python"):
        if "bench_tree" not in code:
            exec(compile(code, str(path), "exec"), scope)
    return scope


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_python_blocks_run(path: Path) -> None:
    executed(path)


def test_the_kernel_template_satisfies_the_protocol_and_the_gate() -> None:
    kernel = executed(ROOT / "docs" / "adding_a_kernel.md")["MyKernel"]()
    assert isinstance(kernel, AttentionKernel)
    tree, shape = DecodeTree([-1, 0, 0], [3, 2, 1], [1, 2]), HeadShape(4, 2, 8, "float32")
    assert kernel.unsupported(HeadShape(128, 1, 8), tree, 1, "cpu")
    assert kernel.io(tree, shape, 1).kv == 9 * shape.kv_token_bytes
    for name, odd in odd_trees().items():
        status, detail, _ = check_one(kernel, odd, shape, 16, torch.device("cpu"))
        assert status == "ok", f"{name}: {detail}"


def test_the_kernel_template_is_annotated_and_clean(tmp_path: Path) -> None:
    page = ROOT / "docs" / "adding_a_kernel.md"
    kernel = executed(page)["MyKernel"]
    for name in ("__init__", "unsupported", "io", "plan", "run"):
        signature = inspect.signature(getattr(kernel, name))
        told = [p.annotation for p in signature.parameters.values() if p.name != "self"]
        assert inspect.Signature.empty not in [*told, signature.return_annotation], name
    if find_spec("ruff") is None:
        pytest.skip("ruff is not installed")
    (tmp_path / "my_kernel.py").write_text(blocks(page, "python")[0])
    for words in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *words, "--config", str(ROOT / "pyproject.toml")]
        done = subprocess.run([*ruff, str(tmp_path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ == "bmm"
        return func(*args, **(kwargs or {}))


def test_the_kernel_template_uses_its_knob() -> None:
    kernel_class = executed(ROOT / "docs" / "adding_a_kernel.md")["MyKernel"]
    tree, shape = odd_trees()["few_shot"], HeadShape(4, 2, 8, "float32")
    read = []
    for block in (1, 7, 1000):
        kernel = kernel_class(block=block)
        outcome = check_one(kernel, tree, shape, 1, torch.device("cpu"))
        assert outcome[0] == "ok", outcome
        with Products() as products:
            kernel.run(torch.zeros(tree.num_qo, 4, 8))
        read.append(products.count)
    # Two products a block; each of three queries sees 37 + 5 tokens.
    assert read == [2 * 3 * 42, 2 * 3 * 6, 2 * 3]


def test_the_kernel_page_gives_readmes_row_of_each_example() -> None:
    text = (ROOT / "docs" / "adding_a_kernel.md").read_text()
    examples = re.findall(r"^# @package kernel\.(\w+)$", text, re.MULTILINE)
    assert sorted(examples) == ["flatten_32", "my_kernel"]
    assert [name for name in examples if f"``| `{name}` | " not in text] == []


def test_plan_document_lists_the_planners() -> None:
    table = (ROOT / "docs" / "plan.md").read_text().partition("## Strategies")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(PLANNERS)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_linked_and_named_files_exist(path: Path) -> None:
    text = path.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    missing = [link for link in links if not (path.parent / link).exists()]
    named = re.findall(
        r"`((?:deft|baselines|experiments|docs|conf|scripts|tests)/[\w./]+\w)`", text
    )
    invented = ("my_kernel", "flatten_32", "NAME")  # files that the reader would write
    missing += [
        name
        for name in named
        if not any(part in name for part in invented) and not (ROOT / name).exists()
    ]
    assert not missing, f"{path.name} names files that are not there: {missing}"


def test_readme_lists_every_kernel() -> None:
    table = (ROOT / "README.md").read_text().partition("## Kernels")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    known = {path.stem for path in (ROOT / "conf" / "kernel").glob("*.yaml")}
    assert listed == known, f"rows missing in README's table of kernels: {sorted(known - listed)}"


def test_page_of_baselines_tells_every_swept_knob_and_every_default() -> None:
    text = (ROOT / "docs" / "baselines.md").read_text()
    table = text.partition("\n## Knobs")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:4] for line in table.splitlines() if line.startswith("| `")]
    swept = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "variants" / "libraries.yaml"))
    assert {kernel.strip(" `"): knobs_of(cell) for kernel, _, cell in rows} == swept
    for kernel, default, cell in rows:
        conf = OmegaConf.load(ROOT / "conf" / "kernel" / f"{kernel.strip(' `')}.yaml")
        told = {key: value for knobs in knobs_of(default) for key, value in knobs.items()}
        assert told == {key: conf[key] for key in told}
        assert set(told) == {key for knobs in knobs_of(cell) for key in knobs}


def knobs_of(cell: str) -> list[dict[str, Any]]:
    """The knobs in backticks of a table's cell, each a mapping as YAML has it."""
    return [yaml.safe_load(f"{{{knobs}}}") for knobs in re.findall(r"`([^`]+)`", cell)]


def table_row(text: str, first_cell: str) -> set[str]:
    """Words in backticks of the second cell of the table row whose first cell holds a text."""
    row = next(line for line in text.splitlines() if line.startswith("|") and first_cell in line)
    return set(re.findall(r"`([\w.]+)`", row.split("|")[2]))


def test_readme_names_real_presets_workloads_and_commands() -> None:
    text = (ROOT / "README.md").read_text()
    for cell, folder in (("+experiment=NAME", "experiment"), ("`workload=NAME`", "workload")):
        names = table_row(text, cell)
        known = {path.stem for path in (ROOT / "conf" / folder).glob("*.yaml")}
        assert names and names <= known, f"not in conf/{folder}: {sorted(names - known)}"
    for path in DOCS:
        modules = set(re.findall(r"python -m\s+(experiments\.\w+)", path.read_text()))
        missing = [m for m in modules if not (ROOT / (m.replace(".", "/") + ".py")).exists()]
        assert not missing, f"{path.name} names commands that are not there: {missing}"
