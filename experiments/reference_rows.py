"""Rows to look at first: the committed reference run, or a small sweep where there is none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from deft.topologies import few_shot
from experiments.results import load_rows

log = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "results" / "h200"
KERNELS = ("radix_attention", "flash_decoding", "deft_node", "deft_node_chunk", "deft_flatten")
SUFFIX_LEN = 32


def small_sweep(
    prefixes: Sequence[int] = (1024, 4096, 16384),
    widths: Sequence[int] = (16, 64, 256),
    kernels: Sequence[str] = KERNELS,
    model: str = "llama3_8b",
) -> pd.DataFrame:
    """Few-shot trees through bench_tree(): measured on a GPU, counted and predicted without one.

    Args:
        prefixes: prompt lengths in tokens.
        widths: leaves of 32 tokens, one query each.
        kernels: ids of conf/kernel/.
        model: head layout, a name of conf/model/.

    Returns:
        Rows as load_rows gives them.
    """
    from experiments import bench_tree

    frames = [
        bench_tree(
            few_shot(prefix, width, SUFFIX_LEN), list(kernels), model,
            name=f"few_shot_{prefix}_{width}_{SUFFIX_LEN}",
        )
        for prefix in prefixes for width in widths
    ]  # fmt: skip
    rows: pd.DataFrame = pd.concat(frames, ignore_index=True)
    return rows


def reference_rows(folder: str | Path = REFERENCE) -> pd.DataFrame:
    """The rows of a results folder; a small sweep made on the spot where it holds none.

    Args:
        folder: results folder, by default the committed H200 run.
    """
    if any(Path(folder).rglob("*.parquet")):
        return load_rows(folder)
    log.warning("%s holds no results; running a small sweep instead", folder)
    return small_sweep()
