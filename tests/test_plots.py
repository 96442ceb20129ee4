"""What stands in the axes is what the rows say, and one source only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import comparison_plots, dot_plots, peers, plots
from experiments.figure_data import one_source, source_frames, workload_text
from experiments.figure_style import KERNEL_STYLES, count_text, series_styles, spread
from experiments.results import load_rows, write_rows
from tests.synthetic import KERNELS, counted, synthetic_row, synthetic_sweep


def frame_of(rows: list[dict[str, Any]], folder: Path) -> pd.DataFrame:
    write_rows(rows, folder / "run.parquet")
    return load_rows(folder)


def only_frame(rows: list[dict[str, Any]], folder: Path, source: str) -> pd.DataFrame:
    (frame,) = source_frames(frame_of(rows, folder), source)
    return frame


def curve(axes: Axes, label: str) -> tuple[list[float], list[float]]:
    (line,) = [line for line in axes.get_lines() if line.get_label() == label]
    return np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()


def all_text(figure: Figure) -> str:
    words = [figure.get_suptitle()]
    for axes in figure.axes:
        words += [axes.get_xlabel(), axes.get_ylabel(), axes.get_title("left")]
    return "\n".join(words)


# ---- frames of one source --------------------------------------------------------------------
def test_frames_part_sources_and_settings(tmp_path: Path) -> None:
    small = [synthetic_row(k, 64, 2, gpu=None, timer="cpu", cold_l2=None) for k in KERNELS]
    large = [counted(row) for row in synthetic_sweep()]
    other = [synthetic_row(k, gpu="NVIDIA H200", num_kv_heads=32) for k in KERNELS]
    df = frame_of(small + large + other, tmp_path)
    measured = source_frames(df, "measured")
    assert [frame["device"].unique().tolist() for frame in measured] == [["cpu"], ["NVIDIA H200"]]
    assert measured[0]["floor_us"].isna().all(), "a CPU has no floor"
    (predicted,) = source_frames(df, "predicted")
    assert set(predicted["workload"]) == {row["workload"] for row in small + large}
    assert predicted["plan_us"].isna().all() and predicted["device"].unique() == ["h200"]
    assert len(source_frames(df, "counted")) == 2
    with pytest.raises(ValueError, match="source must be one of"):
        source_frames(df, "guessed")


def test_a_point_that_a_gpu_measured_is_not_shown_as_predicted(tmp_path: Path) -> None:
    df = frame_of([synthetic_row("deft_node"), counted(synthetic_row("deft_node", 4096))], tmp_path)
    (frame,) = source_frames(df, "predicted")
    assert frame["workload"].tolist() == ["few_shot_4096_16_32"]


@pytest.mark.parametrize("status", ["counted", "incorrect", "oom", "error", "timeout"])
def test_only_ok_rows_are_measured(tmp_path: Path, status: str) -> None:
    bad = counted(synthetic_row("deft_flatten")) | {"status": status, "gpu": "Imaginary GPU"}
    frame = only_frame([synthetic_row("deft_node"), bad], tmp_path, "measured")
    assert frame["kernel"].tolist() == ["deft_node"]


def test_mixed_rows_are_refused(tmp_path: Path) -> None:
    df = frame_of([*synthetic_sweep(), counted(synthetic_row("dense", 64))], tmp_path)
    both = pd.concat([source_frames(df, "measured")[0], source_frames(df, "predicted")[0]])
    with pytest.raises(ValueError, match="several of"):
        one_source(both)
    with pytest.raises(ValueError, match="several of"):
        plots.prefix_figure(both.assign(panel="all", panel_order=0))


# ---- curves ----------------------------------------------------------------------------------
def test_prefix_curves_hold_the_measured_medians(tmp_path: Path) -> None:
    rows = synthetic_sweep()
    frame = only_frame(rows, tmp_path, "measured")
    figure = plots.prefix_figure(plots.prefix_data(frame))
    assert [axes.get_title("left") for axes in figure.axes] == [
        "16 queries, 32-token suffixes",
        "64 queries, 32-token suffixes",
    ]
    for axes, width in zip(figure.axes, (16, 64), strict=True):
        for kernel in KERNELS:
            want = [synthetic_row(kernel, p, width)["latency_us_p50"] for p in (1024, 4096, 16384)]
            x, y = curve(axes, kernel)
            assert x == [1024, 4096, 16384] and y == pytest.approx(want)
        assert axes.get_xscale() == axes.get_yscale() == "log"
        assert axes.get_xlabel() == "prefix length (tokens)"
        assert [t.get_text() for t in axes.get_xticklabels()] == ["1k", "4k", "16k"]
    text = all_text(figure)
    assert "measured on Imaginary GPU, cold L2" in text and "predicted" not in text
    assert figure.axes[0].get_ylabel() == "latency per layer (µs)"
    assert len(figure.legends) == 1 and not any(axes.get_legend() for axes in figure.axes)


def test_predicted_curves_say_so_and_hold_predictions_only(tmp_path: Path) -> None:
    frame = only_frame([counted(row) for row in synthetic_sweep()], tmp_path, "predicted")
    figure = plots.prefix_figure(plots.prefix_data(frame))
    assert "predicted for h200, not measured" in figure.get_suptitle()
    label = figure.axes[0].get_ylabel()
    assert "predicted for" in label and "h200, not measured" in label and "µs" in label
    _, y = curve(figure.axes[0], "deft_node")
    want = [synthetic_row("deft_node", p, 16)["predicted_us"] for p in (1024, 4096, 16384)]
    assert y == pytest.approx(want)


def test_query_curves_need_three_points(tmp_path: Path) -> None:
    frame = only_frame(synthetic_sweep(widths=(4, 16)), tmp_path / "two", "measured")
    assert plots.queries_data(frame).empty
    frame = only_frame(synthetic_sweep(widths=(4, 16, 64)), tmp_path / "three", "measured")
    figure = plots.queries_figure(plots.queries_data(frame))
    x, y = curve(figure.axes[0], "deft_flatten")
    assert x == [4, 16, 64]
    assert y == pytest.approx(
        [synthetic_row("deft_flatten", 1024, w)["latency_us_p50"] for w in (4, 16, 64)]
    )


def test_batches_have_their_own_figure(tmp_path: Path) -> None:
    rows = [
        synthetic_row(k, latency_us_p50=10.0 * n, workload=name, num_qo=16 * n)
        for k in KERNELS
        for n, name in ((1, "kary_2_4_8"), (2, "kary_2_4_8_batch2"), (8, "kary_2_4_8_batch8"))
    ]
    frame = only_frame(rows, tmp_path, "measured")
    assert plots.queries_data(frame).empty, "a batch is not a larger tree"
    figure = plots.batch_figure(plots.batch_data(frame))
    assert curve(figure.axes[0], "deft_node") == ([1, 2, 8], [10.0, 20.0, 80.0])


def test_panels_left_out_are_said(tmp_path: Path) -> None:
    rows = synthetic_sweep((1024, 4096), (1, 2, 4, 8, 16, 32), ("deft_node",))
    figure = plots.prefix_figure(plots.prefix_data(only_frame(rows, tmp_path, "measured")))
    assert [axes.get_title("left").split()[0] for axes in figure.axes] == ["1", "4", "8", "32"]
    assert "(4 of 6 panels)" in figure.get_suptitle()


def test_rereads_are_loaded_over_stored_bytes(tmp_path: Path) -> None:
    frame = only_frame(synthetic_sweep((1024,), (4, 16, 64)), tmp_path, "counted")
    figure = plots.redundancy_figure(plots.redundancy_data(frame))
    _, shared = curve(figure.axes[0], "deft_flatten")
    _, alone = curve(figure.axes[0], "flash_decoding")
    assert shared == [1.0, 1.0, 1.0]
    assert alone[1] == pytest.approx(16 * (1024 + 32) / (1024 + 16 * 32))


def test_plan_time_grows_with_nodes_and_is_of_rows_that_ran(tmp_path: Path) -> None:
    ran = synthetic_sweep((1024,), (16, 64))
    frame = only_frame(ran, tmp_path, "measured")
    figure = plots.plan_time_figure(plots.plan_time_data(frame))
    assert curve(figure.axes[0], "deft_node") == ([17, 65], [56.0, 104.0])
    assert "µs" in figure.axes[0].get_ylabel()


# ---- dots ------------------------------------------------------------------------------------
def test_topology_dots_name_every_workload(tmp_path: Path) -> None:
    rows = [
        synthetic_row(k, workload=name, latency_us_p50=us)
        for k in KERNELS
        for name, us in (("kary_2_4_8", 20.0), ("chain_8", 30.0), ("layered_1-4_8-16", 40.0))
    ]
    figure = dot_plots.topology_figure(
        dot_plots.topology_data(only_frame(rows, tmp_path, "measured"))
    )
    (axes,) = figure.axes
    names = [tick.get_text() for tick in axes.get_yticklabels()]
    assert names == ["chain 8", "kary 2 4 8", "layered 1-4\n8-16 tokens"]
    x, y = curve(axes, "deft_node")
    assert dict(zip(y, x, strict=True)) == {0: 30.0, 1: 20.0, 2: 40.0}


def test_topology_keeps_the_extremes_of_many_workloads(tmp_path: Path) -> None:
    rows = synthetic_sweep(tuple(2**i for i in range(5, 15)), (2, 4, 8, 16), ("deft_node",))
    data = dot_plots.topology_data(only_frame(rows, tmp_path, "measured"))
    assert data["workload"].nunique() == dot_plots.MAX_WORKLOADS
    assert "(24 of 40 workloads)" in dot_plots.topology_figure(data).get_suptitle()
    assert {"few_shot_32_2_32", "few_shot_16384_16_32"} <= set(data["workload"])


def test_few_shot_leaves_room_for_other_topologies(tmp_path: Path) -> None:
    rows = synthetic_sweep((64, 128, 256, 512), (2, 4, 8), ("deft_node",))
    rows += [synthetic_row("deft_node", workload=f"kary_2_{n}_8") for n in range(1, 9)]
    data = dot_plots.topology_data(only_frame(rows, tmp_path, "measured"))
    families = data["family"].value_counts().to_dict()
    assert families == {"kary": 8, "few_shot": dot_plots.MAX_FEW_SHOT}


def test_fraction_of_floor_marks_and_mean(tmp_path: Path) -> None:
    rows = [
        synthetic_row("deft_node", p, floor_us=floor, latency_us_p50=100.0)
        for p, floor in ((1024, 20.0), (2048, 80.0))
    ]
    figure = dot_plots.floor_figure(dot_plots.floor_data(only_frame(rows, tmp_path, "measured")))
    x, _ = curve(figure.axes[0], "deft_node")
    assert x == pytest.approx([0.2, 0.8])
    assert "40%" in [text.get_text() for text in figure.axes[0].texts]
    assert figure.axes[0].get_xlabel() == "floor / latency"


# ---- comparisons -----------------------------------------------------------------------------
def test_io_bars_stack_to_the_counted_total(tmp_path: Path) -> None:
    frame = only_frame(synthetic_sweep((1024,), (16,)), tmp_path, "counted")
    figure = comparison_plots.io_figure(comparison_plots.io_data(frame))
    left, right = figure.axes
    want = {k: synthetic_row(k, 1024, 16) for k in KERNELS}
    unit = {"GB per layer": 1e9, "MB per layer": 1e6, "kB per layer": 1e3}
    for axes, gone in ((left, 0), (right, 1)):
        ends = {
            bar.get_y() + bar.get_height() / 2: bar.get_x() + bar.get_width()
            for bar in axes.patches
        }
        scale = unit[axes.get_xlabel()]
        for place, tick in zip(left.get_yticks(), left.get_yticklabels(), strict=True):
            row = want[tick.get_text()]
            assert ends[place] * scale == pytest.approx(row["total_bytes"] - gone * row["kv_bytes"])
    assert "counted" in figure.get_suptitle()


def test_speed_up_map_cells(tmp_path: Path) -> None:
    frame = only_frame(synthetic_sweep(), tmp_path, "measured")
    data = comparison_plots.speed_up_data(frame, "flash_decoding")
    figure = comparison_plots.speed_up_figure(data)
    maps = {axes.get_title("left"): axes for axes in figure.axes if axes.images}
    assert set(maps) == set(KERNELS) - {"flash_decoding"}
    image = maps["deft_flatten"].images[0].get_array()
    assert image is not None and image.shape == (3, 2)
    assert np.asarray(image) == pytest.approx(np.full((3, 2), 2.0)), "log2 of 4x"
    assert {t.get_text() for t in maps["deft_flatten"].texts} == {"4.0\N{MULTIPLICATION SIGN}"}
    assert "predicted" not in all_text(figure)
    assert figure.axes[-1].get_ylabel() == "speed-up over flash_decoding"


def peer_table() -> pd.DataFrame:
    row = {"workload": "layered_1-64_8-32", "num_qo_heads": 32, "num_kv_heads": 8}
    return pd.DataFrame([{**row, **{f"{name}_us": 30.0 for name in peers.PEERS}}]).assign(
        pat_us=np.nan
    )


def h200(kernel: str, latency_us: float, **changes: Any) -> dict[str, Any]:
    name = "layered_1-64_8-32"
    return synthetic_row(
        kernel, workload=name, gpu="NVIDIA H200", latency_us_p50=latency_us, **changes
    )


def test_peers_are_compared_with_our_fastest_right_row(tmp_path: Path) -> None:
    wrong = counted(h200("dense", 1.0)) | {"status": "incorrect", "gpu": "NVIDIA H200"}
    rows = [h200("deft_node", 15.0), h200("deft_flatten", 20.0), wrong, synthetic_row("dense")]
    df = frame_of([*rows, h200("deft_paper", 2.0, cold_l2=False)], tmp_path)
    (line,) = peers.compare_peers(df, peer_table()).to_dict("records")
    assert (line["our_kernel"], line["our_us"]) == ("deft_node", 15.0)
    assert line["fasttree_ratio"] == 2.0 and np.isnan(line["pat_ratio"])
    (line,) = peers.compare_peers(df, peer_table(), "deft_flatten").to_dict("records")
    assert line["deft_port_ratio"] == 1.5
    figure = peers.peers_figure(peers.compare_peers(df, peer_table(), "deft_flatten"))
    assert curve(figure.axes[0], "deft_port") == ([1.5], [0])
    assert "deft_flatten" in figure.get_suptitle()


def test_the_peers_file_covers_the_layered_suite() -> None:
    path = peers.shared_folder() / peers.PEERS_FILE
    if not path.exists():
        pytest.skip(f"{path} is absent; set TREE_BENCH_SHARED")
    table = peers.load_peers()
    assert len(table) == 45 and table["workload"].nunique() == 15
    wrong = table["fasttree_wrong"] == 1
    assert wrong.any() and table.loc[wrong, "fasttree_us"].isna().all()


def test_a_file_that_is_not_of_peers_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set TREE_BENCH_SHARED"):
        peers.load_peers(tmp_path / "absent.csv")
    (tmp_path / "other.csv").write_text("price\n1\n")
    with pytest.raises(ValueError, match="no column nodes"):
        peers.load_peers(tmp_path / "other.csv")


# ---- style -----------------------------------------------------------------------------------
def test_kernels_differ_without_colour() -> None:
    marks = [(s.marker, s.is_hollow) for s in KERNEL_STYLES.values()]
    assert len(set(marks)) == len(marks)
    labels = [*KERNEL_STYLES, "deft_flatten block_kv=64", "newcomer", "other"]
    styles = series_styles(labels)
    seen = {(s.colour, s.marker, str(s.line), s.is_hollow) for s in styles.values()}
    assert len(seen) == len(labels)
    assert styles["deft_flatten"] == KERNEL_STYLES["deft_flatten"]


def test_axis_texts() -> None:
    assert [count_text(n) for n in (16, 1024, 4000, 1 << 20)] == ["16", "1k", "4000", "1M"]
    assert spread(range(100), 3) == [0, 50, 99] and spread([2, 1], 3) == [1, 2]
    assert workload_text("few_shot_1024_16_32_batch4").endswith(" 32, batch 4")
    assert workload_text("layered_1-2_3-4") == "layered 1-2\n3-4 tokens"
