"""Movements (shift, halo, relayout) put rows where the definition on whole sequences does.

Those of JAX, by hops of an SPMD program, run in `tests/jax_only/test_movement.py`.
"""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import numpy.typing as npt
import pytest
from cases import RANDOM
from hypothesis import given, strategies as st

from ring_core import LAYOUTS, Layout, LayoutSpec
from ring_core.layouts.run_table import RowCopy
from ring_core.movement import Movement, halo, halo_ids, pack_documents, relayout, shift
from ring_core.pages import own_positions, to_pages

Rows = npt.NDArray[np.int64]
T = 72
FILL = -1


def layouts(cp_size: int, seq_len: int = T) -> list[Layout]:
    names: list[LayoutSpec] = [*LAYOUTS, *(x for size, x in RANDOM.items() if size == cp_size)]
    return [Layout(name, seq_len, cp_size) for name in names]


def copy(out: Rows, x: Rows, copies: RowCopy) -> None:
    for source, target in copies.slices():
        out[target] = x[source]
    read, written = copies.indices()
    np.testing.assert_array_equal(out[written], x[read])


def move(movement: Movement, parts: list[Rows]) -> list[Rows]:
    """Run a movement over all ranks' rows, as backends do."""
    exchanges = [movement.exchange(rank) for rank in range(len(parts))]
    messages: dict[tuple[int, int], Rows] = {}
    for rank, (x, part) in enumerate(zip(parts, exchanges, strict=True)):
        buffer = np.full(part.pack.rows, -9)
        copy(buffer, x, part.pack)
        first = 0
        for peer, count in part.sent:
            messages[rank, peer] = buffer[first : first + count]
            first += count
        assert first == len(buffer)
    results = []
    for rank, (x, part) in enumerate(zip(parts, exchanges, strict=True)):
        assert len(x) == movement.rows_of(rank)[0]
        out = np.full(movement.rows_of(rank)[1], FILL)
        copy(out, x, part.local)
        arrived = [messages.pop((peer, rank)) for peer, _ in part.received]
        assert [len(rows) for rows in arrived] == [rows for _, rows in part.received]
        copy(out, np.concatenate([*arrived, np.empty(0, np.int64)]), part.unpack)
        results.append(out)
    assert not messages
    return results


def shards(layout: Layout, whole: Rows) -> list[Rows]:
    return [whole[layout.positions(rank)] for rank in range(layout.cp_size)]


def shifted(whole: Rows, n: int, offsets: tuple[int, ...]) -> Rows:
    """Compute the definition of a shift: ``out[t] = x[t - n]`` within documents."""
    out = np.full_like(whole, FILL)
    for start, stop in pairwise(offsets):
        for t in range(start, stop):
            if start <= t - n < stop:
                out[t] = whole[t - n]
    return out


def check(movement: Movement, held: list[Rows], expected: list[Rows]) -> int:
    """Check what a movement makes of all ranks' rows; return how many rows leave a rank."""
    for out, like in zip(move(movement, held), expected, strict=True):
        np.testing.assert_array_equal(out, like)
    return sum(movement.exchange(rank).pack.rows for rank in range(len(held)))


DOCUMENTS = (0, 1, 1, 7, 30, 31, 32, 60, T)


@pytest.mark.parametrize("n", [0, 1, -1, 2, -5, 17, -31, 71, -72, 500])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_a_shift_moves_tokens_inside_of_documents(cp_size: int, n: int) -> None:
    whole = np.arange(T) + 100
    for layout, offsets in product(layouts(cp_size), ((0, T), DOCUMENTS)):
        expected = shards(layout, shifted(whole, n, offsets))
        check(shift(layout, n, offsets), shards(layout, whole), expected)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (3, 0), (0, 1), (2, 2), (30, 7), (80, 80)])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_a_halo_has_the_rows_on_both_sides_of_each_run(cp_size: int, left: int, right: int) -> None:
    starts, stops = np.array([0, *DOCUMENTS[2:8]]), np.array([1, *DOCUMENTS[3:]])
    for layout in layouts(cp_size):
        if layout.stride > 1 and cp_size > 1:
            continue
        ids = [halo_ids(layout, left, right, rank, DOCUMENTS) for rank in range(cp_size)]
        expected = [positions.reshape(-1) for positions, _ in ids]
        check(halo(layout, left, right), shards(layout, np.arange(T)), expected)
        for rank, (positions, documents) in enumerate(ids):
            width = left + layout.run_length + right
            assert positions.shape == (layout.num_runs, width)
            own = positions[:, left : width - right].reshape(-1)
            np.testing.assert_array_equal(own, layout.positions(rank))
            inside = positions >= 0
            np.testing.assert_array_equal(documents >= 0, inside)
            document = documents[inside]
            assert (starts[document] <= positions[inside]).all()
            assert (positions[inside] < stops[document]).all()
            _, alone = halo_ids(layout, left, right, rank)
            np.testing.assert_array_equal(alone, np.where(inside, 0, -1))


