"""Mamba's selective scan in Triton: each program computes one chunk of some channels.

A chunk's states are held by its program alone: what is written is the map of each chunk, and later
the outputs, of the states before all chunks. The backward computes the states again. Sums over
channels are made by few programs each, and added in one order: results do not change from run to
run.
"""

# Triton's decorator, and the arguments of kernels, have no types in Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_torch.recurrent.kernels import Parts
from ring_torch.recurrent.runs import EagerRuns, Starts

_NUMBERS = 4096  # of a program's states: tokens x channels x N
_PARTS = 8  # programs that share the channels of a group, in the backward of B and C


@triton.jit
def _compose(first_a, first_b, late_a, late_b):
    return first_a * late_a, late_a * first_b + late_b


@triton.jit
def _indices(D, G, N, C: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr):
    """Return where a program's tokens, keys and states are: a chunk, some channels of a group."""
    r, t, s = tl.program_id(0).to(tl.int64), tl.arange(0, C), tl.arange(0, BN)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    group = tl.program_id(1) * BD // (D // G)
    rows = (r * C + t)[:, None] * D + d[None, :]
    keys = ((r * C + t)[:, None] * G + group) * N + s[None, :]
    cells = d[:, None] * N + s[None, :]
    is_key, is_cell = (t[:, None] >= 0) & (s[None, :] < N), (d[:, None] >= 0) & (s[None, :] < N)
    return rows, keys, is_key, cells, is_cell, r * D * N + cells


@triton.jit
def _loaded(u, delta, rates, key, rows, cells, is_cell):
    """Return steps, inputs and rates of a chunk, its decays, and what its tokens write."""
    step, x = tl.load(delta + rows), tl.load(u + rows)
    rate = tl.load(rates + cells, mask=is_cell, other=0.0)
    a = tl.exp(step[:, :, None] * rate[None, :, :])
    return step, x, rate, a, (step * x)[:, :, None] * key[:, None, :]


