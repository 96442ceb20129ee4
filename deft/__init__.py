"""DeFT: tree attention for decoding. Trees, plans, kernels, counted IO."""

from deft.attention import AttentionKernel, TreeAttention, tree_attention
from deft.device_model import DeviceModel
from deft.io_model import IOBytes
from deft.kv_cache import PagedKVCache, PoolFull
from deft.plan import Plan
from deft.planners import PLANNERS, make_plan, plan_tree
from deft.reference import reference_attention
from deft.shape import HeadShape, TileConfig
from deft.tree import DecodeTree

__all__ = [
    "PLANNERS",
    "AttentionKernel",
    "DecodeTree",
    "DeviceModel",
    "HeadShape",
    "IOBytes",
    "PagedKVCache",
    "Plan",
    "PoolFull",
    "TileConfig",
    "TreeAttention",
    "make_plan",
    "plan_tree",
    "reference_attention",
    "tree_attention",
]
