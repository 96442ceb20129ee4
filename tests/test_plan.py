"""Plan.validate() is shown to see faults: each one is put into a right plan and must be refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deft.planners import plan_tree
from deft.shape import HeadShape
from deft.topologies import few_shot, layered
from tests.trees import CAUSAL, ODD

SHAPE = HeadShape(4, 2, 64)


def changed(array, index, value):
    out = array.copy()
    out[index] = value
    return out


@pytest.fixture
def plan():
    return plan_tree(ODD, SHAPE, "flatten", block_kv=64, tile={"block_m": 16, "block_n": 32})


def test_a_lost_token_in_a_pure_chunk(plan):
    at = int(np.argmax(plan.chunk_len))
    bad = replace(plan, chunk_len=changed(plan.chunk_len, at, plan.chunk_len[at] - 1))
    with pytest.raises(ValueError, match=r"gap|overlap|end other"):
        bad.validate()


def test_a_lost_token_in_a_mixed_piece(plan):
    at = int(np.argmax(plan.mixed_len))
    bad = replace(plan, mixed_len=changed(plan.mixed_len, at, plan.mixed_len[at] - 1))
    with pytest.raises(ValueError, match=r"gap|overlap|end other|never reads"):
        bad.validate()


def test_a_doubled_token(plan):
    at = int(np.flatnonzero(plan.mixed_start > 0)[0]) if (plan.mixed_start > 0).any() else None
    if at is None:
        at = int(np.flatnonzero(plan.chunk_start > 0)[0])
        bad = replace(
            plan,
            chunk_start=changed(plan.chunk_start, at, plan.chunk_start[at] - 1),
            chunk_len=changed(plan.chunk_len, at, plan.chunk_len[at] + 1),
        )
    else:
        bad = replace(
            plan,
            mixed_start=changed(plan.mixed_start, at, plan.mixed_start[at] - 1),
            mixed_len=changed(plan.mixed_len, at, plan.mixed_len[at] + 1),
        )
    with pytest.raises(ValueError, match=r"gap|overlap|bad length"):
        bad.validate()


def test_a_mask_bit_too_many_and_one_too_few(plan):
    item = np.searchsorted(plan.item_run_indptr, plan.mixed_run, side="right") - 1
    full = (1 << np.diff(plan.item_query_indptr)[item]) - 1
    at = int(np.flatnonzero(plan.run_mask[plan.mixed_run, 0] != full)[0])
    mixed = plan.mixed_run[at]
    word = plan.run_mask[mixed, 0]
    zero = next(j for j in range(64) if int(full[at]) >> j & 1 and not int(word) >> j & 1)
    one = next(j for j in range(64) if int(word) >> j & 1)
    for bit in (zero, one):
        flipped = word ^ np.uint64(1 << bit)
        bad = replace(plan, run_mask=changed(plan.run_mask, (mixed, 0), flipped))
        with pytest.raises(ValueError, match=r"does not see|never reads"):
            bad.validate()


def test_a_destination_of_another_query(plan):
    partial = np.flatnonzero(plan.item_dest >= 0)
    first = plan.item_dest[partial[0]]
    other = next(i for i in partial if plan.item_query[i] != plan.item_query[partial[0]])
    dest = changed(plan.item_dest, partial[0], plan.item_dest[other])
    with pytest.raises(ValueError, match="belongs to another query"):
        replace(plan, item_dest=changed(dest, other, first)).validate()


def test_a_partial_slot_used_twice(plan):
    partial = np.flatnonzero(plan.item_dest >= 0)
    dest = changed(plan.item_dest, partial[0], plan.item_dest[partial[1]])
    with pytest.raises(ValueError, match="not used exactly once"):
        replace(plan, item_dest=dest).validate()


def test_an_open_run_that_is_not_marked_open():
    plan = plan_tree(few_shot(20, 4, 5), SHAPE, "node")
    at = int(np.flatnonzero(plan.run_open)[0])
    one_closed = replace(plan, run_open=changed(plan.run_open, at, False))
    one_closed.validate()  # the node has no other reader that grows, so nobody disagrees
    split = plan_tree(few_shot(200, 40, 5), HeadShape(4, 4, 64), "node", tile={"block_m": 16})
    root = np.flatnonzero(split.run_open & (split.run_node == 0))
    assert len(root) > 1  # several query tiles read the root
    bad = replace(split, run_open=changed(split.run_open, root[0], False))
    with pytest.raises(ValueError, match="open run"):
        bad.validate()


def test_an_item_over_its_tile():
    wide = plan_tree(layered([1, 40], [3, 3]), SHAPE, "node")
    small = tuple(replace(tile, block_m=16) for tile in wide.tiles)
    with pytest.raises(ValueError, match="more queries than its tile"):
        replace(wide, tiles=small).validate()


@pytest.mark.parametrize("name", ["chunk_indptr", "mixed_indptr", "item_run_indptr"])
def test_a_piece_handed_to_another_item(name):
    plan = plan_tree(ODD, SHAPE, "flatten", block_kv=24, tile={"block_m": 16, "block_n": 16})
    indptr = getattr(plan, name)
    at = int(np.flatnonzero(np.diff(indptr)[1:] > 0)[0]) + 1
    bad = replace(plan, **{name: changed(indptr, at, indptr[at] + 1)})
    with pytest.raises(ValueError, match="not a run of that item"):
        bad.validate()


@pytest.mark.parametrize("name", ["chunk_indptr", "item_query_indptr", "merge_indptr"])
def test_offsets_that_leave_entries_out(plan, name):
    indptr = getattr(plan, name)
    with pytest.raises(ValueError, match=f"{name} must be"):
        replace(plan, **{name: changed(indptr, 0, 1)}).validate()
    with pytest.raises(ValueError, match=f"{name} must be"):
        replace(plan, **{name: indptr[:-1]}).validate()


@pytest.mark.parametrize(
    "name,message",
    [("run_node", "is of node"), ("item_tile", "has a tile"), ("chunk_run", "not a run")],
)
def test_an_id_out_of_range(plan, name, message):
    with pytest.raises(ValueError, match=message):
        replace(plan, **{name: changed(getattr(plan, name), 0, 1000)}).validate()


def test_a_mask_bit_lost_under_a_pure_chunk(plan):
    """Binding lists the chunk under its mask where the pool's slots are not consecutive."""
    run = plan.chunk_run[0]
    flipped = plan.run_mask[run, 0] ^ np.uint64(1)
    with pytest.raises(ValueError, match="mask leaves out query 0"):
        replace(plan, run_mask=changed(plan.run_mask, (run, 0), flipped)).validate()


