"""Line and dot figures: pure functions of a frame of one source (experiments/figure_data.py).

Every figure comes as a pair: `*_data(frame)` picks and condenses the rows (it is what the CSV
beside the figure holds), `*_figure(data)` draws them. Empty data means that the rows do not allow
the figure.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from experiments.derived import HEADS
from experiments.figure_data import (
    few_shot_rows,
    heading,
    latency_text,
    median_by,
    shown_text,
    workload_text,
)
from experiments.figure_style import (
    GREY,
    SeriesStyle,
    count_axis,
    count_text,
    legend_below,
    legend_columns,
    panels,
    plain_log,
    series_handles,
    series_styles,
    spread,
    styled,
)

MAX_PANELS = 4
MAX_WORKLOADS = 24
_SETTING = ["source", "device", "cold_l2", *HEADS]
_LATENCY = ["latency_us", "low_us", "high_us", "floor_us"]
_FLOOR = "floor (bound)"


def _curves(rows: pd.DataFrame, x: str, values: list[str], min_points: int = 2) -> pd.DataFrame:
    """Medians by (panel, label, x); panels of few points, and those past the limit, left out."""
    if rows.empty:
        return rows
    points = rows.groupby("panel")[x].nunique()
    rows = rows[rows["panel"].isin(points.index[points >= min_points])]
    keep = spread(rows["panel_order"], MAX_PANELS)
    shown = shown_text(len(keep), rows["panel_order"].nunique(), "panels")
    rows = rows[rows["panel_order"].isin(keep)].assign(shown=shown)
    keys = [*_SETTING, "shown", "panel_order", "panel", "label", "kernel", x]
    return median_by(rows, keys, values)


def prefix_data(frame: pd.DataFrame) -> pd.DataFrame:
    """Few-shot latencies by prefix length, one panel per width (four at most)."""
    rows = few_shot_rows(frame)
    text = [
        f"{int(width)} queries, {int(suffix)}-token suffixes"
        for width, suffix in zip(rows["width"], rows["suffix_len"], strict=True)
    ]
    rows = rows.assign(panel=text, panel_order=rows["width"])
    return _curves(rows, "prefix_len", _LATENCY)


def _by_queries(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows with a panel per few-shot prefix length, or per family of other trees."""
    plain = few_shot_rows(frame)
    text = [
        f"{count_text(prefix)}-token prefix, {int(suffix)}-token suffixes"
        for prefix, suffix in zip(plain["prefix_len"], plain["suffix_len"], strict=True)
    ]
    plain = plain.assign(panel=text, panel_order=plain["prefix_len"])
    is_batch = frame["workload"].str.contains(r"_batch\d+$")
    others = frame[~is_batch & ~frame["family"].isin(["few_shot", "layered"])]
    order = {family: 1e9 + at for at, family in enumerate(sorted(others["family"].unique()))}
    others = others.assign(panel=others["family"], panel_order=others["family"].map(order))
    parts = [part for part in (plain, others) if len(part)]
    rows: pd.DataFrame = pd.concat(parts, ignore_index=True) if parts else plain
    return rows


def queries_data(frame: pd.DataFrame) -> pd.DataFrame:
    """Latencies by the number of queries, one panel per few-shot prefix or tree family."""
    return _curves(_by_queries(frame), "num_qo", _LATENCY, min_points=3)


def redundancy_data(frame: pd.DataFrame) -> pd.DataFrame:
    """KV bytes loaded per KV byte that the queries need, by the number of queries."""
    rows = _by_queries(frame)
    rows = rows.assign(kv_loads=rows["kv_bytes"] / rows["kv_unique_bytes"])
    return _curves(rows, "num_qo", ["kv_loads"], min_points=3)


def batch_data(frame: pd.DataFrame) -> pd.DataFrame:
    """Latencies by the number of trees in the batch, one panel per tree (four at most)."""
    parts = frame["workload"].str.extract(r"^(.*?)(?:_batch(\d+))?$")
    rows = frame.assign(panel=parts[0], batch=parts[1].fillna("1").astype(int))
    rows = rows.assign(panel_order=rows.groupby("panel")["num_tokens"].transform("min"))
    return _curves(rows, "batch", _LATENCY, min_points=3)


def plan_time_data(frame: pd.DataFrame) -> pd.DataFrame:
    """Host time of plan() by nodes of the tree, rows that ran only."""
    rows: pd.DataFrame = frame[frame["plan_us"] > 0]
    if rows["num_nodes"].nunique() < 2:
        rows = rows.iloc[:0]
        return rows
    return median_by(rows, [*_SETTING, "label", "kernel", "num_nodes"], ["plan_us"])


