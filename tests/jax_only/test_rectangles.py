"""What a step is known to be when it is traced: what ranks show each other, if all or nothing."""

from __future__ import annotations

import pytest
from cases import RINGS

from ring_core import Mask, make_plan, ring_program
from ring_core.programs.ring import TABLE_COLUMNS
from ring_jax.rank_view import step_table
from ring_jax.records import rectangles_of

MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(causal=True, window=(9, 0)),
    "documents": Mask(causal=True, cu_seqlens=(0, 20, 64)),
    "predicate": Mask(predicate=lambda q, k: (q + k) % 2 == 0),
}


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("name", MASKS)
def test_rectangles_are_those_of_the_items(name: str, ring: str) -> None:
    program = ring_program(
        make_plan(MASKS[name], seq_len=64, cp_size=4, layout=RINGS[ring][0]), RINGS[ring][1]
    )
    for step, what in enumerate(program.steps):
        items = {
            rank: [item for item in program.items(rank, step) if item.q_rank == rank]
            for rank in range(program.plan.cp_size)
        }
        by_rank = {x.q_rank: x for x in rectangles_of(step_table(program, step).items)}
        if any(len(some) > 1 or not all(x.is_full for x in some) for some in items.values()):
            assert by_rank == {}
            continue
        assert by_rank.keys() == {rank for rank, some in items.items() if some}
        for rank, x in by_rank.items():
            (item,) = items[rank]
            assert x.kv_rank == item.kv_rank == (rank - what.shift) % program.plan.cp_size
            assert (x.q_start, x.q_stop) == (item.q_start, item.q_stop)
            assert (x.k_start, x.k_stop) == (item.k_start, item.k_stop)


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("name", MASKS)
def test_items_are_those_of_the_plan(name: str, ring: str) -> None:
    """With their bands; none where a rank has several, or it takes more than a band to say it."""
    program = ring_program(
        make_plan(MASKS[name], seq_len=64, cp_size=4, layout=RINGS[ring][0]), RINGS[ring][1]
    )
    column_index = {column: n for n, column in enumerate(TABLE_COLUMNS)}
    for step in range(program.num_steps):
        part = step_table(program, step)
        live = [
            [row for row in rows if row[column_index["q_stop"]] > row[column_index["q_start"]]]
            for rows in part.own
        ]
        several = [len(rows) > 1 or part.has_documents for rows in live]
        if any(several) or program.plan.blocks is not None:
            assert part.items is None
            continue
        assert part.items is not None
        shown = [(*x.rectangle, x.lo, x.hi) for x in part.items]
        names = ("q_rank", "kv_rank", "q_start", "q_stop", "k_start", "k_stop", "lo", "hi")
        assert shown == [
            tuple(row[column_index[x]] for x in names) for rows in live for row in rows
        ]


def test_steps_of_a_causal_ring_are_rectangles() -> None:
    """All but the first, of a zigzag: half of the queries see all, or all of them a half."""
    program = ring_program(make_plan(Mask(causal=True), seq_len=64, cp_size=4, layout="zigzag"))
    steps = [rectangles_of(step_table(program, step).items) for step in range(program.num_steps)]
    assert [len(x) for x in steps] == [0, 4, 4, 4]
    assert {tuple(x)[2:] for some in steps for x in some} == {(8, 16, 0, 16), (0, 16, 0, 8)}
