"""The rows behind a figure: one source, one machine and one head layout at a time.

A source is "measured" (latencies of rows whose status is ok), "predicted" (a device model's
latencies, for points that no GPU measured) or "counted" (traffic, which needs no run). A frame
holds one source only, so no panel can mix them.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from experiments.derived import (
    BASELINE,
    HEADS,
    SETTING,
    derive,
    is_gpu,
    is_measured,
    is_predicted,
)
from experiments.figure_style import TIMES, count_text
from experiments.results import latest
from experiments.schema import IO_TERMS

SOURCES = ("measured", "predicted", "counted")
_POINT = [*HEADS, "workload", "step"]
_KEPT = (
    *("kernel", "label", "workload", "step", "family", "prefix_len", "width", "suffix_len"),
    *("num_qo", "num_nodes", "num_tokens", *HEADS, "cold_l2"),
    *(f"{term}_bytes" for term in (*IO_TERMS, "kv_unique", "total")),
)


def _with_values(rows: pd.DataFrame, source: str, values: dict[str, str]) -> pd.DataFrame:
    """The kept columns, the source, and value columns taken from the named ones."""
    out: pd.DataFrame = rows[list(_KEPT)].copy()
    out.insert(0, "source", source)
    for name, column in values.items():
        out[name] = rows[column] if column else np.nan
    return out


def best_of_variants(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """Of a kernel that was run with several knobs, each point's row with the least value.

    Args:
        rows: derived rows that all hold the value.
        value: column to compare; the row's label becomes the kernel id alone.
    """
    varied = set(rows.loc[rows["variant"].notna(), "kernel"])
    is_varied = rows["kernel"].isin(varied)
    point = ["kernel", "model", *SETTING, "workload", "step"]
    best = rows[is_varied].sort_values(value, kind="stable").drop_duplicates(point)
    best = best.assign(label=best["kernel"])
    kept: pd.DataFrame = pd.concat([rows[~is_varied], best]).sort_index()
    return kept


def _measured(rows: pd.DataFrame) -> pd.DataFrame:
    kept = best_of_variants(rows[is_measured(rows)], "latency_us_p50")
    values = {
        "latency_us": "latency_us_p50",
        "low_us": "latency_us_p20",
        "high_us": "latency_us_p80",
        **{name: name for name in ("speed_up", "fraction_of_floor", "floor_us", "plan_us")},
    }
    out = _with_values(kept, "measured", values)
    out.insert(1, "device", kept["gpu"].where(is_gpu(kept), "cpu"))
    out.loc[~is_gpu(kept), "floor_us"] = np.nan  # a floor is a GPU's
    return out


def _predicted(rows: pd.DataFrame) -> pd.DataFrame:
    on_gpu = rows[is_measured(rows) & is_gpu(rows)]
    known = set(on_gpu[_POINT].itertuples(index=False, name=None))
    kept = rows[is_predicted(rows)]
    is_new = [point not in known for point in kept[_POINT].itertuples(index=False, name=None)]
    kept = best_of_variants(kept[np.array(is_new, dtype=bool)], "predicted_us")
    values = {
        "latency_us": "predicted_us",
        "low_us": "",
        "high_us": "",
        "speed_up": "predicted_speed_up",
        "fraction_of_floor": "predicted_fraction_of_floor",
        "floor_us": "floor_us",
        "plan_us": "",
    }
    out: pd.DataFrame = _with_values(kept, "predicted", values).assign(cold_l2=None)
    out.insert(1, "device", kept["predicted_for"].fillna("an unnamed device"))
    out = out.drop_duplicates(["device", "label", *_POINT])
    return out


def _counted(rows: pd.DataFrame) -> pd.DataFrame:
    kept = rows[rows["status"].isin(["ok", "counted"]) & rows["total_bytes"].notna()]
    kept = best_of_variants(kept, "total_bytes")
    out: pd.DataFrame = _with_values(kept, "counted", {}).assign(cold_l2=None)
    out.insert(1, "device", "any")
    out = out.drop_duplicates(["label", *_POINT])
    return out


def source_frames(df: pd.DataFrame, source: str, baseline: str = BASELINE) -> list[pd.DataFrame]:
    """The rows of one source, one frame per machine, cache state and head layout.

    Args:
        df: rows as load_rows gives them; of repeats the newest counts.
        source: "measured", "predicted" or "counted".
        baseline: kernel id that the speed_up column compares with.

    Returns:
        Frames with columns source, device, label, kernel, workload, step, the workload's axes, head
        layout, {term}_bytes, and (measured, predicted) latency_us, low_us, high_us, speed_up,
        fraction_of_floor, floor_us, plan_us; largest frame first.

    Raises:
        ValueError: another source.
    """
    makers = {"measured": _measured, "predicted": _predicted, "counted": _counted}
    if source not in makers:
        raise ValueError(f"source must be one of {SOURCES}, got {source!r}")
    rows = makers[source](derive(latest(df), baseline))
    groups = rows.groupby(["device", "cold_l2", *HEADS], dropna=False, sort=False)
    frames = [group.reset_index(drop=True) for _, group in groups]
    return sorted(frames, key=len, reverse=True)


def one_source(frame: pd.DataFrame) -> str:
    """The source of a frame.

    Raises:
        ValueError: no rows, or rows of several sources, machines or head layouts in one figure.
    """
    if frame.empty:
        raise ValueError("no rows to draw")
    mixed = [name for name in ("source", "device", *HEADS) if frame[name].nunique() > 1]
    if mixed:
        raise ValueError(f"one figure shows one source and setting, got several of {mixed}")
    return str(frame["source"].iloc[0])


def heading(frame: pd.DataFrame, what: str) -> str:
    """Two lines: what is shown, how much of it, and where it comes from; the head layout."""
    source, first = one_source(frame), frame.iloc[0]
    cold = {True: ", cold L2", False: ", warm L2"}.get(first["cold_l2"], "")
    machine = "a CPU (torch, no GPU kernel)" if first["device"] == "cpu" else first["device"]
    origin = {
        "measured": f"measured on {machine}{cold}",
        "predicted": f"predicted for {first['device']}, not measured",
        "counted": "counted from the plans",
    }[source]
    heads = (
        f"{first['num_qo_heads']} query / {first['num_kv_heads']} KV heads, "
        f"head_dim {first['head_dim']}, {first['dtype']}, page size {first['page_size']}"
    )
    shown = str(first.get("shown", ""))
    return f"{what}{shown}: {origin}\n{heads}"


def shown_text(shown: int, there: int, what: str) -> str:
    """Says in a heading what a figure leaves out; empty when it shows everything."""
    return "" if shown == there else f" ({shown} of {there} {what})"


def workload_text(name: str) -> str:
    """A workload's name for an axis: few-shot numbers told apart, layered names on two lines."""
    stem, _, copies = name.partition("_batch")
    batch = f", batch {copies}" if copies else ""
    if found := re.fullmatch(r"few_shot_(\d+)_(\d+)_(\d+)", stem):
        prefix, width, suffix = found.groups()
        return f"few shot {count_text(int(prefix))} + {width} {TIMES} {suffix}{batch}"
    if found := re.fullmatch(r"layered_([^_]+)_(.+)", stem):
        return f"layered {found[1]}{batch}\n{found[2].replace('_', ' ')} tokens"
    return stem.replace("_", " ") + batch


