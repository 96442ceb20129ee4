"""Curves: latency, re-reads and plan time, as pure functions of a frame of one source.

Every figure comes as a pair: `*_data(frame)` picks and condenses the rows (it is what the CSV
beside the figure holds), `*_figure(data)` draws them. Empty data means that the rows do not allow
the figure.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

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
