"""How much KV each way of decoding a tree reads, on a tree small enough to count by hand.

A 1,024-token prefix and, below it, 16 one-token nodes in a binary tree (node i hangs under node
i // 2, node 1 under the prefix); every node holds one query, as in speculative decoding. Three ways
to attend, each a plan that is proved, run and compared with dense attention in fp64:

    each query alone   every query reads the prefix and its ancestors: the conventional way
    prefix shared      the prefix is read once for all, each query reads its own ancestors
    each token once    the tree's tokens in tiles of 64, each read once (DeFT-Flatten)

    python -m experiments.walkthrough [--out FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from deft import (
    DecodeTree,
    HeadShape,
    TileConfig,
    plan_tree,
    reference_attention,
    tree_attention,
)
from deft.plan import Plan
from deft.reference import visible_tokens
from deft.testing import LIMITS, make_inputs, row_rms_error
from experiments.command_line import run_command
from experiments.drawing import draw_plan
from experiments.results import ResultsError
from experiments.tile_picture import tile_figure, write_picture

PREFIX_LEN = 1024
NUM_NODES = 16
SHAPE = HeadShape(num_qo_heads=1, num_kv_heads=1, head_dim=64, dtype="float16")
TILE = TileConfig(block_m=16, block_n=64)
COLUMNS = ("method", "strategy", "num_items", "token_reads", "kv_bytes", "reads_per_token", "error")


@dataclass(frozen=True)
class Method:
    """One way to attend over the tree.

    Args:
        name: as shown.
        strategy: planner.
        options: the planner's.
        tree: what it plans over; prefix sharing copies the ancestors of each query.
        source: int64 [tree.num_tokens], the token of the walkthrough's tree behind each of its own.
    """

    name: str
    strategy: str
    options: dict[str, Any]
    tree: DecodeTree
    source: np.ndarray

    def plan(self) -> Plan:
        """The plan, proved to read every visible (query, token) pair once and no other."""
        plan = plan_tree(self.tree, SHAPE, self.strategy, tile=TILE, **self.options)
        plan.validate(self.tree)
        return plan

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention by this method; k and v hold the walkthrough's tree, in node order."""
        rows = torch.from_numpy(self.source)
        o = tree_attention(
            q, k[rows], v[rows], self.tree,
            strategy=self.strategy, backend="torch", tile=TILE, **self.options,
        )  # fmt: skip
        assert isinstance(o, Tensor)
        return o


def walkthrough_tree() -> DecodeTree:
    """The prefix as node 0, and the 16 one-token nodes, each with a query."""
    nodes = np.arange(1, NUM_NODES + 1, dtype=np.int32)
    return DecodeTree(
        parent=np.r_[-1, nodes // 2],
        node_len=np.r_[PREFIX_LEN, np.ones(NUM_NODES, int)],
        query_node=nodes,
    )


def _with_private_ancestors(tree: DecodeTree) -> tuple[DecodeTree, np.ndarray]:
    """The prefix with one child per query that holds a copy of the query's ancestors below it."""
    own = [visible_tokens(tree, query)[PREFIX_LEN:] for query in range(tree.num_qo)]
    copied = DecodeTree(
        parent=np.r_[-1, np.zeros(tree.num_qo, int)],
        node_len=np.r_[PREFIX_LEN, [len(tokens) for tokens in own]],
        query_node=np.arange(1, tree.num_qo + 1, dtype=np.int32),
    )
    return copied, np.concatenate([np.arange(PREFIX_LEN), *own])


def methods(tree: DecodeTree) -> list[Method]:
    """The three ways to attend, conventional first."""
    every_token = np.arange(tree.num_tokens)
    return [
        Method("each query alone", "sequence", {}, tree, every_token),
        Method("prefix shared", "node", {}, *_with_private_ancestors(tree)),
        Method("each token once", "flatten", {"block_kv": TILE.block_n}, tree, every_token),
    ]


def run_walkthrough(out_dir: str | Path) -> pd.DataFrame:
    """Count, run and check the three ways, and write the table and the pictures.

    Args:
        out_dir: folder, made where missing, for io_walkthrough.csv, io_walkthrough.{pdf,png} (masks
            and reads) and per method tree_<strategy>.{pdf,png} (the tree and its tiles).

    Returns:
        One row per method with COLUMNS: items of its plan, tokens that they load (per KV head), the
        bytes of that (float16, head_dim 64, one head), loads per token of the tree, and the worst
        relative row error against dense attention in fp64.

    Raises:
        RuntimeError: a method's output is not that of dense attention.
        ResultsError: the folder cannot be written.
    """
    tree = walkthrough_tree()
    inputs = make_inputs(tree, SHAPE, seed=0)
    dense, _ = reference_attention(inputs.q, inputs.k, inputs.v, tree)
    rows, plans = [], {}
    for method in methods(tree):
        plan = plans[method.name] = method.plan()
        reads = int(plan.item_tokens.sum())
        error = row_rms_error(method.run(inputs.q, inputs.k, inputs.v), dense)
        if not error <= LIMITS[SHAPE.dtype]:
            raise RuntimeError(f"{method.name}: row error {error:.1e} against dense attention")
        values = (method.name, method.strategy, plan.num_items, reads, plan.io().kv,
                  reads / tree.num_tokens, error)  # fmt: skip
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    frame: pd.DataFrame = pd.DataFrame(rows, columns=list(COLUMNS))
    out_dir = Path(out_dir)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        frame.to_csv(out_dir / "io_walkthrough.csv", index=False)
        write_picture(tile_figure(plans["each token once"], frame), out_dir / "io_walkthrough")
        for name, plan in plans.items():
            figure = draw_plan(plan, f"{name}: {plan.item_tokens.sum():,} token reads")
            write_picture(figure, out_dir / f"tree_{plan.strategy}")
    except OSError as error:
        raise ResultsError(
            f"cannot write the walkthrough to {out_dir} ({error.strerror or error}); "
            "name another folder or make this one writable"
        ) from error
    return frame


def table(frame: pd.DataFrame) -> Table:
    """The rows of run_walkthrough() for a terminal."""
    out = Table(
        title=f"KV reads of {NUM_NODES} queries over {PREFIX_LEN:,} + {NUM_NODES} tokens",
        title_justify="left",
        caption="error: worst relative row error against dense attention in fp64",
        caption_justify="left",
    )
    out.add_column("method", style="bold")
    for name in ("plan", "items", "token reads", "KV bytes", "reads per token", "error"):
        out.add_column(name, justify="left" if name == "plan" else "right")
    for _, row in frame.iterrows():
        out.add_row(
            row["method"], row["strategy"], f"{row['num_items']}", f"{row['token_reads']:,}",
            f"{row['kv_bytes']:,}", f"{row['reads_per_token']:.2f}", f"{row['error']:.1e}",
        )  # fmt: skip
    return out


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", default="results/io_walkthrough", help="folder (default: here)")
    out_dir = Path(parser.parse_args().out)
    frame = run_walkthrough(out_dir)
    Console().print(walkthrough_tree().to_text(), highlight=False)
    Console().print(table(frame))
    print(f"table, and pictures of the tree and its tiles per method, in {out_dir}")


if __name__ == "__main__":
    sys.exit(run_command(main))
