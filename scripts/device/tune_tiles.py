"""Sweep planners x tile classes x KV blocks over the layered suite on one GPU; correct first, then
timed.

    python scripts/device/tune_tiles.py --cases PEERS_CSV --out DIR [--planners flatten node_chunk
    ...]

PEERS_CSV names the trees (columns nodes, tokens, num_qo_heads, num_kv_heads). Each variant is
compared with the fp64 oracle (row RMS) and timed as CUDA-graph replays with a cold L2. The sweep
chose the defaults in deft/planners/tiles.py; docs/kernel_log.md says what it showed.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import time
from pathlib import Path

import torch

from deft.attention import TreeAttention
from deft.planners import tiles as planner_tiles
from deft.reference import reference_attention
from deft.shape import HeadShape, TileConfig
from deft.testing import make_cache, make_inputs, row_rms_error
from deft.topologies import layered

FLUSH_BYTES = 256 * 2**20

S16 = TileConfig(16, 32, 1, 3)
S16_64 = TileConfig(16, 64, 2, 3)
M64 = TileConfig(64, 64, 4, 3)
TILE_SETS: dict[str, tuple[TileConfig, ...] | None] = {
    "default": None,  # the planner's own
    "16x32w1+64x64w4": (S16, M64),
    "16x32w1+64x32w4": (S16, TileConfig(64, 32, 4, 3)),
    "16x64w2+64x64w4": (S16_64, M64),
    "16x64w2+64x32w4": (S16_64, TileConfig(64, 32, 4, 3)),
    "16x64w2+64x128w4": (S16_64, TileConfig(64, 128, 4, 2)),
    "16x64w1+64x64w4": (TileConfig(16, 64, 1, 2), M64),
    "16x64w4+64x64w4": (TileConfig(16, 64, 4, 3), M64),
    "16x64w2+32x64w4+64x64w4": (S16_64, TileConfig(32, 64, 4, 3), M64),
    "16x32w1+32x32w2+64x128w4": (S16, TileConfig(32, 32, 2, 3), TileConfig(64, 128, 4, 2)),
    "16x32w1+32x64w2+64x128w8": (S16, TileConfig(32, 64, 2, 3), TileConfig(64, 128, 8, 2)),
    "16x64w1+32x64w2+64x64w4": (TileConfig(16, 64, 1, 2), TileConfig(32, 64, 2, 3), M64),
    "16x64w2+32x64w2+64x64w4": (S16_64, TileConfig(32, 64, 2, 3), M64),
    "16x32w1s1+32x32w2s2+64x64w4": (TileConfig(16, 32, 1, 1), TileConfig(32, 32, 2, 2), M64),
    "16x32w1s2+32x32w2s2+64x64w4": (TileConfig(16, 32, 1, 2), TileConfig(32, 32, 2, 2), M64),
    "16x16w1s1+32x32w2s2+64x64w4": (TileConfig(16, 16, 1, 1), TileConfig(32, 32, 2, 2), M64),
    "16x16w1s2+32x32w2s2+64x64w4": (TileConfig(16, 16, 1, 2), TileConfig(32, 32, 2, 2), M64),
    "16x16w1s4+32x32w2+64x64w4": (TileConfig(16, 16, 1, 4), TileConfig(32, 32, 2, 3), M64),
    "16x32w2s2+32x32w2s2+64x64w4": (TileConfig(16, 32, 2, 2), TileConfig(32, 32, 2, 2), M64),
    "16x64w2s2+64x32w4s2": (TileConfig(16, 64, 2, 2), TileConfig(64, 32, 4, 2)),
    "16x64w2s1+64x32w4s3": (TileConfig(16, 64, 2, 1), TileConfig(64, 32, 4, 3)),
    "16x64w2s3+64x32w4s2": (S16_64, TileConfig(64, 32, 4, 2)),
    "16x64w2s3+64x64w4s2": (S16_64, TileConfig(64, 64, 4, 2)),
    "16x32w2s2+64x32w4s2": (TileConfig(16, 32, 2, 2), TileConfig(64, 32, 4, 2)),
    "16x32w1s2+64x32w4s3": (TileConfig(16, 32, 1, 2), TileConfig(64, 32, 4, 3)),
}
CTAS_PER_SM = (2, 4, 8)


def time_us(
    kernel: TreeAttention, q: torch.Tensor, out: torch.Tensor, flush: torch.Tensor, repeats: int
) -> float:
    """Median of cold-L2 CUDA-graph replays."""
    kernel.run(q, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.run(q, out=out)
    events = [(torch.cuda.Event(True), torch.cuda.Event(True)) for _ in range(repeats)]
    for start, stop in events:
        flush.zero_()
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(stop) * 1e3 for start, stop in events)
    return times[len(times) // 2]


def variants(planner: str):
    """(label, CTAs per SM that automatic blocks aim at, planner options) of the sweep."""
    if planner == "pat":
        return [(f"cut{tokens}", 4, {"shortest_cut": tokens}) for tokens in (8, 64, 128)]
    if planner in ("node", "hydragen", "fasttree"):
        return [("", 4, {})]
    name = "split_len" if planner == "sequence" else "block_kv"
    auto = "auto" if planner == "sequence" else None
    fixed = [(str(block), 4, {name: block}) for block in (128, 256)]
    return [(f"auto{n}", n, {name: auto}) for n in CTAS_PER_SM] + fixed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument(
        "--planners", nargs="+", default=["flatten", "node_chunk", "node", "sequence"]
    )
    parser.add_argument("--tiles", nargs="+", default=list(TILE_SETS))
    parser.add_argument("--partial", nargs="+", default=["float32"])
    parser.add_argument("--file", default="tune.csv")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--serial", action="store_true", help="tile classes one after the other")
    parser.add_argument("--seconds", type=float, default=500)
    args = parser.parse_args()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    begin = time.time()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    with open(args.cases) as file:
        cases = list(csv.DictReader(file))
    sink = open(Path(args.out) / args.file, "w")  # noqa: SIM115
    writer = csv.writer(sink)
    columns = "nodes,tokens,heads,planner,option,tiles,partial,us,error,items,turns,plan_ms"
    writer.writerow(columns.split(","))
    for case in cases:
        shape = HeadShape(int(case["num_qo_heads"]), int(case["num_kv_heads"]), 128)
        tree = layered(*([int(x) for x in case[key].split("-")] for key in ("nodes", "tokens")))
        inputs = make_inputs(tree, shape, seed=1, device="cuda")
        cache = make_cache(tree, shape, inputs, device="cuda")
        ref, _ = reference_attention(inputs.q, inputs.k, inputs.v, tree)
        best: dict[str, tuple[float, str]] = {}
        for planner, partial, tiles in itertools.product(args.planners, args.partial, args.tiles):
            for value, ctas, option in variants(planner):
                planner_tiles.CTAS_PER_SM = ctas
                if time.time() - begin > args.seconds:
                    raise SystemExit("out of time")
                kernel = TreeAttention(
                    planner,
                    backend="triton",
                    tile=TILE_SETS[tiles],
                    partial_dtype=partial,
                    **option,
                )
                out = torch.full_like(inputs.q, float("nan"))
                try:
                    since = time.perf_counter()
                    kernel.plan(tree, cache)
                    plan_ms = (time.perf_counter() - since) * 1e3
                    if kernel.bound.plan.workspace_bytes > 8e9:
                        continue
                    if args.serial:
                        kernel.bound.side_stream = None
                    kernel.run(inputs.q, out=out)
                    error = row_rms_error(out, ref)
                    us = (
                        time_us(kernel, inputs.q, out, flush, args.repeats)
                        if error < 1e-3
                        else float("nan")
                    )
                except (ValueError, RuntimeError) as problem:
                    print(planner, tiles, option, type(problem).__name__, str(problem)[:120])
                    continue
                plan = kernel.bound.plan
                writer.writerow(
                    [
                        case["nodes"],
                        case["tokens"],
                        f"{shape.num_qo_heads}/{shape.num_kv_heads}",
                        planner,
                        value,
                        tiles,
                        partial,
                        f"{us:.2f}",
                        f"{error:.2e}",
                        plan.num_items,
                        int(plan.item_turns.max()),
                        f"{plan_ms:.2f}",
                    ]
                )
                if us == us and us < best.get(planner, (1e9, ""))[0]:
                    best[planner] = (us, f"{tiles} {value}")
        sink.flush()
        label = f"{case['nodes']}/{case['tokens']} {shape.num_qo_heads}/{shape.num_kv_heads}"
        print(
            label,
            case.get("deft_port_us"),
            case.get("best_peer_us"),
            {k: (round(v[0], 1), v[1]) for k, v in best.items()},
            f"{time.time() - begin:.0f}s",
            flush=True,
        )
    sink.close()


if __name__ == "__main__":
    main()
