"""What a repeated call costs the host, counted in calls of this project's Python functions.

The host has to be ahead of the GPU.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import ring_torch
from ring_core import StrategyConfig

HYBRID_RING = StrategyConfig("hybrid", ulysses_size=2)
HYBRID_GATHER = StrategyConfig("hybrid", ulysses_size=2, outer="gather")
#: Ranks, strategy, layout: the most calls, and files, of a repeated forward, and of a backward.
MOST: dict[tuple[int, str | StrategyConfig, str], tuple[tuple[int, int], tuple[int, int]]] = {
    (1, "ring", "zigzag"): ((33, 10), (37, 10)),
    (4, "ring", "zigzag"): ((84, 11), (107, 10)),
    (4, "gather", "zigzag"): ((75, 13), (107, 12)),
    (4, "balanced", "contiguous"): ((107, 13), (119, 11)),
    (4, "ulysses", "zigzag"): ((71, 13), (77, 12)),
    (4, HYBRID_RING, "zigzag"): ((91, 13), (94, 12)),
    (4, HYBRID_GATHER, "zigzag"): ((98, 13), (107, 13)),
}


def counted(rank: int, strategy: str | StrategyConfig, layout: Any) -> list[tuple[int, int]]:
    """Return the calls and files of one more forward like those before, and of its backward."""
    del rank
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 64, heads, 16).requires_grad_() for heads in (4, 2, 2))
    dout, files = torch.randn(1, 64, 4, 16), Counter[str]()

    def count(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and "/ring_" in name:
            files[name] += 1

    def watched(what: Callable[[], Any]) -> Any:
        files.clear()
        gc.disable()
        sys.setprofile(count)
        result = what()
        sys.setprofile(None)
        gc.enable()
        counts.append((files.total(), len(files)))
        return result

    def forward() -> torch.Tensor:
        return ring_torch.ring_attention(q, k, v, causal=True, layout=layout, strategy=strategy)

    for _ in range(3):
        torch.autograd.grad(forward(), (q, k, v), dout)
    counts: list[tuple[int, int]] = []
    out = watched(forward)
    watched(lambda: torch.autograd.grad(out, (q, k, v), dout))
    return counts


@pytest.mark.parametrize(("size", "strategy", "layout"), MOST)
def test_a_repeated_call(
    size: int, strategy: str | StrategyConfig, layout: str, backend: Any
) -> None:
    for counts in backend.pool(size).run(counted, strategy, layout):
        for most, (calls, files) in zip(MOST[size, strategy, layout], counts, strict=True):
            assert calls <= most[0] and files <= most[1], counts
