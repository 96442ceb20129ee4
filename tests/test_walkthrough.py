"""The newcomer's walkthrough counts from plans what arithmetic says, and equals dense attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from deft.testing import LIMITS
from experiments.tile_picture import tile_figure
from experiments.walkthrough import (
    NUM_NODES,
    PREFIX_LEN,
    SHAPE,
    TILE,
    methods,
    run_walkthrough,
    table,
    walkthrough_tree,
)

BELOW = [node.bit_length() for node in range(1, NUM_NODES + 1)]  # ancestors below the prefix


@pytest.fixture(scope="module")
def frame(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    return run_walkthrough(tmp_path_factory.mktemp("walkthrough"))


def test_the_tree_is_a_prefix_over_a_binary_tree() -> None:
    tree = walkthrough_tree()
    assert tree.num_tokens == PREFIX_LEN + NUM_NODES == 1040
    assert (tree.query_kv_len - PREFIX_LEN).tolist() == BELOW
    children = np.diff(tree.children[0])
    assert children[0] == 1 and children[1:].max() == 2


def test_token_reads_are_those_of_arithmetic(frame: pd.DataFrame) -> None:
    reads = dict(zip(frame["method"], frame["token_reads"], strict=True))
    assert reads == {
        "each query alone": NUM_NODES * PREFIX_LEN + sum(BELOW),
        "prefix shared": PREFIX_LEN + sum(BELOW),
        "each token once": PREFIX_LEN + NUM_NODES,
    }
    assert (frame["kv_bytes"] == frame["token_reads"] * SHAPE.kv_token_bytes).all()
    assert frame["num_items"].tolist() == [16, 17, -(-1040 // TILE.block_n)]


def test_every_method_equals_dense_attention(frame: pd.DataFrame) -> None:
    assert (frame["error"] > 0).all() and (frame["error"] <= LIMITS[SHAPE.dtype]).all()


def test_a_wrong_method_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies of the ancestors read one token off: same reads, another output."""
    import experiments.walkthrough as walkthrough

    right = walkthrough._with_private_ancestors

    def shifted(tree: object) -> object:
        copied, source = right(tree)  # type: ignore[arg-type]
        return copied, np.r_[source[:-1], source[-1] - 1]

    monkeypatch.setattr(walkthrough, "_with_private_ancestors", shifted)
    with pytest.raises(RuntimeError, match="prefix shared: row error"):
        run_walkthrough(tmp_path)


def test_the_picture_shows_the_tiles_of_the_plan(frame: pd.DataFrame) -> None:
    plan = methods(walkthrough_tree())[-1].plan()
    item = np.repeat(np.arange(plan.num_items), np.diff(plan.item_run_indptr))
    assert item[plan.run_node == 0].tolist() == list(range(16)), "the prefix in 16 tiles"
    assert set(item[plan.run_node > 0].tolist()) == {16}, "the rest in one"
    figure = tile_figure(plan, frame)
    mask_axes, read_axes = figure.axes
    pairs = NUM_NODES * 16 + sum(BELOW)
    assert len(mask_axes.patches) == pairs, "a cell per (query, run) that the masks allow"
    widths = [bar.get_width() for bar in read_axes.patches]
    assert widths == frame["token_reads"].tolist()


def test_files_and_errors(tmp_path: Path, frame: pd.DataFrame) -> None:
    out = tmp_path / "out"
    again = run_walkthrough(out)
    pd.testing.assert_frame_equal(again, frame)
    names = {path.name for path in out.iterdir()}
    pictures = ["io_walkthrough", *(f"tree_{strategy}" for strategy in frame["strategy"])]
    assert names == {"io_walkthrough.csv"} | {f"{p}.{s}" for p in pictures for s in ("pdf", "png")}
    assert table(frame).row_count == 3
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ValueError, match="cannot write the walkthrough"):
        run_walkthrough(tmp_path / "file" / "out")