def _draw_curves(
    axes: Axes, rows: pd.DataFrame, x: str, y: str, styles: dict[str, SeriesStyle]
) -> None:
    """One line per label, with the 20th to 80th percentile as a bar where it is known."""
    # Later curves are drawn thinner, so that equal ones stay visible under each other.
    sizes = np.linspace(1.3, 0.75, len(styles))
    for size, (label, style) in zip(sizes, styles.items(), strict=True):
        curve = rows[rows["label"] == label].sort_values(x)
        if curve.empty:
            continue
        axes.plot(
            curve[x], curve[y], label=label, lw=1.3 * size, ms=4.6 * size, **style.line_options()
        )
        if y == "latency_us" and curve["low_us"].notna().any():
            axes.vlines(curve[x], curve["low_us"], curve["high_us"], color=style.colour, lw=0.8)


def _panel_figure(data: pd.DataFrame, x: str, y: str, what: str, axis_text: str) -> Figure:
    shown = data[["panel_order", "panel"]].drop_duplicates().sort_values("panel_order")
    styles = series_styles(data["label"])
    handles = series_handles(styles)
    has_floor = "floor_us" in data and data["floor_us"].notna().any()
    if has_floor:
        handles.append(Line2D([], [], color=GREY, linestyle=(0, (1, 1)), label=_FLOOR))
    width_in = max(4.2, 2.4 * len(shown))
    names = [str(one.get_label()) for one in handles]
    height_in = 2.6 + 0.17 * -(-len(names) // legend_columns(width_in, names))
    figure, grid = panels(1, len(shown), height_in, width_in, sharey=True)
    for axes, panel in zip(grid[0], shown["panel"], strict=True):
        rows = data[data["panel"] == panel]
        _draw_curves(axes, rows, x, y, styles)
        if has_floor:
            floor = rows.groupby(x)["floor_us"].min()
            axes.plot(
                floor.index, floor.to_numpy(), color=GREY, ls=(0, (1, 1)), label=_FLOOR, zorder=1
            )
        axes.set_title(workload_text(panel))
        plain_log(axes.yaxis, data[y])
        count_axis(axes, rows[x], _X_TEXT[x])
    grid[0][0].set_ylabel(axis_text)
    figure.suptitle(heading(data, what))
    legend_below(figure, handles)
    return figure


_X_TEXT = {
    "prefix_len": "prefix length (tokens)",
    "num_qo": "queries",
    "batch": "trees in the batch",
}


@styled
def prefix_figure(data: pd.DataFrame) -> Figure:
    """Latency against prefix length, from prefix_data()."""
    return _panel_figure(
        data, "prefix_len", "latency_us", "Latency by prefix length", latency_text(data)
    )


@styled
def queries_figure(data: pd.DataFrame) -> Figure:
    """Latency against the number of queries, from queries_data()."""
    return _panel_figure(data, "num_qo", "latency_us", "Latency by tree size", latency_text(data))


@styled
def batch_figure(data: pd.DataFrame) -> Figure:
    """Latency against the number of trees, from batch_data()."""
    return _panel_figure(data, "batch", "latency_us", "Latency by batch size", latency_text(data))


@styled
def redundancy_figure(data: pd.DataFrame) -> Figure:
    """KV re-reads against the number of queries, from redundancy_data()."""
    return _panel_figure(
        data, "num_qo", "kv_loads", "KV re-reads by tree size", "KV bytes loaded /\nKV bytes stored"
    )


@styled
def plan_time_figure(data: pd.DataFrame) -> Figure:
    """Host time of plan() against nodes, from plan_time_data()."""
    styles = series_styles(data["label"])
    figure, grid = panels(1, 1, 3.4, width_in=4.8)
    axes = grid[0][0]
    _draw_curves(axes, data, "num_nodes", "plan_us", styles)
    plain_log(axes.yaxis, data["plan_us"])
    count_axis(axes, data["num_nodes"], "nodes of the tree")
    axes.set_ylabel("plan time on the host (µs)")
    figure.suptitle(heading(data, "Plan time"))
    legend_below(figure, series_handles(styles))
    return figure


def topology_data(frame: pd.DataFrame) -> pd.DataFrame:
    """Latencies by workload: at most MAX_WORKLOADS, spread evenly over each family by tokens."""
    families = frame["family"].unique()
    if frame["workload"].nunique() < 2:
        nothing: pd.DataFrame = frame.iloc[:0]
        return nothing
    share = max(2, MAX_WORKLOADS // len(families))
    chosen: set[str] = set()
    for _, rows in frame.groupby("family"):
        sizes = rows.groupby("workload")[["num_tokens", "num_qo"]].max().reset_index()
        order = sizes.sort_values(["num_tokens", "num_qo", "workload"])["workload"].tolist()
        chosen |= {order[at] for at in spread(range(len(order)), share)}
    shown = shown_text(len(chosen), frame["workload"].nunique(), "workloads")
    rows = frame[frame["workload"].isin(chosen)].assign(shown=shown)
    keys = [*_SETTING, "shown", "family", "num_tokens", "num_qo", "workload", "label", "kernel"]
    return median_by(rows, keys, _LATENCY)


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
    axes.set_yticks(range(len(names)), [workload_text(name) for name in names], fontsize=7)
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
