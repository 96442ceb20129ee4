"""Comparison figures: traffic by term, speed-up maps, and other projects' kernels.

As in experiments/plots.py, `*_data` makes the table behind a figure and `*_figure` draws it.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch

from experiments.derived import HEADS
from experiments.figure_data import (
    few_shot_rows,
    heading,
    median_by,
    one_source,
    shown_text,
    workload_text,
)
from experiments.figure_style import (
    TERM_STYLES,
    TIMES,
    count_text,
    legend_below,
    ordered_labels,
    panels,
    spread,
    styled,
)
from experiments.schema import IO_TERMS

MAX_IO_WORKLOADS = 3
MAX_LOG2_COLOUR = 4.0  # colours saturate at a factor of 16; the cells hold the numbers
_SETTING = ["source", "device", "cold_l2", *HEADS]
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def io_data(frame: pd.DataFrame) -> pd.DataFrame:
    """Counted bytes by term of up to three workloads: the least, a middling and the most KV.

    Workloads that the most kernels cover are preferred.
    """
    covered = frame.groupby("workload")["label"].nunique()
    if covered.empty:
        return frame
    rows = frame[frame["workload"].isin(covered.index[covered == covered.max()])]
    size = rows.groupby("workload")["kv_unique_bytes"].max().sort_values(kind="stable")
    chosen = [size.index[at] for at in spread(range(len(size)), MAX_IO_WORKLOADS)]
    shown = shown_text(len(chosen), len(covered), "workloads")
    rows = rows[rows["workload"].isin(chosen)].assign(shown=shown)
    keys = [*_SETTING, "shown", "workload", "label", "kernel"]
    terms = [f"{term}_bytes" for term in (*IO_TERMS, "kv_unique", "total")]
    out = median_by(rows, keys, terms)
    order = {name: at for at, name in enumerate(chosen)}
    ordered: pd.DataFrame = out.iloc[out["workload"].map(order).to_numpy().argsort(kind="stable")]
    return ordered


def _unit(largest: float) -> tuple[str, float]:
    return next(((name, size) for name, size in _UNITS if largest >= size), _UNITS[-1])


def _draw_terms(axes: Axes, rows: pd.DataFrame, terms: list[str], labels: list[str]) -> None:
    """Stacked horizontal bars, one per kernel, with the sum at the end."""
    rows = rows.set_index("label").reindex(labels)
    columns = [f"{term}_bytes" for term in terms]
    sums = rows[columns].fillna(0).sum(axis=1).to_numpy()
    unit, size = _unit(float(sums.max(initial=0.0)))
    left = np.zeros(len(labels))
    for term, column in zip(terms, columns, strict=True):
        colour, hatch = TERM_STYLES[term]
        value = rows[column].fillna(0).to_numpy() / size
        axes.barh(
            np.arange(len(labels)), value, 0.68, left=left, color=colour, hatch=hatch,
            edgecolor="white" if not hatch else "#404040", linewidth=0.4, label=term,
        )  # fmt: skip
        left = left + value
    top = max(float(left.max(initial=0.0)), 1e-12)
    for at, end in enumerate(left.tolist()):
        text = f"{end:.3g}" if rows["kernel"].notna().iloc[at] else "no row"
        axes.annotate(text, (end + 0.015 * top, at), va="center", fontsize=7)
    axes.set_xlim(0, 1.16 * top)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel(f"{unit} per layer")
    axes.grid(axis="y", visible=False)


@styled
def io_figure(data: pd.DataFrame) -> Figure:
    """Traffic by term from io_data(): per workload all terms, and beside it all but KV."""
    workloads = list(dict.fromkeys(data["workload"]))
    labels = ordered_labels(data["label"])
    terms = [term for term in IO_TERMS if data[f"{term}_bytes"].fillna(0).any()]
    others = [term for term in terms if term != "kv"]
    height = 1.0 + len(workloads) * (0.85 + 0.19 * len(labels))
    figure, grid = panels(len(workloads), 2, height, sharey="row")
    for (left, right), name in zip(grid, workloads, strict=True):
        rows = data[data["workload"] == name]
        _draw_terms(left, rows, terms, labels)
        _draw_terms(right, rows, others, labels)
        left.set_title(workload_text(name))
        right.set_title("without KV")
    handles = [
        Patch(facecolor=TERM_STYLES[t][0], hatch=TERM_STYLES[t][1], edgecolor="#404040", label=t)
        for t in terms
    ]
    figure.suptitle(heading(data, "Traffic by term"))
    legend_below(figure, handles)
    return figure


def speed_up_data(frame: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Speed-up over the baseline by few-shot prefix length and width; same source throughout."""
    rows = few_shot_rows(frame)
    rows = rows[rows["speed_up"].notna() & (rows["kernel"] != baseline)]
    if rows.empty or rows["workload"].nunique() < 2:
        nothing: pd.DataFrame = rows.iloc[:0]
        return nothing
    keys = [*_SETTING, "label", "kernel", "prefix_len", "width", "suffix_len"]
    out: pd.DataFrame = median_by(rows, keys, ["speed_up", "latency_us"]).assign(baseline=baseline)
    return out


