"""Who sees what in the tiles of a small plan, and what each method reads of the tree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from deft.plan import Plan
from experiments.figure_style import BLUE, ORANGE, SKY, panels, style_context, styled


def _tint(colour: str, share: float = 0.45) -> tuple[float, float, float]:
    """The colour mixed with white: print-safe under black text."""
    red, green, blue = (share * part + 1 - share for part in to_rgb(colour))
    return red, green, blue


def _draw_masks(axes: Axes, plan: Plan) -> None:
    """Queries against runs in tile order; a filled cell is a (query, run) pair under the mask."""
    tree = plan.tree
    item_of = np.repeat(np.arange(plan.num_items), np.diff(plan.item_run_indptr))
    edges = np.flatnonzero(np.r_[True, item_of[1:] != item_of[:-1]])
    for run, item in enumerate(item_of.tolist()):
        queries = plan.item_query[plan.item_query_indptr[item] : plan.item_query_indptr[item + 1]]
        local = np.arange(len(queries))
        bits = plan.run_mask[run, local // 64] >> (local % 64).astype(np.uint64)
        for query in queries[(bits & np.uint64(1)) == 1].tolist():
            colour = SKY if tree.node_len[plan.run_node[run]] > 1 else ORANGE
            axes.add_patch(
                Rectangle(
                    (run, query), 1, 1, facecolor=_tint(colour, 0.75), edgecolor="white", lw=0.4
                )
            )
    axes.vlines([*edges, len(item_of)], 0, tree.num_qo, color="black", lw=0.5)
    axes.set_xlim(0, len(item_of))
    axes.set_ylim(tree.num_qo, 0)
    middle = (edges + np.r_[edges[1:], len(item_of)]) / 2
    shown = [at for at in range(plan.num_items) if at % 3 == 0 or at == plan.num_items - 1]
    shown = [at for at in shown if at == shown[-1] or middle[shown[-1]] - middle[at] > 2]
    axes.set_xticks(middle[shown], [str(at) for at in shown], fontsize=7)
    axes.set_yticks(
        np.arange(tree.num_qo) + 0.5, [str(node) for node in tree.query_node], fontsize=7
    )
    axes.set_xlabel("tile (one column per run of tokens)")
    axes.set_ylabel("query, by node")
    axes.set_title("Who sees what in each tile")
    axes.grid(visible=False)


def _draw_reads(axes: Axes, reads: pd.DataFrame) -> None:
    """Token reads per method, the numbers at the bars."""
    place = np.arange(len(reads))
    axes.barh(
        place, reads["token_reads"], 0.6, color=[_tint(c, 0.8) for c in (ORANGE, SKY, BLUE)],
        edgecolor="black", linewidth=0.5, hatch=["", "////", "...."],
    )  # fmt: skip
    for at, row in zip(place, reads.itertuples(), strict=True):
        axes.annotate(
            f" {row.token_reads:,}  ({row.reads_per_token:.2f} per token)",
            (row.token_reads, at), va="center", fontsize=8,
        )  # fmt: skip
    axes.set_yticks(place, reads["method"])
    axes.set_ylim(len(reads) - 0.5, -0.5)
    axes.set_xlim(0, 1.75 * float(reads["token_reads"].max()))
    axes.set_xlabel("KV tokens read, all queries")
    axes.set_title("What each method reads")
    axes.grid(axis="y", visible=False)


@styled
def tile_figure(plan: Plan, reads: pd.DataFrame) -> Figure:
    """The masks of a plan's tiles, and the reads of each method.

    Args:
        plan: of a tree small enough to draw (tens of nodes).
        reads: columns method, token_reads and reads_per_token, three rows at most.
    """
    figure, grid = panels(1, 2, 3.0)
    _draw_masks(grid[0][0], plan)
    _draw_reads(grid[0][1], reads)
    return figure


def write_picture(figure: Figure, stem: Path) -> list[Path]:
    """Write stem.pdf and stem.png."""
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("pdf", "png")]
    with style_context():
        for path in paths:
            figure.savefig(path)
    return paths
