"""Imports point one way, and heavy or optional packages stay where they belong."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "deft": {"deft"},
    "baselines": {"deft", "baselines"},
    "experiments": {"deft", "baselines", "experiments"},
}
PROJECT = {*MAY_IMPORT, "notebooks", "tests", "scripts"}
ONLY_EXPERIMENTS = {"hydra", "omegaconf", "pandas", "pyarrow", "matplotlib", "rich"}


def imports(node: ast.AST, at_import: bool = True) -> Iterator[tuple[str, int, bool]]:
    """(top package, line, runs when the module is imported) of every import below a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((name.name.split(".")[0], child.lineno, at_import) for name in child.names)
        elif isinstance(child, ast.ImportFrom):
            module = child.module or ""
            yield "." * child.level or module.split(".")[0], child.lineno, at_import
        else:
            in_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from imports(child, at_import and not in_function and not typing_only)


def faults(package: str, where: str, source: str) -> list[str]:
    """What a source file of a package imports that it must not."""
    found = []
    for name, line, at_import in imports(ast.parse(source)):
        place = f"{where}:{line}"
        if name.startswith("."):
            found.append(f"{place} has a relative import; write absolute ones")
        elif name in PROJECT - MAY_IMPORT[package]:
            found.append(f"{place} imports {name}, above {package}")
        elif package == "experiments" or not at_import:
            continue
        elif name in ONLY_EXPERIMENTS:
            found.append(f"{place} imports {name} when {package} is imported")
        elif name == "triton" and not where.startswith("deft/kernels/"):
            found.append(f"{place} imports triton when {package} is imported")
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_of_each_package(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    names = [(path.relative_to(ROOT).as_posix(), path.read_text()) for path in files]
    found = [fault for name, source in names for fault in faults(package, name, source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("package", "source", "fault"),
    [
        ("deft", "import baselines.dense", "above deft"),
        ("deft", "def f():\n    from experiments import results", "above deft"),
        ("baselines", "from experiments.schema import SCHEMA", "above baselines"),
        ("experiments", "import notebooks", "above experiments"),
        ("deft", "import numpy, pandas as pd", "imports pandas"),
        ("baselines", "try:\n    import rich\nexcept ImportError:\n    pass", "imports rich"),
        ("baselines", "try:\n    pass\nexcept OSError:\n    import hydra", "imports hydra"),
        ("deft", "class A:\n    from matplotlib import pyplot", "imports matplotlib"),
        ("deft", "import triton.language as tl", "imports triton"),
        ("deft", "from .tree import DecodeTree", "absolute"),
    ],
)
def test_a_wrong_import_is_found(package: str, source: str, fault: str) -> None:
    found = faults(package, f"{package}/planted.py", source)
    assert len(found) == 1 and fault in found[0]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nfrom deft.tree import DecodeTree",
        "def draw():\n    import matplotlib.pyplot as plt",
        "def launch():\n    import triton",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pandas",
    ],
)
def test_a_right_import_passes(source: str) -> None:
    assert not faults("deft", "deft/planted.py", source)
    assert not faults("deft", "deft/kernels/planted.py", "import triton")


def test_importing_deft_and_baselines_loads_nothing_heavy() -> None:
    watched = sorted(ONLY_EXPERIMENTS | {"triton", "experiments"})
    # torch itself loads triton on some machines, so only what deft adds to it counts.
    code = (
        "import sys, torch\nbefore = set(sys.modules)\nimport deft, baselines\n"
        f"print([m for m in {watched!r} if m in sys.modules and m not in before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
