"""The repository keeps its own rules: layout, file sizes, configuration headers, package data."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("deft", "baselines", "experiments")
MAX_LINES = 300
TEXT_SUFFIXES = {".py", ".md", ".yaml", ".toml", ".json", ".mplstyle", ".ipynb", ".sh", ""}
# A path of somebody's machine: it works nowhere else.
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])/(home|root|Users|work|mnt|opt|data)/[\w.-]+")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")


def tracked() -> list[Path]:
    """Files that git tracks, or all source files where this is no git checkout."""
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        listed = None
    if listed is None or listed.returncode:
        folders = [*PACKAGES, "tests", "conf", "docs", "scripts"]
        return [path for name in folders for path in (ROOT / name).rglob("*") if path.is_file()]
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def name_of(path: Path) -> str:
    """Path inside the repository, with forward slashes."""
    return path.relative_to(ROOT).as_posix()


def text_files() -> list[tuple[str, str]]:
    """(name, text) of every tracked text file but this test."""
    paths = [path for path in tracked() if path.suffix in TEXT_SUFFIXES]
    return [(name_of(p), p.read_text()) for p in paths if p != Path(__file__).resolve()]


def machine_paths(text: str) -> list[str]:
    """Absolute paths of one machine in a text."""
    return [match.group() for match in ABSOLUTE_PATH.finditer(text)]


def header_fault(name: str, text: str) -> str | None:
    """What is wrong with the first line of conf/kernel/NAME.yaml."""
    wanted = f"# @package kernel.{Path(name).stem}"
    first = text.partition("\n")[0].rstrip()
    return None if first == wanted else f"{name} starts with {first!r}, want {wanted!r}"


@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "LICENSE", "CHANGELOG.md", "Makefile", "pyproject.toml", ".gitignore"),
        *(".ci/run", "scripts/install"),
        *("docs/io.md", "docs/plan.md", "docs/timing.md", "docs/adding_a_kernel.md"),
        *(f"{package}/__init__.py" for package in PACKAGES),
        *(f"deft/device_models/{gpu}.json" for gpu in ("h200", "h100", "a100")),
    ],
)
def test_file_is_there(name: str) -> None:
    path = ROOT / name
    assert path.is_file()
    if name in (".ci/run", "scripts/install"):
        assert path.stat().st_mode & 0o111, f"{name} is not executable"


def test_every_kernel_config_names_its_package() -> None:
    files = sorted((ROOT / "conf" / "kernel").glob("*.yaml"))
    assert files, "no conf/kernel/*.yaml"
    texts = [(name_of(path), path.read_text()) for path in files]
    found = [fault for name, text in texts if (fault := header_fault(name, text))]
    assert not found, "\n".join(found)
    assert all("_target_:" in text for _, text in texts)
    planted = "# @package kernel.other\n_target_: deft.TreeAttention"
    assert header_fault("conf/kernel/mine.yaml", planted)


def test_no_path_of_one_machine() -> None:
    found = [(name, hits) for name, text in text_files() if (hits := machine_paths(text))]
    assert not found, found
    assert machine_paths("see /home/me/tree.json") and not machine_paths("results/h200/rows")


def test_source_files_are_short() -> None:
    sizes = {
        name: len(text.splitlines())
        for name, text in text_files()
        if name.endswith(".py") and not name.startswith(("deft/kernels/", "tests/"))
    }
    assert "deft/plan.py" in sizes
    long = {name: lines for name, lines in sizes.items() if lines > MAX_LINES}
    assert not long, f"more than {MAX_LINES} lines: {long}"


def test_nothing_is_marked_unfinished() -> None:
    found = [name for name, text in text_files() if UNFINISHED.search(text)]
    assert not found, found
    assert UNFINISHED.search("# TODO: later")


def test_package_data_is_declared() -> None:
    """What is no Python file inside a package must match a package-data pattern."""
    declared = re.search(r'"\*" = \[(.*?)\]', (ROOT / "pyproject.toml").read_text())
    assert declared is not None
    suffixes = {pattern.strip(' "').lstrip("*") for pattern in declared.group(1).split(",")}
    data = [p for p in tracked() if name_of(p).split("/")[0] in PACKAGES and p.suffix != ".py"]
    assert data
    missing = [name_of(path) for path in data if path.suffix not in suffixes]
    assert not missing, f"not in package-data: {missing}"


def test_install_refuses_an_unknown_build_of_torch(tmp_path: Path) -> None:
    words = [ROOT / "scripts" / "install", tmp_path / "venv", "/nonexistent/python"]
    environ = {**os.environ, "TORCH": "gpu"}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["install: TORCH must be auto, cpu or cuda, got gpu"]