#: Number of ranks, those that hold the sequence, and those that get it.
RANKS: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    **{f"all of {n}": (n, tuple(range(n)), tuple(range(n))) for n in (1, 2, 3, 4)},
    "to some": (4, (0, 1, 2, 3), (1, 3)), "from some": (4, (3, 0), (0, 1, 2, 3)),
    "to one": (3, (0, 1, 2), (2,)), "from one": (3, (1,), (0, 1, 2)),
    "another order": (4, (0, 1, 2, 3), (2, 0, 3, 1)), "both": (4, (2, 0, 3, 1), (3, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", RANKS)
def test_a_relayout_goes_to_other_layouts_and_other_ranks(name: str) -> None:
    size, *ranks = RANKS[name]
    for source, target in product(*(layouts(len(x)) for x in ranks)):
        held, expected = ([np.empty(0, np.int64)] * size for _ in range(2))
        for parts, numbers, layout in zip((held, expected), ranks, (source, target), strict=True):
            for rank, rows in zip(numbers, shards(layout, np.arange(T)), strict=True):
                parts[rank] = rows
        as_many = name.startswith("all")
        movement = relayout(source, target, *(() if as_many else ranks))
        leaving = check(movement, held, expected)
        stay = map(len, map(np.intersect1d, held, expected))
        assert leaving == T - sum(stay)


@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_documents_that_all_ranks_share_move_to_the_layout_of_their_pack(
    cp_size: int, name: LayoutSpec
) -> None:
    offsets = (0, 6, 6, 8, 18, 24)
    pieces = [
        [cp_size * start + Layout(name, cp_size * (stop - start), cp_size).positions(rank)
         for start, stop in pairwise(offsets) if stop > start]
        for rank in range(cp_size)
    ]  # fmt: skip
    pack = Layout(name, cp_size * offsets[-1], cp_size)
    held, expected = [np.concatenate(x) for x in pieces], shards(pack, np.arange(pack.seq_len))
    check(pack_documents(pack, offsets), held, expected)


@pytest.mark.parametrize("skipped", [0, 3])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 31])
@pytest.mark.parametrize("start", [0, 3, 4, 13])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_token_goes_to_the_rank_of_its_page(
    size: int, layout: LayoutSpec, start: int, n: int, skipped: int
) -> None:
    page = 4
    rows = Layout.padded(layout, n + skipped, size)
    held = [rows.positions(rank) for rank in range(size)]  # rows by their number
    positions = [own_positions(start, start + n, page, rank, size) for rank in range(size)]
    expected = [x - start + skipped for x in positions]
    check(to_pages(rows, start, page, skipped), held, expected)
    assert all(t // page % size == rank for rank, x in enumerate(positions) for t in x)


@given(st.data())
def test_adjoint(data: st.DataObject) -> None:
    """A reversed exchange sends what was received and receives what was sent, row by row."""
    size = data.draw(st.integers(1, 5))
    layout = data.draw(st.sampled_from(layouts(size, 2 * 3 * 5 * size)))
    n = data.draw(st.integers(-layout.seq_len, layout.seq_len))
    movement = shift(layout, n)
    back = shift(layout, -n)
    for rank in range(size):
        reverse, backward = movement.exchange(rank).reversed(), back.exchange(rank)
        assert (reverse.sent, reverse.received) == (backward.sent, backward.received)


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
def test_a_plan_is_as_large_as_its_runs(name: LayoutSpec) -> None:
    """Plans store runs as slices: a list of the tokens of such a sequence would not fit."""
    layout = Layout(name, 1 << 39, 8)
    for movement in (shift(layout, 1), shift(layout, -12345), relayout(layout, layout)):
        for rank in range(8):
            part = movement.exchange(rank)
            assert sum(len(x.length) for x in part[:3]) <= 8
    offsets = tuple(range(0, (1 << 39) + 1, 1 << 29))
    part = shift(layout, 1, offsets).exchange(3)
    assert sum(len(x.length) for x in part[:3]) <= 2 * 1024 + 8
