"""What follows from a result row: rates, fractions of the floor, savings, and the workload's axes.

Pure functions of a DataFrame with the columns of `experiments.results.SCHEMA`. Measured and
predicted values never meet in one column.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

BASELINE = "flash_decoding"
# Rows that agree on these may share a figure. The timer is not one of them: a kernel that cannot be
# captured is timed eager beside the others, and its label says so.
HEADS = ("num_qo_heads", "num_kv_heads", "head_dim", "dtype", "page_size")
SETTING = ("gpu", "cold_l2", *HEADS)

_FEW_SHOT = re.compile(r"few_shot_(\d+)_(\d+)_(\d+)(?:_|$)")
_LAYERED = re.compile(r"layered_(\d+(?:-\d+)*)_(\d+(?:-\d+)*)(?:_|$)")


def workload_axes(name: str) -> dict[str, Any]:
    """The axes that a workload's name tells.

    Args:
        name: `few_shot_<prompt>_<width>_<suffix>`, `layered_<nodes>_<tokens>` with dashes between
            the levels, or any other name.

    Returns:
        family (the text before the first underscore and digit), prefix_len (tokens that every
        query shares), width (leaves) and suffix_len (tokens a leaf has to itself); None where the
        name does not tell.
    """
    axes: dict[str, Any] = {"family": re.split(r"_(?=\d)", name, maxsplit=1)[0]}
    prefix = width = suffix = None
    if found := _FEW_SHOT.match(name):
        prefix, width, suffix = (int(part) for part in found.groups())
    elif found := _LAYERED.match(name):
        nodes, tokens = ([int(part) for part in group.split("-")] for group in found.groups())
        if len(nodes) == len(tokens):
            shared = next((level for level, count in enumerate(nodes) if count > 1), len(nodes))
            prefix, width, suffix = sum(tokens[:shared]), nodes[-1], tokens[-1]
    return {**axes, "prefix_len": prefix, "width": width, "suffix_len": suffix}


def is_measured(df: pd.DataFrame) -> pd.Series[bool]:
    """True where a row holds a latency that a machine showed for a right output."""
    return (df["status"] == "ok") & df["latency_us_p50"].notna()


def is_predicted(df: pd.DataFrame) -> pd.Series[bool]:
    """True where a row holds a device model's latency of a kernel that is not known to be wrong."""
    return df["status"].isin(["ok", "counted"]) & df["predicted_us"].notna()


def is_gpu(df: pd.DataFrame) -> pd.Series[bool]:
    """True where a GPU made the row."""
    return df["gpu"].notna() & ~df["gpu"].astype(str).str.lower().isin(["", "cpu", "none"])


def is_own(df: pd.DataFrame) -> pd.Series[bool]:
    """True where a plan of deft/planners ran on this project's kernels."""
    return df["kernel_config"].astype(str).str.contains('"_target_": "deft.TreeAttention"')


def kernel_labels(df: pd.DataFrame) -> list[str]:
    """The kernel id of each row, with what tells apart rows of one id.

    Knobs that differ are added where one id has several configurations, and the timer where a
    measured row's is not the one that most measured rows have.
    """
    configs = {text: json.loads(text) for text in df["kernel_config"].dropna().unique() if text}
    knobs: dict[tuple[str, str], str] = {}
    for kernel, texts in df.groupby("kernel")["kernel_config"].unique().items():
        own = {text: configs[text] for text in texts if text in configs}
        keys = sorted({key for config in own.values() for key in config})
        varied = [key for key in keys if len({str(config.get(key)) for config in own.values()}) > 1]
        for text, config in own.items():
            parts = [f"{key}={config[key]}" for key in varied if key in config]
            knobs[str(kernel), text] = "".join(f" {part}" for part in parts)
    timers = df.loc[is_measured(df), "timer"].dropna()
    usual = timers.mode().iloc[0] if len(timers) else None
    labels = []
    for kernel, text, timer, status in zip(
        df["kernel"], df["kernel_config"], df["timer"], df["status"], strict=True
    ):
        odd_timer = status == "ok" and usual is not None and pd.notna(timer) and timer != usual
        suffix = f" ({timer})" if odd_timer else ""
        labels.append(f"{kernel}{knobs.get((kernel, text), '')}{suffix}")
    return labels


def _of_baseline(
    df: pd.DataFrame, value: pd.Series[float], baseline: str, point: Sequence[str]
) -> pd.Series[float]:
    """The baseline's value at each row's point, NaN where there is none."""
    keys = [df[name] for name in point]
    of_baseline = value.where(df["kernel"] == baseline)
    best: pd.Series[float] = of_baseline.groupby(keys, dropna=False, sort=False).transform("min")
    return best


def derive(df: pd.DataFrame, baseline: str = BASELINE) -> pd.DataFrame:
    """The rows with derived columns added; pure, the input is left as it is.

    Added: family, prefix_len, width, suffix_len (see workload_axes; width falls back to num_qo),
    label (see kernel_labels), hbm_gb_s and fraction_of_floor (rows measured on a GPU only: a floor
    is a GPU's), predicted_fraction_of_floor, speed_up (measured over measured, same machine),
    predicted_speed_up (predicted over predicted, same device model), io_saved (1 - kv_bytes over
    the baseline's kv_bytes).

    Args:
        df: rows as load_rows gives them.
        baseline: kernel id that speed_up and io_saved compare with, at the same point.
    """
    out: pd.DataFrame = df.copy()
    names = out["workload"].astype(str)
    axes = {name: workload_axes(name) for name in names.unique()}
    out["family"] = [axes[name]["family"] for name in names]
    for axis in ("prefix_len", "width", "suffix_len"):
        out[axis] = np.array([axes[name][axis] for name in names], dtype=float)
    out["width"] = out["width"].fillna(out["num_qo"].astype(float))
    out["label"] = kernel_labels(out)
    latency = out["latency_us_p50"].astype(float).where(is_measured(out))
    forecast = out["predicted_us"].astype(float).where(is_predicted(out))
    forecast = forecast.where(forecast > 0)  # a tree without queries takes no time: no ratio
    kv = out["kv_bytes"].astype(float).where(out["status"].isin(["ok", "counted"]))
    floor = out["floor_us"].astype(float)
    on_gpu = latency.where(is_gpu(out))
    out["hbm_gb_s"] = out["hbm_bytes"].astype(float) / on_gpu / 1e3  # bytes / us = 1e-3 GB/s
    out["fraction_of_floor"] = floor / on_gpu
    out["predicted_fraction_of_floor"] = floor / forecast
    place = ("workload", "step")
    out["speed_up"] = _of_baseline(out, latency, baseline, (*SETTING, *place)) / latency
    modelled = (*HEADS, "predicted_for", *place)
    out["predicted_speed_up"] = _of_baseline(out, forecast, baseline, modelled) / forecast
    out["io_saved"] = 1.0 - kv / _of_baseline(out, kv, baseline, (*HEADS, *place))
    return out
