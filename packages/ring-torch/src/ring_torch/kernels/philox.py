"""Dropout's random numbers in torch: the same words as ``ring_core``'s Philox-4x32-10."""

from __future__ import annotations

import torch
from torch import Tensor

from ring_core import philox

_LOW = 0xFFFFFFFF


def dropout_keep(
    p: float, seed: int, batch: range, heads: int, index: Tensor, position: Tensor
) -> Tensor:
    """Which elements survive: boolean ``[len(batch), heads, len(index), len(position)]``.

    Args:
        p: Probability to drop.
        seed: 64 bits.
        batch: Rows of the batch.
        heads: Counted from 0.
        index: Global indices of the queries.
        position: Global indices of the keys, ascending.
    """
    device = index.device
    groups, group_index = torch.unique_consecutive(position >> 2, return_inverse=True)
    b = torch.arange(batch.start, batch.stop, device=device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=device).view(1, -1, 1, 1)
    words = torch.stack(_words((groups, index.view(-1, 1), h, b), philox.seed_key(seed)), dim=-1)
    return words.flatten(-2)[..., group_index * 4 + (position & 3)] >= philox.dropout_threshold(p)


def _words(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, ...]:
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(philox.ROUNDS):
        high0, low0 = _multiply(c0, philox.MULTIPLIERS[0])
        high1, low1 = _multiply(c2, philox.MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + philox.KEY_STEPS[0]) & _LOW, (k1 + philox.KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product of 32-bit numbers held in int64.

    The product needs 64 bits and int64 has a sign, so the high half comes from two 48-bit products.
    """
    high, low = a * (b >> 16), a * (b & 0xFFFF)
    return (high + (low >> 16)) >> 16, (a * b) & _LOW
