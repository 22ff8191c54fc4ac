"""Every token lies on exactly one rank, where the layout says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from plans import chunk_layouts

from ring_core import ChunkLayout, Layout


@given(st.data(), st.integers(1, 16), st.integers(1, 20))
def test_a_partition(data: st.DataObject, cp_size: int, units: int) -> None:
    name: Any = data.draw(
        st.sampled_from(["contiguous", "zigzag", "striped"]) | chunk_layouts(cp_size)
    )
    runs = (
        name.chunks_per_rank
        if isinstance(name, ChunkLayout)
        else 1 + (name == "zigzag" and cp_size > 1)
    )
    divisor = runs * cp_size
    layout = Layout(name, divisor * units, cp_size)
    assert layout.divisor == divisor
    whole = np.concatenate([layout.positions(rank) for rank in range(cp_size)])
    np.testing.assert_array_equal(np.sort(whole), np.arange(divisor * units))
    for rank in range(cp_size):
        positions = layout.positions(rank)
        assert positions.size == layout.local_len
        for run in layout.runs(rank):
            part = positions[run.local_start : run.local_start + run.length]
            np.testing.assert_array_equal(
                part, run.global_start + run.stride * np.arange(run.length)
            )


def test_by_hand() -> None:
    assert Layout("contiguous", 8, 2).positions(1).tolist() == [4, 5, 6, 7]
    assert Layout("zigzag", 8, 2).positions(0).tolist() == [0, 1, 6, 7]
    assert Layout("striped", 8, 2).positions(1).tolist() == [1, 3, 5, 7]
    assert Layout(ChunkLayout(((1, 2), (0, 3))), 8, 2).positions(0).tolist() == [2, 3, 4, 5]


def test_refused() -> None:
    with pytest.raises(
        ValueError,
        match="unknown layout 'ring'; known: contiguous, zigzag, striped, or a ChunkLayout",
    ):
        Layout("ring", 8, 2)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match=r"must be an integer < 2\*\*40"):
        Layout("contiguous", 1 << 40, 2)
    with pytest.raises(ValueError, match=r"2999 .* multiple of 16.*pad to 3008"):
        Layout("zigzag", 2999, 8)
    with pytest.raises(ValueError, match="pad to 4"):
        Layout("contiguous", 0, 4)
    of_two = ChunkLayout(((0, 3), (1, 2)))
    with pytest.raises(ValueError, match=r"chunks\(2x2\) has chunks for 2 ranks, and there are 4"):
        Layout(of_two, 16, 4)
    with pytest.raises(ValueError, match=r"multiple of 4, as the chunks\(2x2\) layout.*pad to 8"):
        Layout(of_two, 6, 2)


@pytest.mark.parametrize("rank", [-1, 2])
def test_ranks_it_does_not_have(rank: int) -> None:
    layout = Layout("zigzag", 8, 2)
    for asked in (layout.runs, layout.positions):
        with pytest.raises(ValueError, match=r"^rank must be in 0\.\.1, got"):
            asked(rank)
