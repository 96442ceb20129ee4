"""DeviceModel: the ceilings of one GPU, the floor no kernel can beat, and a predicted latency.

A device model is a JSON file of eight figures, each with its source, because a floor is only as
good as the bandwidth under it:

    measured   read off such a GPU by a benchmark or by its driver
    datasheet  the vendor's figure, which kernels do not reach
    estimated  a judgement; changes predictions, never floors of a measured device

The latency model is the planner's cost model:
time = max(HBM bytes / bw, L2 bytes / L2 bw, FLOPs / peak) + waves x item overhead + launches.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from deft.io_model import IOBytes
from deft.shape import HeadShape
from deft.tree import DecodeTree

MODEL_DIR = Path(__file__).with_name("device_models")
SOURCES = ("measured", "datasheet", "estimated")
_INT_FIELDS = ("num_sms", "l2_bytes", "smem_per_sm_bytes")


@dataclass(frozen=True)
class DeviceModel:
    """Ceilings of one GPU.

    Args:
        name: shown in tables, and the value of the `predicted_for` column.
        num_sms: streaming multiprocessors.
        hbm_gb_s: DRAM read bandwidth, GB/s (10^9 bytes).
        l2_bytes: L2 cache size.
        l2_gb_s: L2 to SM read bandwidth, GB/s, for working sets that fit.
        matmul_tflop_s: dense 16-bit matmul rate, TFLOP/s, fp32 accumulation.
        launch_us: one kernel launch as the timer sees it (an empty kernel in a CUDA graph).
        item_overhead_us: what one wave of thread blocks costs beside its bytes and FLOPs: the chain
            index -> K -> V -> store of dependent loads.
        turn_us: one turn of a thread block's loop over KV tiles; turns of one block wait for each
            other, however idle the rest of the GPU is.
        smem_per_sm_bytes: shared memory of one SM, which bounds resident blocks.
        sources: source of every figure above, "measured", "datasheet" or "estimated".
        note: free text: how the figures were obtained.

    Raises:
        ValueError: a figure that is not a positive number, or a source missing or unknown.
    """

    name: str
    num_sms: int
    hbm_gb_s: float
    l2_bytes: int
    l2_gb_s: float
    matmul_tflop_s: float
    launch_us: float
    item_overhead_us: float
    turn_us: float
    smem_per_sm_bytes: int
    sources: dict[str, str]
    note: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"device model: name must be a non-empty string, got {self.name!r}")
        for name in figure_names():
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not 0 < value < math.inf
            ):
                raise ValueError(
                    f"device model {self.name}: {name} must be a positive number, got {value!r}"
                )
            if name in _INT_FIELDS and int(value) != value:
                raise ValueError(f"device model {self.name}: {name} must be whole, got {value!r}")
        if not isinstance(self.sources, dict):
            raise ValueError(
                f"device model {self.name}: sources must map each figure to one of {SOURCES}"
            )
        missing = sorted(set(figure_names()) - set(self.sources))
        unknown = sorted(set(self.sources) - set(figure_names()))
        if missing or unknown:
            raise ValueError(
                f"device model {self.name}: sources missing {missing}, unknown {unknown}"
            )
        bad = {name: source for name, source in self.sources.items() if source not in SOURCES}
        if bad:
            raise ValueError(
                f"device model {self.name}: sources must be one of {SOURCES}, got {bad}"
            )

    def __hash__(self) -> int:
        return hash((self.name, tuple(getattr(self, name) for name in figure_names())))

    @classmethod
    def load(cls, name_or_json_path: str | Path) -> DeviceModel:
        """A model of this package by name (see `available()`), or of your own JSON file.

        Args:
            name_or_json_path: "h200", "h100", "a100", or the path of a `.json` file with the same
                keys as `deft/device_models/h200.json`.

        Raises:
            ValueError: no such name or file, not JSON, or a field missing, unknown or out of range.
        """
        text = str(name_or_json_path)
        path = Path(text) if text.endswith(".json") else MODEL_DIR / f"{text}.json"
        if not path.is_file():
            raise ValueError(
                f"no device model {text!r}; want one of {available()} or the path of a .json file"
            )
        try:
            data: Any = json.loads(path.read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: not a readable device model ({error})") from error
        if not isinstance(data, dict):
            raise ValueError(f"{path}: want a JSON object, got {type(data).__name__}")
        wanted = [f.name for f in fields(cls) if f.name != "note"]
        missing = [name for name in wanted if name not in data]
        unknown = sorted(set(data) - set(wanted) - {"note"})
        if missing or unknown:
            raise ValueError(f"{path}: missing fields {missing}, unknown fields {unknown}")
        try:
            return cls(**data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def figure_names() -> tuple[str, ...]:
    """The fields that hold figures, and so need a source."""
    return tuple(f.name for f in fields(DeviceModel) if f.name not in ("name", "sources", "note"))


def available() -> list[str]:
    """Names that DeviceModel.load() knows."""
    return sorted(path.stem for path in MODEL_DIR.glob("*.json"))


def floor_us(tree: DecodeTree, shape: HeadShape, device: DeviceModel) -> float:
    """Lower bound of one layer's latency: every byte once, every useful FLOP once, one launch.

    max((K and V of attended tokens + q + o) / hbm_gb_s, useful FLOPs / matmul_tflop_s) + launch_us,
    in microseconds. No strategy enters: two kernels of one point have the same floor.
    """
    moved = tree.attended_tokens * shape.kv_token_bytes + 2 * tree.num_qo * shape.q_token_bytes
    memory = moved / (device.hbm_gb_s * 1e3)
    compute = tree.flops(shape) / (device.matmul_tflop_s * 1e6)
    return max(memory, compute) + device.launch_us


def predict_us(
    io: IOBytes,
    flops: int,
    device: DeviceModel,
    num_ctas: int = 0,
    num_launches: int = 1,
    smem_per_cta_bytes: int = 48 * 1024,
    longest_turns: int = 0,
) -> float:
    """Modelled latency of one layer in microseconds. A model, not a measurement.

    Args:
        io: counted traffic; `io.hbm(l2_bytes)` is charged to DRAM and `io.total` to L2.
        flops: FLOPs executed, masked and padded work included.
        num_ctas: thread blocks of all launches together; 0 leaves the wave term out.
        num_launches: kernels launched one after the other.
        smem_per_cta_bytes: shared memory of one block, which sets how many an SM holds at once
            (default: a 64 x 64 tile at head_dim 128, 16 bit, two stages).
        longest_turns: KV tiles that the busiest thread block reads one after the other.

    Raises:
        ValueError: a negative count.
    """
    counts = {
        "flops": flops,
        "num_ctas": num_ctas,
        "num_launches": num_launches,
        "longest_turns": longest_turns,
    }
    bad = {name: value for name, value in counts.items() if value < 0}
    if bad or smem_per_cta_bytes <= 0:
        raise ValueError(
            f"counts must be >= 0 and smem_per_cta_bytes > 0, got {bad}, {smem_per_cta_bytes}"
        )
    hbm = io.hbm(device.l2_bytes) / (device.hbm_gb_s * 1e3)
    l2 = io.total / (device.l2_gb_s * 1e3)
    compute = flops / (device.matmul_tflop_s * 1e6)
    resident = device.num_sms * max(1, device.smem_per_sm_bytes // smem_per_cta_bytes)
    waves = -(-num_ctas // resident)
    chain = longest_turns * device.turn_us
    return (
        max(hbm, l2, compute, chain)
        + waves * device.item_overhead_us
        + num_launches * device.launch_us
    )
