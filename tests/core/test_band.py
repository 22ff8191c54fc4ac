"""Bands over rectangles are cut, trimmed and counted like their dense masks."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ring_core.masks.band import UNBOUNDED, Rectangles, clip, count, local_band, trim

SIZE = 5
SIDES = st.integers(-SIZE, SIZE)


@st.composite
def rectangles(draw: st.DrawFn) -> Rectangles:
    """Draw any rectangle in ``SIZE x SIZE`` with any band; it may show nothing."""
    (q_start, q_stop), (k_start, k_stop) = (
        sorted(draw(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)))) for _ in "qk"
    )
    lo, hi = draw(st.just(-UNBOUNDED) | SIDES), draw(st.just(UNBOUNDED) | SIDES)
    return Rectangles(*map(np.asarray, (q_start, q_stop, k_start, k_stop, lo, hi)))


def cells(rect: Rectangles) -> Any:
    """Return the dense mask of a rectangle, ``[SIZE, SIZE]``."""
    i, j = np.arange(SIZE)[:, None], np.arange(SIZE)
    inside = (rect.q_start <= i) & (i < rect.q_stop) & (rect.k_start <= j) & (j < rect.k_stop)
    distance = (i - rect.q_start) - (j - rect.k_start)
    return inside & (rect.lo <= distance) & (distance <= rect.hi)


def test_trimmed() -> None:
    """Trimming gives the smallest box and drops band sides that hide nothing; or all zeros."""
    sides, sizes = range(-3, 4), range(4)
    for q_len, k_len, lo, hi in product(sizes, sizes, (-UNBOUNDED, *sides), (*sides, UNBOUNDED)):
        check_trimmed(Rectangles(*map(np.asarray, (1, 1 + q_len, 2, 2 + k_len, lo, hi))))


def check_trimmed(rect: Rectangles) -> None:
    seen, trimmed = cells(rect), trim(rect)
    assert trimmed.live == seen.any()
    if not seen.any():
        assert not any(trimmed)
        return
    np.testing.assert_array_equal(cells(trimmed), seen)
    for shown, start, stop in ((seen.any(axis=1), *trimmed[:2]), (seen.any(axis=0), *trimmed[2:4])):
        assert (start, stop - 1) == (np.flatnonzero(shown)[0], np.flatnonzero(shown)[-1])
    for open_side in ({"lo": np.asarray(-UNBOUNDED)}, {"hi": np.asarray(UNBOUNDED)}):
        opened = trimmed._replace(**open_side)
        assert (opened == trimmed) == bool((cells(opened) == seen).all())


@given(rectangles(), rectangles())
def test_cut(rect: Rectangles, other: Rectangles) -> None:
    part = clip(rect, *other[:4])
    window = other._replace(lo=np.asarray(-UNBOUNDED), hi=np.asarray(UNBOUNDED))
    np.testing.assert_array_equal(cells(part), cells(rect) & cells(window))
    assert part == trim(part)


@given(rectangles())
def test_counted(rect: Rectangles) -> None:
    q_len, k_len = rect.q_stop - rect.q_start, rect.k_stop - rect.k_start
    assert count(q_len, k_len, rect.lo, rect.hi) == cells(rect).sum()


@pytest.mark.parametrize("n", [1 << 22, (1 << 30) - 3])
def test_long_rectangles_are_counted_exactly(n: int) -> None:
    """Counts are int64: they do not overflow, and do not round as floats would."""
    for lo, hi, pairs in ((-UNBOUNDED, UNBOUNDED, n * n), (0, UNBOUNDED, n * (n + 1) // 2)):
        counted = count(n, n, lo, hi)
        assert counted == pairs and counted.dtype == np.int64


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 5), st.data())
def test_global_rule_as_a_local_band(
    q_start: int, k_start: int, stride: int, data: st.DataObject
) -> None:
    left, right = (data.draw(st.none() | st.integers(0, 60)) for _ in "lr")
    lo, hi = local_band(q_start, k_start, stride, (left, right))
    assert lo.dtype == hi.dtype == np.int64
    i, j = np.arange(SIZE)[:, None], np.arange(SIZE)
    ahead = q_start + stride * i - (k_start + stride * j)
    visible = (left is None or ahead <= left) & np.asarray(right is None or -ahead <= right)
    np.testing.assert_array_equal(
        (lo <= i - j) & (i - j <= hi), np.broadcast_to(visible, (SIZE, SIZE))
    )
