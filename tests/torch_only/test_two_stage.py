"""A gather in two stages, with a kernel that masks causally or not at all.

The kernel returns views of its own tensors, as cuDNN's.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from plain_flash import Returning, flash_of
from torch import Tensor

from ring_torch import ContextParallel, prepare, ring_attention
from ring_torch.accumulate import Accumulator, Joins
from ring_torch.kernels.api import Selection
from ring_torch.strategies import gather

KERNEL = flash_of(Returning(), "causal")
LENGTH, HEADS, DIM = 96, (4, 2, 2), 8


def with_sinks_or_lse(rank: int) -> None:
    """Check that a forward with sinks is rounded once, and that calls with lse save no keys."""
    del rank
    made: list[torch.dtype] = []

    def accumulator(joins: Joins, *arguments: Any) -> Accumulator:
        made.append(joins.dtype)
        return Accumulator(joins, *arguments)

    q, k, v = (torch.randn(1, 32, n, DIM).bfloat16().requires_grad_() for n in HEADS)
    options: dict[str, Any] = {"causal": True, "strategy": "gather", "transport": "p2p"}
    prepare._prepare.cache_clear()
    with (
        patch.object(prepare, "choose", lambda *_: Selection(KERNEL, ())),
        patch.object(gather, "Accumulator", accumulator),
    ):
        for sinks in (None, torch.zeros(HEADS[0])):
            ring_attention(q, k, v, sinks=sinks, **options)
        assert made == [torch.bfloat16, torch.float32]
        for _ in range(2):
            out, lse = ring_attention(q, k, v, return_lse=True, **options)
            assert len(out.grad_fn.saved_tensors) == 10  # inputs, given or not, out and lse
    prepare._prepare.cache_clear()
    out, lse = ring_attention(q, k, v, return_lse=True, **options)
    torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    prepare._prepare.cache_clear()


def test_sinks_and_lse(backend: Any) -> None:
    backend.pool(2).run(with_sinks_or_lse)


def changed_in_place(rank: int) -> None:
    """Check that results of a repeated call can be changed in place, like those of the first."""
    del rank
    q, k, v = (torch.randn(1, 32, n, DIM).requires_grad_() for n in HEADS)
    bias = torch.ones(DIM, requires_grad=True)
    options: dict[str, Any] = {"causal": True, "strategy": "gather", "transport": "p2p"}
    prepare._prepare.cache_clear()
    with patch.object(prepare, "choose", lambda *_: Selection(KERNEL, ())):
        for grad in (True, False):
            for _ in range(2):
                with torch.set_grad_enabled(grad):
                    out, lse = ring_attention(q, k, v, return_lse=True, **options)
                out += bias
                lse += 1
    prepare._prepare.cache_clear()


def test_results_may_be_changed_in_place(backend: Any) -> None:
    backend.pool(2).run(changed_in_place)


def with_odd_gradients(rank: int) -> None:
    """Check gradients of ``out`` at any address, and of one sequence with any batch stride."""
    del rank
    q, k, v = (torch.randn(1, 32, n, DIM).requires_grad_() for n in HEADS)
    dout = torch.randn(1, 32, HEADS[0], DIM)
    options: dict[str, Any] = {"causal": True, "strategy": "gather", "transport": "p2p"}
    prepare._prepare.cache_clear()
    with patch.object(prepare, "choose", lambda *_: Selection(KERNEL, ())):
        grads = [
            torch.autograd.grad(ring_attention(q, k, v, **options), (q, k, v), x)
            for x in (dout, _among(dout, before=0), _among(dout, before=1))
        ]
    prepare._prepare.cache_clear()
    for others in grads[1:]:
        torch.testing.assert_close(others, grads[0])


def _among(x: Tensor, before: int) -> Tensor:
    """Return a copy of a one-sequence tensor in a larger one, with an odd stride of the batch."""
    apart = x.numel() + 1
    strides = (apart, *x.stride()[1:])
    return torch.zeros(2 * apart).as_strided(x.shape, strides, before).copy_(x)


def test_gradients_of_odd_strides(backend: Any) -> None:
    backend.pool(2).run(with_odd_gradients)


def with_infinities(rank: int, layout: Any) -> list[list[tuple[Tensor, Tensor]]]:
    """Return ``(out, lse)`` of the first and repeated calls where some scores are not finite."""
    del rank
    cp = ContextParallel(layout=layout)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, LENGTH, n, DIM, generator=generator) for n in HEADS]
    whole[0][0, 1, :, 0] = torch.inf
    whole[1][0, :2, :, 0] = -1.0  # all scores of row 1 are -inf, and its lse with them
    options: dict[str, Any] = {"causal": True, "strategy": "gather", "transport": "p2p"}
    prepare._prepare.cache_clear()
    with patch.object(prepare, "choose", lambda *_: Selection(KERNEL, ())):
        calls = [
            ring_attention(*map(cp.shard, whole), return_lse=True, layout=layout, **options)
            for _ in range(3)
        ]
    prepare._prepare.cache_clear()
    return [list(zip(calls[0], repeat, strict=True)) for repeat in calls[1:]]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_rows_whose_scores_are_not_finite(layout: str, backend: Any) -> None:
    """Rows with NaN or infinite scores are NaN in every call, whatever the kernel leaves there."""
    ranks = backend.pool(3).run(with_infinities, layout)
    for repeats in ranks:
        for pair in (pair for repeat in repeats for pair in repeat):
            torch.testing.assert_close(*pair, rtol=0, atol=0, equal_nan=True)
    out, lse = ranks[0][0][0][0], ranks[0][0][1][0]
    assert out[:, 1].isnan().all() and lse[:, :, 1].isnan().all()
