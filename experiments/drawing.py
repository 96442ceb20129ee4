"""Pictures of a decode tree, and of the tiles that a plan cuts it in.

One row of boxes per depth. A box's width grows as the square root of its tokens (a 1,024-token
prefix and a one-token node have to fit one page), the number in it is its token count, and dots
under it are queries. In a plan's picture each box is cut where the plan cuts it: a coloured strip
is what one item loads, and strips above each other are loads of the same tokens. Trees of many
nodes are drawn as one bar per level.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from deft.plan import Plan
from deft.tree import DecodeTree
from experiments.level_drawing import FONT_POINTS, NODE_COLOUR, draw_levels

# Okabe and Ito's palette, without black: told apart by colour-blind readers and in grey.
ITEM_COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#D55E00", "#0072B2")
_DARK_COLOURS = ("#009E73", "#D55E00", "#0072B2")
_QUERY_COLOUR, _EDGE_COLOUR = "#D55E00", "#555555"
_BOX_HEIGHT, _ROW_PITCH = 0.56, 1.0
_INCHES_PER_ROW = 0.95
_MAX_LANES = 32

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Layout:
    """Left edge, width and top of each node's box, and the picture's width."""

    left: FloatArray
    width: FloatArray
    top: FloatArray
    total: float

    def centre(self, node: int) -> float:
        return float(self.left[node] + self.width[node] / 2)


def draw_tree(tree: DecodeTree, title: str | None = None, max_nodes: int = 64) -> Figure:
    """A figure of the tree: boxes for nodes, dots for queries.

    Args:
        tree: what to draw.
        title: text above; None describes the tree.
        max_nodes: trees of more nodes are drawn as one box per level.

    Raises:
        ValueError: a tree without nodes.
    """
    if title is None:
        title = (
            f"{tree.num_tokens:,} tokens in {tree.num_nodes:,} nodes, {tree.num_qo:,} queries, "
            f"sharing factor {tree.sharing_factor:.1f}"
        )
    if tree.num_nodes > max_nodes:
        return draw_levels(tree, title)
    layout = _lay_out(tree)
    figure, axes = _canvas(layout, title)
    _draw_edges(axes, tree, layout)
    for node in range(tree.num_nodes):
        corner = (layout.left[node], layout.top[node] - _BOX_HEIGHT)
        axes.add_patch(
            Rectangle(corner, layout.width[node], _BOX_HEIGHT, fc=NODE_COLOUR, ec="black", lw=0.8)
        )
        _label(axes, layout, node, f"{tree.node_len[node]:,}")
    _draw_queries(axes, tree, layout)
    _caption(axes, "box: node with its KV tokens")
    return figure


def draw_plan(plan: Plan, title: str | None = None, max_nodes: int = 64) -> Figure:
    """A figure of the plan's tree in which a coloured strip is what one item loads of a node.

    Args:
        plan: any planner's plan.
        title: text above; None gives the strategy, items and token loads.
        max_nodes: trees of more nodes are drawn as one box per level, without items.

    Raises:
        ValueError: a tree without nodes.
    """
    tree = plan.tree
    if title is None:
        loads, unique = int(plan.item_tokens.sum()), tree.attended_tokens
        title = f"{plan.strategy}: {plan.num_items:,} items load {loads:,} tokens"
        title += f" ({loads / unique:.2f} x the {unique:,} there are)" if unique else ""
    if tree.num_nodes > max_nodes:
        return draw_levels(tree, title)
    layout = _lay_out(tree)
    figure, axes = _canvas(layout, title)
    _draw_edges(axes, tree, layout)
    run_item = np.repeat(np.arange(plan.num_items), np.diff(plan.item_run_indptr))
    number = _tree_order(plan, run_item)
    for node in range(tree.num_nodes):
        runs = np.flatnonzero(plan.run_node == node)
        starts, ends = plan.run_start[runs], plan.run_end[runs]
        loads = _draw_strips(axes, tree, layout, node, starts, ends, number[run_item[runs]])
        _write_above(axes, tree, layout, node, loads)
    _draw_queries(axes, tree, layout)
    unread = "    white: not read" if tree.attended_tokens < tree.num_tokens else ""
    _caption(axes, f"strip: loads of one item    above: KV tokens (loads){unread}")
    return figure


def _tree_order(plan: Plan, run_item: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Number of each item, counted along the tree, so that neighbours get different colours."""
    first = plan.tree.dfs_rank[plan.run_node].astype(np.int64) << 32
    place = np.full(plan.num_items, np.iinfo(np.int64).max)
    np.minimum.at(place, run_item, first + plan.run_start)
    number = np.empty(plan.num_items, np.int64)
    number[np.argsort(place, kind="stable")] = np.arange(plan.num_items)
    return number


