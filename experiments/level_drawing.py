"""Picture of a tree that has too many nodes to draw: one bar per level."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from deft.tree import DecodeTree

NODE_COLOUR = "#DCE9F5"
FONT_POINTS = 8.0


def draw_levels(tree: DecodeTree, title: str) -> Figure:
    """A figure with one bar per level of the tree: its nodes, tokens and queries."""
    levels = int(tree.depth.max()) + 1
    nodes = np.bincount(tree.depth, minlength=levels)
    tokens = np.bincount(tree.depth, weights=tree.node_len, minlength=levels)
    queries = np.bincount(tree.depth[tree.query_node], minlength=levels)
    figure = Figure(figsize=(8.0, min(levels * 0.36 + 0.9, 14.0)))
    axes = figure.add_axes(
        (0.08, 0.55 / figure.get_figheight(), 0.88, 1 - 1.0 / figure.get_figheight())
    )
    rows = np.arange(levels)
    axes.barh(rows, tokens, height=0.7, color=NODE_COLOUR, edgecolor="black", linewidth=0.8)
    font = min(FONT_POINTS, 200.0 / levels)
    for row in rows if levels <= 60 else ():
        text = f"nodes: {nodes[row]:,}, tokens: {int(tokens[row]):,}, queries: {queries[row]:,}"
        is_long = tokens[row] > tokens.max() / 2
        place = (0 if is_long else tokens[row], row)
        axes.annotate(text, place, (4, 0), textcoords="offset points", va="center", fontsize=font)
    axes.set_ylim(levels - 0.4, -0.6)
    axes.set_xlim(0, 1.02 * max(tokens.max(), 1.0))
    axes.set_xlabel("KV tokens of the level", fontsize=FONT_POINTS)
    axes.set_ylabel("depth", fontsize=FONT_POINTS)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=FONT_POINTS - 1)
    axes.spines[["top", "right"]].set_visible(False)
    figure.text(0.02, 1 - 0.06 / figure.get_figheight(), title, va="top", fontsize=FONT_POINTS + 2)
    return figure
