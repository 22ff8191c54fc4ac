"""Runs of evenly spaced positions as arrays, and the intersection of two tables of runs.

Plans of movement ask with it which rows of which rank hold the positions that another rank wants.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import numpy as np

from ring_core.base.arguments import Ints
from ring_core.layouts.layout import Layout


class RunTable(NamedTuple):
    """Runs of all ranks, as arrays ``[runs]``: :class:`ring_core.Run` by columns.

    Local row ``local + i`` of a rank holds, or wants, position ``start + stride * i``.
    """

    rank: Ints
    local: Ints
    length: Ints
    start: Ints
    stride: int

    @property
    def last(self) -> Ints:
        """Last position of each run."""
        return self.start + self.stride * (self.length - 1)

    def of(self, rank: int) -> RunTable:
        """Return the runs of one rank."""
        return self.take(self.rank == rank)

    def positions(self) -> Ints:
        """Return the position of each row, run by run."""
        return np.repeat(self.start, self.length) + self.stride * counts_up(self.length)

    def take(self, index: Ints | np.ndarray[tuple[int], np.dtype[np.bool_]]) -> RunTable:
        """Return some of the runs."""
        rank, local, length, start = (x[index] for x in self[:4])
        return RunTable(rank, local, length, start, self.stride)


class Overlap(NamedTuple):
    """Positions that runs ``a`` and runs ``b`` share, a slice for each pair that shares any.

    Attributes:
        a, b: The runs of each slice, int64 ``[slices]``.
        local_a, local_b: Local rows of its first position.
        length: Number of its positions.
        start: Its first position.
        step_a, step_b: Distances of its rows.
    """

    a: Ints
    b: Ints
    local_a: Ints
    local_b: Ints
    length: Ints
    start: Ints
    step_a: int
    step_b: int


def overlap_of(a: RunTable, b: RunTable) -> Overlap:
    """Intersect evenly spaced runs; if ``b`` are sorted by their starts, their ends ascend, too."""
    # Which pairs overlap: of the runs b, in the order of their starts, one range for each run a.
    order = np.argsort(b.start, kind="stable")
    first = np.searchsorted(b.last[order], a.start, side="left")
    counts = np.maximum(np.searchsorted(b.start[order], a.last, side="right") - first, 0)
    i = np.repeat(np.arange(len(counts)), counts)
    j = order[np.repeat(first, counts) + counts_up(counts)]
    # Of which positions: those that both spacings hit, from the later start to the earlier end.
    (a_start, b_start), divisor = (a.start[i], b.start[j]), gcd(a.stride, b.stride)
    step = a.stride * b.stride // divisor
    period = b.stride // divisor
    distance = b_start - a_start
    skipped = distance // divisor * pow(a.stride // divisor, -1, period) % period
    start = a_start + a.stride * skipped
    start += -((start - np.maximum(a_start, b_start)) // step) * step
    length = (np.minimum(a.last[i], b.last[j]) - start) // step + 1
    hit = (distance % divisor == 0) & (length > 0)
    i, j, start, length = i[hit], j[hit], start[hit], length[hit]
    return Overlap(
        i, j, a.local[i] + (start - a.start[i]) // a.stride,
        b.local[j] + (start - b.start[j]) // b.stride,
        length, start, step // a.stride, step // b.stride,
    )  # fmt: skip


def runs_of(layout: Layout) -> RunTable:
    """Return the runs of all ranks of a layout."""
    ranks, size = np.arange(layout.cp_size, dtype=np.int64), layout.num_runs
    local = np.tile(np.asarray(layout.run_starts, dtype=np.int64), layout.cp_size)
    start = layout.run_positions(ranks).reshape(-1)
    length = np.full_like(local, layout.run_length)
    return RunTable(np.repeat(ranks, size), local, length, start, layout.stride)


def ranges_of(start: Ints, stop: Ints) -> RunTable:
    """Return ranges ``[start, stop)`` as runs of rank 0 and row 0, without the empty ones."""
    start, length = start[stop > start], (stop - start)[stop > start]
    return RunTable(np.zeros_like(start), np.zeros_like(start), length, start, 1)


def starts_of(length: Ints) -> Ints:
    """Return where each of some slices begins if they lie one behind the other."""
    return np.cumsum(length) - length


def counts_up(counts: Ints) -> Ints:
    """Return ``0, 1, ..., count - 1`` for each count, one behind the other."""
    return np.arange(counts.sum(), dtype=np.int64) - np.repeat(starts_of(counts), counts)
