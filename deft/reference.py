"""The oracle: dense attention in fp64, one query path at a time, no cleverness.

o = softmax(q K^T x sm_scale) V over the visible tokens; lse = ln sum exp(q K^T x sm_scale).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deft.tree import DecodeTree, segment_arange


def visible_tokens(tree: DecodeTree, query: int) -> np.ndarray:
    """int64: node-order token indices one query sees, root first."""
    indptr, path = tree.path
    nodes = path[indptr[query] : indptr[query + 1]]
    lens = tree.node_len[nodes].astype(np.int64)
    if tree.query_len is not None:
        lens[-1] = tree.query_len[query]
    return np.repeat(tree.node_start[nodes], lens) + segment_arange(lens)


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, tree: DecodeTree, sm_scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Exact tree attention in fp64 on the tensors' own device.

    Args:
        q: [num_qo, num_qo_heads, head_dim].
        k, v: [tree.num_tokens, num_kv_heads, head_dim], in node order.
        sm_scale: default head_dim ** -0.5.

    Returns:
        (o fp64 [num_qo, num_qo_heads, head_dim], lse fp64 [num_qo, num_qo_heads], natural log);
        a query that sees nothing gets o = 0 and lse = -inf.
    """
    num_qo, num_qo_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    scale = head_dim**-0.5 if sm_scale is None else sm_scale
    o = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full((num_qo, num_qo_heads), -torch.inf, dtype=torch.float64, device=q.device)
    qs = q.double().reshape(num_qo, num_kv_heads, num_qo_heads // num_kv_heads, head_dim) * scale
    # Queries on one path (same node, same length) share the gathered K and V.
    own = tree.query_len if tree.query_len is not None else tree.node_len[tree.query_node]
    groups, group_of = np.unique(np.stack([tree.query_node, own]), axis=1, return_inverse=True)
    for index in range(groups.shape[1]):
        members = np.flatnonzero(group_of.reshape(-1) == index)
        tokens = torch.from_numpy(visible_tokens(tree, int(members[0]))).to(q.device)
        if not tokens.numel():
            continue
        rows = torch.from_numpy(members).to(q.device)
        kt = k[tokens].double().permute(1, 2, 0)  # [num_kv_heads, head_dim, tokens]
        vt = v[tokens].double().transpose(0, 1)
        logits = torch.einsum("qhgd,hdn->hqgn", qs[rows], kt)
        weights = torch.softmax(logits, dim=-1)
        o[rows] = torch.einsum("hqgn,hnd->qhgd", weights, vt).reshape(
            len(members), num_qo_heads, head_dim
        )
        lse[rows] = torch.logsumexp(logits, -1).permute(1, 0, 2).reshape(len(members), num_qo_heads)
    return o, lse
