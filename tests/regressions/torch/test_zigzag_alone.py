"""Zigzag over one rank takes a sequence of any length, unchanged."""

from __future__ import annotations

import numpy as np
import torch

from ring_core import reference
from ring_torch import ContextParallel


def test_an_odd_length() -> None:
    cp = ContextParallel()
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 7, 2, 4)
    out = cp.unshard(cp.attention(*map(cp.shard, (q, k, v)), causal=True))
    assert cp.positions(7).tolist() == list(range(7))
    np.testing.assert_allclose(out, reference.attention(q, k, v, causal=True)[0], atol=2e-6)
