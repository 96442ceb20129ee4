"""DeviceModel: the floors of the reference measurements, the shape of the prediction, bad files."""

import csv
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deft.device_model import MODEL_DIR, DeviceModel, available, floor_us, predict_us
from deft.io_model import IOBytes
from deft.shape import HeadShape
from deft.tree import DecodeTree

SHARED = os.environ.get("TREE_BENCH_SHARED") or Path(__file__).parents[2] / "shared"
PEERS = Path(SHARED) / "reference" / "peers_h200.csv"


def layered(nodes: list[int], tokens: list[int]) -> DecodeTree:
    """Child j of a level of n hangs under node j * m // n of the m above; a query per leaf."""
    first = np.cumsum([0, *nodes])
    parent = [np.full(nodes[0], -1)]
    for level in range(1, len(nodes)):
        parent.append(first[level - 1] + np.arange(nodes[level]) * nodes[level - 1] // nodes[level])
    leaves = np.arange(first[-2], first[-1])
    return DecodeTree(np.concatenate(parent), np.repeat(tokens, nodes), leaves)


@pytest.mark.skipif(not PEERS.is_file(), reason="needs ../shared/reference/peers_h200.csv")
def test_floor_reproduces_the_reference_measurements() -> None:
    device = replace(DeviceModel.load("h200"), hbm_gb_s=4500)  # that table's rounded bandwidth
    with PEERS.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 45
    for row in rows:
        tree = layered(*([int(x) for x in row[name].split("-")] for name in ("nodes", "tokens")))
        shape = HeadShape(int(row["num_qo_heads"]), int(row["num_kv_heads"]), 128)
        assert floor_us(tree, shape, device) == pytest.approx(float(row["floor_us"]), rel=0.03), row


def test_prediction_takes_the_largest_of_three_and_adds_waves_and_launches() -> None:
    device = replace(
        DeviceModel.load("h200"),
        hbm_gb_s=1000,
        l2_gb_s=2000,
        matmul_tflop_s=1,
        launch_us=3,
        item_overhead_us=2,
        turn_us=0.5,
    )
    io = IOBytes(kv=4_000_000, kv_unique=1_000_000)  # 1 us of DRAM, 2 us of L2
    assert predict_us(io, 0, device) == pytest.approx(2 + 3)
    assert predict_us(io, 5_000_000, device, num_launches=2) == pytest.approx(5 + 6)
    one_wave = device.num_sms * (device.smem_per_sm_bytes // 65536)
    for ctas, waves in ((one_wave, 1), (one_wave + 1, 2)):
        got = predict_us(io, 0, device, num_ctas=ctas, smem_per_cta_bytes=65536)
        assert got == pytest.approx(2 + 2 * waves + 3)
    assert predict_us(io, 0, device, longest_turns=3) == pytest.approx(2 + 3)
    assert predict_us(io, 0, device, longest_turns=10) == pytest.approx(5 + 3)
    with pytest.raises(ValueError, match="num_ctas"):
        predict_us(io, 0, device, num_ctas=-1)


def test_a_working_set_over_l2_pays_dram_for_rereads() -> None:
    device = DeviceModel.load("h200")
    unique = 4 * device.l2_bytes
    reread = predict_us(IOBytes(kv=3 * unique, kv_unique=unique), 0, device)
    assert reread > predict_us(IOBytes(kv=unique, kv_unique=unique), 0, device) * 2


def test_shipped_models_load_and_mark_their_sources() -> None:
    assert available() == ["a100", "h100", "h200"]
    h200 = DeviceModel.load("h200")
    assert (h200.hbm_gb_s, h200.matmul_tflop_s, h200.launch_us) == (4564, 770, 3.6)
    assert {h200.sources[name] for name in ("hbm_gb_s", "matmul_tflop_s", "launch_us")} == {
        "measured"
    }
    for name in ("h100", "a100"):
        model = DeviceModel.load(name)
        assert model.name == name
        assert "measured" not in model.sources.values()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hbm_gb_s": None}, r"missing fields \['hbm_gb_s'\]"),
        ({"hbm_tb_s": 4.5}, r"unknown fields \['hbm_tb_s'\]"),
        ({"num_sms": "132"}, "num_sms must be a positive number, got '132'"),
        ({"launch_us": 0}, "launch_us must be a positive number"),
        ({"sources": {}}, "sources missing"),
        ({"sources": "guess"}, "sources must map"),
    ],
)
def test_a_bad_file_says_what_is_wrong(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    data = json.loads((MODEL_DIR / "h200.json").read_text()) | change
    data = {key: value for key, value in data.items() if value is not None}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        DeviceModel.load(path)


def test_a_users_own_file_loads_and_missing_ones_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    data = json.loads((MODEL_DIR / "a100.json").read_text()) | {"name": "mine", "hbm_gb_s": 1555}
    path.write_text(json.dumps(data))
    assert DeviceModel.load(path).hbm_gb_s == 1555
    path.write_text("{")
    with pytest.raises(ValueError, match="not a readable device model") as caught:
        DeviceModel.load(path)
    assert "\n" not in str(caught.value)
    path.write_text("[1]")
    with pytest.raises(ValueError, match="want a JSON object, got list"):
        DeviceModel.load(path)
    with pytest.raises(
        ValueError, match=r"no device model 'b300'; want one of \['a100', 'h100', 'h200'\]"
    ):
        DeviceModel.load("b300")
