"""Mamba's selective scan by Ring's own kernels, compared with torch's operations."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor

from ring_torch import ContextParallel
from ring_torch.local import LocalRanks
from ring_torch.recurrent import libraries


@pytest.fixture(scope="module")
def two() -> Iterator[LocalRanks]:
    with LocalRanks(2, timeout=120) as ranks:
        yield ranks


def inputs(tokens: int, channels: int, groups: int, numbers: int, rate: float) -> list[Tensor]:
    """Draw u, delta, A to minus a rate, B and C."""
    torch.manual_seed(channels)
    u, delta = torch.randn(2, 2, tokens, channels).unbind(0)
    projections = torch.randn(2, 2, tokens, groups, numbers).unbind(0)
    return [u, delta.abs(), -torch.rand(channels, numbers) * rate, *projections]


@pytest.mark.parametrize(
    ("documents", "tokens", "sizes", "rate"),
    [
        (None, 160, (4, 1, 4), 3),
        ((0, 5, 70, 71, 110), 110, (6, 1, 3), 3),  # chunks of short documents, padding, odd sizes
        (None, 37, (12, 2, 2), 3),
        (None, 160, (4, 1, 4), 300),  # decays of 0 in float32, and what is left of A's gradient
    ],
    ids=["chunks", "documents", "groups", "strong decays"],
)
@on_ranks
def test_its_runs_are_those_of_torch(
    documents: tuple[int, ...] | None, tokens: int, sizes: tuple[int, int, int], rate: float
) -> None:
    cp, whole = ContextParallel(), inputs(tokens, *sizes, rate)
    results = []
    for kernel in ("triton", "eager"):
        own = [
            (x if n == 2 else cp.shard(x, pad=True, fill=torch.nan)).clone().requires_grad_()
            for n, x in enumerate(whole)
        ]
        with patch.object(libraries, "reasons_against_triton", lambda *_: iter(())):
            out = cp.selective_scan(*own, cu_seqlens=documents, seq_len=tokens, kernel=kernel)
        torch.manual_seed(2)
        grads = torch.autograd.grad(out, own, torch.randn(out.shape))
        results.append([out.detach(), *grads])
    for name, actual, expected in zip(("out", "u", "delta", "A", "B", "C"), *results, strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=1e-4, atol=1e-5, msg=f"{name}: {actual} and {expected}"
        )


def test_auto_takes_it_where_it_can() -> None:
    given = inputs(8, 4, 1, 4, 1.0)
    cp = ContextParallel()
    assert "kernel eager: torch's operations" in cp.explain_recurrent("selective_scan", *given)
    with patch.object(libraries, "reasons_against_triton", lambda *_: iter(())):
        assert "kernel triton: Ring's own" in cp.explain_recurrent("selective_scan", *given)


def test_other_layers_are_refused() -> None:
    q, k, v = torch.randn(3, 1, 8, 2, 4).unbind(0)
    with pytest.raises(
        ValueError, match="Ring has a kernel of selective_scan, and none of simple_gla"
    ):
        ContextParallel().simple_gla(q, k, v, kernel="triton")
