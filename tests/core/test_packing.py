"""Sequences packed into rows of equal work: all are there, none is too long, few steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ring_core import pack_sequences


def work(lengths: Any, hidden_size: int) -> Any:
    return lengths * (lengths + 1) // 2 + 6 * hidden_size * lengths


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 5), st.integers(50, 90)
)
def test_each_sequence_is_in_one_row_that_holds_it(
    lengths: list[int], rings: int, tokens: int
) -> None:
    steps = pack_sequences(lengths, rings=rings, tokens=tokens)
    rows = [row for step in steps for row in step]
    assert sorted(n for row in rows for n in row) == [*range(len(lengths))]
    assert all(len(step) == rings for step in steps)
    assert all(sum(lengths[n] for n in row) <= tokens for row in rows)
    assert all(row == tuple(sorted(row)) for row in rows)
    # Empty rows are of the last step alone, and there are steps enough for all others only.
    assert all(rows[: len(rows) - rings])
    assert len(steps) <= -(-2 * sum(lengths) // (rings * tokens)) + 1


@pytest.mark.parametrize("hidden_size", [1, 64, 4096])
@pytest.mark.parametrize(("rings", "tokens"), [(2, 32768), (8, 32768), (3, 65536)])
def test_rings_have_equally_much_work(hidden_size: int, rings: int, tokens: int) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(900), 0.8, 512).astype(int).clip(1, 4096)
    of_sequence = work(lengths, hidden_size)
    of_ring = np.zeros(rings)
    for step in pack_sequences(
        lengths.tolist(), rings=rings, tokens=tokens, hidden_size=hidden_size
    ):
        load = np.array([of_sequence[[*row]].sum() for row in step])
        assert load.max() <= max(1.03 * load.mean(), of_sequence.max())  # or one has more by itself
        of_ring += load
    assert of_ring.max() <= 1.03 * of_ring.mean()


def test_work_is_quadratic_in_a_sequence_and_linear_in_tokens() -> None:
    lengths = [100, 50, 50, 50, 50]
    assert pack_sequences(lengths, rings=2, tokens=400, hidden_size=1)[0] == ((1, 2, 3, 4), (0,))
    by_tokens = pack_sequences(lengths, rings=2, tokens=400, hidden_size=10**6)[0]
    assert [sum(lengths[n] for n in row) for row in by_tokens] == [150, 150]
