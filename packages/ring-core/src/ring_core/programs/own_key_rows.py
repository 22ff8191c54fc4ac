"""Which rows of gathered work see their own rank's keys only: these need no buffer and no wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ring_core.base.arguments import TILE, Ints
from ring_core.plan.items import WorkItem
from ring_core.plan.plan import Plan


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


class OwnKeySpan(NamedTuple):
    """Own keys that are neighbours in the sequence and in memory."""

    start: int  # position
    stop: int
    local: int  # local index of the first


def split_own_key_rows(
    plan: Plan, rank: int, items: Sequence[WorkItem]
) -> tuple[list[WorkItem], list[WorkItem]]:
    """Items over positions without the rows that see own keys only; and these, over local keys.

    Only where that leaves most of the own keys to them alone: else all stay as they are.
    """
    spans = _own_key_spans(plan, rank)
    tile = TILE if plan.k_layout.run_length % TILE == 0 else 1
    rest: list[WorkItem] = []
    in_place: list[WorkItem] = []
    for item in items:
        found = [(own, part) for own in spans if (part := _inside(item, own, tile))]
        if not found:
            rest.append(item)
            continue
        ((own, part),) = found  # no two can be most of it
        by = own.local - own.start
        in_place.append(replace(part, k_start=part.k_start + by, k_stop=part.k_stop + by))
        sides = item.rows(item.q_start, part.q_start), item.rows(part.q_stop, item.q_stop)
        rest += [side for side in sides if side is not None]
    parts = (
        span.within(Interval(own.start, own.stop))
        for span in union(Interval(item.k_start, item.k_stop) for item in rest)
        for own in spans
    )
    needed = sum(part.stop - part.start for part in parts)
    return (list(items), []) if 2 * needed > plan.k_layout.local_len else (rest, in_place)


def _own_key_spans(plan: Plan, rank: int) -> list[OwnKeySpan]:
    found: list[OwnKeySpan] = []
    for run in plan.k_layout.runs(rank):
        start, stop = run.global_start, run.global_start + run.length
        last = found[-1] if found else None
        if last and last.stop == start and last.local + last.stop - last.start == run.local_start:
            found[-1] = last._replace(stop=stop)
        else:
            found.append(OwnKeySpan(start, stop, run.local_start))
    return found


def _inside(item: WorkItem, own: OwnKeySpan, tile: int) -> WorkItem | None:
    """The rows of an item that see these keys only, if they are most of it."""
    from_first = item.cu_q is None and item.hi is None  # every row sees the first key
    to_last = item.cu_q is None and item.lo is None
    if (from_first and item.k_start < own.start) or (to_last and own.stop < item.k_stop):
        return None
    left, right = item.seen
    first = int(np.searchsorted(left, own.start - item.k_start))
    last = int(np.searchsorted(right, own.stop - item.k_start, side="right"))
    cuts = _cuts(item, tile)
    first = int(cuts[np.searchsorted(cuts, first)])
    last = int(cuts[np.searchsorted(cuts, last, side="right") - 1])
    if 2 * (last - first) <= item.q_stop - item.q_start:
        return None
    part = item.rows(item.q_start + first, item.q_start + last)
    inside = part is not None and own.start <= part.k_start and part.k_stop <= own.stop
    return part if inside else None


def _cuts(item: WorkItem, tile: int) -> Ints:
    """Where the rows of an item may be cut.

    Between documents, as a cut one would need a launch of its own; else between tiles, in which
    kernels add up gradients, with two of them at least on either side.
    """
    if item.cu_q is not None:
        return item.cu_q
    rows = item.q_stop - item.q_start
    least = 1 if tile == 1 else 2 * tile
    return np.concatenate([[0], np.arange(least, rows - least + 1, tile), [rows]])
