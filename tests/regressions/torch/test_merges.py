"""Merged partial results with non-finite scores are NaN, as in the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ring_core import merge
from ring_torch.accumulate import merge_in_torch
from ring_torch.records import AttentionState

LSE = (-np.inf, -1e5, 0.0, np.inf, np.nan)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("new", LSE)
@pytest.mark.parametrize("old", LSE)
def test_a_merge_is_that_of_the_specification(old: float, new: float) -> None:
    outs = np.full((1, 1, 1, 2), 3.0), np.full((1, 1, 1, 2), 5.0)  # [B, n, H, D] and [B, H, n, D]
    lses = np.full((1, 1, 1), old), np.full((1, 1, 1), new)
    expected = merge(outs[0], lses[0], outs[1], lses[1])
    state = AttentionState(*(torch.tensor(x) for x in (outs[0], lses[0])))
    if np.isneginf(old):  # the identity of merging
        state.out.zero_()
    merge_in_torch(state, *(torch.tensor(x) for x in (outs[1], lses[1])))
    np.testing.assert_allclose(state.out.numpy(), expected[0], rtol=1e-9)
    assert np.isnan(expected[0]).all() == (not np.maximum(old, new) < np.inf)
