"""Every token lies on exactly one rank, where the layout says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ring_core import Layout


@given(st.sampled_from(["contiguous", "zigzag", "striped"]), st.integers(1, 16), st.integers(1, 20))
def test_a_partition(name: str, cp_size: int, units: int) -> None:
    divisor = 2 * cp_size if name == "zigzag" else cp_size
    layout = Layout(name, divisor * units, cp_size)  # type: ignore[arg-type]
    whole = np.concatenate([layout.positions(rank) for rank in range(cp_size)])
    np.testing.assert_array_equal(np.sort(whole), np.arange(divisor * units))
    for rank in range(cp_size):
        at = layout.positions(rank)
        assert at.size == layout.local_len
        for run in layout.runs(rank):
            part = at[run.local_start : run.local_start + run.length]
            np.testing.assert_array_equal(
                part, run.global_start + run.stride * np.arange(run.length)
            )


def test_by_hand() -> None:
    assert Layout("contiguous", 8, 2).positions(1).tolist() == [4, 5, 6, 7]
    assert Layout("zigzag", 8, 2).positions(0).tolist() == [0, 1, 6, 7]
    assert Layout("striped", 8, 2).positions(1).tolist() == [1, 3, 5, 7]


def test_refused() -> None:
    with pytest.raises(ValueError, match="unknown layout 'ring'; known: contiguous"):
        Layout("ring", 8, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"2999 .* multiple of 16.*pad to 3008"):
        Layout("zigzag", 2999, 8)
    with pytest.raises(ValueError, match="pad to 4"):
        Layout("contiguous", 0, 4)
