"""Over gathered keys every visible pair is computed once, and only what is seen is fetched."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import plans, shown

from ring_core import (
    Gather,
    Mask,
    Plan,
    ScheduleName,
    gather_memory,
    gather_refusals,
    make_plan,
)


def seen(plan: Plan, gather: Gather) -> npt.NDArray[np.int64]:
    """How often the items show each pair of a rank's queries and all keys."""
    count = np.zeros((plan.q_layout.local_len, plan.kv_seq_len), dtype=int)
    for item in gather.items:
        columns = gather.positions[item.k_slice]
        count[item.q_start : item.q_stop, columns] += shown(plan, item)
    return count


@given(plans(), st.data())
def test_every_visible_pair_once(plan: Plan, data: st.DataObject) -> None:
    if gather_refusals(plan):
        return
    rank = data.draw(st.integers(0, plan.cp_size - 1))
    positions = plan.q_positions(rank)
    dense = plan.mask.dense(positions, np.arange(plan.kv_seq_len))
    np.testing.assert_array_equal(seen(plan, plan.gather(rank)), dense)
    dense = dense.copy()
    dense[:, plan.k_positions(rank)] = False
    remote = plan.gather(rank, own=False)
    np.testing.assert_array_equal(seen(plan, remote), dense)
    assert all(fetch.rank != rank for fetch in remote.fetches)


@given(plans(), st.data())
def test_fetches_fill_the_buffer_in_time(plan: Plan, data: st.DataObject) -> None:
    if gather_refusals(plan):
        return
    rank, own = data.draw(st.integers(0, plan.cp_size - 1)), data.draw(st.booleans())
    gather = plan.gather(rank, own=own)
    buffer = np.full(gather.length, -1)
    arrived = 0
    for item, needs in zip(gather.items, gather.needs, strict=True):
        assert needs >= arrived
        for fetch in gather.fetches[arrived:needs]:
            assert (buffer[fetch.target] == -1).all()
            buffer[fetch.target] = plan.k_positions(fetch.rank)[fetch.source]
        arrived = needs
        assert (buffer[item.k_slice] >= 0).all()
    assert arrived == len(gather.fetches)
    np.testing.assert_array_equal(buffer, gather.positions)
    assert gather.is_disjoint or not own


@pytest.mark.parametrize("rank", range(4))
def test_a_causal_zigzag_is_one_launch_a_run(rank: int) -> None:
    plan = make_plan(Mask(causal=True), seq_len=64, cp_size=4, schedule="zigzag")
    gather = plan.gather(rank)
    assert [item.window for item in gather.items] == [(None, 0), (None, 0)]
    assert [item.k_stop for item in gather.items] == [8 * (rank + 1), 8 * (8 - rank)]
    remote = plan.gather(rank, own=False)
    assert all(item.is_full for item in remote.items)
    assert sum((item.q_stop - item.q_start) * item.k_stop for item in remote.items) == 8 * 8 * 6


@given(plans(), st.data())
def test_a_backward_writes_each_column_once_first(plan: Plan, data: st.DataObject) -> None:
    if gather_refusals(plan):
        return
    gather = plan.gather(data.draw(st.integers(0, plan.cp_size - 1)))
    written = np.zeros(gather.length, dtype=bool)
    for item, fresh in reversed(list(zip(gather.items, gather.fresh, strict=True))):
        new = np.zeros_like(written)
        for part in fresh:
            new[part] = True
        seen = np.zeros_like(written)
        seen[item.k_slice] = True
        np.testing.assert_array_equal(new, seen & ~written)
        written |= new
    assert written.all()


def test_ranks_begin_with_different_peers() -> None:
    plan = make_plan(Mask(causal=True), seq_len=64, cp_size=4, schedule="zigzag")
    order = [
        [fetch.rank for fetch in plan.gather(rank).fetches if fetch.rank != rank]
        for rank in range(4)
    ]
    assert [ranks[0] for ranks in order] == [3, 0, 1, 2]


def test_a_window_fetches_its_halo() -> None:
    plan = make_plan(Mask(causal=True, window=(5, 0)), seq_len=64, cp_size=4, schedule="plain")
    remote = plan.gather(2, own=False)
    assert [(fetch.rank, fetch.source) for fetch in remote.fetches] == [(1, slice(11, 16))]
    assert plan.gather(2).length == 16 + 5


def test_memory_grows_with_what_is_seen() -> None:
    def memory(mask: Mask, cp_size: int) -> float:
        plan = make_plan(mask, seq_len=64 * cp_size, cp_size=cp_size)
        return gather_memory(plan, q_width=32, kv_width=16, itemsize=2)

    # By hand: of 64 tokens a rank, (64 P + 64) * 16 * 6 bytes over 64 * 16 * 16 + 64 * 32 * 4.
    assert memory(Mask(), 4) == pytest.approx(5 * 96 / 384)
    assert memory(Mask(causal=True), 8) == pytest.approx(9 * 96 / 384)
    halo = Mask(causal=True, window=(16, 0))
    assert memory(halo, 4) == memory(halo, 64) < memory(Mask(), 2)


@pytest.mark.parametrize("schedule", ["striped", "balanced"])
def test_what_cannot_be_gathered_says_why(schedule: ScheduleName) -> None:
    """Every reason at once."""
    plan = make_plan(Mask(causal=True), seq_len=64, cp_size=4, schedule=schedule)
    (reason,) = gather_refusals(plan)
    assert f"schedule '{schedule}'" in reason
    mask = Mask(predicate=lambda q, k: q >= k)
    plan = make_plan(mask, seq_len=64, cp_size=4, schedule=schedule)
    assert len(gather_refusals(plan)) == 2
    assert "predicate" in gather_refusals(plan)[1]