def _lay_out(tree: DecodeTree) -> _Layout:
    """Subtrees side by side, a parent centred over its children."""
    if not tree.num_nodes:
        raise ValueError("a tree without nodes has no picture")
    root_tokens = np.sqrt(tree.node_len.astype(float))
    width = np.maximum(root_tokens, max(root_tokens.max() / 24, 0.5))
    gap = 0.35 * float(width[tree.leaves].mean())
    room = np.zeros(tree.num_nodes)  # of the subtree, gaps between children included
    for node in range(tree.num_nodes - 1, -1, -1):
        room[node] = max(room[node] - gap, width[node])
        if tree.parent[node] >= 0:
            room[tree.parent[node]] += room[node] + gap
    indptr, children = tree.children
    origin = np.zeros(tree.num_nodes)
    origin[tree.roots] = np.cumsum(room[tree.roots] + 2 * gap) - room[tree.roots] - 2 * gap
    for node in range(tree.num_nodes):
        below = children[indptr[node] : indptr[node + 1]]
        used = room[below].sum() + gap * max(len(below) - 1, 0)
        start = origin[node] + (room[node] - used) / 2
        origin[below] = start + np.cumsum(room[below] + gap) - room[below] - gap
    left = origin + (room - width) / 2
    total = float((origin + room).max())
    return _Layout(left, width, -_ROW_PITCH * tree.depth.astype(float), total)


def _canvas(layout: _Layout, title: str) -> tuple[Figure, Axes]:
    narrowest = float(layout.width.min())
    inches = float(np.clip(0.16 * layout.total / narrowest, 6.0, 13.0))
    rows = 1 - layout.top.min() / _ROW_PITCH
    figure = Figure(figsize=(inches, rows * _INCHES_PER_ROW + 0.9))
    axes = figure.add_axes((0.02, 0.0, 0.96, 1.0))
    axes.set_xlim(-0.01 * layout.total, 1.01 * layout.total)
    above, below = 0.55, 0.35  # rows left free for the title and the caption
    axes.set_ylim(layout.top.min() - _BOX_HEIGHT - 0.25 - below, above)
    axes.set_axis_off()
    axes.text(0.0, 0.985, title, transform=axes.transAxes, va="top", fontsize=FONT_POINTS + 2)
    return figure, axes


def _caption(axes: Axes, text: str) -> None:
    place = axes.transAxes
    axes.plot([0.008], [0.035], "o", ms=4, color=_QUERY_COLOUR, mec="black", transform=place)
    text = f"query    {text}    width: square root of tokens"
    size = FONT_POINTS - 1
    axes.text(0.018, 0.035, text, va="center", fontsize=size, color="#333333", transform=place)


def _draw_edges(axes: Axes, tree: DecodeTree, layout: _Layout) -> None:
    # Under a box that is wider than all its children they hang straight down, else from its middle.
    spans_children = np.ones(tree.num_nodes, bool)
    child = np.flatnonzero(tree.parent >= 0)
    up_width = layout.width[tree.parent[child]]
    reach = layout.left + layout.width / 2 - layout.left[np.maximum(tree.parent, 0)]
    outside = (reach[child] < 0) | (reach[child] > up_width)
    spans_children[tree.parent[child[outside]]] = False
    for node in child:
        up = int(tree.parent[node])
        bottom = layout.top[up] - _BOX_HEIGHT
        x = layout.centre(int(node))
        start = x if spans_children[up] else layout.centre(up)
        axes.plot([start, x], [bottom, layout.top[node]], color=_EDGE_COLOUR, lw=0.8, zorder=0)


def _draw_queries(axes: Axes, tree: DecodeTree, layout: _Layout) -> None:
    counts = np.bincount(tree.query_node, minlength=tree.num_nodes)
    for node in np.flatnonzero(counts):
        x, y = layout.centre(int(node)), layout.top[node] - _BOX_HEIGHT
        axes.plot([x], [y], "o", ms=4.5, color=_QUERY_COLOUR, mec="black", mew=0.5, zorder=4)
        if counts[node] > 1:
            text, size = f"x{counts[node]}", FONT_POINTS - 1
            axes.annotate(text, (x, y), (4, -7), textcoords="offset points", fontsize=size)


