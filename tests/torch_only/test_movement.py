"""Layers that look at neighbours: shifts, halos and relayouts against one process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_core import ChunkLayout, LayoutSpec
from ring_torch import ContextParallel
from ring_torch.local import LocalRanks

T = 48
CHUNKS = {
    2: ChunkLayout(((0, 1, 5), (2, 3, 4))), 4: ChunkLayout(((1, 7), (0, 2), (3, 6), (4, 5))),
}  # fmt: skip
DOCUMENTS = (0, 1, 1, 7, 23, 24, 30, T)


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def pool(request: Any) -> Iterator[LocalRanks]:
    with LocalRanks(request.param) as ranks:
        yield ranks


def layouts(size: int) -> list[LayoutSpec]:
    return ["contiguous", "zigzag", "striped", CHUNKS[size]]


def shifted(x: Tensor, n: int, dim: int, fill: float, offsets: tuple[int, ...] | None) -> Tensor:
    """The definition: ``out[t] = x[t - n]`` inside of documents."""
    rows = x.movedim(dim, 0)
    out = []
    for start, stop in pairwise(offsets or (0, T)):
        for t in range(start, stop):
            there = start <= t - n < stop
            out.append(rows[t - n] if there else torch.full_like(rows[0], fill))
    return torch.stack(out).movedim(0, dim)


def numbers(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _shift(rank: int, size: int, n: int) -> None:
    for layout in layouts(size):
        cp = ContextParallel(layout=layout)
        for dim, shape in ((1, (2, T, 3)), (0, (T,)), (-1, (2, 3, T))):
            for offsets in (None, DOCUMENTS):
                whole, grad = numbers(0, *shape).requires_grad_(), numbers(1, *shape)
                expected = shifted(whole, n, dim, 0.5, offsets)
                (like,) = torch.autograd.grad(expected + 0 * whole, whole, grad)
                x = cp.shard(whole.detach(), dim=dim).requires_grad_()
                out = cp.shift(x, n, dim=dim, fill=0.5, cu_seqlens=offsets)
                (got,) = torch.autograd.grad(out, x, cp.shard(grad, dim=dim))
                assert torch.equal(out, cp.shard(expected.detach(), dim=dim)), (layout, dim)
                assert torch.equal(got, cp.shard(like, dim=dim)), (layout, dim)


@pytest.mark.parametrize("n", [0, 1, -1, -2, 5, 25, -37, 60])
def test_a_shift_is_that_of_the_whole_sequence(n: int, pool: LocalRanks) -> None:
    pool.run(_shift, len(pool), n)