@triton.jit
def _maps(
    u, delta, b, rates, transition, state, D, G, N, C: tl.constexpr, BD: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Write the map of a chunk: what multiplies the state before, and what is left of zeros."""
    rows, keys, is_key, cells, is_cell, of_chunk = _indices(D, G, N, C, BD, BN)
    key = tl.load(b + keys, mask=is_key, other=0.0)
    step, _, rate, a, w = _loaded(u, delta, rates, key, rows, cells, is_cell)
    _, h = tl.associative_scan((a, w), 0, _compose)
    left = tl.sum(tl.where((tl.arange(0, C) == C - 1)[:, None, None], h, 0.0), 0)
    tl.store(state + of_chunk, left, mask=is_cell)
    total = tl.sum(step, 0)[:, None] * rate
    tl.store(transition + of_chunk, tl.exp(total), mask=is_cell)


@triton.jit
def _outputs(
    u, delta, b, c, rates, before, out, out_grad, D, G, N, C: tl.constexpr, BD: tl.constexpr,
    BN: tl.constexpr, IS_GRAD: tl.constexpr,
):  # fmt: skip
    """Write a chunk's outputs of the state before it; or of their gradient that of that state."""
    rows, keys, is_key, cells, is_cell, of_chunk = _indices(D, G, N, C, BD, BN)
    key = tl.load(b + keys, mask=is_key, other=0.0)
    query = tl.load(c + keys, mask=is_key, other=0.0)
    _, _, _, a, w = _loaded(u, delta, rates, key, rows, cells, is_cell)
    since, h = tl.associative_scan((a, w), 0, _compose)
    if IS_GRAD:
        dy = tl.load(out_grad + rows)
        grad = tl.sum(since * query[:, None, :] * dy[:, :, None], 0)
        tl.store(before + of_chunk, grad, mask=is_cell)
    else:
        start = tl.load(before + of_chunk, mask=is_cell, other=0.0)
        h += since * start[None, :, :]
        tl.store(out + rows, tl.sum(h * query[:, None, :], 2))


@triton.jit
def _gradients(
    u, delta, b, c, rates, before, behind, out_grad, du, ddelta, db, dc, drates, D, G, N, ROWS,
    BLOCKS, C: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a chunk's inputs; those of B and C of this program's channels."""
    r, t, s = tl.program_id(0).to(tl.int64), tl.arange(0, C), tl.arange(0, BN)
    group, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    keys, is_key = (
        ((r * C + t)[:, None] * G + group) * N + s[None, :],
        (t[:, None] >= 0) & (s[None, :] < N),
    )
    key, query = (
        tl.load(b + keys, mask=is_key, other=0.0),
        tl.load(c + keys, mask=is_key, other=0.0),
    )
    key_grad, query_grad = tl.zeros([C, BN], tl.float32), tl.zeros([C, BN], tl.float32)
    for block in range(part, BLOCKS, PARTS):
        d = group * (D // G) + block * BD + tl.arange(0, BD)
        rows = (r * C + t)[:, None] * D + d[None, :]
        dy = tl.load(out_grad + rows)
        later = tl.load(delta + rows + D, mask=(t[:, None] < C - 1) & (d[None, :] >= 0), other=0.0)
        cells, is_cell = d[:, None] * N + s[None, :], (d[:, None] >= 0) & (s[None, :] < N)
        start = tl.load(before + r * D * N + cells, mask=is_cell, other=0.0)
        end = tl.load(behind + r * D * N + cells, mask=is_cell, other=0.0)
        # The states behind all tokens, again ...
        step, x, rate, a, w = _loaded(u, delta, rates, key, rows, cells, is_cell)
        since, h = tl.associative_scan((a, w), 0, _compose)
        h += since * start[None, :, :]
        # ... and their gradients, from the last on, each through the decay of the next token.
        next_a = tl.exp(later[:, :, None] * rate[None, :, :])
        own = query[:, None, :] * dy[:, :, None]
        own += tl.where((t == C - 1)[:, None, None], end[None, :, :], 0.0)
        _, g = tl.associative_scan((next_a, own), 0, _compose, reverse=True)
        kept = h - w  # what a token keeps of the state before it
        tl.store(du + rows, tl.sum(g * key[:, None, :], 2) * step)
        step_grad = tl.sum(g * kept * rate[None, :, :], 2) + tl.sum(g * key[:, None, :], 2) * x
        tl.store(ddelta + rows, step_grad)
        rate_grad = tl.sum(g * kept * step[:, :, None], 0)
        tl.store(drates + r * D * N + cells, rate_grad, mask=is_cell)
        key_grad += tl.sum(g * (step * x)[:, :, None], 1)
        query_grad += tl.sum(h * dy[:, :, None], 1)
    # The last of a sum's parts are zeros where there are fewer blocks than parts.
    parts = part.to(tl.int64) * ROWS * C * G * N
    tl.store(db + parts + keys, key_grad, mask=is_key)
    tl.store(dc + parts + keys, query_grad, mask=is_key)


class ScanRuns(EagerRuns):
    """Runs of the selective scan, whose chunks are computed by the kernels above."""

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The inputs in chunks, contiguous: u, delta, B, C and A."""
        return [x.contiguous() for x in self._split(*self.inputs)]

    @cached_property
    def parts(self) -> Parts:
        """The map of each chunk; outputs are computed of the inputs."""
        u, delta, b, _, rates = self.tensors
        transition, state = (u.new_empty(*u.shape[:2], *rates.shape) for _ in range(2))
        _maps[self._grid](u, delta, b, rates, transition, state, *self._sizes, **self._blocks)
        return Parts(transition, state, u, u)

    def outputs(self, starts: Starts) -> Tensor:
        """Return the outputs of all chunks, each from its own state."""
        self._leave_all(starts)
        out = torch.empty_like(self.tensors[0])
        self._read_chunks(self.before, out, out, is_grad=False)
        return self._joined(out, self.inputs[0])

    def entry_grads(self, starts: Starts, out_grad: Tensor, runs: Sequence[int]) -> list[Tensor]:
        """Return the gradients from the runs' own outputs."""
        self._leave_all(starts)
        self.out_grad = self.chunks.split(out_grad, 0).to(self.dtype).contiguous()
        self.grads = torch.empty_like(self.before)
        self._read_chunks(self.grads, self.out_grad, self.out_grad, is_grad=True)
        return [self._grad_before(run, None, None) for run in runs]

    def input_grads(self, exits: Starts) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return all gradients, through the states of all chunks."""
        behind = torch.empty_like(self.before)
        entries = [self._grad_before(run, grad, behind) for run, grad in enumerate(exits)]
        u, delta, b, c, rates = self.tensors
        du, ddelta = torch.empty_like(u), torch.empty_like(delta)
        db, dc = (b.new_empty(_PARTS, *b.shape) for _ in range(2))
        drates = torch.empty_like(behind)
        channels, groups, _ = self._sizes
        count = u.shape[0] * u.shape[1]
        _gradients[count, groups * _PARTS](
            u, delta, b, c, rates, self.before, behind, self.out_grad, du, ddelta, db, dc, drates,
            *self._sizes, count, channels // groups // self._blocks["BD"], **self._blocks,
            PARTS=_PARTS, num_warps=8,
        )  # fmt: skip
        rows = zip((du, ddelta, db.sum(0), dc.sum(0)), self.inputs, strict=False)
        return entries, (
            *(self._joined(x, like) for x, like in rows),
            drates.sum((0, 1)).to(self.inputs[4].dtype),
        )

    def _leave_all(self, starts: Starts) -> None:
        """Write the states before all chunks."""
        for run, start in enumerate(starts):
            if run not in self.known:
                self.leave(run, start)

    def _read_chunks(self, before: Tensor, out: Tensor, out_grad: Tensor, *, is_grad: bool) -> None:
        """Compute outputs of the states before chunks, or gradients of these of the outputs'."""
        _outputs[self._grid](
            *self.tensors, before, out, out_grad, *self._sizes, **self._blocks, IS_GRAD=is_grad
        )

    def _joined(self, x: Tensor, like: Tensor) -> Tensor:
        """Return chunks as this rank's rows."""
        return self.chunks.join(x, like.shape[1]).to(like.dtype)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Channels, groups and numbers of a state."""
        rates, b = self.tensors[4], self.tensors[2]
        return rates.shape[0], b.shape[3], rates.shape[1]

    @cached_property
    def _blocks(self) -> dict[str, int]:
        """Sizes of a program's part: all tokens of a chunk, some channels of one group."""
        channels, groups, numbers = self._sizes
        tokens, padded = self.chunks.size, triton.next_power_of_2(numbers)
        most = max(1, _NUMBERS // (tokens * padded))
        of_group = channels // groups
        # The largest power of 2 that divides a group's channels.
        return {"C": tokens, "BD": min(most, of_group & -of_group), "BN": padded}

    @property
    def _grid(self) -> tuple[int, int]:
        """Return the grid: a program for each chunk, row and block of channels."""
        n, rows = self.tensors[0].shape[:2]
        return n * rows, self._sizes[0] // self._blocks["BD"]
