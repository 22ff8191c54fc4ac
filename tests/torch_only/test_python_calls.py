"""What a repeated call costs the host, counted in calls of this project's Python functions.

The host has to be ahead of the GPU.
"""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any

import pytest
import torch

import ring_torch

#: Ranks, strategy, layout: calls of a forward, and of forward and backward.
MOST = {
    (1, "ring", "zigzag"): (119, 225),
    (2, "ring", "zigzag"): (239, 472),
    (2, "gather", "zigzag"): (233, 484),
    (2, "balanced", "contiguous"): (1280, 2602),
    (2, "ulysses", "zigzag"): (258, 501),
}


def counted(rank: int, strategy: str, layout: Any, grad: bool) -> int:
    """The calls of one more call like those before."""
    del rank
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 64, heads, 16).requires_grad_(grad) for heads in (4, 2, 2))
    dout, calls = torch.randn(1, 64, 4, 16), 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and "/ring_" in frame.f_code.co_filename

    def once() -> None:
        out = ring_torch.ring_attention(q, k, v, causal=True, layout=layout, strategy=strategy)
        if grad:
            torch.autograd.grad(out, (q, k, v), dout)

    for _ in range(3):
        once()
    gc.disable()
    sys.setprofile(count)
    once()
    sys.setprofile(None)
    gc.enable()
    return calls


@pytest.mark.parametrize(("size", "strategy", "layout"), MOST)
def test_a_repeated_call(size: int, strategy: str, layout: str, backend: Any) -> None:
    for most, grad in zip(MOST[size, strategy, layout], (False, True), strict=True):
        assert max(backend.pool(size).run(counted, strategy, layout, grad)) <= most
