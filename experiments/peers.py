"""Other projects' kernels, timed on an H200, against rows measured on the same trees and heads.

The peers' figures are read at run time from `peers_h200.csv` in the shared folder: `../shared`
beside the repository, or the folder that TREE_BENCH_SHARED names. Both sides are medians with an
emptied L2, so only rows timed that way on an H200 are compared.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.derived import is_gpu, is_measured, is_own, kernel_labels
from experiments.figure_data import workload_text
from experiments.figure_style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    TIMES,
    VERMILLION,
    SeriesStyle,
    legend_below,
    panels,
    series_handles,
    styled,
)
from experiments.recordings import shared_folder
from experiments.results import latest

PEERS_FILE = Path("reference", "peers_h200.csv")
_HEADS = ["num_qo_heads", "num_kv_heads"]
_STYLES = {
    "fasttree": SeriesStyle(VERMILLION, "o"),
    "pat": SeriesStyle(GREEN, "D"),
    "deft_port": SeriesStyle(ORANGE, "s", is_hollow=True),
    "flashinfer_decode": SeriesStyle(SKY, "^"),
    "flashinfer_batch_nodes": SeriesStyle(PURPLE, "v"),
    "flashinfer_cascade_fa2": SeriesStyle(BLUE, "<", is_hollow=True),
    "flashinfer_cascade_fa3": SeriesStyle(BLACK, ">", is_hollow=True),
}
PEERS = tuple(_STYLES)


def load_peers(path: str | Path | None = None) -> pd.DataFrame:
    """The peers' latencies, wrong outputs blanked, with a `workload` column.

    Args:
        path: the CSV; None means PEERS_FILE in the shared folder.

    Raises:
        ValueError: the file is missing or lacks a column.
    """
    path = shared_folder() / PEERS_FILE if path is None else Path(path)
    try:
        peers: pd.DataFrame = pd.read_csv(path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: no peers' figures ({reason}); set TREE_BENCH_SHARED") from error
    wanted = ["nodes", "tokens", *_HEADS, "fasttree_wrong", *(f"{name}_us" for name in PEERS)]
    absent = [name for name in wanted if name not in peers]
    if absent:
        raise ValueError(f"{path}: no column {', '.join(absent)}")
    peers.loc[peers["fasttree_wrong"] == 1, "fasttree_us"] = np.nan
    peers.insert(0, "workload", "layered_" + peers["nodes"] + "_" + peers["tokens"])
    return peers


def comparable(df: pd.DataFrame) -> pd.DataFrame:
    """The newest rows that were measured as the peers were: H200, cold L2, head_dim 128, fp16."""
    rows = latest(df)
    on_h200 = is_measured(rows) & is_gpu(rows) & rows["gpu"].str.contains("H200", na=False)
    alike = (rows["head_dim"] == 128) & (rows["dtype"] == "float16") & rows["cold_l2"].eq(True)
    kept: pd.DataFrame = rows[on_h200 & alike]
    return kept


def agreement(df: pd.DataFrame, peers: pd.DataFrame) -> pd.DataFrame:
    """Peers that were measured here too, or whose rule was: our timing over the published one.

    Args:
        df: rows as load_rows gives them.
        peers: as load_peers gives them.

    Returns:
        A line per peer: peer, cases, ratio (geometric mean), least, most, within (cases that differ
        by up to 15%). Of rows with several knobs the fastest counts; for a cascade those of its
        backend, and as for batch_nodes those that make a request of every node.
    """
    rows = comparable(df)
    knobs = rows["kernel_config"].map(json.loads)
    backend = knobs.map(lambda knob: str(knob.get("backend")))
    is_plain = knobs.map(lambda knob: knob.get("min_share", 0) == 0)
    cascade = (rows["kernel"] == "flashinfer_cascade") & is_plain
    chosen = {
        "flashinfer_decode": rows["kernel"] == "flashinfer_decode",
        "flashinfer_batch_nodes": (rows["kernel"] == "flashinfer_batch_nodes") & is_plain,
        "flashinfer_cascade_fa2": cascade & (backend == "fa2"),
        "flashinfer_cascade_fa3": cascade & (backend == "fa3"),
        "fasttree": rows["kernel"] == "fasttree",
        "pat": rows["kernel"] == "pat",
    }
    case, lines = ["workload", *_HEADS], []
    for name, is_chosen in chosen.items():
        ours = rows[is_chosen].groupby(case, as_index=False)["latency_us_p50"].min()
        both = peers[[*case, f"{name}_us"]].merge(ours, on=case).dropna()
        if both.empty:
            continue
        ratio = both["latency_us_p50"] / both[f"{name}_us"]
        lines.append(
            {
                "peer": name,
                "cases": len(both),
                "ratio": float(np.exp(np.log(ratio).mean())),
                "least": ratio.min(),
                "most": ratio.max(),
                "within": int(ratio.between(1 / 1.15, 1.15).sum()),
            }
        )
    found: pd.DataFrame = pd.DataFrame(lines)
    return found


def compare_peers(df: pd.DataFrame, peers: pd.DataFrame, kernel: str | None = None) -> pd.DataFrame:
    """Per case: our latency, each peer's, and how many times slower the peer is.

    Args:
        df: rows as load_rows gives them.
        peers: as load_peers gives them.
        kernel: our kernel id; None takes the fastest of those that run a plan of deft/planners.

    Returns:
        One line per case that both sides have: workload, heads, our_kernel, our_us and
        {peer}_ratio = peer's latency / our_us (above 1: ours is faster), NaN where the peer has no
        right result.
    """
    rows = comparable(df)
    rows = rows.assign(our_kernel=kernel_labels(rows))
    rows = rows[is_own(rows) if kernel is None else rows["kernel"] == kernel]
    rows = rows.sort_values("latency_us_p50").drop_duplicates(["workload", *_HEADS])
    ours = rows[["workload", *_HEADS, "our_kernel", "latency_us_p50"]]
    ours = ours.rename(columns={"latency_us_p50": "our_us"})
    columns = ["workload", *_HEADS, *(f"{name}_us" for name in PEERS)]
    joined: pd.DataFrame = peers[columns].merge(ours, on=["workload", *_HEADS], how="inner")
    for name in PEERS:
        joined[f"{name}_ratio"] = joined[f"{name}_us"] / joined["our_us"]
    joined = joined.drop(columns=[f"{name}_us" for name in PEERS])
    joined = joined.assign(compared=kernel or "the fastest of our kernels")
    return joined


@styled
def peers_figure(data: pd.DataFrame) -> Figure:
    """Ratios of compare_peers(): a panel per head layout, a row per tree, a marker per peer."""
    names = list(dict.fromkeys(data["workload"]))
    place = {name: at for at, name in enumerate(names)}
    layouts = list(data[_HEADS].drop_duplicates().itertuples(index=False, name=None))
    height = 1.5 + 0.31 * len(names)
    figure, grid = panels(1, len(layouts), height, width_in=2.2 + 1.9 * len(layouts), sharey=True)
    for axes, (query_heads, kv_heads) in zip(grid[0], layouts, strict=True):
        is_here = (data["num_qo_heads"] == query_heads) & (data["num_kv_heads"] == kv_heads)
        rows = data[is_here]
        axes.axvline(1.0, color=GREY, lw=0.9, zorder=1)
        for name, style in _STYLES.items():
            axes.plot(
                rows[f"{name}_ratio"],
                rows["workload"].map(place),
                label=name,
                **style.dot_options(),
            )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.2g}{TIMES}")
        axes.set_title(f"{query_heads} query / {kv_heads} KV heads")
    grid[0][0].set_yticks(
        range(len(names)), [workload_text(name) for name in names], fontsize=6.5, linespacing=0.9
    )
    grid[0][0].set_ylim(len(names) - 0.5, -0.5)
    grid[0][len(layouts) // 2].set_xlabel(
        f"peer latency / our latency (right of 1{TIMES}: ours is faster)"
    )
    figure.suptitle(
        f"Peers against {data['compared'].iloc[0]}: measured on H200, cold L2\n"
        f"head_dim 128, float16, {len(data)} cases"
    )
    legend_below(figure, series_handles(_STYLES, lines=False))
    return figure
