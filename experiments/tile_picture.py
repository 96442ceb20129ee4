"""A picture of a small tree, the tiles that a plan cuts it into, and what each method reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from deft.plan import Plan
from deft.tree import DecodeTree
from experiments.figure_style import BLUE, GREEN, GREY, ORANGE, SKY, style_context, styled

_TILE_COLOURS = (SKY, ORANGE, GREEN)


def _tint(colour: str, share: float = 0.45) -> tuple[float, float, float]:
    """The colour mixed with white: print-safe under black text."""
    red, green, blue = (share * part + 1 - share for part in to_rgb(colour))
    return red, green, blue


def _positions(tree: DecodeTree) -> np.ndarray:
    """[num_nodes, 2]: leaves side by side in depth-first order, parents over their children."""
    x = np.zeros(tree.num_nodes)
    order = np.argsort(tree.dfs_rank)
    leaf = np.isin(order, tree.leaves)
    x[order[leaf]] = np.arange(leaf.sum())
    indptr, child = tree.children
    for node in reversed(order.tolist()):
        below = child[indptr[node] : indptr[node + 1]]
        if len(below):
            x[node] = x[below].mean()
    at: np.ndarray = np.c_[x, -tree.depth]
    return at


def node_tiles(plan: Plan) -> list[np.ndarray]:
    """Items that read each node, in item order."""
    item = np.repeat(np.arange(plan.num_items), np.diff(plan.item_run_indptr))
    return [np.unique(item[plan.run_node == node]) for node in range(plan.tree.num_nodes)]


def _tile_text(items: np.ndarray) -> str:
    if not len(items):
        return "no tile"
    return f"tile {items[0]}" if len(items) == 1 else f"tiles {items[0]}-{items[-1]}"


def _draw_tree(axes: Axes, plan: Plan) -> None:
    """Nodes as boxes with their tokens, coloured by tile; a query sits on each marked node."""
    tree, at, tiles = plan.tree, _positions(plan.tree), node_tiles(plan)
    for node, parent in enumerate(tree.parent.tolist()):
        if parent >= 0:
            axes.plot(*at[[parent, node]].T, color=GREY, lw=0.8, zorder=1)
    starts = sorted({int(items[0]) for items in tiles if len(items)})
    for node, (x, y) in enumerate(at):
        items = tiles[node]
        colour = _TILE_COLOURS[starts.index(int(items[0])) % 3] if len(items) else GREY
        is_long = tree.node_len[node] > 1
        text = f"{tree.node_len[node]:,} tokens" if is_long else str(node)
        axes.text(
            x, y, text, ha="center", va="center", fontsize=8 if is_long else 7,
            bbox={"boxstyle": "round,pad=0.35", "facecolor": _tint(colour), "edgecolor": "black",
                  "linewidth": 0.6},
        )  # fmt: skip
    axes.set_xlim(at[:, 0].min() - 0.7, at[:, 0].max() + 0.7)
    axes.set_ylim(at[:, 1].min() - 0.5, at[:, 1].max() + 0.5)
    axes.set_axis_off()
    groups = {int(items[0]): items for items in tiles if len(items)}
    handles = [
        Patch(
            facecolor=_tint(_TILE_COLOURS[at % 3]),
            edgecolor="black",
            label=_tile_text(groups[start]),
        )
        for at, start in enumerate(starts)
    ]
    axes.legend(handles=handles, loc="upper right")
    axes.set_title("The tree: a prefix, and one-token nodes with a query each")


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
    """The tree, the tiles of a plan over it, and the reads of each method.

    Args:
        plan: of a tree small enough to draw (tens of nodes).
        reads: columns method, token_reads and reads_per_token, three rows at most.
    """
    figure = Figure(figsize=(7.2, 5.6), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.15, 1.0))
    _draw_tree(figure.add_subplot(grid[0, :]), plan)
    _draw_masks(figure.add_subplot(grid[1, 0]), plan)
    _draw_reads(figure.add_subplot(grid[1, 1]), reads)
    return figure


def write_picture(figure: Figure, stem: Path) -> list[Path]:
    """Write stem.pdf and stem.png."""
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("pdf", "png")]
    with style_context():
        for path in paths:
            figure.savefig(path)
    return paths
