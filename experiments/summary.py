"""The table at the end of a sweep: who wins each point, by how much, and how far from the floor.

A point is one workload and step at one head layout on one machine. Measured points compare measured
latencies with each other; predicted points compare one device model's predictions with each other;
a row that was only counted never enters a measured point.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from rich.table import Table

from experiments.derived import (
    BASELINE,
    HEADS,
    SETTING,
    derive,
    is_gpu,
    is_measured,
    is_own,
    is_predicted,
)
from experiments.measurement import BYTES_ONLY
from experiments.results import latest

FRAME_COLUMNS = (
    "source",
    "device",
    "workload",
    "step",
    *HEADS,
    "num_kernels",
    "winner",
    "winner_us",
    "baseline_us",
    "speed_up",
    "io_saved",
    "fraction_of_floor",
)


def _winners(rows: pd.DataFrame, source: str, point: list[str], baseline: str) -> pd.DataFrame:
    """One line per point of rows that all hold a latency of this source."""
    prefix = "" if source == "measured" else "predicted_"
    latency = "latency_us_p50" if source == "measured" else "predicted_us"
    lines = []
    for _, group in rows.groupby(point, dropna=False, sort=False):
        ranked = group
        if source == "predicted":  # a lower bound is no rival of a prediction
            is_bound = group["status_detail"] == BYTES_ONLY
            ranked = group[~is_bound] if not is_bound.all() else group
            ranked = ranked[is_own(ranked)] if is_own(ranked).any() else ranked
        best = ranked.iloc[int(ranked[latency].to_numpy().argmin())]
        base = group.loc[group["kernel"] == baseline, latency]
        device = best["gpu"] if source == "measured" else best["predicted_for"]
        lines.append(
            {
                **{name: best[name] for name in ("workload", "step", *HEADS, "io_saved")},
                "source": source,
                "device": "cpu" if pd.isna(device) else device,
                "num_kernels": ranked["label"].nunique(),
                "winner": best["label"],
                "winner_us": best[latency],
                "baseline_us": base.min() if len(base) else float("nan"),
                "speed_up": best[f"{prefix}speed_up"],
                "fraction_of_floor": best[f"{prefix}fraction_of_floor"],
            }
        )
    frame: pd.DataFrame = pd.DataFrame(lines, columns=list(FRAME_COLUMNS))
    return frame


def summary_frame(df: pd.DataFrame, baseline: str = BASELINE) -> pd.DataFrame:
    """The winner of every point, measured points first.

    Args:
        df: rows as `load_rows` gives them; of repeats the newest counts.
        baseline: kernel id that speed_up and io_saved compare with.

    Returns:
        One row per point and source ("measured" or "predicted") with FRAME_COLUMNS: the winner has
        the least latency of that source (of kernels predicted from bytes alone only where there is
        no other), speed_up is
        baseline_us / winner_us of the same source, io_saved is 1 - kv_bytes over the baseline's,
        both NaN where the point has no baseline row; fraction_of_floor is NaN for CPU latencies.
        A point measured on a GPU has no predicted line; one measured on a CPU has both.
    """
    rows = derive(latest(df), baseline)
    place = ["workload", "step"]
    measured = rows[is_measured(rows)]
    on_gpu = measured[is_gpu(measured)]
    known = set(on_gpu[[*HEADS, *place]].itertuples(index=False, name=None))
    predicted = rows[is_predicted(rows)]
    places = predicted[[*HEADS, *place]].itertuples(index=False, name=None)
    predicted = predicted[np.array([where not in known for where in places], dtype=bool)]
    parts = [
        _winners(measured, "measured", [*SETTING, *place], baseline),
        _winners(predicted, "predicted", [*HEADS, "predicted_for", *place], baseline),
    ]
    filled = [part for part in parts if len(part)] or parts[:1]
    frame: pd.DataFrame = pd.concat(filled, ignore_index=True)
    return frame


def _number(value: float, form: str) -> str:
    return "-" if pd.isna(value) else format(value, form)


def _saved(share: float) -> str:
    """KV bytes saved against the baseline, or how many times more are read."""
    if pd.notna(share) and share < -0.5:
        return f"{1 - share:.1f}x more"
    return _number(share, ".1%")


def _heads(line: pd.Series) -> str:
    text = f"{line['num_qo_heads']}/{line['num_kv_heads']} x {line['head_dim']} {line['dtype']}"
    return text if line["page_size"] == 1 else f"{text} page {line['page_size']}"


def table_of(frame: pd.DataFrame, source: str, baseline: str, max_rows: int = 60) -> Table:
    """The lines of one source of a summary frame as a table; what is cut is said in the caption."""
    lines = frame[frame["source"] == source]
    devices = ", ".join(sorted(lines["device"].astype(str).unique()))
    machine = devices if devices != "cpu" else "a CPU (torch, no GPU kernel)"
    title = f"measured on {machine}" if devices else "no measured and no predicted rows"
    if source == "predicted":
        title = f"predicted (device model {devices}), not measured"
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("workload", overflow="fold", no_wrap=False)
    table.add_column("heads", overflow="fold")
    winner = "winner" if source == "measured" else "lowest prediction"
    table.add_column(winner, style="bold", overflow="fold")
    for name in ("us", f"{baseline} us", "speed-up", "KV IO saved", "of floor"):
        table.add_column(name, justify="right")
    has_steps = lines["step"].nunique() > 1
    for _, line in lines.head(max_rows).iterrows():
        table.add_row(
            f"{line['workload']} step {line['step']}" if has_steps else str(line["workload"]),
            _heads(line),
            f"{line['winner']} (of {line['num_kernels']})",
            _number(line["winner_us"], ".1f"),
            _number(line["baseline_us"], ".1f"),
            _number(line["speed_up"], ".2f") + ("x" if pd.notna(line["speed_up"]) else ""),
            _saved(line["io_saved"]),
            _number(line["fraction_of_floor"], ".0%"),
        )
    notes = []
    if source == "predicted":
        notes.append(
            "Predictions rank plans, they are no latencies (docs/timing.md)."
            " Baselines' are lower bounds and not ranked where a plan has one."
        )
    if len(lines) > max_rows:
        notes.append(f"{len(lines) - max_rows} more points are in the rows.")
    if lines["baseline_us"].isna().any():
        notes.append(f"- : no {baseline} row of this source at that point, or no floor (CPU).")
    table.caption = " ".join(notes) or None
    return table


def summary_tables(df: pd.DataFrame, baseline: str = BASELINE, max_rows: int = 60) -> list[Table]:
    """Every table that the rows allow: the measured one, then the predicted one."""
    frame = summary_frame(df, baseline)
    sources = [name for name in ("measured", "predicted") if (frame["source"] == name).any()]
    return [table_of(frame, source, baseline, max_rows) for source in sources or ["measured"]]


def summary_table(df: pd.DataFrame, baseline: str = BASELINE, max_rows: int = 60) -> Table:
    """The measured table or, when nothing was measured, the predicted one, titled so."""
    return summary_tables(df, baseline, max_rows)[0]
