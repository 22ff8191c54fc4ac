"""Repeated calls on GPUs reuse prepared launches, also for tensors of other strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ring_torch

#: Query and K/V heads: grouped ones take FlashAttention-4's split backward, others do not.
HEADS = {"grouped": (8, 2), "single": (4, 4)}


def _repeats(rank: int, heads: tuple[int, int]) -> None:
    """Compare later calls with the first, while the memory orders of k and v change."""
    torch.manual_seed(rank)
    shapes = [(1, 1024, n, 128) for n in (heads[0], heads[1], heads[1], heads[0])]
    numbers = [torch.randn(x, device="cuda", dtype=torch.bfloat16) for x in shapes]
    results = []
    for turn in range(5):
        q, k, v, dout = (x.clone() for x in numbers)
        if turn >= 2:  # the tokens of a head are contiguous
            k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = ring_torch.ring_attention(q, k, v, causal=True, layout="zigzag")
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    for again in results[1:]:
        for x, first in zip(again, results[0], strict=True):
            torch.testing.assert_close(x, first, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("heads", HEADS)
def test_key_heads_may_lie_apart_in_later_calls(heads: str, backend: Any) -> None:
    backend.pool(2).run(_repeats, HEADS[heads])
