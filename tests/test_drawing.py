"""Pictures: that they show the tree and the plan they were given, and can be saved."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from deft.plan import Plan
from deft.planners import make_plan
from deft.topologies import few_shot, layered
from deft.tree import DecodeTree
from experiments.drawing import ITEM_COLOURS, draw_plan, draw_tree
from tests.trees import NAMED

BINARY = DecodeTree(
    parent=[-1, 0] + [(i - 1) // 2 + 1 for i in range(1, 16)],
    node_len=[1024] + [1] * 16,
    query_node=list(range(1, 17)),
)


def plan_of(tree: DecodeTree, strategy: str, **options: int) -> Plan:
    heads = {"num_qo_heads": 4, "num_kv_heads": 4, "head_dim": 64}
    return make_plan(tree, strategy, **heads, **options)


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def boxes(figure: Figure) -> list[Rectangle]:
    return [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]


def spans(figure: Figure, is_strip: bool) -> list[tuple[float, float, float, float]]:
    found = []
    for box in boxes(figure):
        if (to_hex(box.get_facecolor()).upper() in ITEM_COLOURS) == is_strip:
            x, y = box.get_xy()
            found.append((x, y, x + box.get_width(), y + box.get_height()))
    return found


def overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    slack = 1e-9
    return min(a[2], b[2]) - max(a[0], b[0]) > slack and min(a[3], b[3]) - max(a[1], b[1]) > slack


@pytest.mark.parametrize("name", NAMED)
def test_every_node_has_a_box_and_no_boxes_overlap(name: str) -> None:
    tree = NAMED[name]
    figure = draw_tree(tree, max_nodes=100)
    drawn = spans(figure, is_strip=False)
    assert len(drawn) == tree.num_nodes
    assert not any(overlap(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    left, right = figure.axes[0].get_xlim()
    assert all(left <= a[0] and a[2] <= right for a in drawn)


def test_widths_grow_as_the_square_root_of_tokens() -> None:
    widths = [box.get_width() for box in boxes(draw_tree(layered([1, 2], [900, 100])))]
    assert widths[0] == pytest.approx(3 * widths[1])


def test_tokens_and_repeated_queries_are_written() -> None:
    figure = draw_tree(DecodeTree([-1, 0], [1234, 56], [0, 1, 1, 1]))
    assert {"1,234", "56", "x3"} <= set(texts(figure))


def test_a_strip_for_every_run_and_none_overlap() -> None:
    for strategy in ("flatten", "node_chunk", "sequence"):
        options = {} if strategy == "sequence" else {"block_kv": 64}
        plan = plan_of(BINARY, strategy, **options)
        drawn = spans(draw_plan(plan), is_strip=True)
        assert len(drawn) == len(plan.run_node)
        assert not any(overlap(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_the_title_says_how_many_tokens_the_plan_loads() -> None:
    plan = plan_of(BINARY, "sequence")
    title = next(text for text in texts(draw_plan(plan)) if text.startswith("sequence"))
    assert f"16 items load {int(BINARY.query_kv_len.sum()):,} tokens" in title
    assert "1,024 (16x)" in texts(draw_plan(plan))


def test_each_item_keeps_its_colour_across_nodes() -> None:
    plan = plan_of(few_shot(10, 6, 4), "flatten", block_kv=1000)
    colours = {to_hex(box.get_facecolor()).upper() for box in boxes(draw_plan(plan))}
    assert plan.num_items == 1
    assert len(colours & set(ITEM_COLOURS)) == 1


@pytest.mark.parametrize("name", NAMED)
def test_any_plan_can_be_drawn(name: str, tmp_path: Path) -> None:
    figure = draw_plan(plan_of(NAMED[name], "flatten"), title="A plan")
    path = tmp_path / "plan.png"
    figure.savefig(path, dpi=40)
    assert path.stat().st_size > 1000


def test_a_big_tree_is_drawn_by_level(tmp_path: Path) -> None:
    tree = layered([1, 16, 1024], [4000, 64, 8])
    figure = draw_tree(tree)
    assert [bar.get_width() for bar in boxes(figure)] == [4000, 1024, 8192]
    assert any("nodes: 1,024" in text and "queries: 1,024" in text for text in texts(figure))
    figure.savefig(tmp_path / "tree.pdf")
    assert draw_plan(plan_of(tree, "flatten")).axes


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(ValueError, match="a tree without nodes has no picture"):
        draw_tree(DecodeTree([], [], []))


def test_colours_of_neighbouring_items_differ() -> None:
    assert len(set(ITEM_COLOURS)) == len(ITEM_COLOURS) == 7
    plan = plan_of(few_shot(640, 2, 64), "node_chunk", block_kv=64)
    strips = [box for box in boxes(draw_plan(plan)) if box.get_height() < 1]
    shown = [to_hex(box.get_facecolor()).upper() for box in strips if box.get_width() > 0]
    root = [colour for colour in shown if colour in ITEM_COLOURS][:10]
    assert all(a != b for a, b in pairwise(root))
    assert np.unique(root).size == 7
