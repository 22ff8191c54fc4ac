"""The plan computes every visible pair once, whatever the mask, lengths, ranks and layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import RINGS, prefix
from hypothesis import given, strategies as st
from plans import plans, programs, shown

from ring_core import Mask, Plan, RingProgram, WorkItem, make_plan, ring_program
from ring_core.base.arguments import TILE
from ring_core.programs.ring import TABLE_COLUMNS, TABLE_UNBOUNDED


def ring_of(name: str, mask: Mask, *, seq_len: int, cp_size: int) -> RingProgram:
    """Return a ring program by its name in :data:`cases.RINGS`."""
    layout, strategy = RINGS[name]
    return ring_program(make_plan(mask, seq_len=seq_len, cp_size=cp_size, layout=layout), strategy)


@given(programs())
def test_every_visible_pair_once(program: RingProgram) -> None:
    cover = np.zeros((program.plan.seq_len, program.plan.kv_seq_len), dtype=int)
    for rank in range(program.plan.cp_size):
        for step in range(program.num_steps):
            pairs = 0
            for item in program.items(rank, step):
                cells = shown(program.plan, item)
                assert cells.any(), "an item shows something"
                queries = program.plan.positions(item.q_rank)[item.q_slice]
                cover[np.ix_(queries, program.plan.k_positions(item.kv_rank)[item.k_slice])] += (
                    cells
                )
                pairs += int(cells.sum())
            assert pairs == program.work()[step, rank]
    assert program.work().dtype == np.int64
    everything = program.plan.mask.dense(
        np.arange(program.plan.seq_len) + program.plan.q_offset, np.arange(program.plan.kv_seq_len)
    )
    np.testing.assert_array_equal(cover, everything)


@given(programs())
def test_items_are_kernel_shaped(program: RingProgram) -> None:
    """Items are trimmed, so every row and column sees something, and have flash-attn windows."""
    for rank in range(program.plan.cp_size):
        for step in range(program.num_steps):
            for item in program.items(rank, step):
                assert item.out_rank == item.q_rank
                assert rank in (item.q_rank, item.kv_rank)
                if item.cu_q is not None or item.tiles is not None:
                    continue
                cells = shown(program.plan, item)
                assert cells.any(axis=0).all()
                assert cells.any(axis=1).all()
                assert item.is_full == bool(cells.all())
                left, right = item.window
                assert (left is None or left >= 0) and (right is None or right >= 0)
                rows, columns = cells.shape
                aligned = np.arange(columns) - (np.arange(rows)[:, None] + columns - rows)
                window = np.ones_like(cells)
                window &= aligned <= right if right is not None else True
                window &= -aligned <= left if left is not None else True
                np.testing.assert_array_equal(window, cells)


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
    shift = 0
    for stage in program.forward:
        assert shift == program.steps[stage.step].shift
        shift += stage.kv_hop or 0
    assert program.forward[-1].kv_hop is None
    shift = program.steps[-1].shift
    for n, stage in enumerate(program.backward):
        expected = program.steps[stage.step].shift
        assert (shift if stage.step else 0) == expected
        if stage.step:
            assert stage.grad_hop is not None
            assert expected + stage.grad_hop == program.steps[stage.step - 1].shift
        shift += stage.kv_hop or 0
        assert n + stage.step == program.num_steps - 1
    assert program.backward[-1].grad_hop is None and program.backward[-1].kv_hop is None


@given(programs())
def test_item_counts_count_the_items(program: RingProgram) -> None:
    items = [
        item
        for rank in range(program.plan.cp_size)
        for step in range(program.num_steps)
        for item in program.items(rank, step)
    ]
    square = [i for i in items if i.q_stop - i.q_start == i.k_stop - i.k_start]
    causal = [i for i in square if i.lo == 0 and i.hi is None]
    banded = [i for i in items if (i.lo is not None or i.hi is not None) and i not in causal]
    assert program.item_counts.causal == len(causal)
    assert program.item_counts.banded == len(banded)
    assert program.item_counts.full == len(items) - len(causal) - len(banded)
    assert program.item_counts.several_documents == sum(item.cu_q is not None for item in items)


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
    for rank in range(8):
        assert all(len(program.items(rank, step)) <= 1 for step in range(program.num_steps))
    assert (
        ring_program(make_plan(Mask(), seq_len=4096, cp_size=8, layout="zigzag")).item_counts.full
        == 64
    )


def test_window_hops_over_dead_steps() -> None:
    program = ring_program(make_plan(Mask(causal=True, window=(512, 0)), seq_len=65536, cp_size=8))
    assert [step.shift for step in program.steps] == [0, 1]
    zigzag = ring_program(
        make_plan(Mask(causal=True, window=(256, 0)), seq_len=8 * 4096, cp_size=8, layout="zigzag")
    )
    assert [step.shift for step in zigzag.steps] == [0, 1, 7]
    assert [stage.kv_hop for stage in zigzag.forward] == [1, 6, None]
    right = ring_program(make_plan(Mask(window=(0, 3)), seq_len=64, cp_size=8))
    assert [step.shift for step in right.steps] == [0, 7]


def test_documents_inside_shards_need_no_step() -> None:
    mask = Mask(causal=True, cu_seqlens=(0, 16, 20, 32, 48, 64))
    assert ring_program(make_plan(mask, seq_len=64, cp_size=4)).num_steps == 1


def test_balanced_equals_plain_where_no_rank_idles() -> None:
    for mask in (Mask(), Mask(causal=True, window=(9, 0)), Mask(window=(3, 3))):
        plain, balanced = (
            ring_of(layout, mask, seq_len=48, cp_size=6) for layout in ("contiguous", "balanced")
        )
        assert plain.steps == balanced.steps
        np.testing.assert_array_equal(plain.work(), balanced.work())


def test_plans_are_cached_and_refused() -> None:
    mask = Mask(causal=True)
    assert make_plan(mask, seq_len=64, cp_size=4) is make_plan(mask, seq_len=64, cp_size=4)
    with pytest.raises(ValueError, match="pad to 64"):
        make_plan(mask, seq_len=63, cp_size=4, layout="zigzag")
    with pytest.raises(ValueError, match="contiguous, zigzag, striped"):
        make_plan(mask, seq_len=64, cp_size=4, layout="zigzak")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match="end at the sequence length 64, got 60"):
        make_plan(Mask(cu_seqlens=(0, 20, 60)), seq_len=64, cp_size=4)
    with pytest.raises(ValueError, match="segment_ids"):
        make_plan(Mask(cu_seqlens=(0, 64)), seq_len=64, cp_size=4, kv_seq_len=128)
    with pytest.raises(ValueError, match="pairs to classify"):
        make_plan(Mask(predicate=prefix), seq_len=1 << 18, cp_size=4)
    with pytest.raises(ValueError, match="cp_size"):
        make_plan(mask, seq_len=64, cp_size=0)
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.3"):
        make_plan(mask, seq_len=64, cp_size=4).items(4, 0)
    plan = make_plan(mask, seq_len=64, cp_size=4)
    assert ring_program(plan) is ring_program(plan, "ring")
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.3"):
        ring_program(plan).items(4, 0)


@given(plans(), plans())
def test_digests_differ_where_plans_do(plan: Plan, other_plan: Plan) -> None:
    if plan.digest == other_plan.digest:
        sizes = [(p.seq_len, p.kv_seq_len, p.cp_size, p.q_layout.name) for p in (plan, other_plan)]
        assert sizes[0] == sizes[1]
        positions = np.arange(plan.seq_len) + plan.q_offset, np.arange(plan.kv_seq_len)
        np.testing.assert_array_equal(
            plan.mask.dense(*positions), other_plan.mask.dense(*positions)
        )


@given(programs())
def test_ranks_know_who_helps_them(program: RingProgram) -> None:
    for rank in range(program.plan.cp_size):
        for step in range(program.num_steps):
            helper = (rank + program.steps[step].shift) % program.plan.cp_size
            items_for_others = [
                item for item in program.items(helper, step) if item.q_rank == rank != helper
            ]
            remote_items = program.remote_items(rank, step)
            facts = ("q_rank", "kv_rank", "out_rank", "q_slice", "k_slice", "lo", "hi")
            sent, received = (
                [[getattr(item, fact) for fact in facts] for item in items]
                for items in (remote_items, items_for_others)
            )
            assert sent == received


@given(programs(), st.integers(1, 5))
def test_pieces_of_an_item_show_what_it_shows(program: RingProgram, pieces: int) -> None:
    for item in program.items(program.plan.cp_size - 1, program.num_steps - 1):
        cut = item.cut(pieces)
        assert len(cut) <= pieces
        assert [piece.q_start for piece in cut[1:]] == [piece.q_stop for piece in cut[:-1]]
        whole = np.concatenate([_in_columns_of(item, program.plan, piece) for piece in cut])
        np.testing.assert_array_equal(whole, shown(program.plan, item))
        for piece in cut if item.cu_q is None and item.tiles is None else ():
            assert all(side is None or side >= 0 for side in piece.window)
        for piece in cut if program.plan.blocks is not None else ():
            assert piece.tiles is not None and piece.tiles.shape[0] == -(
                -(piece.q_stop - piece.q_start) // TILE
            )


def _in_columns_of(item: WorkItem, plan: Plan, piece: WorkItem) -> Any:
    """Return the dense mask of a piece, padded to all columns of its item."""
    sides = piece.k_start - item.k_start, item.k_stop - piece.k_stop
    return np.pad(shown(plan, piece), ((0, 0), sides))
