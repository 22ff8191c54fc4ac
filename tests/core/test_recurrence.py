"""Runs of documents: which rank holds them, and that folding their maps is the recurrence."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, strategies as st
from plans import chunk_layouts

from ring_core import LAYOUTS, Layout
from ring_core.recurrence import runs_of_documents

PRIME = 10_007  # maps of integers modulo a prime are exact


@st.composite
def sequences(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...] | None]:
    """Draw a layout, with padding or without, and documents, empty ones and single tokens too."""
    size = draw(st.integers(1, 5))
    layout: Any = draw(st.sampled_from(LAYOUTS) | chunk_layouts(size))
    layout = Layout.padded(layout, draw(st.integers(1, 60)), size)
    inner = draw(st.lists(st.integers(0, layout.seq_len), max_size=8))
    offsets = (0, *sorted(inner), layout.seq_len)
    return layout, draw(st.sampled_from([None, offsets]))


def documents_of(layout: Layout, offsets: tuple[int, ...] | None) -> list[range]:
    return [range(*ends) for ends in pairwise(offsets or (0, layout.seq_len))]


@given(sequences(), st.integers(0, 2**32 - 1))
def test_folding_the_maps_of_runs_is_the_recurrence(
    case: tuple[Layout, tuple[int, ...] | None], seed: int
) -> None:
    """A rank that reads the slots it is told, and nothing else, has the recurrence's states."""
    layout, offsets = case
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, PRIME, (2, layout.seq_len)).tolist()
    initial = rng.integers(0, PRIME, len(documents_of(layout, offsets))).tolist()
    entry: dict[int, int] = {}  # the state before each token
    for number, document in enumerate(documents_of(layout, offsets)):
        state = initial[number]
        for token in document:
            entry[token] = state
            state = (a[token] * state + b[token]) % PRIME
    runs = runs_of_documents(layout, offsets)
    assert runs.documents == len(initial)
    slot, slots = runs.slots(runs.continues)
    # What is in no slot must not be read.
    gathered: list[list[tuple[int, int] | None]] = [[None] * slots for _ in range(layout.cp_size)]
    columns = (runs.rank, runs.local, runs.start, runs.length, runs.document)
    for n, (rank, local, start, length, number) in enumerate(np.stack(columns, axis=1).tolist()):
        held = layout.positions(rank)[local : local + length]
        np.testing.assert_array_equal(held, np.arange(start, start + length))
        transition, left = 1, 0 if runs.follows[n] else initial[number]
        for token in range(start, start + length):
            transition, left = transition * a[token] % PRIME, (a[token] * left + b[token]) % PRIME
        if runs.continues[n]:
            assert gathered[rank][slot[n]] is None
            gathered[rank][slot[n]] = (transition, left)
        else:
            assert slot[n] == -1
    for rank in range(layout.cp_size):
        exits: dict[int, int] = {}
        for n in runs.before(rank).tolist():
            carried = gathered[runs.rank[n]][slot[n]]
            assert carried is not None
            transition, left = carried
            exits[n] = (transition * exits[n - 1] + left) % PRIME if runs.follows[n] else left
        own = runs.of_rank(rank)
        assert (runs.rank[own] == rank).all() and (np.diff(runs.local[own]) > 0).all()
        assert runs.length[own].sum() == layout.num_tokens(rank)
        for n in own.tolist():
            state = exits[n - 1] if runs.follows[n] else initial[runs.document[n]]
            assert state == entry[int(runs.start[n])]


def test_a_zigzag_rank_sends_two_maps_however_long_the_sequence() -> None:
    for seq_len in (64, 64_000):
        runs = runs_of_documents(Layout("zigzag", seq_len, 4))
        assert len(runs.rank) == 7  # the last rank's two chunks lie side by side
        assert runs.slots(runs.continues)[1] == 2
