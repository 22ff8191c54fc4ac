"""Work items show the same pairs per document, with a window for all documents, and in part."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given, strategies as st
from plans import all_items, programs, shown, through

from ring_core import Mask, Plan, WorkItem, gather_program, gather_refusals, make_plan, ring_program

Cells = npt.NDArray[np.bool_]


@st.composite
def items(draw: st.DrawFn) -> tuple[Plan, list[WorkItem]]:
    """Draw a rank's items of a ring and of a gather, except items made of tiles."""
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


def packed(items: list[WorkItem]) -> list[WorkItem]:
    """Return the items that pack several documents."""
    return [item for item in items if item.cu_q is not None]


@given(items())
def test_a_window_for_all_documents(plan_and_items: tuple[Plan, list[WorkItem]]) -> None:
    plan, items_of_rank = plan_and_items
    for item in packed(items_of_rank):
        assert item.cu_q is not None and item.cu_k is not None
        window = item.documents_window
        if window is None:
            assert item.lo is not None or item.hi is not None
            continue
        assert all(side is None or side >= 0 for side in window)
        cells = np.zeros_like(shown(plan, item))
        for n in range(len(item.cu_q) - 1):
            rows, columns = slice(*item.cu_q[n : n + 2]), slice(*item.cu_k[n : n + 2])
            cells[rows, columns] = through(window, *cells[rows, columns].shape)
        np.testing.assert_array_equal(cells, shown(plan, item))


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


@given(items())
def test_documents_one_by_one(plan_and_items: tuple[Plan, list[WorkItem]]) -> None:
    plan, items_of_rank = plan_and_items
    for item in packed(items_of_rank):
        whole = shown(plan, item)
        count = np.zeros(whole.shape, dtype=int)
        ranks = item.q_rank, item.kv_rank, item.out_rank
        for document in item.each_document():
            cells = shown(plan, document)
            assert document.cu_q is None and document.cu_k is None
            assert cells.any(axis=0).all() and cells.any(axis=1).all()
            assert document.is_full == bool(cells.all())
            assert (document.q_rank, document.kv_rank, document.out_rank) == ranks
            count += within(whole, plan, document, (0, 0))
        np.testing.assert_array_equal(count, whole)


@given(items(), st.data())
def test_the_part_between_two_rows(
    plan_and_items: tuple[Plan, list[WorkItem]], data: st.DataObject
) -> None:
    plan, items_of_rank = plan_and_items
    if not items_of_rank:
        return
    item = data.draw(st.sampled_from(items_of_rank))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, item.q_stop + 2)] * 2)))
    whole = shown(plan, item)
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
    else:
        assert part.cu_q.size > 2 and part.cu_k is not None
        assert (part.cu_q[0], part.cu_q[-1]) == (0, part.q_stop - part.q_start)
        assert (part.cu_k[0], part.cu_k[-1]) == (0, part.k_stop - part.k_start)


def plain(item: WorkItem | None) -> tuple[Any, ...]:
    """Return all fields of an item except its ranks, as plain numbers."""
    assert item is not None
    arrays = (None if x is None else x.tolist() for x in (item.cu_q, item.cu_k, item.tiles))
    return item.q_start, item.q_stop, item.k_start, item.k_stop, item.lo, item.hi, *arrays


def test_rows_by_hand() -> None:
    """Cutting rows keeps the documents that the rows touch, and all columns of a rectangle."""
    cuts, docs = np.array([0, 4, 8, 12]), ([0, 2, 5], [0, 4, 8], None)
    full = WorkItem(0, 0, 0, 0, 8, 3, 7, None, None)
    packed_up = WorkItem(0, 0, 0, 10, 22, 20, 32, None, None, cuts, cuts)
    banded = WorkItem(0, 0, 0, 10, 22, 20, 32, 0, 3, cuts, cuts)
    none = (None,) * 5
    for item, start, stop, expected in (
        (full, 2, 4, (3, 7, *none)),
        (packed_up, 15, 17, (24, 28, *none)), (packed_up, 14, 18, (24, 28, *none)),
        (packed_up, 12, 17, (20, 28, None, None, *docs)),
        (banded, 12, 17, (20, 28, -2, 1, *docs)), (banded, 15, 17, (24, 27, -1, *none[1:])),
    ):  # fmt: skip
        assert plain(item.rows(start, stop)) == (start, stop, *expected)
    below = WorkItem(0, 0, 0, 0, 4, 0, 4, 2, None)  # the first two rows see nothing
    assert below.rows(0, 2) is None


def test_only_square_causal_items_stay_whole() -> None:
    causal = WorkItem(0, 1, 0, 0, 8, 4, 12, 0, None)
    assert causal.cut(4) == (causal,)
    for columns, lo, hi in ((12, None, None), (12, 0, 3), (8, 0, None)):
        cut = WorkItem(0, 1, 0, 0, 8, 4, columns, lo, hi).cut(4)
        assert [piece.q_start for piece in cut] == [0, 2, 4, 6]


def test_what_rows_see() -> None:
    def seen(item: WorkItem) -> list[tuple[int, int]]:
        first, stop = item.seen
        return list(zip(first.tolist(), stop.tolist(), strict=True))

    assert seen(WorkItem(0, 0, 0, 4, 7, 8, 10, None, None)) == [(0, 2)] * 3
    assert seen(WorkItem(0, 0, 0, 0, 4, 0, 6, -2, 1)) == [(0, 3), (0, 4), (1, 5), (2, 6)]
    documents = [(0, 1), (0, 2), (1, 3), (3, 4), (3, 5), (4, 6)]
    assert seen(WorkItem(0, 0, 0, 0, 6, 0, 6, 0, 1, CUTS, CUTS)) == documents
    fewer = WorkItem(0, 0, 0, 0, 6, 0, 3, None, None, CUTS, np.array([0, 0, 3]))
    first, stop = fewer.seen
    assert (stop > first).tolist() == [False] * 3 + [True] * 3


def test_pieces_by_hand() -> None:
    first, second = WorkItem(0, 1, 0, 10, 16, 20, 26, -1, 2, CUTS, CUTS).cut(2)
    assert plain(first) == (10, 13, 20, 26, -1, 2, [0, 3, 3], [0, 3, 6], None)
    assert plain(second) == (13, 16, 20, 26, -4, -1, [0, 0, 3], [0, 3, 6], None)
    tiles = np.arange(6, dtype=np.uint8).reshape(3, 2)
    first, second = WorkItem(0, 1, 0, 0, 300, 0, 200, None, None, tiles=tiles).cut(2)
    assert plain(first)[:2] == (0, 256) and plain(first)[-1] == [[0, 1], [2, 3]]
    assert plain(second)[:2] == (256, 300) and plain(second)[-1] == [[4, 5]]
