"""Neighbouring whole numbers: positions, columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Interval(NamedTuple):
    """Neighbours: whole numbers from ``start`` up to, but not including, ``stop``."""

    start: int
    stop: int

    def within(self, other: Interval) -> Interval:
        """The part of it inside another; of no length if there is none."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))


def union(spans: Iterable[Interval]) -> list[Interval]:
    """Spans in order, those that touch or overlap as one."""
    union: list[Interval] = []
    for span in sorted(spans):
        if union and span.start <= union[-1].stop:
            union[-1] = Interval(union[-1].start, max(span.stop, union[-1].stop))
        else:
            union.append(span)
    return union
