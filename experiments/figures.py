"""Every figure that a set of rows allows, each as PDF, PNG and the CSV behind it.

    python -m experiments.figures results=results/h200 figure=all out=results/h200/figures

A figure of measured rows and one of predicted rows are two files: NAME and NAME_predicted.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import hydra
import pandas as pd
from matplotlib.figure import Figure
from omegaconf import DictConfig, ListConfig

from experiments import comparison_plots, dot_plots, peers, plots
from experiments.command_line import USER_ERRORS, WANTS_TRACEBACK, print_error, run_command
from experiments.derived import BASELINE
from experiments.figure_data import setting_slugs, source_frames
from experiments.figure_style import style_context
from experiments.results import ResultsError, load_rows

log = logging.getLogger(__name__)
# fontTools tells every glyph it puts in a PDF, at the level of this project's own messages.
logging.getLogger("fontTools").setLevel(logging.WARNING)
CONF_DIR = Path(__file__).resolve().parents[1] / "conf"
# Fixed dates keep the files of equal rows equal.
_METADATA = {"pdf": {"CreationDate": None, "ModDate": None}, "png": {"Software": None}}


@dataclass(frozen=True)
class FigureKind:
    """How one figure is made.

    Args:
        data: rows of one source -> the table behind the figure, empty where they do not allow it.
        draw: that table -> Figure.
        sources: which sources it can show; each gets files of its own.
        wants: what the rows must hold, for the message when it is skipped.
    """

    data: Callable[..., pd.DataFrame]
    draw: Callable[[pd.DataFrame], Figure]
    sources: tuple[str, ...]
    wants: str


_LATENCIES = ("measured", "predicted")
KINDS = {
    "latency_by_prefix": FigureKind(
        plots.prefix_data, plots.prefix_figure, _LATENCIES,
        "few_shot rows of one width at two or more prefix lengths",
    ),
    "latency_by_queries": FigureKind(
        plots.queries_data, plots.queries_figure, _LATENCIES,
        "rows of one prefix length or tree family at three or more query counts",
    ),
    "latency_by_batch": FigureKind(
        plots.batch_data, plots.batch_figure, _LATENCIES,
        "rows of one tree at three or more batch sizes",
    ),
    "latency_by_topology": FigureKind(
        dot_plots.topology_data, dot_plots.topology_figure, _LATENCIES, "two or more workloads"
    ),
    "speed_up_map": FigureKind(
        comparison_plots.speed_up_data, comparison_plots.speed_up_figure, _LATENCIES,
        "few_shot rows of the baseline and of another kernel at two or more points",
    ),
    "fraction_of_floor": FigureKind(
        dot_plots.floor_data, dot_plots.floor_figure, _LATENCIES, "rows with a floor (of a GPU)"
    ),
    "plan_time": FigureKind(
        plots.plan_time_data, plots.plan_time_figure, ("measured",),
        "ok rows with plan_us at two or more numbers of nodes",
    ),
    "io_terms": FigureKind(
        comparison_plots.io_data, comparison_plots.io_figure, ("counted",), "rows with counted IO"
    ),
    "kv_rereads": FigureKind(
        plots.redundancy_data, plots.redundancy_figure, ("counted",),
        "rows of one prefix length or tree family at three or more query counts",
    ),
}  # fmt: skip
PEER_KINDS: dict[str, str | None] = {"peers": None, "peers_deft_flatten": "deft_flatten"}
FIGURES = (*KINDS, *PEER_KINDS)


def save_figure(figure: Figure, data: pd.DataFrame, stem: Path) -> list[Path]:
    """Write stem.pdf, stem.png and stem.csv.

    Raises:
        ResultsError: the folder cannot be written.
    """
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("pdf", "png", "csv")]
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        with style_context():
            for path in paths[:2]:
                figure.savefig(path, metadata=_METADATA[path.suffix[1:]])
        data.to_csv(paths[2], index=False, float_format="%.6g")
    except OSError as error:
        raise ResultsError(
            f"cannot write figures to {stem.parent} ({error.strerror or error}); "
            "name another folder with out=... or make this one writable"
        ) from error
    return paths


def _frames(
    df: pd.DataFrame, name: str, baseline: str
) -> Iterator[tuple[str, pd.DataFrame, FigureKind]]:
    """(file stem, table, kind) of every setting that allows the figure."""
    kind = KINDS[name]
    with_baseline = {comparison_plots.speed_up_data: {"baseline": baseline}}
    make = partial(kind.data, **with_baseline.get(kind.data, {}))
    for source in kind.sources:
        tables = [make(frame) for frame in source_frames(df, source, baseline)]
        tables = [table for table in tables if not table.empty]
        stem = f"{name}_predicted" if source == "predicted" else name
        for slug, table in zip(setting_slugs(tables) if tables else [], tables, strict=True):
            yield (f"{stem}_{slug}" if slug else stem), table, kind


def _peer_tables(
    df: pd.DataFrame, names: Sequence[str], peers_csv: str | Path | None
) -> Iterator[tuple[str, pd.DataFrame | str]]:
    """(name, table or the reason for there being none) of the figures against other projects."""
    if not names:
        return
    try:
        other = peers.load_peers(peers_csv)
    except ValueError as error:
        if peers_csv is not None:
            raise
        yield from ((name, str(error)) for name in names)
        return
    for name in names:
        table = peers.compare_peers(df, other, PEER_KINDS[name])
        absent = "it wants float16 layered rows with head_dim 128 and cold L2, measured on an H200"
        yield name, (absent if table.empty else table)


def draw_figures(
    df: pd.DataFrame,
    names: Sequence[str] = FIGURES,
    *,
    baseline: str = BASELINE,
    peers_csv: str | Path | None = None,
) -> Iterator[tuple[str, pd.DataFrame, Figure]]:
    """Draw every figure that the rows allow; what they do not allow is named in one log line.

    Args:
        df: rows as load_rows gives them.
        names: figures to draw, of FIGURES.
        baseline: kernel id that speed-ups compare with.
        peers_csv: latencies of other projects; None looks in the shared folder and is skipped where
            that is absent.

    Yields:
        File stem, the table behind the figure, the figure.

    Raises:
        ValueError: an unknown name, or a peers_csv that cannot be read.
    """
    unknown = sorted(set(names) - set(FIGURES))
    if unknown:
        raise ValueError(f"unknown figure {', '.join(unknown)}; choose from {', '.join(FIGURES)}")
    for name in (name for name in names if name in KINDS):
        is_drawn = False
        for stem, table, kind in _frames(df, name, baseline):
            is_drawn = True
            yield stem, table, kind.draw(table)
        if not is_drawn:
            log.info("skipped %s: it wants %s", name, KINDS[name].wants)
    for name, found in _peer_tables(df, [n for n in names if n in PEER_KINDS], peers_csv):
        if isinstance(found, str):
            log.info("skipped %s: %s", name, found)
        else:
            yield name, found, peers.peers_figure(found)


def make_figures(
    df: pd.DataFrame,
    out_dir: str | Path,
    names: Sequence[str] = FIGURES,
    *,
    baseline: str = BASELINE,
    peers_csv: str | Path | None = None,
) -> list[Path]:
    """Save what draw_figures() draws as PDF, PNG and CSV.

    Args:
        df, names, baseline, peers_csv: see draw_figures.
        out_dir: folder, made where it is missing; files of the same name are replaced.

    Returns:
        Paths of the files written, three per figure.

    Raises:
        ValueError: as draw_figures, or a folder that cannot be written.
    """
    written: list[Path] = []
    for stem, table, figure in draw_figures(df, names, baseline=baseline, peers_csv=peers_csv):
        written += save_figure(figure, table, Path(out_dir) / stem)
    return written


def _out_folder(source: str) -> Path:
    path = Path(source)
    return (path if path.is_dir() else path.parent) / "figures"


def run(config: DictConfig) -> None:
    """Make the configured figures and print where they are.

    Raises:
        ValueError: nothing to draw, or a bad setting.
    """
    if config.figure == "list":
        print("\n".join(FIGURES))
        return
    chosen = config.figure
    names = list(chosen) if isinstance(chosen, ListConfig) else [str(chosen)]
    source = str(config.results)
    out_dir = Path(config.out) if config.out else _out_folder(source)
    paths = make_figures(
        load_rows(source), out_dir, FIGURES if names == ["all"] else names,
        baseline=config.baseline, peers_csv=config.peers,
    )  # fmt: skip
    if not paths:
        raise ValueError(f"{source}: its rows allow none of the figures {', '.join(names)}")
    print(f"figures (PDF, PNG, CSV) in {out_dir}: {', '.join(p.stem for p in paths[::3])}")


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="figures")
def _hydra_main(config: DictConfig) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:  # told here: Hydra would put a line of its own before the error
        run(config)
    except USER_ERRORS as error:
        if WANTS_TRACEBACK:
            raise
        print_error(error)
        sys.exit(1)


def main() -> int:
    """The command; returns its exit code. An error is one line on stderr."""
    return run_command(_hydra_main)


if __name__ == "__main__":
    sys.exit(main())
