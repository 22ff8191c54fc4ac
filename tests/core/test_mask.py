"""Masks mean what they say, and malformed ones are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import prefix

from ring_core import Mask


def test_every_part_by_hand() -> None:
    i, j = np.arange(12)[:, None], np.arange(12)
    dense = {
        "causal": j <= i,
        "window": (i - 2 <= j) & (j <= i + 1),
        "left": i - 3 <= j,
        "chunks": i // 5 == j // 5,
        "documents": (i < 4) == (j < 4),
        "predicate": (j < 20) | (j <= i),
    }
    masks = {
        "causal": Mask(causal=True),
        "window": Mask(window=(2, 1)),
        "left": Mask(window=(3, None)),
        "chunks": Mask(chunk_size=5),
        "documents": Mask(cu_seqlens=(0, 4, 12)),
        "predicate": Mask(predicate=prefix),
    }
    for name, mask in masks.items():
        np.testing.assert_array_equal(mask.dense(np.arange(12), np.arange(12)), dense[name])
    everything = Mask(
        causal=True, window=(2, 1), chunk_size=5, cu_seqlens=(0, 4, 12), predicate=prefix
    )
    combined = np.logical_and.reduce([value for name, value in dense.items() if name != "left"])
    np.testing.assert_array_equal(everything.dense(np.arange(12), np.arange(12)), combined)


def test_masks_are_values() -> None:
    one, other = Mask(causal=True, cu_seqlens=(0, 3, 9)), Mask(True, None, None, (0, 3, 9))
    assert one == other
    assert hash(one) == hash(other)
    assert Mask(cu_seqlens=np.array([0, 3])) == Mask(cu_seqlens=(0, 3))  # type: ignore[arg-type]
    assert len({one, other, Mask()}) == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window": 4}, r"window must be a pair .* got 4"),
        ({"window": (1, 2, 3)}, "window must be a pair"),
        ({"window": (-1, 0)}, r"window=\(-1, 0\): each side must be an integer >= 0"),
        ({"window": (1.5, 0)}, "integer >= 0"),
        ({"chunk_size": 0}, "chunk_size must be an integer >= 1 or None, got 0"),
        ({"chunk_size": True}, "chunk_size"),
        ({"cu_seqlens": (0, 6, 4, 10)}, "ascending; entry 2 is 4 after 6"),
        ({"cu_seqlens": (1, 6)}, "start at 0, got 1"),
        ({"cu_seqlens": (0,)}, "at least two"),
        ({"cu_seqlens": (0.0, 4.0)}, "integers"),
        ({"cu_seqlens": 5}, "one row"),
        ({"causal": 1}, "causal must be a bool"),
        ({"predicate": 3}, "callable"),
    ],
)
def test_malformed(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Mask(**fields)
