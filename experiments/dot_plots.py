"""Dot figures: one row per workload or kernel, one mark per measurement.

As in experiments/plots.py, `*_data` makes the table behind a figure and `*_figure` draws it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from experiments.derived import HEADS
from experiments.figure_data import heading, latency_text, median_by, shown_text, workload_text
from experiments.figure_style import (
    GREY,
    legend_below,
    panels,
    plain_log,
    series_styles,
    spread,
    styled,
)

MAX_WORKLOADS = 24
MAX_FEW_SHOT = 4  # beside other families: few-shot trees have figures of their own
_SETTING = ["source", "device", "cold_l2", *HEADS]
_FLOOR = "floor (bound)"


def topology_data(frame: pd.DataFrame) -> pd.DataFrame:
    """Latencies by workload: at most MAX_WORKLOADS, spread evenly over each family by tokens."""
    if frame["workload"].nunique() < 2:
        nothing: pd.DataFrame = frame.iloc[:0]
        return nothing
    sizes = frame.groupby("family")["workload"].nunique()
    if len(sizes) > 1 and "few_shot" in sizes:
        sizes["few_shot"] = min(sizes["few_shot"], MAX_FEW_SHOT)
    shares = range(MAX_WORKLOADS, 1, -1)
    share = next((n for n in shares if sizes.clip(upper=n).sum() <= MAX_WORKLOADS), 1)
    chosen: set[str] = set()
    for family, rows in frame.groupby("family"):
        ends = rows.groupby("workload")[["num_tokens", "num_qo"]].max().reset_index()
        order = ends.sort_values(["num_tokens", "num_qo", "workload"])["workload"].tolist()
        chosen |= {order[at] for at in spread(range(len(order)), min(share, sizes[family]))}
    shown = shown_text(len(chosen), frame["workload"].nunique(), "workloads")
    rows = frame[frame["workload"].isin(chosen)].assign(shown=shown)
    keys = [*_SETTING, "shown", "family", "num_tokens", "num_qo", "workload", "label", "kernel"]
    return median_by(rows, keys, ["latency_us", "low_us", "high_us", "floor_us"])


@styled
def topology_figure(data: pd.DataFrame) -> Figure:
    """Latency of every kernel on every topology, from topology_data()."""
    names = list(dict.fromkeys(data.sort_values(["family", "num_tokens", "num_qo"])["workload"]))
    place = {name: at for at, name in enumerate(names)}
    styles = series_styles(data["label"])
    lines = sum(workload_text(name).count("\n") + 1 for name in names)
    figure, grid = panels(1, 1, 1.7 + 0.13 * lines + 0.1 * len(names))
    axes = grid[0][0]
    for label, style in styles.items():
        rows = data[data["label"] == label]
        axes.plot(
            rows["latency_us"], rows["workload"].map(place), label=label, **style.dot_options()
        )
    if data["floor_us"].notna().any():
        floor = data.groupby("workload")["floor_us"].min()
        axes.plot(
            floor.to_numpy(), [place[n] for n in floor.index], ls="none", marker="|", ms=9,
            color=GREY, label=_FLOOR,
        )  # fmt: skip
    axes.set_yticks(
        range(len(names)), [workload_text(name) for name in names], fontsize=7, linespacing=0.9
    )
    axes.set_ylim(len(names) - 0.5, -0.5)
    plain_log(axes.xaxis, data["latency_us"])
    axes.set_xlabel(latency_text(data).replace("\n", " "))
    figure.suptitle(heading(data, "Latency by topology"))
    legend_below(figure, axes.get_legend_handles_labels()[0])
    return figure


def floor_data(frame: pd.DataFrame) -> pd.DataFrame:
    """Fraction of the floor of every workload and kernel."""
    rows: pd.DataFrame = frame[frame["fraction_of_floor"] > 0]
    if rows.empty:
        return rows
    keys = [*_SETTING, "workload", "label", "kernel"]
    return median_by(rows, keys, ["fraction_of_floor", "latency_us", "floor_us"])


def _dodge(count: int) -> npt.NDArray[np.float64]:
    """Vertical offsets that keep equal values apart, the same every time."""
    return np.resize([0.0, 0.12, -0.12, 0.24, -0.24, 0.06, -0.18, 0.18, -0.06], count)


@styled
def floor_figure(data: pd.DataFrame) -> Figure:
    """Fraction of the floor by kernel, from floor_data(): a mark a workload, and the mean."""
    styles = series_styles(data["label"])
    figure, grid = panels(1, 1, 1.5 + 0.3 * len(styles), width_in=5.6)
    axes = grid[0][0]
    for at, (label, style) in enumerate(styles.items()):
        values = data.loc[data["label"] == label, "fraction_of_floor"].sort_values().to_numpy()
        mean = float(np.exp(np.log(values).mean()))
        axes.plot(
            values, at + _dodge(len(values)), **{**style.dot_options(), "markersize": 3},
            alpha=0.7, label=label,
        )  # fmt: skip
        axes.plot([mean, mean], [at - 0.36, at + 0.36], color="black", lw=1.6, zorder=3)
        axes.annotate(
            f"{mean:.0%}", (1.01, at), xycoords=("axes fraction", "data"), va="center", fontsize=8
        )
    axes.set_title("bar, right: geometric mean", loc="right", fontsize=8)
    axes.set_yticks(range(len(styles)), list(styles))
    axes.set_ylim(len(styles) - 0.5, -0.5)
    axes.set_xlim(0, max(1.0, 1.03 * float(data["fraction_of_floor"].max())))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    predicted = data["source"].iloc[0] == "predicted"
    axes.set_xlabel("floor / predicted latency, not measured" if predicted else "floor / latency")
    figure.suptitle(heading(data, f"Fraction of the floor, {data['workload'].nunique()} workloads"))
    return figure
