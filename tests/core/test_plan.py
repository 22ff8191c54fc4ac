"""The plan computes every visible pair once, whatever the mask, lengths, ranks and layout.

Items of its work show the same pairs per document, with a window for all documents, and in part.
"""

from __future__ import annotations

from itertools import accumulate, product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cases import RINGS
from hypothesis import given, strategies as st
from plans import all_items, place, programs, shown, through

from ring_core import (
    ChunkLayout,
    Mask,
    Plan,
    RingProgram,
    WorkItem,
    gather_program,
    gather_refusals,
    make_plan,
    ring_program,
)
from ring_core.base.arguments import TILE, not_none
from ring_core.programs.ring import TABLE_COLUMNS, TABLE_UNBOUNDED

Cells = npt.NDArray[np.bool_]


def ring_of(name: str, mask: Mask, *, seq_len: int, cp_size: int) -> RingProgram:
    """Return a ring program by its name in :data:`cases.RINGS`."""
    layout, strategy = RINGS[name]
    return ring_program(make_plan(mask, seq_len=seq_len, cp_size=cp_size, layout=layout), strategy)


@given(programs())
def test_every_visible_pair_once(program: RingProgram) -> None:
    plan, pairs = program.plan, np.zeros_like(program.work())
    cover = np.zeros((plan.seq_len, plan.kv_seq_len), dtype=int)
    for rank, step, item in all_items(program):
        cells = shown(plan, item)
        assert cells.any(), "an item shows something"
        cover[place(plan, item)] += cells
        pairs[step, rank] += cells.sum()
    np.testing.assert_array_equal(program.work(), pairs)
    assert program.work().dtype == np.int64
    np.testing.assert_array_equal(cover, everything(plan))


def everything(plan: Plan) -> Any:
    """Return the dense mask of all queries and keys."""
    return plan.mask.dense(np.arange(plan.seq_len) + plan.q_offset, np.arange(plan.kv_seq_len))


@given(programs())
def test_items_are_kernel_shaped(program: RingProgram) -> None:
    """Items are trimmed, so every row and column sees something, and have flash-attn windows."""
    for rank, _, item in all_items(program):
        assert item.out_rank == item.q_rank
        assert rank in (item.q_rank, item.kv_rank)
        if item.cu_q is not None or item.tiles is not None:
            continue
        cells = shown(program.plan, item)
        assert cells.any(axis=0).all()
        assert cells.any(axis=1).all()
        assert item.is_full == bool(cells.all())
        assert all(side is None or side >= 0 for side in item.window)
        np.testing.assert_array_equal(through(item.window, *cells.shape), cells)


@given(programs())
def test_table_shows_the_same_items(program: RingProgram) -> None:
    ranks = range(program.plan.cp_size)
    for step in range(program.num_steps):
        table, items = program.table(step), [program.items(rank, step) for rank in ranks]
        assert table.shape == (len(ranks), max(1, *map(len, items)), len(TABLE_COLUMNS))
        assert table.dtype == np.int32
        for rows, of_rank in zip(table, items, strict=True):
            assert not rows[len(of_rank) :].any()
            for values, item in zip(rows.tolist(), of_rank, strict=False):
                row = dict(zip(TABLE_COLUMNS, values, strict=True))
                names = ("q_rank", "kv_rank", "out_rank", "q_start", "q_stop", "k_start", "k_stop")
                assert all(row[name] == getattr(item, name) for name in names)
                assert row["lo"] == (-TABLE_UNBOUNDED if item.lo is None else item.lo)
                assert row["hi"] == (TABLE_UNBOUNDED if item.hi is None else item.hi)
                assert (row["doc_stop"] > 0) == (item.cu_q is not None)


@given(programs())
def test_steps_are_live_and_in_order(program: RingProgram) -> None:
    work = program.work()
    assert [step.shift for step in program.steps] == sorted({step.shift for step in program.steps})
    assert program.steps[0].shift == 0
    assert all(work[step].any() for step in range(1, program.num_steps))
    for stage in (*program.forward, *program.backward):
        assert stage.offloads is (program.steps[stage.step].offload != "none")
    assert program.forward[-1].kv_hop is program.backward[-1].grad_hop is None
    ranks = program.plan.cp_size
    for rank, (n, step) in product(range(ranks), enumerate(program.steps)):
        helper = (rank + step.shift) % ranks
        helped = [x for x in program.items(helper, n) if x.q_rank == rank != helper]
        assert repr([*program.remote_items(rank, n)]) == repr(helped)
    # The own block comes last in the backward, so the stage before it moves no K/V.
    assert all(stage.kv_hop is None for stage in program.backward if stage.step <= 1)


