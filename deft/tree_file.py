"""Tree files and tree text: what a DecodeTree looks like outside the program.

A file is JSON or npz with the keys parent, node_len, query_node and, optionally, query_len.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from deft.tree import DecodeTree

KEYS = ("parent", "node_len", "query_node")
OPTIONAL_KEYS = ("query_len",)


def save_arrays(path: Path, data: dict[str, list[int]]) -> None:
    """Write the arrays of a tree to `.json` or `.npz`, chosen by the suffix.

    Raises:
        ValueError: another suffix.
    """
    if path.suffix == ".json":
        path.write_text(json.dumps(data))
    elif path.suffix == ".npz":
        arrays: dict[str, Any] = {name: np.asarray(x, np.int32) for name, x in data.items()}
        np.savez_compressed(path, **arrays)
    else:
        raise ValueError(f"a tree file ends in .json or .npz, got {path.name!r}")


def load_arrays(path: Path) -> dict[str, Any]:
    """Read the arrays of a tree file; the tree itself is not validated here.

    Raises:
        ValueError: the file is missing, unreadable, or has missing or unknown keys.
    """
    if not path.is_file():
        raise ValueError(f"no tree file at {path}")
    try:
        data = _read(path)
    except Exception as error:  # zip, JSON, unicode and pickle errors share no base class
        raise ValueError(f"{path}: not a readable tree file ({error})") from error
    if not isinstance(data, dict):
        got = type(data).__name__
        raise ValueError(f"{path}: want an object with parent, node_len, query_node, got {got}")
    missing = [name for name in KEYS if name not in data]
    unknown = sorted(set(data) - {*KEYS, *OPTIONAL_KEYS})
    if missing or unknown:
        raise ValueError(f"{path}: missing keys {missing}, unknown keys {unknown}")
    return data


def _read(path: Path) -> Any:
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    if path.suffix == ".json":
        return json.loads(path.read_text())
    raise ValueError("a tree file ends in .json or .npz")


def tree_text(tree: DecodeTree, max_lines: int = 40) -> str:
    """An indented drawing in depth-first order, one node a line: id, tokens, queries on it."""
    counts = np.bincount(tree.query_node, minlength=tree.num_nodes)
    order = np.argsort(tree.dfs_rank, kind="stable")
    lines = []
    for node in order[:max_lines]:
        queries = f", {counts[node]} {'query' if counts[node] == 1 else 'queries'}"
        indent = "  " * int(tree.depth[node])
        own = queries if counts[node] else ""
        lines.append(f"{indent}node {node}: {tree.node_len[node]} tokens{own}")
    if tree.num_nodes > max_lines:
        lines.append(f"... {tree.num_nodes - max_lines} more nodes")
    return "\n".join(lines)
