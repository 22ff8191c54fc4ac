"""A gather in two stages, with a kernel that masks causally or not at all.

The kernel returns views of its own tensors, as cuDNN's.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from on_ranks import on_ranks, on_three_ranks
from patched import chosen
from plain_flash import Returning, flash_of
from torch import Tensor

from ring_torch import ContextParallel, prepare, ring_attention
from ring_torch.accumulate import Accumulator, Joins
from ring_torch.strategies import gather

KERNEL = flash_of(Returning(), "causal")
LENGTH, HEADS, DIM = 96, (4, 2, 2), 8


OPTIONS: dict[str, Any] = {"causal": True, "strategy": "gather", "transport": "p2p"}


def _qkv(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(1, 32, n, DIM).to(dtype).requires_grad_() for n in HEADS]


@on_ranks
def test_sinks_and_lse() -> None:
    """A forward with sinks is rounded once, and calls with lse save no keys."""
    made: list[torch.dtype] = []

    def accumulator(joins: Joins, *arguments: Any) -> Accumulator:
        made.append(joins.dtype)
        return Accumulator(joins, *arguments)

    qkv = q, k, v = _qkv(torch.bfloat16)
    with chosen(KERNEL), patch.object(gather, "Accumulator", accumulator):
        for sinks in (None, torch.zeros(HEADS[0])):
            ring_attention(q, k, v, sinks=sinks, **OPTIONS)
        assert made == [torch.bfloat16, torch.float32]
        for _ in range(2):
            out, lse = ring_attention(q, k, v, return_lse=True, **OPTIONS)
            assert len(out.grad_fn.saved_tensors) == 10  # inputs, given or not, out and lse
    out, lse = ring_attention(q, k, v, return_lse=True, **OPTIONS)
    torch.autograd.grad(out.sum() + lse.sum(), qkv)
    prepare._prepare.cache_clear()


@on_ranks
def test_results_may_be_changed_in_place() -> None:
    """Results of a repeated call, like those of the first."""
    q, k, v = _qkv()
    bias = torch.ones(DIM, requires_grad=True)
    with chosen(KERNEL):
        for grad in (True, False):
            for _ in range(2):
                with torch.set_grad_enabled(grad):
                    out, lse = ring_attention(q, k, v, return_lse=True, **OPTIONS)
                out += bias
                lse += 1


@on_ranks
def test_gradients_of_odd_strides() -> None:
    """Gradients of ``out`` at any address, and of one sequence with any batch stride."""
    qkv, dout = _qkv(), torch.randn(1, 32, HEADS[0], DIM)
    with chosen(KERNEL):
        first, *others = [
            torch.autograd.grad(ring_attention(*qkv, **OPTIONS), qkv, x)
            for x in (dout, _among(dout, before=0), _among(dout, before=1))
        ]
    for grads in others:
        torch.testing.assert_close(grads, first)


def _among(x: Tensor, before: int) -> Tensor:
    """Return a copy of a one-sequence tensor in a larger one, with an odd stride of the batch."""
    apart = x.numel() + 1
    strides = (apart, *x.stride()[1:])
    return torch.zeros(2 * apart).as_strided(x.shape, strides, before).copy_(x)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@on_three_ranks
def test_rows_whose_scores_are_not_finite(rank: int, layout: Any) -> None:
    """Rows with NaN or infinite scores are NaN in every call, whatever the kernel leaves there."""
    cp = ContextParallel(layout=layout)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, LENGTH, n, DIM, generator=generator) for n in HEADS]
    whole[0][0, 1, :, 0] = torch.inf
    whole[1][0, :2, :, 0] = -1.0  # all scores of row 1 are -inf, and its lse with them
    shards = [cp.shard(x) for x in whole]
    with chosen(KERNEL):
        first, *repeats = [
            ring_attention(*shards, return_lse=True, layout=layout, **OPTIONS) for _ in range(3)
        ]
    for repeat in repeats:
        torch.testing.assert_close(repeat, first, rtol=0, atol=0, equal_nan=True)
    if rank == 0:
        out, lse = first
        assert out[:, 1].isnan().all() and lse[:, :, 1].isnan().all()
