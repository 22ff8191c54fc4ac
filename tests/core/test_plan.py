"""The plan computes every visible pair once, whatever the mask, lengths, ranks and layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import RINGS, prefix
from hypothesis import given
from hypothesis import strategies as st
from plans import plans, shown

from ring_core import (
    TABLE_COLUMNS,
    TABLE_UNBOUNDED,
    TILE,
    Mask,
    Plan,
    WorkItem,
    make_plan,
)


def ring_of(name: str) -> dict[str, Any]:
    """The layout and the strategy of a ring."""
    return dict(zip(("layout", "strategy"), RINGS[name], strict=True))


@given(plans())
def test_every_visible_pair_once(plan: Plan) -> None:
    cover = np.zeros((plan.seq_len, plan.kv_seq_len), dtype=int)
    for rank in range(plan.cp_size):
        for step in range(plan.num_steps):
            pairs = 0
            for item in plan.items(rank, step):
                cells = shown(plan, item)
                assert cells.any(), "an item shows something"
                queries = plan.positions(item.q_rank)[item.q_slice]
                cover[np.ix_(queries, plan.k_positions(item.kv_rank)[item.k_slice])] += cells
                pairs += int(cells.sum())
            assert pairs == plan.work()[step, rank]
    assert plan.work().dtype == np.int64
    everything = plan.mask.dense(
        np.arange(plan.seq_len) + plan.q_offset, np.arange(plan.kv_seq_len)
    )
    np.testing.assert_array_equal(cover, everything)


@given(plans())
def test_items_are_kernel_shaped(plan: Plan) -> None:
    """Trimmed: every row and column sees something, and windows are flash-attention's."""
    for rank in range(plan.cp_size):
        for step in range(plan.num_steps):
            for item in plan.items(rank, step):
                assert item.out_rank == item.q_rank
                assert rank in (item.q_rank, item.kv_rank)
                if item.cu_q is not None or item.tiles is not None:
                    continue
                cells = shown(plan, item)
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


@given(plans())
def test_table_shows_the_same_items(plan: Plan) -> None:
    for step in range(plan.num_steps):
        table = plan.table(step)
        assert table.shape[0] == plan.cp_size and table.dtype == np.int32
        for rank in range(plan.cp_size):
            rows = [dict(zip(TABLE_COLUMNS, row, strict=True)) for row in table[rank].tolist()]
            live = [row for row in rows if row["q_stop"] > row["q_start"]]
            assert all(not any(row.values()) for row in rows if row not in live)
            items = plan.items(rank, step)
            assert len(live) == len(items)
            for row, item in zip(live, items, strict=True):
                names = ("q_rank", "kv_rank", "out_rank", "q_start", "q_stop", "k_start", "k_stop")
                assert all(row[name] == getattr(item, name) for name in names)
                assert row["lo"] == (-TABLE_UNBOUNDED if item.lo is None else item.lo)
                assert row["hi"] == (TABLE_UNBOUNDED if item.hi is None else item.hi)
                assert (row["doc_stop"] > 0) == (item.cu_q is not None)


@given(plans())
def test_steps_are_live_and_in_order(plan: Plan) -> None:
    work = plan.work()
    assert [step.shift for step in plan.steps] == sorted({step.shift for step in plan.steps})
    assert plan.steps[0].shift == 0
    assert all(work[step].any() for step in range(1, plan.num_steps))


@given(plans())
def test_programs_carry_everything_where_it_belongs(plan: Plan) -> None:
    """Hops add up to the shifts; dK/dV end at home; the last step sends nothing."""
    shift = 0
    for stage in plan.forward:
        assert shift == plan.steps[stage.step].shift
        shift += stage.kv_hop or 0
    assert plan.forward[-1].kv_hop is None
    shift = plan.steps[-1].shift
    for n, stage in enumerate(plan.backward):
        expected = plan.steps[stage.step].shift
        assert (shift if stage.step else 0) == expected
        if stage.step:
            assert stage.grad_hop is not None
            assert expected + stage.grad_hop == plan.steps[stage.step - 1].shift
        shift += stage.kv_hop or 0
        assert n + stage.step == plan.num_steps - 1
    assert plan.backward[-1].grad_hop is None and plan.backward[-1].kv_hop is None


