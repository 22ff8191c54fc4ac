"""Masks show what their rules define; bands are trimmed like their dense masks."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from cases import prefix

from ring_core import Mask
from ring_core.masks.band import UNBOUNDED, Rectangles, count, trim


def test_every_part_by_hand() -> None:
    i, j = np.arange(12)[:, None], np.arange(12)
    parts: dict[str, tuple[Any, Any]] = {
        "causal": (True, j <= i),
        "window": ((2, 1), (i - 2 <= j) & (j <= i + 1)),
        "chunk_size": (5, i // 5 == j // 5),
        "cu_seqlens": ((0, 4, 12), (i < 4) == (j < 4)),
        "predicate": (prefix, (j < 20) | (j <= i)),
    }
    for name, (value, dense) in parts.items():
        np.testing.assert_array_equal(Mask(**{name: value}).dense(j, j), dense)
    np.testing.assert_array_equal(Mask(window=(3, None)).dense(j, j), i - 3 <= j)
    everything = Mask(**{name: value for name, (value, _) in parts.items()})
    combined = np.logical_and.reduce([dense for _, dense in parts.values()])
    np.testing.assert_array_equal(everything.dense(j, j), combined)


def test_masks_are_values() -> None:
    mask, equal_mask = Mask(causal=True, cu_seqlens=(0, 3, 9)), Mask(True, None, None, (0, 3, 9))
    assert mask == equal_mask
    assert hash(mask) == hash(equal_mask) != hash(Mask())
    assert Mask(cu_seqlens=np.array([0, 3])) == Mask(cu_seqlens=(0, 3))  # type: ignore[arg-type]  # an array is taken, too
    assert len({mask, equal_mask, Mask()}) == 2
    assert repr(Mask(window=[np.int64(2), None])) == repr(Mask(window=(2, None)))  # type: ignore[arg-type]  # and a list


def test_described_part_by_part() -> None:
    assert Mask().describe() == "full"
    everything = Mask(
        causal=True, window=(4, None), chunk_size=8, cu_seqlens=(0, 3, 9), predicate=prefix
    )
    message = "causal, window=(4, None), chunk_size=8, 2 documents, predicate=prefix"
    assert everything.describe() == message
    assert Mask(predicate=partial(prefix)).describe() == "predicate=function"


def test_the_largest_and_smallest_sizes() -> None:
    largest = (1 << 40) - 1
    assert Mask(window=(largest, 0), chunk_size=largest).window == (largest, 0)
    assert Mask(window=(0, largest), chunk_size=1).chunk_size == 1
    assert Mask(cu_seqlens=(0, 0)).cu_seqlens == (0, 0)


SIZE = 5


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
        rect = Rectangles(*map(np.asarray, (1, 1 + q_len, 2, 2 + k_len, lo, hi)))
        seen, trimmed = cells(rect), trim(rect)
        assert trimmed.live == seen.any()
        if not seen.any():
            assert not any(trimmed)
            continue
        np.testing.assert_array_equal(cells(trimmed), seen)
        for axis, start, stop in ((1, *trimmed[:2]), (0, *trimmed[2:4])):
            shown = np.flatnonzero(seen.any(axis=axis))
            assert (start, stop - 1) == (shown[0], shown[-1])
        for open_side in ({"lo": np.asarray(-UNBOUNDED)}, {"hi": np.asarray(UNBOUNDED)}):
            opened = trimmed._replace(**open_side)
            assert (opened == trimmed) == bool((cells(opened) == seen).all())


@pytest.mark.parametrize("n", [1 << 22, (1 << 30) - 3])
def test_long_rectangles_are_counted_exactly(n: int) -> None:
    """Counts are int64: they do not overflow, and do not round as floats would."""
    for lo, hi, pairs in ((-UNBOUNDED, UNBOUNDED, n * n), (0, UNBOUNDED, n * (n + 1) // 2)):
        counted = count(n, n, lo, hi)
        assert counted == pairs and counted.dtype == np.int64
