"""Generators of decode trees: every topology of the benchmark that needs no recorded file.

All return a DecodeTree with one query per leaf unless their docstring says otherwise. Lengths are
in KV tokens; random ones take a seed and use numpy's default generator: a seed names one tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deft.tree import DecodeTree

Lengths = Sequence[int] | npt.NDArray[np.integer]


def _at_least(minimum: int, **values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int | np.integer) or value < minimum:
            raise ValueError(f"{name} must be >= {minimum} and an integer, got {value!r}")


def few_shot(prompt_len: int, width: int, suffix_len: int) -> DecodeTree:
    """One shared prompt and `width` suffixes of equal length: few-shot prompting, best-of-n.

    Raises:
        ValueError: width < 1 or a negative length.
    """
    _at_least(0, prompt_len=prompt_len, suffix_len=suffix_len)
    _at_least(1, width=width)
    node_len = np.full(width + 1, suffix_len)
    node_len[0] = prompt_len
    return DecodeTree(np.r_[-1, np.zeros(width, int)], node_len, np.arange(1, width + 1))


def layered(nodes_per_level: Lengths, tokens_per_level: Lengths) -> DecodeTree:
    """Levels of equal nodes: child j of n hangs under node floor(j * m / n) of the m above.

    Raises:
        ValueError: no level, unequally long lists, a level without nodes, or a negative length.
    """
    counts, tokens = np.asarray(nodes_per_level), np.asarray(tokens_per_level)
    if counts.ndim != 1 or not counts.size or counts.shape != tokens.shape:
        raise ValueError(
            "nodes_per_level and tokens_per_level must be equally long, non-empty lists, "
            f"got shapes {counts.shape} and {tokens.shape}"
        )
    is_whole = np.issubdtype(np.result_type(counts, tokens), np.integer)
    if not is_whole or counts.min() < 1 or tokens.min() < 0:
        raise ValueError(
            f"want >= 1 nodes and >= 0 tokens, integers, at each level, got {counts} and {tokens}"
        )
    starts = np.cumsum(counts) - counts
    parents = [np.full(counts[0], -1)]
    for level in range(1, len(counts)):
        above = np.arange(counts[level]) * counts[level - 1] // counts[level]
        parents.append(starts[level - 1] + above)
    return _leaf_queries(np.concatenate(parents), np.repeat(tokens, counts))


def kary(branching: int, depth: int, node_len: int, root_len: int | None = None) -> DecodeTree:
    """A complete tree with `depth` levels below the root, branching ** depth leaves.

    Args:
        branching: children of each inner node.
        depth: levels below the root; 0 gives the root alone.
        node_len: tokens of each node.
        root_len: tokens of the root; None means node_len.

    Raises:
        ValueError: branching < 1, or a negative depth or length.
    """
    _at_least(1, branching=branching)
    _at_least(0, depth=depth, node_len=node_len, root_len=root_len or 0)
    if (branching > 1 and depth > 24) or branching**depth > 1 << 24:
        raise ValueError(f"{branching} ** {depth} leaves is beyond this generator's 2 ** 24")
    tokens = [node_len if root_len is None else root_len] + [node_len] * depth
    return layered([branching**level for level in range(depth + 1)], tokens)


def chain(lengths: Lengths) -> DecodeTree:
    """Nodes one under the other, one query at the last: a request whose prefix has several owners.

    Raises:
        ValueError: an empty list or a negative length.
    """
    if not len(lengths):
        raise ValueError("a chain needs at least one length")
    n = len(lengths)
    return DecodeTree(np.arange(n) - 1, np.asarray(lengths), np.asarray([n - 1]))


def skewed(num_leaves: int, root_len: int, mean_len: int, seed: int = 0) -> DecodeTree:
    """A root, then binary splits that send a Beta(1/2, 1/2) share of the leaves to one side.

    Most splits are lopsided, so paths differ in depth and a few inner nodes are shared by nearly
    all queries. Lengths are geometric with the given mean (at least one token).

    Raises:
        ValueError: num_leaves or mean_len < 1, or root_len < 0.
    """
    _at_least(1, num_leaves=num_leaves, mean_len=mean_len)
    _at_least(0, root_len=root_len)
    rng = np.random.default_rng(seed)
    parents, ids, sizes = [np.asarray([-1])], np.asarray([0]), np.asarray([num_leaves])
    total = 1
    while (split := sizes > 1).any():
        ids, sizes = ids[split], sizes[split]
        left = 1 + (rng.beta(0.5, 0.5, len(sizes)) * (sizes - 1)).astype(np.int64)
        left = np.minimum(left, sizes - 1)
        parents.append(np.repeat(ids, 2))
        sizes = np.stack([left, sizes - left], 1).reshape(-1)
        ids = total + np.arange(len(sizes))
        total += len(sizes)
    node_len = rng.geometric(1 / mean_len, total)
    node_len[0] = root_len
    return _leaf_queries(np.concatenate(parents), node_len)


def random_tree(
    num_nodes: int,
    seed: int,
    max_len: int = 64,
    *,
    num_qo: int | None = None,
    num_roots: int = 1,
    empty_share: float = 0.1,
    with_query_len: bool = False,
) -> DecodeTree:
    """A random forest with queries anywhere, for property tests: odd cases are in it on purpose.

    Parents are uniform over earlier nodes; about `empty_share` of the nodes are empty; queries sit
    on any node, several on one, in random order, so some nodes have no query below.

    Args:
        num_nodes: nodes, >= 1.
        seed: names the tree.
        max_len: longest node.
        num_qo: queries; None means num_nodes // 2 + 1.
        num_roots: trees of the forest, at most num_nodes.
        empty_share: chance that a node has no tokens.
        with_query_len: cut each query's view of its own node at a random length.

    Raises:
        ValueError: a count or length out of range.
    """
    _at_least(1, num_nodes=num_nodes, num_roots=num_roots)
    _at_least(0, max_len=max_len, num_qo=0 if num_qo is None else num_qo)
    if num_roots > num_nodes:
        raise ValueError(f"num_roots must be <= num_nodes, got {num_roots} > {num_nodes}")
    rng = np.random.default_rng(seed)
    parent = (rng.random(num_nodes) * np.arange(num_nodes)).astype(np.int64)
    parent[:num_roots] = -1
    node_len = rng.integers(min(1, max_len), max_len + 1, num_nodes)
    node_len[rng.random(num_nodes) < empty_share] = 0
    query_node = rng.integers(0, num_nodes, num_nodes // 2 + 1 if num_qo is None else num_qo)
    query_len = rng.integers(0, node_len[query_node] + 1) if with_query_len else None
    return DecodeTree(parent, node_len, query_node, query_len)


def from_choices(
    choices: Sequence[Sequence[int]], prompt_len: int, root_token: bool = True
) -> DecodeTree:
    """A token tree for verification: node 0 the prompt, node 1 the root token, one node per path.

    Every candidate token, the root token included, is a query on its own node, so there are
    len(choices) + 1 queries. Paths are ordered by length, else as given.

    Args:
        choices: Medusa paths, the rank chosen at each depth; the parent of a path is the path
            without its last entry, the empty path being the root token.
        prompt_len: tokens before the root token.
        root_token: False leaves the root token out: paths hang under the prompt, one query each.

    Raises:
        ValueError: an empty or repeated path, or one whose parent path is missing.
    """
    _at_least(0, prompt_len=prompt_len)
    paths = sorted((tuple(path) for path in choices), key=len)
    first = 1 if root_token else 0
    node_of: dict[tuple[int, ...], int] = {(): first}
    parent = [-1, 0][: first + 1]
    for path in paths:
        if path in node_of:
            raise ValueError(f"path {list(path)} is {'repeated' if path else 'empty'}")
        if path[:-1] not in node_of:
            raise ValueError(f"path {list(path)} has no parent path {list(path[:-1])}")
        parent.append(node_of[path[:-1]])
        node_of[path] = len(parent) - 1
    node_len = np.ones(len(parent), np.int64)
    node_len[0] = prompt_len
    return DecodeTree(parent, node_len, np.arange(1, len(parent)))


def thought(
    prompt_len: int, branching: int | Sequence[int], depth: int, thought_len: int, seed: int = 0
) -> DecodeTree:
    """Tree of thoughts: `depth` levels of thoughts with random lengths, the last ones decoding.

    Args:
        prompt_len: tokens of the root.
        branching: thoughts proposed from each thought; a list gives one number per level.
        depth: levels of thoughts, >= 1.
        thought_len: mean tokens of a thought; lengths are uniform in [1, 2 * thought_len - 1].
        seed: names the lengths.

    Raises:
        ValueError: a number out of range, or a list of another length than depth.
    """
    _at_least(0, prompt_len=prompt_len)
    _at_least(1, depth=depth, thought_len=thought_len)
    factors: list[int] = np.repeat(branching, depth if np.ndim(branching) == 0 else 1).tolist()
    if len(factors) != depth or min(factors) < 1:
        raise ValueError(f"branching wants {depth} numbers >= 1, got {factors}")
    counts = np.cumprod([1, *factors])
    tree = layered(counts, np.ones(depth + 1, int))
    node_len = np.random.default_rng(seed).integers(1, 2 * thought_len, tree.num_nodes)
    node_len[0] = prompt_len
    return tree.with_lengths(node_len)


def beam(prompt_len: int, width: int, steps: int, seed: int = 0) -> DecodeTree:
    """The tree that beam search leaves after `steps` steps: live hypotheses and their ancestors.

    At each step every surviving hypothesis picks its parent among the `width` before it at random;
    hypotheses without a live descendant are pruned and unbranched runs are one node.

    Raises:
        ValueError: width < 1 or a negative number.
    """
    _at_least(1, width=width)
    _at_least(0, prompt_len=prompt_len, steps=steps)
    rng = np.random.default_rng(seed)
    if steps == 0:
        return few_shot(prompt_len, width, 0)
    # Token j of step s is s * width + j; the first step's hypotheses all come from the prompt.
    picks = np.sort(rng.integers(0, width, (steps, width)), axis=1)
    up = picks + (np.arange(steps)[:, None] - 1) * width
    up[0] = -1
    alive = np.zeros((steps, width), bool)
    alive[-1] = True
    for step in range(steps - 1, 0, -1):
        alive[step - 1, picks[step][alive[step]]] = True
    return _merge_runs(up.reshape(-1), alive.reshape(-1), prompt_len)


def _merge_runs(
    up: npt.NDArray[np.int64], alive: npt.NDArray[np.bool_], root_len: int
) -> DecodeTree:
    """A tree of live one-token nodes (up: parent or -1 = the root), unbranched runs as one node."""
    children = np.bincount(up[alive & (up >= 0)], minlength=len(up))
    starts = alive & ((up < 0) | (children[np.maximum(up, 0)] > 1))
    node = np.cumsum(starts) * starts  # run id, 1.. ; 0 is the root
    for token in np.flatnonzero(alive & ~starts):
        node[token] = node[up[token]]
    node_len = np.bincount(node[alive], minlength=int(starts.sum()) + 1)
    node_len[0] = root_len
    parent = np.r_[-1, np.where(up[starts] < 0, 0, node[np.maximum(up[starts], 0)])]
    return _leaf_queries(parent, node_len)


def forest(trees: Sequence[DecodeTree]) -> DecodeTree:
    """The trees side by side as one batch, queries in the trees' order.

    Raises:
        ValueError: no tree.
    """
    if not trees:
        raise ValueError("a forest needs at least one tree")
    sizes = np.asarray([tree.num_nodes for tree in trees])
    offset = np.repeat(np.cumsum(sizes) - sizes, sizes)
    parent = np.concatenate([tree.parent for tree in trees])
    shift = np.repeat(np.cumsum(sizes) - sizes, [tree.num_qo for tree in trees])
    query_node = np.concatenate([tree.query_node for tree in trees]) + shift
    cuts = None
    if any(tree.query_len is not None for tree in trees):
        whole = [tree.node_len[tree.query_node] for tree in trees]
        own = [tree.query_len for tree in trees]
        cuts = np.concatenate([a if b is None else b for a, b in zip(whole, own, strict=True)])
    node_len = np.concatenate([tree.node_len for tree in trees])
    return DecodeTree(np.where(parent < 0, -1, parent + offset), node_len, query_node, cuts)


def replicate(tree: DecodeTree, batch: int) -> DecodeTree:
    """A batch of `batch` requests that have the same tree and share nothing.

    Raises:
        ValueError: batch < 1.
    """
    _at_least(1, batch=batch)
    return forest([tree] * batch)


def _leaf_queries(parent: npt.NDArray[np.integer], node_len: npt.NDArray[np.integer]) -> DecodeTree:
    """The tree with one query on each leaf, in node order."""
    is_leaf = np.ones(len(parent), bool)
    is_leaf[parent[parent >= 0]] = False
    return DecodeTree(parent, node_len, np.flatnonzero(is_leaf))
