"""Gather programs compute every visible pair once and fetch only the keys that are seen."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from itertools import pairwise, product, zip_longest
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from plans import chunk_layouts, plan_of, plans, shown

from ring_core import (
    ChunkLayout,
    GatherProgram,
    Mask,
    Plan,
    WorkItem,
    divisor_of,
    gather_memory,
    gather_program,
    gather_refusals,
    longest_gather,
    ring_program,
)
from ring_core.programs.gather import moved_keys

CAUSAL = Mask(causal=True)
#: Rows, columns, band and offsets of documents.
Rows = list[tuple[Any, ...]]


@st.composite
def windowed(draw: st.DrawFn) -> tuple[Plan, int]:
    """Draw a plan with a window, and a tile of which its runs are whole ones."""
    cp_size, tile = draw(st.integers(1, 4)), draw(st.sampled_from([2, 4, 8]))
    layout: Any = draw(st.sampled_from(["contiguous", "zigzag"]) | chunk_layouts(cp_size))
    unit = tile * divisor_of(layout, cp_size)
    seq_len = kv_seq_len = unit * draw(st.integers(1, 4))
    cuts = draw(st.none() | st.lists(st.integers(0, seq_len), max_size=3))
    if cuts is None:
        kv_seq_len = unit * draw(st.integers(1, 4))
    mask = Mask(
        causal=draw(st.booleans()),
        window=(draw(st.integers(1, 3 * tile)), draw(st.none() | st.integers(0, 2 * tile))),
        cu_seqlens=None if cuts is None else (0, *sorted(cuts), seq_len),
    )
    return plan_of(mask, seq_len, cp_size, layout, kv_seq_len), tile


@st.composite
def gathers(draw: st.DrawFn) -> tuple[Plan, int, GatherProgram]:
    """Draw the gather program of a rank: with its own keys, work in place and tiles, or without."""
    others = st.tuples(plans().filter(lambda plan: not gather_refusals(plan)), st.integers(1, 8))
    plan, tile = draw(others | windowed())
    options: Any = {"own": draw(st.booleans()), "splits": draw(st.booleans()), "tile": tile}
    rank = draw(st.integers(0, plan.cp_size - 1))
    gather = gather_program(plan, rank, **options)
    assert options.items() <= vars(gather).items()
    return plan, rank, gather


def work_of(plan: Plan, rank: int, gather: GatherProgram) -> Iterator[tuple[WorkItem, Any]]:
    """Yield all items, each with the positions of its keys."""
    for items, positions in (
        (gather.items, gather.positions),
        (gather.in_place, plan.k_positions(rank)),
    ):
        for item in items:
            yield item, positions[item.k_slice]


@given(gathers())
def test_every_visible_pair_once(case: tuple[Plan, int, GatherProgram]) -> None:
    """Items show each pair that the mask shows once, whatever fills their tiles, and no other."""
    plan, rank, gather = case
    count = np.zeros((plan.q_layout.local_len, plan.kv_seq_len), dtype=int)
    for item, columns in work_of(plan, rank, gather):
        count[item.q_start : item.q_stop, columns] += shown(plan, item)
    dense = plan.mask.dense(plan.q_positions(rank), np.arange(plan.kv_seq_len)).copy()
    dense[plan.positions(rank) >= plan.seq_len] = False  # padding
    if not gather.own:
        dense[:, plan.k_positions(rank)[: plan.k_layout.num_tokens(rank)]] = False
        assert all(fetch.rank != rank for fetch in gather.fetches)
    np.testing.assert_array_equal(count, dense)


@given(gathers())
def test_fetches_fill_the_buffer_in_time(case: tuple[Plan, int, GatherProgram]) -> None:
    plan, _, gather = case
    buffer = np.full(gather.length, -1)
    arrived = 0
    for item, waits_for in zip(gather.items, gather.waits_for, strict=True):
        assert waits_for >= arrived
        for fetch in gather.fetches[arrived:waits_for]:
            assert (buffer[fetch.target] == -1).all()
            buffer[fetch.target] = plan.k_positions(fetch.rank)[fetch.source]
        arrived = waits_for
        assert (buffer[item.k_slice] >= 0).all()
    assert arrived == len(gather.fetches)
    np.testing.assert_array_equal(buffer, gather.positions)
    rows = sorted((item.q_start, item.q_stop) for item in (*gather.items, *gather.in_place))
    assert not gather.own or all(a[1] <= b[0] for a, b in pairwise(rows))  # nothing to merge


@given(gathers())
def test_what_is_gathered_says_what_it_is(case: tuple[Plan, int, GatherProgram]) -> None:
    _, rank, gather = case
    assert all(a.stop < b.start for a, b in pairwise(gather.spans))
    items = [*gather.items, *gather.in_place]
    assert gather.num_rows == sum(item.q_stop - item.q_start for item in items)
    for item in items:
        assert (item.q_rank, item.kv_rank, item.out_rank) == (rank, rank, rank)
        sizes = item.q_stop - item.q_start, item.k_stop - item.k_start
        for cu, size in zip((item.cu_q, item.cu_k), sizes, strict=True):
            if cu is not None:  # the first and the last document have a query and a key
                assert cu[0] == 0 < cu[1] <= cu[-2] < cu[-1] == size
    assert all(part.start < part.stop for parts in gather.overwritten for part in parts)
    for fetch in gather.fetches:
        last = np.zeros(gather.length, dtype=bool)
        last[gather.items[0].k_slice] = True
        assert gather.is_before_last_item(fetch) != last[fetch.target].any()


def test_kernels_that_can_run_the_ring_can_run_what_is_gathered() -> None:
    """Without banded items in the ring, by which kernels are chosen, gathered ones have none."""
    for plan in (
        plan_of(Mask(window=(None, 9)), 15, 3),
        plan_of(Mask(causal=True, window=(5, 0)), 12, 3, "zigzag"),
        plan_of(Mask(causal=True, chunk_size=1), 12, 3, "zigzag", 6),
    ):
        counts = ring_program(plan).item_counts
        assert counts.banded == counts.several_documents == 0
        items = [item for rank in range(3) for item in gather_program(plan, rank, own=False).items]
        assert items and all(item.is_full or item.is_causal for item in items)


def side(item: WorkItem) -> tuple[Any, ...]:
    """Return rows, columns and band of an item and, if it has several, its documents' offsets."""
    offsets = [x.tolist() for x in (item.cu_q, item.cu_k) if x is not None]
    return item.q_start, item.q_stop, item.k_start, item.k_stop, item.lo, item.hi, *offsets