@given(plans())
def test_stages_say_where_ranks_help(plan: Plan) -> None:
    for stage in (*plan.forward, *plan.backward):
        assert stage.helps is (plan.steps[stage.step].helps != "none")


@given(plans())
def test_the_own_block_is_sent_for_by_nobody(plan: Plan) -> None:
    """Backward it comes last, so the stage before it moves no K/V."""
    assert all(stage.kv_hop is None for stage in plan.backward if stage.step <= 1)


@given(plans())
def test_traits_count_the_items(plan: Plan) -> None:
    items = [
        item
        for rank in range(plan.cp_size)
        for step in range(plan.num_steps)
        for item in plan.items(rank, step)
    ]
    square = [i for i in items if i.q_stop - i.q_start == i.k_stop - i.k_start]
    causal = [i for i in square if i.lo == 0 and i.hi is None]
    banded = [i for i in items if (i.lo is not None or i.hi is not None) and i not in causal]
    assert plan.traits.causal == len(causal)
    assert plan.traits.banded == len(banded)
    assert plan.traits.full == len(items) - len(causal) - len(banded)
    assert plan.traits.several_documents == sum(item.cu_q is not None for item in items)


@pytest.mark.parametrize(
    ("layout", "steps", "balance"),
    [("contiguous", 8, 1.87), ("zigzag", 8, 1.01), ("striped", 8, 1.01), ("balanced", 5, 1.01)],
)
def test_causal_balance_of_eight_ranks(layout: Any, steps: int, balance: float) -> None:
    plan = make_plan(Mask(causal=True), seq_len=8 * 4096, cp_size=8, **ring_of(layout))
    assert plan.num_steps == steps
    assert plan.imbalance <= balance + 0.005
    assert plan.lockstep_imbalance == pytest.approx(plan.imbalance, abs=0.01)


@pytest.mark.parametrize(
    ("mask", "cp_size", "helps"),
    [
        (Mask(causal=True), 4, ["none", "mirror", "half"]),
        (Mask(window=(2, 2)), 2, ["none", "none"]),  # sharing would give one rank more to do
    ],
)
def test_what_ranks_share_is_what_the_plan_counts(
    mask: Mask, cp_size: int, helps: list[str]
) -> None:
    plan = make_plan(
        mask, seq_len=2 * cp_size, cp_size=cp_size, layout="contiguous", strategy="balanced"
    )
    assert [step.helps for step in plan.steps] == helps
    for step, rank in np.ndindex(plan.num_steps, cp_size):
        pairs = sum(int(shown(plan, item).sum()) for item in plan.items(rank, step))
        assert pairs == plan.work()[step, rank]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
def test_causal_takes_one_launch_a_step(layout: Any) -> None:
    plan = make_plan(Mask(causal=True), seq_len=4096, cp_size=8, **ring_of(layout))
    for rank in range(8):
        assert all(len(plan.items(rank, step)) <= 1 for step in range(plan.num_steps))
    assert make_plan(Mask(), seq_len=4096, cp_size=8, layout="zigzag").traits.full == 64


def test_window_hops_over_dead_steps() -> None:
    plan = make_plan(Mask(causal=True, window=(512, 0)), seq_len=65536, cp_size=8)
    assert [step.shift for step in plan.steps] == [0, 1]
    zigzag = make_plan(
        Mask(causal=True, window=(256, 0)), seq_len=8 * 4096, cp_size=8, layout="zigzag"
    )
    assert [step.shift for step in zigzag.steps] == [0, 1, 7]
    assert [stage.kv_hop for stage in zigzag.forward] == [1, 6, None]
    right = make_plan(Mask(window=(0, 3)), seq_len=64, cp_size=8)
    assert [step.shift for step in right.steps] == [0, 7]


