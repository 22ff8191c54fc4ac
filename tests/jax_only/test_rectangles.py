"""Distinct items known when a step, or a loop of steps, is traced."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from cases import RINGS

from ring_core import LayoutSpec, Mask, RingProgram, make_plan, ring_program
from ring_core.programs.ring import TABLE_COLUMNS, TABLE_UNBOUNDED
from ring_jax.rank_view import Launches, remote_table, step_table
from ring_jax.records import Item

MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(causal=True, window=(9, 0)),
    "chunks": Mask(causal=True, chunk_size=20),
    "predicate": Mask(predicate=lambda q, k: (q + k) % 2 == 0),
}


def ring_of(name: str, ring: str, cp_size: int = 4) -> RingProgram:
    """Return the ring program of a mask, with 16 tokens a rank."""
    plan = make_plan(MASKS[name], seq_len=16 * cp_size, cp_size=cp_size, layout=RINGS[ring][0])
    return ring_program(plan, RINGS[ring][1])


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("name", MASKS)
def test_items_are_those_of_the_plan(name: str, ring: str) -> None:
    program = ring_of(name, ring)
    ranks = range(program.plan.cp_size)
    for step in range(program.num_steps):
        own = [[x for x in program.items(rank, step) if x.q_rank == rank] for rank in ranks]
        launches = Launches.of(step_table(program, step))
        several = any(len(items) > 1 or any(x.cu_q is not None for x in items) for items in own)
        if several or program.plan.blocks is not None or launches.table is None:
            assert launches.items is None
            assert several or program.plan.blocks is not None or not any(own)
            continue
        assert launches.items is not None
        assert len(set(launches.items)) == len(launches.items)
        for rank in ranks:
            item = launches.items[int(launches.table.rows_of(jnp.int32(rank))[1][0, 0])]
            expected = [
                Item(
                    x.q_start, x.q_stop, x.k_start, x.k_stop,
                    -TABLE_UNBOUNDED if x.lo is None else x.lo,
                    TABLE_UNBOUNDED if x.hi is None else x.hi,
                )
                for x in own[rank]
            ]  # fmt: skip
            assert ([] if item.is_empty else [item]) == expected
            assert all(x.is_full == item.is_full for x in own[rank])


@pytest.mark.parametrize("ring", [name for name in RINGS if RINGS[name][1] == "ring"])
@pytest.mark.parametrize("name", MASKS)
def test_a_rank_finds_its_rows(name: str, ring: str) -> None:
    program = ring_of(name, ring, cp_size=8)
    tables = [step_table(program, step).own for step in range(program.num_steps)]
    launches = Launches.of(*(step_table(program, step) for step in range(program.num_steps)))
    assert launches.table is not None
    columns = [TABLE_COLUMNS.index(x) for x in Item._fields]
    for rank in range(8):
        numbers = np.asarray(launches.table.rows_of(jnp.int32(rank))[1])
        for table, rows in zip(tables, launches.table.rows[numbers], strict=True):
            np.testing.assert_array_equal(rows[: table.shape[1]], table[rank][:, columns])
            assert not rows[table.shape[1] :].any()


def test_steps_of_a_causal_ring_are_rectangles() -> None:
    program = ring_of("causal", "zigzag")
    parts = [step_table(program, step) for step in range(program.num_steps)]
    assert [part.has_rectangles for part in parts] == [False, True, True, True]
    items = Launches.of(*parts[1:]).items
    assert items is not None
    assert {tuple(x)[:4] for x in items} == {(8, 16, 0, 16), (0, 16, 0, 8)}


LOCAL = 12
GATHERED_MASKS = {
    "full": Mask(), "causal": Mask(causal=True), "window": Mask(causal=True, window=(17, 0)),
    "two-sided window": Mask(window=(9, 30)), "chunks": Mask(causal=True, chunk_size=18),
    "documents": Mask(cu_seqlens=(0, 7, 31, 48)),
}  # fmt: skip
LAYOUTS: tuple[LayoutSpec, ...] = ("contiguous", "zigzag", "striped")


def _seen(rows: npt.NDArray[np.int32], shift: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how often a rank's table shows each pair of its queries and all keys, ``[T, S]``."""
    visible = np.zeros((LOCAL, 4 * LOCAL), dtype=np.int64)
    i, j = np.ogrid[: visible.shape[0], : visible.shape[1]]
    for row, before in zip(rows.tolist(), shift.tolist(), strict=True):
        columns = dict(zip(TABLE_COLUMNS, row, strict=True))
        k = j - before - columns["k_start"]
        inside = (columns["q_start"] <= i) & (i < columns["q_stop"])
        inside = inside & (k >= 0) & (k < columns["k_stop"] - columns["k_start"])
        band = (columns["lo"] <= i - columns["q_start"] - k) & (
            i - columns["q_start"] - k <= columns["hi"]
        )
        visible += inside & band
    return visible


def _one_by_one(program: RingProgram, rank: int) -> npt.NDArray[np.int64]:
    visible = np.zeros((LOCAL, 4 * LOCAL), dtype=np.int64)
    for n, step in enumerate(program.steps):
        if step.shift:
            rows = step_table(program, n).own[rank]
            visible += _seen(rows, rows[:, TABLE_COLUMNS.index("kv_rank")].astype(np.int64) * LOCAL)
    return visible


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", GATHERED_MASKS)
def test_joined_rectangles_show_the_same_pairs(name: str, layout: LayoutSpec) -> None:
    program = ring_program(
        make_plan(GATHERED_MASKS[name], seq_len=4 * LOCAL, cp_size=4, layout=layout)
    )
    others = remote_table(program)
    assert others is not None
    for rank in range(4):
        rows = others.own[rank]
        pairs = _seen(rows, np.zeros(len(rows), dtype=np.int64))
        np.testing.assert_array_equal(pairs, _one_by_one(program, rank))