#: Two ranks of two chunks of 4 each, next to each other or not.
NEXT, OUTER = ChunkLayout(((0, 1), (2, 3))), ChunkLayout(((0, 3), (1, 2)))
LATER = ChunkLayout(((1, 2, 3, 4, 5, 6, 7, 14), (0, 8, 9, 10, 11, 12, 13, 15)))
SLIDING, PAIR = Mask(window=(200, 3)), Mask(causal=True, window=(1, 0))
#: Plans and the rank; its items, `None` where they do not matter, and its rows in place.
IN_PLACE: dict[str, tuple[Plan, int, Rows | None, Rows]] = {
    "the first row of each chunk needs the rank before": (
        plan_of(PAIR, 16, 2, "zigzag"), 0, [(4, 5, 0, 2, None, None)], [(0, 4, 0, 4, 0, 1), (5, 8, 4, 8, -1, 0)],
    ),
    "chunks of rank 1 are neighbours": (
        plan_of(PAIR, 16, 2, "zigzag"), 1, [(0, 1, 0, 2, None, None)], [(1, 4, 0, 4, -1, 0), (4, 8, 3, 8, -1, 0)],
    ),
    "cut at tiles, without the first and the last two": (
        plan_of(SLIDING, 6144, 3), 1, [(0, 256, 0, 459, -203, 0), (1792, 2048, 459, 918, -203, 0)],
        [(256, 1792, 56, 1795, -203, 0)],
    ),
    "two chunks": (
        plan_of(Mask(window=(0, 3)), 4096, 2, "zigzag"), 1, None,
        [(0, 1024, 0, 1027, -3, 0), (1024, 1792, 1024, 1795, -3, 0)],
    ),
    "queries are no whole tiles: from row 768 on there are 255 left": (
        plan_of(Mask(window=(0, 3)), 2046, 2, keys=2048), 0, None, [(0, 640, 2, 645, -3, 0)],
    ),
    "exact without tiles: two rows see before, three after": (
        plan_of(Mask(window=(2, 3)), 96, 3), 1, None, [(2, 29, 0, 32, -5, 0)]
    ),
    "half of the own keys is gathered whole": (
        plan_of(Mask(causal=True, window=(2, 0)), 16, 2, "zigzag"), 0, [(4, 8, 0, 6, -2, 0)], [(0, 4, 0, 4, 0, 2)]
    ),
    "and the other half, with a token to the right": (plan_of(Mask(window=(2, 1)), 16, 2, "zigzag"), 0, None, []),
    "windows that begin before the first key": (
        plan_of(PAIR, 128, 2, LATER, 16), 0, [(56, 58, 0, 2, 0, None)], [(58, 64, 0, 7, -1, 0)],
    ),
    "most own keys are needed beside others: causal": (plan_of(CAUSAL, 32, 2), 1, None, []),
    "documents": (plan_of(Mask(cu_seqlens=(0, 15, 25, 32)), 32, 2), 1, None, []),
    "a document for each rank": (plan_of(Mask(cu_seqlens=(0, 8, 16)), 16, 2), 1, [], [(0, 8, 0, 8, None, None)]),
    "one document of 4 tokens begins on the rank before, the others are not cut": (
        plan_of(Mask(cu_seqlens=(0, 14, 18, 24, 32)), 32, 2), 1, [(0, 2, 0, 4, None, None)],
        [(2, 16, 2, 16, None, None, [0, 6, 14], [0, 6, 14])],
    ),
    "offsets are cut at columns: query 8 sees from key 5, inside the first document": (
        plan_of(Mask(causal=True, window=(3, 0), cu_seqlens=(0, 12, 16)), 16, 2), 1,
        [(0, 8, 0, 11, -3, 0, [0, 4, 8], [0, 7, 11])], [],
    ),
    "a causal zigzag is a launch a run": (
        plan_of(CAUSAL, 64, 4, "zigzag"), 1, [(0, 8, 0, 16, -8, None), (8, 16, 0, 56, -48, None)], []
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PLACE)
def test_rows_that_see_own_keys_only_are_in_place(name: str) -> None:
    plan, rank, items, in_place = IN_PLACE[name]
    gather = gather_program(plan, rank)
    assert [*map(side, gather.in_place)] == in_place
    assert items is None or [*map(side, gather.items)] == items


#: Full items over fetched keys that are side by side become one; items with a band stay separate.
REMOTE: dict[str, tuple[Plan, int, Rows]] = {
    "two chunks of two": (plan_of(CAUSAL, 16, 2, NEXT), 1, [(0, 8, 0, 8, None, None)]),
    "a causal zigzag": (
        plan_of(CAUSAL, 64, 4, "zigzag"), 1, [(0, 8, 0, 8, None, None), (8, 16, 0, 40, None, None)]
    ),
    "a wide window": (plan_of(Mask(window=(None, 12)), 16, 2, OUTER), 1, [(0, 8, 0, 8, None, None)]),
    "a band below": (
        plan_of(Mask(causal=True, window=(12, 0)), 16, 2, NEXT), 1, [(0, 4, 0, 8, None, None), (4, 8, 0, 8, None, 0)]
    ),
    "a band above": (
        plan_of(Mask(window=(None, 12)), 16, 2, NEXT), 0,
        [(0, 4, 0, 4, None, None), (0, 4, 4, 8, 0, None), (4, 8, 0, 8, None, None)],
    ),
    "two documents": (
        plan_of(Mask(chunk_size=8), 16, 2, OUTER), 1, [(0, 4, 0, 4, None, None), (4, 8, 4, 8, None, None)]
    ),
    "the last query does not see the first key": (
        plan_of(Mask(window=(9, None)), 18, 3), 1, [(0, 6, 0, 6, None, 3), (0, 6, 6, 12, None, None)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REMOTE)
def test_full_items_side_by_side_are_one(name: str) -> None:
    plan, rank, expected = REMOTE[name]
    assert [*map(side, gather_program(plan, rank, own=False).items)] == expected


@given(gathers())
def test_a_backward_writes_each_column_once_first(case: tuple[Plan, int, GatherProgram]) -> None:
    *_, gather = case
    written = np.zeros(gather.length, dtype=bool)
    for item, overwritten in reversed(list(zip(gather.items, gather.overwritten, strict=True))):
        new = np.zeros_like(written)
        for part in overwritten:
            new[part] = True
        visible = np.zeros_like(written)
        visible[item.k_slice] = True
        np.testing.assert_array_equal(new, visible & ~written)
        written |= new
    assert written.all()


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ranks_read_from_different_peers_at_a_time(size: int) -> None:
    plan = plan_of(CAUSAL, 16 * size, size, "zigzag")
    order = [
        [fetch.rank for fetch in gather_program(plan, rank).fetches if fetch.rank != rank]
        for rank in range(size)
    ]
    for at_a_time in zip_longest(*order):
        sources = [rank for rank in at_a_time if rank is not None]
        assert len({*sources}) == len(sources)
    full = gather_program(plan_of(Mask(), 16 * size, size), 1)
    assert [fetch.rank for fetch in full.fetches] == [(1 - n) % size for n in range(size)]


def test_memory_grows_with_what_is_seen() -> None:
    def memory(mask: Mask, cp_size: int) -> float:
        return gather_memory(
            plan_of(mask, 64 * cp_size, cp_size), q_width=32, kv_width=16, itemsize=2
        )

    # By hand: of 64 tokens a rank, (64 P + 64) * 16 * 6 bytes over 64 * 16 * 16 + 64 * 32 * 4.
    assert memory(Mask(), 4) == pytest.approx(5 * 96 / 384)
    assert memory(CAUSAL, 8) == pytest.approx(9 * 96 / 384)
    halo = Mask(causal=True, window=(16, 0))
    assert memory(halo, 4) == memory(halo, 64) < memory(Mask(), 2)


def test_what_striped_would_launch_and_fetch() -> None:
    """The page on layouts has these numbers: 2 launches for 8, and 3.5 and 14 times the keys."""
    documents = Mask(causal=True, cu_seqlens=tuple(range(0, 32769, 4096)))
    for mask, most in ((Mask(causal=True, window=(4095, 0)), 8190), (documents, 2048)):
        zigzag, striped = plan_of(mask, 32768, 8, "zigzag"), plan_of(mask, 32768, 8, "striped")
        program = gather_program(zigzag, 0)
        assert len(program.items) + len(program.in_place) == 2
        assert moved_keys(zigzag, like=program).sum(0).max() == most
        seen = [
            [key for x in striped.items(7, n) for key in (x.k_start, x.k_stop)] for n in range(7)
        ]
        assert sum(max(x) - min(x) for x in seen) == 7 * 4096


@given(gathers())
def test_tiles_cost_less_than_a_tile_for_an_item(case: tuple[Plan, int, GatherProgram]) -> None:
    """Tiles add less than a tile per item, and only where a window begins inside of one."""
    plan, rank, tiled = case
    tile, splits = tiled.tile, tiled.splits
    plain = gather_program(plan, rank, own=tiled.own, splits=splits)
    assert plain.length <= tiled.length <= plain.length + (tile - 1) * len(plain.items)
    if tiled.own:
        programs = [gather_program(plan, n, splits=splits, tile=tile) for n in range(plan.cp_size)]
        longest = longest_gather(plan, splits=splits, tile=tile)
        assert longest.length == max(program.length for program in programs)
        assert longest.in_place == any(program.in_place for program in programs)
    if plan.k_layout.run_length % tile:  # positions would not match indices
        assert (tiled.spans, tiled.fetches) == (plain.spans, plain.fetches)
        return
    for item, keys in work_of(plan, rank, tiled):
        assert keys[0] % tile == 0 or item.hi != 0 or item.cu_q is not None


def test_what_no_window_can_hide_is_not_fetched() -> None:
    """Keys do not fill a tile if a document border, and no window, would have to hide them."""
    for causal, tile in product((False, True), (1, 8)):
        plan = plan_of(Mask(causal=causal, cu_seqlens=(0, 13, 32)), 32, 2)
        assert gather_program(plan, 1, tile=tile).spans == ((13, 32),)


def test_it_takes_little_memory() -> None:
    """A million tokens on 256 ranks take less than a byte per token, and no lists of fetches."""
    tokens = 1 << 20
    plan = plan_of(CAUSAL, tokens, 256, "zigzag")
    tracemalloc.start()
    try:
        gather_memory(plan, q_width=1, kv_width=1, itemsize=2)
        assert tracemalloc.get_traced_memory()[1] < tokens
    finally:
        tracemalloc.stop()