def test_documents_inside_shards_need_no_step() -> None:
    mask = Mask(causal=True, cu_seqlens=(0, 16, 20, 32, 48, 64))
    assert make_plan(mask, seq_len=64, cp_size=4).num_steps == 1


def test_balanced_equals_plain_where_no_rank_idles() -> None:
    for mask in (Mask(), Mask(causal=True, window=(9, 0)), Mask(window=(3, 3))):
        plain, balanced = (
            make_plan(mask, seq_len=48, cp_size=6, **ring_of(layout))
            for layout in ("contiguous", "balanced")
        )
        assert plain.steps == balanced.steps
        np.testing.assert_array_equal(plain.work(), balanced.work())


def test_plans_are_cached_and_refused() -> None:
    mask = Mask(causal=True)
    assert make_plan(mask, seq_len=64, cp_size=4) is make_plan(mask, seq_len=64, cp_size=4)
    with pytest.raises(ValueError, match="pad to 64"):
        make_plan(mask, seq_len=63, cp_size=4, layout="zigzag")
    with pytest.raises(ValueError, match="contiguous, zigzag, striped"):
        make_plan(mask, seq_len=64, cp_size=4, layout="zigzak")  # type: ignore[arg-type]
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


@given(plans(), plans())
def test_digests_differ_where_plans_do(one: Plan, other: Plan) -> None:
    """Equal digests mean equal sizes and equal masks, however the mask was written."""
    if one.digest == other.digest:
        sizes = [
            (p.seq_len, p.kv_seq_len, p.cp_size, p.q_layout.name, p.strategy) for p in (one, other)
        ]
        assert sizes[0] == sizes[1]
        at = np.arange(one.seq_len) + one.q_offset, np.arange(one.kv_seq_len)
        np.testing.assert_array_equal(one.mask.dense(*at), other.mask.dense(*at))


@given(plans())
def test_ranks_know_who_helps_them(plan: Plan) -> None:
    for rank in range(plan.cp_size):
        for step in range(plan.num_steps):
            helper = (rank + plan.steps[step].shift) % plan.cp_size
            theirs = [item for item in plan.items(helper, step) if item.q_rank == rank != helper]
            mine = plan.helped(rank, step)
            facts = ("q_rank", "kv_rank", "out_rank", "q_slice", "k_slice", "lo", "hi")
            one, other = (
                [[getattr(item, fact) for fact in facts] for item in items]
                for items in (mine, theirs)
            )
            assert one == other


@given(plans(), st.integers(1, 5))
def test_pieces_of_an_item_show_what_it_shows(plan: Plan, pieces: int) -> None:
    for item in plan.items(plan.cp_size - 1, plan.num_steps - 1):
        cut = item.cut(pieces)
        assert len(cut) <= pieces
        assert [piece.q_start for piece in cut[1:]] == [piece.q_stop for piece in cut[:-1]]
        whole = np.concatenate([_in_columns_of(item, plan, piece) for piece in cut])
        np.testing.assert_array_equal(whole, shown(plan, item))
        for piece in cut if item.cu_q is None and item.tiles is None else ():
            assert all(side is None or side >= 0 for side in piece.window)
        for piece in cut if plan.blocks is not None else ():
            assert piece.tiles is not None and piece.tiles.shape[0] == -(
                -(piece.q_stop - piece.q_start) // TILE
            )


def _in_columns_of(item: WorkItem, plan: Plan, piece: WorkItem) -> Any:
    """What a piece shows, among all columns of its item."""
    sides = piece.k_start - item.k_start, item.k_stop - piece.k_stop
    return np.pad(shown(plan, piece), ((0, 0), sides))


def test_square_causal_items_stay_whole() -> None:
    (item,) = make_plan(Mask(causal=True), seq_len=8, cp_size=1).items(0, 0)
    assert item.cut(4) == (item,)
