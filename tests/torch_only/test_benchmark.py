"""What the benchmark on GPUs compares with: a pass without its communication."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ring_torch.local import LocalRanks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def errors(rank: int) -> list[tuple[bool, float]]:
    """Of the gradients of q and k, against those with communication: without, and after that."""
    sys.path.insert(0, str(BENCHMARKS))
    from gpu_methods import Mask, method

    torch.manual_seed(rank)
    q, k, v = (torch.randn(1, 64, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    ways = [method(f"zigzag/eager/gather{end}", Mask(), 128) for end in ("", "/alone", "")]
    found = []
    for way in ways:
        with way.around():
            found.append(
                torch.cat(
                    [x.flatten() for x in torch.autograd.grad(way.attend(q, k, v).sum(), (q, k))]
                )
            )
    right, *others = found
    return [(bool(x.isfinite().all()), float((x - right).abs().max())) for x in others]


def test_alone_does_all_but_communicate() -> None:
    with LocalRanks(2) as ranks:
        for without, after in ranks.run(errors):
            assert without[0] and without[1] > 0.01
            assert after == (True, 0.0)
