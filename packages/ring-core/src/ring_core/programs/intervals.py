"""Intervals of positions: their unions, intersections and differences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ring_core.layouts.layout import Run


class Interval(NamedTuple):
    """A half-open interval of integers: ``start`` up to, but not including, ``stop``."""

    start: int
    stop: int

    def within(self, other: Interval) -> Interval:
        """Return the intersection with another interval; of no length if there is none."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))


def union(spans: Iterable[Interval]) -> list[Interval]:
    """Return intervals in order, those that touch or overlap joined into one.

    >>> union([Interval(4, 6), Interval(0, 2), Interval(2, 3)])
    [Interval(start=0, stop=3), Interval(start=4, stop=6)]
    """
    joined: list[Interval] = []
    for span in sorted(spans):
        if joined and span.start <= joined[-1].stop:
            joined[-1] = Interval(joined[-1].start, max(span.stop, joined[-1].stop))
        else:
            joined.append(span)
    return joined


def subtract(span: Interval, others: Sequence[Interval]) -> list[Interval]:
    """Return the parts of a span that lie in none of the others; those must not overlap."""
    inside = [
        part for part in (other.within(span) for other in sorted(others)) if part.start < part.stop
    ]
    edges = [span.start, *(x for part in inside for x in part), span.stop]
    return [Interval(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def ends_of(run: Run) -> tuple[int, int]:
    """Return the first position of a run of contiguous tokens, and the one after its last."""
    return run.global_start, run.global_start + run.length
