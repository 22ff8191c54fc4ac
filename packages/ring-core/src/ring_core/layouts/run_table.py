"""Runs of evenly spaced positions as arrays, and the intersection of two tables of runs.

Plans of movement ask with it which rows of which rank hold the positions that another rank wants.
"""

from __future__ import annotations

from collections.abc import Iterator
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

    def of_rank(self, rank: int) -> RunTable:
        """Return the runs of one rank."""
        return self.take(self.rank == rank)

    def positions(self) -> Ints:
        """Return the position of each row, run by run."""
        return np.repeat(self.start, self.length) + self.stride * counts_up(self.length)

    def take(self, index: Ints | np.ndarray[tuple[int], np.dtype[np.bool_]]) -> RunTable:
        """Return some of the runs."""
        rank, local, length, start = (x[index] for x in self[:4])
        return RunTable(rank, local, length, start, self.stride)


class RowCopy(NamedTuple):
    """Copies of evenly spaced rows, as slices that are read and slices that are written.

    Attributes:
        source: First row that each slice reads, int64 ``[slices]``.
        target: First row that it writes, likewise.
        length: Number of its rows, likewise; at least 1.
        source_step: Distance of the rows that are read.
        target_step: Distance of the rows that are written.
    """

    source: Ints
    target: Ints
    length: Ints
    source_step: int
    target_step: int

    @property
    def rows(self) -> int:
        """Number of rows that are copied."""
        return int(self.length.sum())

    def reversed(self) -> RowCopy:
        """Return the copies that go the other way."""
        return RowCopy(self.target, self.source, self.length, self.target_step, self.source_step)

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """Yield the slice that is read and the slice that is written, pair by pair."""
        starts = zip(*(x.tolist() for x in self[:3]), strict=True)
        for source, target, length in starts:
            yield (
                slice(source, source + self.source_step * (length - 1) + 1, self.source_step),
                slice(target, target + self.target_step * (length - 1) + 1, self.target_step),
            )

    def indices(self) -> tuple[Ints, Ints]:
        """Return the rows that are read and the rows that are written, int64 ``[rows]`` each."""
        inside = counts_up(self.length)
        source, target = (np.repeat(x, self.length) for x in self[:2])
        return source + self.source_step * inside, target + self.target_step * inside


class Overlap(NamedTuple):
    """Positions that runs ``a`` and runs ``b`` share, a slice for each pair that shares any.

    Attributes:
        a, b: The runs of each slice, int64 ``[slices]``.
        start: Its first position.
        copies: Its rows, from those of run ``a`` to those of run ``b``.
    """

    a: Ints
    b: Ints
    start: Ints
    copies: RowCopy


def overlap_of(a: RunTable, b: RunTable) -> Overlap:
    """Intersect evenly spaced runs, in any order.

    No run of ``b`` may lie within another: by ascending starts their ends must ascend, too.
    """
    # Which pairs overlap: of the runs b, in the order of their starts, one range for each run a.
    order = np.argsort(b.start, kind="stable")
    first = np.searchsorted(b.last[order], a.start, side="left")
    counts = np.maximum(np.searchsorted(b.start[order], a.last, side="right") - first, 0)
    i = np.repeat(np.arange(len(counts)), counts)
    j = order[np.repeat(first, counts) + counts_up(counts)]
    # Shared positions are those that both spacings hit, from the later start to the earlier end.
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
    local_a, local_b = (
        runs.local[n] + (start - runs.start[n]) // runs.stride for runs, n in ((a, i), (b, j))
    )
    copies = RowCopy(local_a, local_b, length, step // a.stride, step // b.stride)
    return Overlap(i, j, start, copies)


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
    """Return the offset of each slice in the concatenation of all of them."""
    return np.cumsum(length) - length


def counts_up(counts: Ints) -> Ints:
    """Return ``0, 1, ..., count - 1`` for each count, one behind the other."""
    return np.arange(counts.sum(), dtype=np.int64) - np.repeat(starts_of(counts), counts)
