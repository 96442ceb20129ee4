"""A sweep as a Markdown table: one line per tree, medians in microseconds, ratios to peers.

    python -m experiments.markdown_table [results/h200/layered_suite] [--model llama3_8b]

Prints the table of the README, and what all head layouts together show against peers. Their figures
are read from the shared folder at run time; where it is not there, their part is left out.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.command_line import run_command
from experiments.derived import is_measured
from experiments.peers import agreement, compare_peers, load_peers
from experiments.reference_rows import REFERENCE
from experiments.results import latest, load_rows

KERNELS = (
    "deft_flatten",
    "flash_decoding",
    "deft_paper",
    "medusa_dense",
    "flashinfer_decode",
    "flashinfer_cascade",
    "flashinfer_batch_nodes",
    "cudnn_prefix",
)
_HEADS = ["num_qo_heads", "num_kv_heads"]
_CASCADES = ["flashinfer_cascade_fa2_ratio", "flashinfer_cascade_fa3_ratio"]


def table_rows(
    df: pd.DataFrame,
    model: str,
    kernels: Sequence[str] = KERNELS,
    peers: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """One line per workload, in the rows' order of size.

    Args:
        df: rows as load_rows gives them.
        model: head layout, a name of conf/model/.
        kernels: kernel ids that get a column of medians, if there is one.
        peers: as load_peers gives them, None for no ratios.

    Returns:
        Columns tree (nodes / tokens by level), floor, the kernels (best of the knobs they were run
        with; the default's median, where it is another, stands in {kernel} default), best (the
        fastest right kernel and its median); with peers also their latency over that of
        deft_flatten: deft_port, cascade (the faster of two backends), best peer.

    Raises:
        ValueError: no measured row of this model.
    """
    rows = latest(df)
    rows = rows[is_measured(rows) & (rows["model"] == model)]
    if rows.empty:
        raise ValueError(f"no measured rows of model {model!r}")
    kernels = [kernel for kernel in kernels if (rows["kernel"] == kernel).any()]
    ratios = None if peers is None else compare_peers(df, peers, "deft_flatten")
    lines = []
    for name, group in rows.sort_values("num_tokens", kind="stable").groupby(
        "workload", sort=False
    ):
        us = group.groupby("kernel")["latency_us_p50"].min()
        default = group[group["variant"].isna()].groupby("kernel")["latency_us_p50"].min()
        tree = str(name).removeprefix("layered_").replace("_", " / ")
        line: dict[str, Any] = {"tree": tree, "floor": group["floor_us"].iloc[0]}
        line |= {kernel: us.get(kernel, float("nan")) for kernel in kernels}
        line |= {
            f"{kernel} default": default.get(kernel, float("nan"))
            for kernel in kernels
            if (group.loc[group["kernel"] == kernel, "variant"].notna()).any()
        }
        line["best"] = f"{us.idxmin()} {us.min():.1f}"
        if ratios is not None:
            is_same = (ratios["workload"] == name) & (ratios[_HEADS] == group[_HEADS].iloc[0]).all(
                axis=1
            )
            line |= _peer_ratios(ratios[is_same])
        lines.append(line)
    frame: pd.DataFrame = pd.DataFrame(lines)
    return frame


def _peer_ratios(case: pd.DataFrame) -> dict[str, float]:
    every = [str(name) for name in case if str(name).endswith("_ratio")]
    if case.empty:
        return {"deft_port": float("nan"), "cascade": float("nan"), "best peer": float("nan")}
    return {
        "deft_port": case["deft_port_ratio"].iloc[0],
        "cascade": case[_CASCADES].min(axis=1).iloc[0],
        "best peer": case[every].min(axis=1).iloc[0],
    }


def markdown(frame: pd.DataFrame) -> str:
    """The frame as a Markdown table: medians with one decimal, ratios with two and a sign.

    A default that differs from the best of the knobs stands behind it in brackets.
    """
    ratios = ("deft_port", "cascade", "best peer")

    def cell(column: str, value: Any) -> str:
        if isinstance(value, str):
            return value
        if math.isnan(value):
            return "-"
        return f"{value:.2f}x" if column in ratios else f"{value:.1f}"

    columns = [name for name in frame.columns if not name.endswith(" default")]

    def with_default(column: str, row: pd.Series) -> str:
        text, default = cell(column, row[column]), row.get(f"{column} default", float("nan"))
        is_same = math.isnan(default) or cell(column, default) == text
        return text if is_same else f"{text} ({default:.1f})"

    head = "| " + " | ".join(columns) + " |"
    rule = "|" + "|".join("---" if name == "tree" else "---:" for name in columns) + "|"
    body = [
        "| " + " | ".join(with_default(name, row) for name in columns) + " |"
        for _, row in frame.iterrows()
    ]
    return "\n".join([head, rule, *body])


def peer_summary(df: pd.DataFrame, peers: pd.DataFrame) -> str:
    """How often ours is faster than peers, over every case that both have, and by how little."""
    flatten, best = compare_peers(df, peers, "deft_flatten"), compare_peers(df, peers)
    any_peer = [str(name) for name in best if str(name).endswith("_ratio")]
    lines = [
        ("deft_flatten against the DeFT port", flatten["deft_port_ratio"]),
        ("best of ours against the better FlashInfer cascade", best[_CASCADES].min(axis=1)),
        ("best of ours against the best of seven peers", best[any_peer].min(axis=1)),
    ]
    won = "\n".join(
        f"- {title}: faster in {int((ratio > 1).sum())} of {ratio.notna().sum()} cases, "
        f"{ratio.min():.2f}x at worst, {math.exp(float(ratio.map(math.log).mean())):.2f}x in the "
        "geometric mean"
        for title, ratio in lines
        if ratio.notna().any()
    )
    again = "\n".join(
        f"- {line['peer']} measured here against its published timing: {line['ratio']:.2f}x in the "
        f"geometric mean of {line['cases']} cases ({line['least']:.2f}x to {line['most']:.2f}x), "
        f"{line['within']} within 15%"
        for _, line in agreement(df, peers).iterrows()
    )
    return "\n".join(text for text in (won, again) if text)


def reference_table(folder: str | Path, model: str) -> str:
    """The table of a results folder, with peers' ratios where their figures can be read."""
    rows = load_rows(folder)
    try:
        peers = load_peers()
    except ValueError:
        return markdown(table_rows(rows, model))
    return markdown(table_rows(rows, model, peers=peers)) + "\n\n" + peer_summary(rows, peers)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("results", nargs="?", default=str(REFERENCE / "layered_suite"))
    parser.add_argument("--model", default="llama3_8b", help="a name of conf/model/")
    args = parser.parse_args()
    print(reference_table(args.results, args.model))


if __name__ == "__main__":
    sys.exit(run_command(main))
