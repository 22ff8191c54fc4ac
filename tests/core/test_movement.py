"""Movements (shift, halo, relayout) put rows where the definition on whole sequences does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from ring_core import ChunkLayout, Layout, LayoutSpec, UnsupportedError
from ring_core.hops import hops
from ring_core.layouts.run_table import RowCopy
from ring_core.movement import Movement, halo, halo_ids, pack_documents, relayout, shift

Rows = npt.NDArray[np.int64]
#: A layout with neighbouring chunks on a rank, and with distant ones.
CHUNKS = {
    2: ChunkLayout(((0, 1, 5), (2, 3, 4))), 3: ChunkLayout(((0, 3, 8), (1, 2, 7), (4, 5, 6))),
    4: ChunkLayout(((1, 7), (0, 2), (3, 6), (4, 5))),
}  # fmt: skip
T = 72
FILL = -1


def layouts(cp_size: int, seq_len: int = T) -> list[Layout]:
    names: list[LayoutSpec] = ["contiguous", "zigzag", "striped"]
    names += [CHUNKS[cp_size]] if cp_size in CHUNKS else []
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
        for (peer, _), rows in zip(part.sent, messages_in(buffer, part.sent), strict=True):
            messages[rank, peer] = rows
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


def messages_in(buffer: Rows, counts: tuple[tuple[int, int], ...]) -> list[Rows]:
    """Split the rows of a buffer by peer."""
    ends = np.cumsum([rows for _, rows in counts], dtype=np.int64)
    assert len(buffer) == sum(rows for _, rows in counts)
    return [buffer[end - rows : end] for end, (_, rows) in zip(ends, counts, strict=True)]


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


def move_by_hops(movement: Movement, parts: list[Rows]) -> list[Rows]:
    """Run a movement by hops, as an SPMD program does."""
    size = len(parts)
    results = [np.full(movement.target_rows, FILL) for _ in parts]
    for hop in hops(movement, size):
        assert hop.rows == max(hop.written.rows)
        for receiver in range(size):
            sender = (receiver - hop.distance) % size
            rows = hop.written.rows[receiver]
            assert rows == hop.read.rows[sender]
            gets = [stop - start for start, stop, ranks in hop.pieces if receiver in ranks]
            assert sum(gets) == rows
            i = np.arange(rows)
            shards_by_rank = []
            for table, rank in ((hop.read, sender), (hop.written, receiver)):
                piece = np.searchsorted(table.offset[rank], i, side="right") - 1
                shards_by_rank.append(
                    table.start[rank][piece] + table.step * (i - table.offset[rank][piece])
                )
            results[receiver][shards_by_rank[1]] = parts[sender][shards_by_rank[0]]
    return results


@pytest.mark.parametrize("n", [0, 1, -1, 2, -5, 17, -31, 71, -72, 500])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_a_shift_moves_tokens_inside_of_documents(cp_size: int, n: int) -> None:
    whole = np.arange(T) + 100
    for layout in layouts(cp_size):
        for offsets in ((0, T), (0, 1, 1, 7, 30, 31, 32, 60, T)):
            for run in (move, move_by_hops):
                moved = run(shift(layout, n, offsets), shards(layout, whole))
                expected = shards(layout, shifted(whole, n, offsets))
                for out, like in zip(moved, expected, strict=True):
                    np.testing.assert_array_equal(out, like)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (3, 0), (0, 1), (2, 2), (30, 7), (80, 80)])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_a_halo_has_the_rows_on_both_sides_of_each_run(cp_size: int, left: int, right: int) -> None:
    offsets = (0, 1, 1, 7, 30, 31, 32, 60, T)
    for layout in layouts(cp_size):
        if layout.stride > 1:
            continue
        moved = move(halo(layout, left, right), shards(layout, np.arange(T)))
        by_hops = move_by_hops(halo(layout, left, right), shards(layout, np.arange(T)))
        np.testing.assert_array_equal(moved, by_hops)
        for rank, rows in enumerate(moved):
            positions, documents = halo_ids(layout, left, right, rank, offsets)
            width = left + layout.run_length + right
            assert positions.shape == (layout.num_runs, width)
            np.testing.assert_array_equal(rows, positions.reshape(-1))
            own = positions[:, left : width - right].reshape(-1)
            np.testing.assert_array_equal(own, layout.positions(rank))
            inside = positions >= 0
            np.testing.assert_array_equal(documents >= 0, inside)
            starts, stops = (
                np.asarray(offsets)[[0, 2, 3, 4, 5, 6, 7]],
                np.asarray(offsets)[[1, *range(3, 9)]],
            )
            document = documents[inside]
            assert (starts[document] <= positions[inside]).all()
            assert (positions[inside] < stops[document]).all()
            _, alone = halo_ids(layout, left, right, rank)
            np.testing.assert_array_equal(alone, np.where(inside, 0, -1))


def test_a_halo_of_a_striped_layout_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"relayout\(x, to='contiguous'\)"):
        halo(Layout("striped", 8, 2), 1, 0)
    assert halo(Layout("striped", 8, 1), 1, 0).target_rows == 9


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_a_relayout_goes_to_other_layouts_of_as_many_ranks_or_others(cp_size: int) -> None:
    whole = np.arange(T)
    for source in layouts(cp_size):
        for target in layouts(cp_size):
            movement = relayout(source, target)
            moved = move(movement, shards(source, whole))
            np.testing.assert_array_equal(moved, move_by_hops(movement, shards(source, whole)))
            for out, like in zip(moved, shards(target, whole), strict=True):
                np.testing.assert_array_equal(out, like)
            leaving = sum(movement.exchange(rank).pack.rows for rank in range(cp_size))
            owner = [np.empty(T, int), np.empty(T, int)]
            for rank in range(cp_size):
                owner[0][source.positions(rank)] = owner[1][target.positions(rank)] = rank
            assert leaving == (owner[0] != owner[1]).sum()


#: Number of ranks, those that hold the sequence, and those that get it.
RANKS: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    "to some": (4, (0, 1, 2, 3), (1, 3)), "from some": (4, (3, 0), (0, 1, 2, 3)),
    "to one": (3, (0, 1, 2), (2,)), "from one": (3, (1,), (0, 1, 2)),
    "another order": (4, (0, 1, 2, 3), (2, 0, 3, 1)), "both": (4, (2, 0, 3, 1), (3, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", RANKS)
def test_a_relayout_goes_to_other_ranks(name: str) -> None:
    size, source_ranks, target_ranks = RANKS[name]
    whole = np.arange(T)
    for source in layouts(len(source_ranks)):
        for target in layouts(len(target_ranks)):
            held, expected = [np.empty(0, np.int64)] * size, [np.empty(0, np.int64)] * size
            for rank, rows in zip(source_ranks, shards(source, whole), strict=True):
                held[rank] = rows
            for rank, rows in zip(target_ranks, shards(target, whole), strict=True):
                expected[rank] = rows
            movement = relayout(source, target, source_ranks, target_ranks)
            for out, like in zip(move(movement, held), expected, strict=True):
                np.testing.assert_array_equal(out, like)
            stay = sum(
                len(np.intersect1d(held_by_rank, wanted_by_rank))
                for held_by_rank, wanted_by_rank in zip(held, expected, strict=True)
            )
            leaving = sum(movement.exchange(rank).pack.rows for rank in range(size))
            assert leaving == T - stay


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
    movement = pack_documents(pack, offsets)
    moved = move(movement, [np.concatenate(of_rank) for of_rank in pieces])
    for out, like in zip(moved, shards(pack, np.arange(pack.seq_len)), strict=True):
        np.testing.assert_array_equal(out, like)


@given(st.data())
def test_adjoint(data: st.DataObject) -> None:
    """A reversed exchange sends what was received and receives what was sent, row by row."""
    size = data.draw(st.integers(1, 5))
    layout = data.draw(st.sampled_from(layouts(size, 2 * 3 * 5 * size)))
    n = data.draw(st.integers(-layout.seq_len, layout.seq_len))
    movement = shift(layout, n)
    back = shift(layout, -n)
    for rank in range(size):
        reversed_movement, backward_movement = (
            movement.exchange(rank).reversed(),
            back.exchange(rank),
        )
        assert (reversed_movement.sent, reversed_movement.received) == (
            backward_movement.sent,
            backward_movement.received,
        )


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


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "too far": (lambda: shift(Layout("contiguous", 8, 2), 1 << 40), "n must be an integer"),
    "rank": (lambda: halo_ids(Layout("contiguous", 8, 2), 1, 0, 2), "rank must be in"),
    "unlike": (
        lambda: relayout(Layout("zigzag", 8, 2), Layout("striped", 16, 2)), "one sequence, got 8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call()
