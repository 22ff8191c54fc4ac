"""The plan computes every visible pair once, whatever the mask, lengths, ranks and layout."""

from __future__ import annotations

from itertools import accumulate, product
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
from cases import RINGS
from hypothesis import given, strategies as st
from plans import all_items, place, plans, programs, shown, through

from ring_core import Mask, Plan, RingProgram, make_plan, ring_program
from ring_core.base.arguments import TILE
from ring_core.programs.ring import TABLE_COLUMNS, TABLE_UNBOUNDED


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
    for step in range(program.num_steps):
        table = program.table(step)
        most = max(len(program.items(rank, step)) for rank in range(program.plan.cp_size))
        assert table.shape == (program.plan.cp_size, max(1, most), len(TABLE_COLUMNS))
        assert table.dtype == np.int32
        for rank in range(program.plan.cp_size):
            rows = [dict(zip(TABLE_COLUMNS, row, strict=True)) for row in table[rank].tolist()]
            live = [row for row in rows if row["q_stop"] > row["q_start"]]
            items = program.items(rank, step)
            assert live == rows[: len(items)] and not table[rank, len(items) :].any()
            for row, item in zip(live, items, strict=True):
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
    # The own block comes last in the backward, so the stage before it moves no K/V.
    assert all(stage.kv_hop is None for stage in program.backward if stage.step <= 1)


@given(programs())
def test_programs_carry_everything_where_it_belongs(program: RingProgram) -> None:
    """Hops add up to the shifts; dK/dV end at their owner; the last step sends nothing."""
    shift, shifts = 0, [step.shift for step in program.steps]
    for stage in program.forward:
        assert shift == shifts[stage.step]
        shift += stage.kv_hop or 0
    assert program.forward[-1].kv_hop is None
    shift = shifts[-1]
    for n, stage in enumerate(program.backward):
        if stage.step:
            assert shift == shifts[stage.step] and stage.grad_hop is not None
            assert shift + stage.grad_hop == shifts[stage.step - 1]
        shift += stage.kv_hop or 0
        assert n + stage.step == program.num_steps - 1
    assert program.backward[-1].grad_hop is None and program.backward[-1].kv_hop is None


@given(programs())
def test_item_counts_count_the_items(program: RingProgram) -> None:
    items, counts = [item for *_, item in all_items(program)], program.item_counts
    square = [i for i in items if i.q_stop - i.q_start == i.k_stop - i.k_start]
    causal = [i for i in square if i.lo == 0 and i.hi is None]
    banded = [i for i in items if (i.lo is not None or i.hi is not None) and i not in causal]
    assert (counts.causal, counts.banded) == (len(causal), len(banded))
    assert counts.full == len(items) - len(causal) - len(banded)
    assert counts.several_documents == sum(item.cu_q is not None for item in items)


@pytest.mark.parametrize(
    ("layout", "steps", "balance"),
    [("contiguous", 8, 1.87), ("zigzag", 8, 1.01), ("striped", 8, 1.01), ("balanced", 5, 1.01)],
)
def test_causal_balance_of_eight_ranks(layout: Any, steps: int, balance: float) -> None:
    program = ring_of(layout, Mask(causal=True), seq_len=8 * 4096, cp_size=8)
    assert program.num_steps == steps
    assert program.imbalance <= balance + 0.005
    assert program.imbalance_by_step == pytest.approx(program.imbalance, abs=0.01)


def test_ranks_share_only_what_shortens_a_step() -> None:
    for mask, cp_size, offload in (
        (Mask(causal=True), 4, ["none", "mirror", "half"]),
        (Mask(window=(2, 2)), 2, ["none", "none"]),  # sharing would give one rank more to do
    ):
        program = ring_of("balanced", mask, seq_len=2 * cp_size, cp_size=cp_size)
        assert [step.offload for step in program.steps] == offload


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
def test_causal_takes_one_launch_a_step(layout: Any) -> None:
    program = ring_of(layout, Mask(causal=True), seq_len=4096, cp_size=8)
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


def test_balanced_equals_plain_where_no_rank_idles() -> None:
    for mask in (Mask(), Mask(causal=True, window=(9, 0)), Mask(window=(3, 3))):
        plain, balanced = (
            ring_of(layout, mask, seq_len=48, cp_size=6) for layout in ("contiguous", "balanced")
        )
        assert plain.steps == balanced.steps
        np.testing.assert_array_equal(plain.work(), balanced.work())


def test_plans_are_cached() -> None:
    mask = Mask(causal=True)
    plan = make_plan(mask, seq_len=64, cp_size=4)
    assert make_plan(mask, seq_len=64, cp_size=4) is plan
    assert ring_program(plan) is ring_program(plan, "ring")


@given(plans(), plans())
def test_digests_differ_where_plans_do(plan: Plan, other_plan: Plan) -> None:
    if plan.digest == other_plan.digest:
        sizes = [(p.seq_len, p.kv_seq_len, p.cp_size, p.q_layout.name) for p in (plan, other_plan)]
        assert sizes[0] == sizes[1]
        np.testing.assert_array_equal(everything(plan), everything(other_plan))


@given(programs())
def test_ranks_know_who_helps_them(program: RingProgram) -> None:
    ranks = program.plan.cp_size
    for rank, step in product(range(ranks), range(program.num_steps)):
        helper = (rank + program.steps[step].shift) % ranks
        items = [x for x in program.items(helper, step) if x.q_rank == rank != helper]
        facts = attrgetter("q_rank", "kv_rank", "out_rank", "q_slice", "k_slice", "lo", "hi")
        assert [*map(facts, program.remote_items(rank, step))] == [*map(facts, items)]


@given(programs(), st.integers(1, 5))
def test_pieces_of_an_item_show_what_it_shows(program: RingProgram, pieces: int) -> None:
    for item in program.items(program.plan.cp_size - 1, program.num_steps - 1):
        cut = item.cut(pieces)
        assert len(cut) <= pieces
        assert [piece.q_start for piece in cut[1:]] == [piece.q_stop for piece in cut[:-1]]
        in_columns = [
            np.pad(
                shown(program.plan, x), ((0, 0), (x.k_start - item.k_start, item.k_stop - x.k_stop))
            )
            for x in cut
        ]
        np.testing.assert_array_equal(np.concatenate(in_columns), shown(program.plan, item))
        for piece in cut:
            if item.cu_q is None and item.tiles is None:
                assert all(side is None or side >= 0 for side in piece.window)
            if program.plan.blocks is not None:
                rows = piece.q_stop - piece.q_start
                assert piece.tiles is not None and piece.tiles.shape[0] == -(-rows // TILE)
