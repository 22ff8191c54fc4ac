"""Plan geometry counts and cuts pairs of ranks right: bands, documents, halves, chunks, tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, strategies as st
from plans import programs

from ring_core import Mask, Plan, RingProgram, make_plan, ring_program
from ring_core.base.arguments import TILE
from ring_core.masks.band import UNBOUNDED
from ring_core.plan import geometry as geometries
from ring_core.plan.geometry import RectangleTable


@given(programs(), st.data())
def test_one_pair_of_ranks_is_counted_as_among_many(
    program: RingProgram, data: st.DataObject
) -> None:
    geometry, ranks = program.plan.geometry, np.arange(program.plan.cp_size)
    pair = q_rank, kv_rank = [data.draw(st.integers(0, program.plan.cp_size - 1)) for _ in "qk"]
    half = data.draw(st.sampled_from([None, 0, 1])) if program.strategy == "balanced" else None
    with patch.object(geometries, "_MOST_KEPT", 0):  # of many ranks pairs are asked one by one
        each = replace(geometry)
        alone = columns_of(each.rectangles(q_rank, kv_rank, half))
        count = each.count(q_rank, kv_rank, half)
    table = columns_of(geometry.rectangles(ranks[:, None], ranks, half))
    for own, many in zip(alone, table, strict=True):
        assert own.dtype == many.dtype == np.int64
        padded = np.pad(own, (0, many.shape[-1] - own.size))
        np.testing.assert_array_equal(padded, many[*pair])
    assert count == geometry.count(q_rank, kv_rank, half)
    assert count == geometry.count(ranks[:, None], ranks, half)[*pair]
    assert half is not None or count == seen_in(program.plan, q_rank, kv_rank).sum()


def columns_of(rows: RectangleTable) -> list[Any]:
    return [*rows.rect, rows.doc_start, rows.doc_stop]


def seen_in(plan: Plan, q_rank: int, kv_rank: int) -> Any:
    """Return the dense mask between two ranks; padding sees nothing and is not seen."""
    visible = plan.mask.dense(plan.q_positions(q_rank), plan.k_positions(kv_rank))
    visible[plan.q_layout.num_tokens(q_rank) :] = False
    visible[:, plan.k_layout.num_tokens(kv_rank) :] = False
    return visible


@given(st.integers(1, 12), st.integers(1, 24), st.none() | st.integers(1, 30), st.data())
def test_halves_are_cut_at_the_row_that_halves_the_pairs(
    q_len: int, k_len: int, chunk: int | None, data: st.DataObject
) -> None:
    """The first half is the fewest rows that see at least half of the pairs."""
    side = st.none() | st.integers(0, 4 * k_len)
    mask = Mask(data.draw(st.booleans()), (data.draw(side), data.draw(side)), chunk)
    sizes = {"seq_len": 4 * q_len, "kv_seq_len": 4 * k_len, "cp_size": 4}
    plan = make_plan(mask, **sizes, layout="contiguous")
    q_rank, kv_rank = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    seen = seen_in(plan, q_rank, kv_rank)
    pairs = seen.sum(axis=1)
    upto = pairs.cumsum()
    rows = np.arange(q_len) <= np.argmax(2 * upto >= upto[-1])
    for half, expected in enumerate((rows * pairs, ~rows * pairs)):
        half_rows, visible = plan.geometry.rectangles(q_rank, kv_rank, half), 0 * seen
        for q_start, q_stop, k_start, k_stop, *_ in np.stack(columns_of(half_rows), -1).tolist():
            visible[q_start:q_stop, k_start:k_stop] = 1
        np.testing.assert_array_equal((visible * seen).sum(axis=1), expected)
        assert plan.geometry.count(q_rank, kv_rank, half) == expected.sum()


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize(("q_len", "k_len"), [(640, 640), (2304, 260), (260, 1200)])
def test_tiles_are_counted(layout: Any, q_len: int, k_len: int) -> None:
    """Kinds, boxes, counts and halves of tiles agree with the dense mask; some are not whole."""
    table = np.random.default_rng(q_len).random((2, 41, 41)) < [[[0.002]], [[0.2]]]

    def spots(q: Any, k: Any) -> Any:
        """Show full spots of 256 x 256 and smaller ones beside them; some tiles stay empty."""
        return table[1][q // 256 % 41, k // 256 % 41] | table[0][q % 41, k // 9 % 41]

    plan = make_plan(
        Mask(window=(500, 500), chunk_size=1000, predicate=spots),
        seq_len=q_len, kv_seq_len=k_len, cp_size=2, layout=layout,
    )  # fmt: skip
    blocks = plan.blocks
    assert blocks is not None
    assert blocks.pairs.dtype == np.int32 and blocks.kinds.dtype == np.uint8
    cuts = np.arange(-3000 if q_len > k_len else 0, k_len + 1000, 1000)
    np.testing.assert_array_equal(blocks.boundaries, cuts)
    for q_rank, kv_rank in np.ndindex(2, 2):
        dense = seen_in(plan, q_rank, kv_rank)
        pairs, cells = in_tiles(dense), in_tiles(np.ones_like(dense))
        np.testing.assert_array_equal(blocks.pairs[q_rank, kv_rank], pairs)
        kinds = np.where(pairs == cells, 2, np.minimum(pairs, 1))
        np.testing.assert_array_equal(blocks.kinds[q_rank, kv_rank], kinds)
        first = 2 * pairs.sum(axis=1).cumsum() <= pairs.sum()
        for half, rows in ((None, first | True), (0, first), (1, ~first)):
            part = rows[:, None] * pairs
            assert blocks.count(q_rank, kv_rank, half) == part.sum()
            counted = np.concatenate(columns_of(blocks.rectangles(q_rank, kv_rank, half)))
            many = columns_of(blocks.rectangles([[0], [1]], [0, 1], half))
            np.testing.assert_array_equal(counted, np.concatenate(many, axis=-1)[q_rank, kv_rank])
            box: list[int] = []
            for axis, size in zip((1, 0), dense.shape, strict=True):
                at = np.flatnonzero(part.any(axis=axis))
                box += [at[0] * TILE, min((at[-1] + 1) * TILE, size)] if at.size else [0, 0]
            band = [-UNBOUNDED, UNBOUNDED] if part.any() else [0, 0]
            assert counted.tolist() == [*box, *band, 0, 0]


def in_tiles(dense: Any) -> Any:
    rows, columns = (np.arange(0, size, TILE) for size in dense.shape)
    return np.add.reduceat(np.add.reduceat(dense.astype(int), rows), columns, axis=1)


def test_predicates_are_asked_of_tokens_that_there_are() -> None:
    def inside(q_pos: Any, k_pos: Any) -> Any:
        assert (q_pos >= 8).all() and (q_pos < 16).all()
        assert (k_pos >= 0).all() and (k_pos < 16).all()
        return q_pos >= k_pos

    program = ring_program(make_plan(Mask(predicate=inside), seq_len=8, kv_seq_len=16, cp_size=2))
    assert program.work().sum() == sum(range(9, 17))