def test_an_open_run_that_ends_before_its_node(plan):
    at = int(np.flatnonzero(plan.run_open)[0])
    with pytest.raises(ValueError, match="is open but has an end other"):
        replace(plan, run_end=changed(plan.run_end, at, plan.run_end[at] - 1)).validate()


def test_validation_against_another_tree(plan):
    longer = ODD.with_lengths(ODD.node_len + 1)
    with pytest.raises(ValueError):
        plan.validate(longer)


def test_io_terms_of_a_plan_counted_by_hand():
    tree = few_shot(64, 2, 32)
    plan = plan_tree(tree, HeadShape(4, 2, 64), "node", tile={"block_m": 16, "block_n": 32})
    io = plan.io()
    row = 64 * 2  # one head's row in fp16
    assert io.kv == io.kv_unique == 128 * 2 * 2 * row
    assert io.q == (2 + 1 + 1) * 4 * row  # the root's item and the two leaves' items
    assert io.out == 2 * 4 * row
    slots = 4  # two partials for each of two queries
    assert io.partial == 2 * slots * 4 * (64 * 2 + 4)
    assert io.mask == io.logits == 0
    metadata = 3 * 32 + 4 * 8 + (2 + 1 + 1) * 8
    assert io.index == 2 * metadata + 2 * 2 * 12
    assert io.total == io.kv + io.q + io.out + io.partial + io.index
    assert plan.workspace_bytes * 2 == io.partial


def test_causal_queries_count_their_own_part_only():
    plan = plan_tree(CAUSAL, SHAPE, "sequence")
    assert plan.item_tokens.sum() == CAUSAL.query_kv_len.sum()
