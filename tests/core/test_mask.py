"""Masks show what their rules define, and malformed ones are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from cases import prefix

from ring_core import Layout, Mask
from ring_core.plan import tile_mask
from ring_core.plan.tile_mask import BlockGeometry


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


def test_described_part_by_part() -> None:
    assert Mask().describe() == "full"
    everything = Mask(
        causal=True, window=(4, None), chunk_size=8, cu_seqlens=(0, 3, 9), predicate=prefix
    )
    message = "causal, window=(4, None), chunk_size=8, 2 documents, predicate=prefix"
    assert everything.describe() == message
    assert Mask(predicate=partial(prefix)).describe() == "predicate=function"


def test_boundaries_are_those_of_chunks_and_documents() -> None:
    assert Mask(causal=True).boundaries(0, 9) is None
    chunks = Mask(chunk_size=4).boundaries(-3, 9)
    assert chunks is not None and chunks.tolist() == [-4, 0, 4, 8, 12]
    both = Mask(chunk_size=4, cu_seqlens=(0, 3, 3, 9)).boundaries(0, 9)
    assert both is not None and both.tolist() == [0, 3, 4, 8, 9, 12]
    assert Mask(cu_seqlens=(0, 3)).rule(np.arange(3), np.arange(3)) is True


def test_the_largest_and_smallest_sizes() -> None:
    largest = (1 << 40) - 1
    assert Mask(window=(largest, 0), chunk_size=largest).window == (largest, 0)
    assert Mask(window=(0, largest), chunk_size=1).chunk_size == 1
    assert Mask(cu_seqlens=(0, 0)).cu_seqlens == (0, 0)


def test_parts_are_kept_as_plain_values() -> None:
    mask = Mask(causal=np.True_, window=[np.int64(2), None], chunk_size=np.int64(3))  # type: ignore[arg-type]  # numpy's values are taken, too
    assert (mask.causal, mask.window, mask.chunk_size) == (True, (2, None), 3)
    assert [type(x) for x in (mask.causal, mask.window, mask.chunk_size)] == [bool, tuple, int]


def test_as_many_pairs_as_are_classified(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of classified pairs is allowed; one token more raises and says what to do."""
    monkeypatch.setattr(tile_mask, "MAX_PAIRS", 48 * 50)
    mask, queries = Mask(predicate=lambda q, k: q >= k), Layout("contiguous", 48, 1)
    at_most = BlockGeometry(mask, queries, Layout("contiguous", 50, 1), 2)
    assert at_most.count(0, 0) == 48 * 49 // 2 + 48 * 2
    with pytest.raises(
        ValueError,
        match=r"^a predicate mask over 48 x 51 tokens has 2448 pairs to classify, more than 2400; use "
        "causal, window, chunk_size or cu_seqlens, which need no classification, or a shorter "
        "sequence$",
    ):
        BlockGeometry(mask, queries, Layout("contiguous", 51, 1), 3)
