"""Errors about lengths say what helps in the call at hand, and print no tensor's values."""

from __future__ import annotations

import numpy as np
import pytest

from ring_core import Layout


def test_a_length_that_is_an_array_is_told_by_its_shape() -> None:
    with pytest.raises(ValueError, match=r"got a ndarray of shape \[2, 512\]; it is the number of"):
        Layout("zigzag", np.zeros((2, 512)), 2)  # type: ignore[arg-type]  # wrong on purpose


def test_padding_is_told_for_cross_attention_too() -> None:
    with pytest.raises(
        ValueError, match=r"pass seq_len=13, in cross attention seq_len=\(queries', keys'\)"
    ):
        Layout("contiguous", 13, 4)