@given(programs())
def test_item_counts_count_the_items(program: RingProgram) -> None:
    items, counts = [item for *_, item in all_items(program)], program.item_counts
    square = [i for i in items if i.q_stop - i.q_start == i.k_stop - i.k_start]
    causal = [i for i in square if i.lo == 0 and i.hi is None]
    banded = [i for i in items if (i.lo is not None or i.hi is not None) and i not in causal]
    assert (counts.causal, counts.banded) == (len(causal), len(banded))
    assert counts.full == len(items) - len(causal) - len(banded)
    assert counts.several_documents == sum(item.cu_q is not None for item in items)


def test_ranks_share_only_what_shortens_a_step() -> None:
    for mask, cp_size, offload in (
        (Mask(causal=True), 4, ["none", "mirror", "half"]),
        (Mask(window=(2, 2)), 2, ["none", "none"]),  # sharing would give one rank more to do
    ):
        program = ring_of("balanced", mask, seq_len=2 * cp_size, cp_size=cp_size)
        assert [step.offload for step in program.steps] == offload


#: Chunks that lie side by side on their rank.
SIDE_BY_SIDE = ChunkLayout(tuple((3 * rank, 3 * rank + 1, 3 * rank + 2) for rank in range(8)))
ONE_LAUNCH = {
    **{name: RINGS[name] for name in ("contiguous", "zigzag", "balanced")},
    "chunks side by side": (SIDE_BY_SIDE, "ring"),
}


@pytest.mark.parametrize("name", ONE_LAUNCH)
def test_causal_takes_one_launch_a_step(name: str) -> None:
    layout, strategy = ONE_LAUNCH[name]
    plan = make_plan(Mask(causal=True), seq_len=8 * 768, cp_size=8, layout=layout)
    program = ring_program(plan, strategy)
    launches = [(rank, step) for rank, step, _ in all_items(program)]
    assert len({*launches}) == len(launches)
    assert ring_of("zigzag", Mask(), seq_len=4096, cp_size=8).item_counts.full == 64


def test_dead_steps_are_hopped_over() -> None:
    documents = Mask(causal=True, cu_seqlens=tuple(range(0, 65, 8)))
    for ring, mask, seq_len, hops in (
        ("contiguous", Mask(causal=True, window=(512, 0)), 65536, [1]),
        ("zigzag", Mask(causal=True, window=(256, 0)), 32768, [1, 6]),
        ("contiguous", Mask(window=(0, 3)), 64, [7]),
        ("contiguous", documents, 64, []),
    ):
        program = ring_of(ring, mask, seq_len=seq_len, cp_size=8)
        assert [step.shift for step in program.steps] == [0, *accumulate(hops)]
        assert [stage.kv_hop for stage in program.forward] == [*hops, None]


def test_plans_are_cached() -> None:
    mask = Mask(causal=True)
    plan = make_plan(mask, seq_len=64, cp_size=4)
    assert make_plan(mask, seq_len=64, cp_size=4) is plan
    assert ring_program(plan) is ring_program(plan, "ring")
    assert ring_program(plan).steps != ring_program(plan, "balanced").steps


