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


def _halo(rank: int, size: int, left: int, right: int) -> None:
    for layout in layouts(size):
        if layout == "striped":
            continue
        cp = ContextParallel(layout=layout)
        runs = cp.layout(T).num_runs
        for dim, shape in ((1, (2, T, 3)), (0, (T,)), (-1, (2, 3, T))):
            whole, at = numbers(0, *shape), dim % len(shape)
            x = cp.shard(whole, dim=dim).requires_grad_()
            rows, positions, documents = cp.halo(x, left, right, dim=dim, cu_seqlens=DOCUMENTS)
            width = left + T // size // runs + right
            batch = 1 if at == 0 else shape[0]
            assert positions.shape == documents.shape == (batch * runs, width)
            assert rows.shape == ((runs, width) if at == 0 else (batch * runs, *shape[1:at], width, *shape[at + 1 :]))
            # Every token is that of its position, and what is outside is zero.
            tokens = torch.cat([whole.movedim(at, -1), torch.zeros_like(whole.movedim(at, -1)[..., :1])], -1)
            for row, places in enumerate(positions):
                like = tokens[places] if at == 0 else tokens[row // runs][..., places]
                got = rows[row] if at == 0 else rows[row].movedim(at - 1, -1)
                assert torch.equal(got, like), (layout, dim, row)
            inside = positions >= 0
            assert torch.equal(inside, documents >= 0)
            ends = torch.tensor(DOCUMENTS).unique()
            assert torch.equal(torch.bucketize(positions[inside], ends, right=True) - 1, documents[inside])
            # Own tokens come back by join, from the middle of each row.
            middle = rows.narrow(1 if at == 0 else at, left, width - left - right)
            assert torch.equal(cp.join(middle, dim=dim), x)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (3, 0), (1, 2), (20, 30), (0, 70)])
def test_a_halo_holds_the_tokens_that_it_says(left: int, right: int, pool: LocalRanks) -> None:
    pool.run(_halo, len(pool), left, right)


def _relayout(rank: int, size: int) -> None:
    for layout in layouts(size):
        for to in layouts(size):
            cp, other = ContextParallel(layout=layout), ContextParallel(layout=to)
            for dim, shape in ((1, (2, T, 3)), (0, (T,)), (-1, (2, 3, T))):
                whole, grad = numbers(0, *shape), numbers(1, *shape)
                x = cp.shard(whole, dim=dim).requires_grad_()
                out = cp.relayout(x, to=other if dim else to, dim=dim)
                (got,) = torch.autograd.grad(out, x, other.shard(grad, dim=dim))
                assert torch.equal(out, other.shard(whole, dim=dim))
                assert torch.equal(got, cp.shard(grad, dim=dim))


def test_a_relayout_gives_the_tokens_of_the_other_layout(pool: LocalRanks) -> None:
    pool.run(_relayout, len(pool))
