"""Small odd trees with names, and random forests, shared by the tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from deft.topologies import few_shot, forest, layered
from deft.tree import DecodeTree

# Lengths around a 32-token tile, one token, none; queries on inner nodes, several on one node, in
# any order; a strict prefix (query on node 1, whose child 3 has queries too); a node that nobody
# sees.
ODD = DecodeTree(
    parent=[-1, 0, 0, 1, 1, 2, 2, 6, -1, 8],
    node_len=[33, 31, 32, 1, 0, 15, 17, 2, 5, 40],
    query_node=[7, 3, 1, 4, 5, 3, 6, 8],
)
# Several causal queries in one node: each sees a part of it, one sees nothing of it.
CAUSAL = DecodeTree(
    parent=[-1, 0, 0, 1],
    node_len=[20, 6, 0, 35],
    query_node=[1, 1, 1, 3, 2, 0, 3, 3],
    query_len=[2, 6, 0, 35, 0, 0, 1, 34],
)
NAMED = {
    "odd": ODD,
    "causal": CAUSAL,
    "few_shot": few_shot(40, 5, 7),
    "chain": layered([1, 1, 1], [16, 1, 16]),
    "wide": layered([1, 2, 70], [9, 3, 2]),
    "one_token": layered([1], [1]),
    "only_empty": DecodeTree([-1, 0], [0, 0], [0, 1]),
    "no_query": DecodeTree([-1], [5], []),
    "batch": forest([few_shot(17, 3, 2), layered([1, 3], [0, 33])]),
}
STRATEGIES = {
    "sequence": ("sequence", {}),
    "sequence_split": ("sequence", {"split_len": 24}),
    "sequence_auto": ("sequence", {"split_len": "auto"}),
    "node": ("node", {}),
    "node_chunk": ("node_chunk", {"block_kv": 16}),
    "flatten": ("flatten", {}),
    "flatten_24": ("flatten", {"block_kv": 24}),
    "flatten_cap": ("flatten", {"block_kv": 64, "query_cap": 2}),
    "cascade": ("cascade", {}),
    "deft_paper": ("deft_paper", {}),
    "hydragen": ("hydragen", {}),
    "fasttree": ("fasttree", {}),
    "pat": ("pat", {}),
}


@st.composite
def random_forests(draw: st.DrawFn, max_nodes: int = 24, max_len: int = 90) -> DecodeTree:
    """Forests of any topology, with empty nodes, unseen nodes, and often causal queries."""
    seed = draw(st.integers(0, 2**31))
    num_nodes = draw(st.integers(1, max_nodes))
    num_qo = draw(st.integers(0, 40))
    rng = np.random.default_rng(seed)
    parent = [-1] + [int(rng.integers(-1, i)) for i in range(1, num_nodes)]
    node_len = np.where(rng.random(num_nodes) < 0.15, 0, rng.integers(0, max_len, num_nodes))
    query_node = rng.integers(0, num_nodes, num_qo)
    query_len = None
    if draw(st.booleans()):
        query_len = (rng.random(num_qo) * (node_len[query_node] + 1)).astype(int)
    return DecodeTree(parent, node_len, query_node, query_len)