@given(programs(), st.integers(1, 5))
def test_pieces_of_an_item_show_what_it_shows(program: RingProgram, pieces: int) -> None:
    for item in program.items(program.plan.cp_size - 1, program.num_steps - 1):
        cut = item.cut(pieces)
        assert len(cut) <= pieces
        assert [piece.q_start for piece in cut[1:]] == [piece.q_stop for piece in cut[:-1]]
        whole, corner = shown(program.plan, item), (item.q_start, item.k_start)
        parts = [within(whole, program.plan, piece, corner) for piece in cut]
        np.testing.assert_array_equal(np.sum(parts, axis=0), whole)
        if item.cu_q is None and item.tiles is None:
            assert all(side is None or side >= 0 for piece in cut for side in piece.window)
        if item.tiles is not None:
            tiles = [not_none(piece.tiles) for piece in cut]
            np.testing.assert_array_equal(np.concatenate(tiles), item.tiles)
            assert [len(x) for x in tiles] == [-(-(x.q_stop - x.q_start) // TILE) for x in cut]


@st.composite
def items(draw: st.DrawFn) -> tuple[Plan, list[WorkItem]]:
    """Draw a rank's items of a ring and of a gather, without tiles."""
    program = draw(programs())
    plan = program.plan
    rank = draw(st.integers(0, plan.cp_size - 1))
    items_of_rank = [item for of, _, item in all_items(program) if of == rank]
    if not gather_refusals(plan):
        gather = gather_program(plan, rank, own=draw(st.booleans()))
        items_of_rank += [*gather.items, *gather.in_place]
    return plan, [item for item in items_of_rank if item.tiles is None]


def within(whole: Cells, plan: Plan, part: WorkItem, corner: tuple[int, int]) -> Cells:
    """Return the dense mask of a part, placed in that of the whole, which begins at ``corner``."""
    q, k = part.q_start - corner[0], part.k_start - corner[1]
    own = shown(plan, part)
    below, right = whole.shape[0] - q - own.shape[0], whole.shape[1] - k - own.shape[1]
    return np.pad(own, ((q, below), (k, right)))


@given(items())
def test_documents_of_an_item_one_by_one_and_by_a_window(
    plan_and_items: tuple[Plan, list[WorkItem]],
) -> None:
    plan, items_of_rank = plan_and_items
    for item in items_of_rank:
        if item.cu_q is None or item.cu_k is None:
            continue
        whole, ranks = shown(plan, item), (item.q_rank, item.kv_rank, item.out_rank)
        count = np.zeros(whole.shape, dtype=int)
        for document in item.each_document():
            cells = shown(plan, document)
            assert document.cu_q is None and document.cu_k is None
            assert cells.any(axis=0).all() and cells.any(axis=1).all()
            assert document.is_full == bool(cells.all())
            assert (document.q_rank, document.kv_rank, document.out_rank) == ranks
            count += within(whole, plan, document, (0, 0))
        np.testing.assert_array_equal(count, whole)
        if (window := item.documents_window) is None:
            assert item.lo is not None or item.hi is not None
            continue
        assert all(side is None or side >= 0 for side in window)
        by_window = np.zeros_like(whole)
        for n in range(len(item.cu_q) - 1):
            rows, columns = slice(*item.cu_q[n : n + 2]), slice(*item.cu_k[n : n + 2])
            by_window[rows, columns] = through(window, *whole[rows, columns].shape)
        np.testing.assert_array_equal(by_window, whole)


CUTS = np.array([0, 3, 6])


def test_documents_that_end_alike_share_a_window_and_others_none() -> None:
    """Items whose documents end alike get a common window, so that one launch computes them."""
    mask = Mask(causal=True, window=(5, 0), cu_seqlens=(0, 7, 7, 14, 30, 32))
    (item,) = ring_program(make_plan(mask, seq_len=32, cp_size=1)).items(0, 0)
    (second,) = gather_program(make_plan(mask, seq_len=32, cp_size=2), 1).items
    assert item.documents_window == second.documents_window == (5, 0)
    for columns, lo, cu_k, window in (
        (8, -2, np.array([0, 5, 8]), (None, 0)),
        (8, -2, np.array([0, 4, 8]), None),
        (6, 1, CUTS, None),  # no query sees its own position
    ):
        item = WorkItem(0, 0, 0, 0, 6, 0, columns, lo, None, CUTS, cu_k)
        assert item.documents_window == window


@given(items(), st.data())
def test_the_part_between_two_rows(
    plan_and_items: tuple[Plan, list[WorkItem]], data: st.DataObject
) -> None:
    plan, items_of_rank = plan_and_items
    if not items_of_rank:
        return
    item = data.draw(st.sampled_from(items_of_rank))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, item.q_stop + 2)] * 2)))
    whole, (first, last) = shown(plan, item), item.seen
    columns = np.arange(whole.shape[1])
    np.testing.assert_array_equal(whole, (first[:, None] <= columns) & (columns < last[:, None]))
    index = np.arange(item.q_start, item.q_stop)
    expected = whole & ((start <= index) & (index < stop))[:, None]
    part = item.rows(start, stop)
    if part is None:
        assert not expected.any()
        return
    assert start <= part.q_start < part.q_stop <= stop
    assert item.k_start <= part.k_start <= part.k_stop <= item.k_stop
    np.testing.assert_array_equal(within(whole, plan, part, (item.q_start, item.k_start)), expected)
    if part.cu_q is None:
        assert shown(plan, part).any(axis=1).all()
    else:  # the documents that the rows touch, and their columns
        assert part.cu_q.size > 2 and part.cu_k is not None
        assert part.cu_q[1] > 0 and part.cu_q[-2] < part.cu_q[-1]
        assert (part.cu_q[0], part.cu_q[-1]) == (0, part.q_stop - part.q_start)
        assert (part.cu_k[0], part.cu_k[-1]) == (0, part.k_stop - part.k_start)


def test_only_square_causal_items_stay_whole() -> None:
    causal = WorkItem(0, 1, 0, 0, 8, 4, 12, 0, None)
    assert causal.cut(4) == (causal,)
    for columns, lo, hi in ((12, None, None), (12, 0, 3), (8, 0, None)):
        cut = WorkItem(0, 1, 0, 0, 8, 4, columns, lo, hi).cut(4)
        assert [piece.q_start for piece in cut] == [0, 2, 4, 6]