def latency_text(frame: pd.DataFrame) -> str:
    """Axis label of a latency, which says when it is a prediction."""
    if one_source(frame) == "measured":
        return "latency per layer (µs)"
    return f"latency (µs), predicted for\n{frame['device'].iloc[0]}, not measured"


def setting_slugs(frames: list[pd.DataFrame]) -> list[str]:
    """File-name parts that tell frames of one source apart, "" for one alone."""
    firsts = pd.DataFrame([frame.iloc[0] for frame in frames])
    warm = firsts["cold_l2"].eq(False).map({True: "warm", False: "cold"})
    layout = [
        f"q{query}-kv{kv}-d{dim}"
        for query, kv, dim in zip(
            firsts["num_qo_heads"], firsts["num_kv_heads"], firsts["head_dim"], strict=True
        )
    ]
    parts = [
        [re.sub(r"[^a-z0-9]+", "-", str(name).lower()).strip("-") for name in firsts["device"]],
        list(warm),
        layout,
        list(firsts["dtype"]),
        [f"page{size}" for size in firsts["page_size"]],
    ]
    varied = [part for part in parts if len(set(part)) > 1]
    return ["_".join(values) for values in zip(*varied, strict=True)] or [""] * len(frames)


def few_shot_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of plain few-shot trees (one tree, no variant) of the most frequent suffix length."""
    plain = frame["workload"].str.fullmatch(r"few_shot_\d+_\d+_\d+")
    rows: pd.DataFrame = frame[plain]
    if rows.empty:
        return rows
    usual = rows["suffix_len"].mode().iloc[0]
    rows = rows[rows["suffix_len"] == usual]
    return rows


def median_by(frame: pd.DataFrame, keys: list[str], values: list[str]) -> pd.DataFrame:
    """Median of the values over rows that agree on the keys (steps of a replay), in key order.

    num_rows says over how many rows each median is.
    """
    groups = frame.groupby(keys, dropna=False, sort=True)
    out: pd.DataFrame = groups[values].median().reset_index()
    out["num_rows"] = groups.size().to_numpy()
    return out
