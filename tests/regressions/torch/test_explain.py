"""``explain`` fits a screen."""

from __future__ import annotations

import torch

from ring_torch import ContextParallel

WIDTH, HEIGHT = 80, 24


def test_explain_fits_a_screen() -> None:
    x = torch.zeros(1, 4096, 2, 64)
    lines = ContextParallel().explain(x, x, x, causal=True, window=(512, 0)).splitlines()
    assert sum(-(-len(line) // WIDTH) for line in lines) <= HEIGHT
    for word in ("kernel", "strategy", "transport", "layout=zigzag", "balance"):
        assert any(word in line for line in lines)
