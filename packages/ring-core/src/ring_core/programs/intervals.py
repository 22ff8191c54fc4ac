"""Neighbouring whole numbers: positions, columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Span(NamedTuple):
    """Neighbours: whole numbers from ``start`` up to, but not including, ``stop``."""

    start: int
    stop: int

    def within(self, other: Span) -> Span:
        """The part of it inside another; of no length if there is none."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))


def union(spans: Iterable[Span]) -> list[Span]:
    """Spans in order, those that touch or overlap as one."""
    union: list[Span] = []
    for span in sorted(spans):
        if union and span.start <= union[-1].stop:
            union[-1] = Span(union[-1].start, max(span.stop, union[-1].stop))
        else:
            union.append(span)
    return union