def _draw_map(
    axes: Axes, rows: pd.DataFrame, prefixes: list[float], widths: list[float], norm: Normalize
) -> AxesImage:
    table = rows.pivot_table(index="prefix_len", columns="width", values="speed_up")
    values = table.reindex(index=prefixes, columns=widths).to_numpy(dtype=float)
    image = axes.imshow(np.log2(values), cmap="PuOr_r", norm=norm, aspect="auto", origin="lower")
    for (y, x), value in np.ndenumerate(values):
        red, green, blue, _ = image.cmap(norm(np.log2(value)))
        is_dark = np.isfinite(value) and 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
        text = f"{value:.{2 if value < 0.995 else int(value < 10)}f}{TIMES}"
        axes.text(
            x, y, text if np.isfinite(value) else "-", ha="center", va="center", fontsize=7,
            color="white" if is_dark else "black",
        )  # fmt: skip
    axes.set_xticks(range(len(widths)), [count_text(width) for width in widths])
    axes.set_yticks(range(len(prefixes)), [count_text(prefix) for prefix in prefixes])
    axes.grid(visible=False)
    return image


@styled
def speed_up_figure(data: pd.DataFrame) -> Figure:
    """Heat maps of speed_up_data(): a panel per kernel, prefix by width, factors in the cells."""
    labels = ordered_labels(data["label"])
    columns = min(3, len(labels))
    rows = -(-len(labels) // columns)
    prefixes, widths = sorted(data["prefix_len"].unique()), sorted(data["width"].unique())
    largest = float(np.log2(data["speed_up"]).abs().max())
    limit = min(max(largest, 0.1), MAX_LOG2_COLOUR)
    norm = Normalize(-limit, limit)
    height = 1.0 + rows * (0.55 + 0.24 * len(prefixes))
    figure, grid = panels(rows, columns, height, sharex=True, sharey=True)
    for axes in grid.flat[len(labels) :]:
        axes.set_visible(False)
    images = []
    for axes, label in zip(grid.flat, labels, strict=False):
        images.append(_draw_map(axes, data[data["label"] == label], prefixes, widths, norm))
        axes.set_title(label)
    figure.supxlabel("width (queries)", fontsize=9)
    figure.supylabel("prefix length (tokens)", fontsize=9)
    bar = figure.colorbar(
        images[0], ax=grid, shrink=0.9, pad=0.02, extend="both" if largest > limit else "neither"
    )
    ticks = [t for t in range(-10, 11) if -limit <= t <= limit]
    bar.set_ticks(ticks, labels=[f"{2.0**t:g}{TIMES}" for t in ticks])
    base = data["baseline"].iloc[0]
    kind = "predicted speed-up" if one_source(data) == "predicted" else "speed-up"
    bar.set_label(f"{kind} over {base}")
    suffix = f"{int(data['suffix_len'].iloc[0])}-token suffixes"
    figure.suptitle(heading(data, f"Speed-up over {base}, {suffix}"))
    return figure