def _inches(axes: Axes, layout: _Layout) -> float:
    """Inches per unit of width."""
    figure = axes.get_figure(root=True)
    assert figure is not None  # an axes made by _canvas has one
    return float(figure.get_figwidth()) * 0.96 / (1.02 * layout.total)


def _label(axes: Axes, layout: _Layout, node: int, text: str) -> None:
    """The text in a node's box, upright where it does not fit, left out where nothing fits."""
    width = layout.width[node] * _inches(axes, layout)
    needed, line = len(text) * 0.6 * FONT_POINTS / 72 + 0.04, 1.1 * FONT_POINTS / 72
    height = _BOX_HEIGHT * _INCHES_PER_ROW * 0.9
    is_upright = needed > width
    if is_upright and (line > width or needed > height):
        return
    middle = layout.top[node] - _BOX_HEIGHT / 2
    rotation = 90 if is_upright else 0
    x, size = layout.centre(node), FONT_POINTS
    axes.text(x, middle, text, rotation=rotation, fontsize=size, ha="center", va="center")


def _lanes(starts: npt.NDArray[np.int32], ends: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Lane of each run such that overlapping runs lie in different lanes (first that is free)."""
    lane_end: list[int] = []
    lanes = np.zeros(len(starts), np.int64)
    for run in np.argsort(starts, kind="stable"):
        free = [lane for lane, end in enumerate(lane_end) if end <= starts[run]]
        lane = free[0] if free else len(lane_end)
        lane_end[lane : lane + 1] = [int(ends[run])]
        lanes[run] = lane
    return lanes


def _draw_strips(
    axes: Axes,
    tree: DecodeTree,
    layout: _Layout,
    node: int,
    starts: npt.NDArray[np.int32],
    ends: npt.NDArray[np.int32],
    numbers: npt.NDArray[np.int64],
) -> int:
    """A node's box, cut in the strips of its runs; returns how often its tokens are loaded.

    At most _MAX_LANES loads are told apart.
    """
    left, width, top = layout.left[node], layout.width[node], layout.top[node]
    corner = (left, top - _BOX_HEIGHT)
    axes.add_patch(Rectangle(corner, width, _BOX_HEIGHT, fc="white", ec="black", lw=0.8))
    if not len(starts):
        return 0
    order = np.argsort(numbers, kind="stable")
    starts, ends, numbers = starts[order], ends[order], numbers[order]
    lanes = _lanes(starts, ends)
    num_lanes = int(lanes.max()) + 1
    height = _BOX_HEIGHT / min(num_lanes, _MAX_LANES)
    per_token = width / tree.node_len[node]
    for start, end, number, lane in zip(starts, ends, numbers, lanes, strict=True):
        if lane >= _MAX_LANES:
            continue
        x, y = left + start * per_token, top - (lane + 1) * height
        colour = ITEM_COLOURS[number % len(ITEM_COLOURS)]
        strip = Rectangle((x, y), (end - start) * per_token, height, fc=colour, ec="black", lw=0.4)
        axes.add_patch(strip)
        text, ink = str(number + 1), "white" if colour in _DARK_COLOURS else "black"
        room = (end - start) * per_token * _inches(axes, layout)
        if room > len(text) * 0.6 * 7 / 72 + 0.02 and height * _INCHES_PER_ROW > 7.5 / 72:
            centre = (x + (end - start) * per_token / 2, y + height / 2)
            axes.text(*centre, text, fontsize=7, color=ink, ha="center", va="center")
    return num_lanes


def _write_above(axes: Axes, tree: DecodeTree, layout: _Layout, node: int, loads: int) -> None:
    """The node's tokens over its box, and how often they are loaded where there is room."""
    text = f"{tree.node_len[node]:,}"
    width = layout.width[node] * _inches(axes, layout)
    if loads > 1 and (len(text) + 5) * 0.6 * 7 / 72 < 1.7 * width:
        text += f" ({loads}x)"
    place = (layout.centre(node), layout.top[node] + 0.03)
    box = {"fc": "white", "ec": "none", "pad": 0.4}
    axes.text(*place, text, ha="center", va="bottom", fontsize=FONT_POINTS - 1, bbox=box)
