"""Planners: pure functions (DecodeTree, HeadShape, tiles, DeviceModel | None, **options) ->
Plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deft.plan import Plan
from deft.planners.fasttree import plan_fasttree
from deft.planners.flatten import plan_deft_paper, plan_flatten
from deft.planners.hydragen import plan_hydragen
from deft.planners.node import plan_cascade, plan_node, plan_node_chunk
from deft.planners.pat import plan_pat
from deft.planners.sequence import plan_sequence, split_block
from deft.planners.tiles import positive
from deft.shape import DTYPE_BYTES, HeadShape
from deft.tree import DecodeTree

if TYPE_CHECKING:
    from deft.device_model import DeviceModel

PLANNERS: dict[str, Callable[..., Plan]] = {
    "sequence": plan_sequence,
    "node": plan_node,
    "node_chunk": plan_node_chunk,
    "flatten": plan_flatten,
    "cascade": plan_cascade,
    "deft_paper": plan_deft_paper,
    "hydragen": plan_hydragen,
    "fasttree": plan_fasttree,
    "pat": plan_pat,
}


def check_options(strategy: str, options: dict[str, Any]) -> None:
    """Refuse an unknown planner or option by name, and values that no planner takes.

    Raises:
        ValueError: what was got and what there is.
    """
    if strategy not in PLANNERS:
        raise ValueError(f"unknown strategy {strategy!r}; choose from {sorted(PLANNERS)}")
    known = set(inspect.signature(PLANNERS[strategy]).parameters) - {"tree", "shape", "device"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(f"strategy {strategy!r} has no option {unknown}; it has {sorted(known)}")
    for name in ("block_kv", "query_cap"):
        if options.get(name) is not None:
            positive(name, options[name])
    split_block(options.get("split_len"), 1, 1, None)
    partial_dtype = options.get("partial_dtype")
    if partial_dtype not in (None, *DTYPE_BYTES):
        raise ValueError(
            f"partial_dtype must be one of {sorted(DTYPE_BYTES)} or None, got {partial_dtype!r}"
        )


def plan_tree(
    tree: DecodeTree,
    shape: HeadShape,
    strategy: str,
    device: DeviceModel | None = None,
    **options: Any,
) -> Plan:
    """Run a planner by name.

    Raises:
        ValueError: unknown strategy or option, or options that do not fit the shape.
    """
    check_options(strategy, options)
    return PLANNERS[strategy](tree, shape, options.pop("tile", None), device, **options)


def make_plan(
    tree: DecodeTree,
    strategy: str = "flatten",
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype_bytes: int = 2,
    **options: Any,
) -> Plan:
    """A Plan from plain numbers.

    Args:
        strategy: a key of PLANNERS.
        dtype_bytes: 2, 4 or 8 (float16, float32, float64).
        options: the planner's own (block_kv, query_cap, split_len, tile, partial_dtype).

    Raises:
        ValueError: unknown strategy or option, or a shape no kernel can run.
    """
    names = {size: name for name, size in DTYPE_BYTES.items() if name != "bfloat16"}
    if dtype_bytes not in names:
        raise ValueError(f"dtype_bytes must be one of {sorted(names)}, got {dtype_bytes}")
    shape = HeadShape(num_qo_heads, num_kv_heads, head_dim, names[dtype_bytes])
    return plan_tree(tree, shape, strategy, **options)
