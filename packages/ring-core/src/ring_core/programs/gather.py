"""The other way to run a plan: fetch all keys a rank needs into one buffer, in natural order.

A ring passes K/V on in steps, and the parts of a row have to be merged. Where the keys of several
ranks may lie in memory at once, one launch sees all of them: fewer, larger kernels and no merge.
Each rank fetches just the keys its queries see, in the order in which they are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from ring_core.base.arguments import TILE, Ints, check_index, check_kind, not_none
from ring_core.layouts.layout import Layout, Run
from ring_core.masks.band import UNBOUNDED
from ring_core.plan.geometry import BandGeometry
from ring_core.plan.plan import Plan, WorkItem

_KEPT = 1024  # programs


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


class Fetch(NamedTuple):
    """Keys that travel together: a slice of a rank's own, and where it lies in the buffer."""

    rank: int
    source: slice
    target: slice


@dataclass(frozen=True, eq=False)
class GatherProgram:
    """What one rank fetches and computes.

    Attributes:
        own: Whether the rank's own keys are among those in the buffer.
        fetches: In the order in which the items need them.
        items: Work over the buffer: ``k_start`` and ``k_stop`` count its columns; ``kv_rank`` is
            the rank itself.
        needs: For each item, how many of the fetches it waits for.
        spans: The positions of the keys in the buffer, ascending.
        in_place: Work over the rank's own keys where they lie, which waits for nothing:
            ``k_start`` and ``k_stop`` count local indices.
    """

    own: bool
    fetches: tuple[Fetch, ...]
    items: tuple[WorkItem, ...]
    waits_for: tuple[int, ...]
    spans: tuple[Interval, ...] = field(repr=False)
    in_place: tuple[WorkItem, ...] = ()

    @cached_property
    def length(self) -> int:
        """Keys the buffer holds."""
        return sum(span.stop - span.start for span in self.spans)

    @property
    def positions(self) -> Ints:
        """Global index of each key of the buffer, ``[length]``, ascending."""
        return np.concatenate([np.arange(*span) for span in self.spans] or [np.arange(0)])

    def is_early(self, fetch: Fetch) -> bool:
        """Whether a backward, which runs the items in reverse, is done with these keys early.

        That is before its last item: their gradients travel home beside it.
        """
        last = self.items[0]
        return bool(fetch.target.stop <= last.k_start or last.k_stop <= fetch.target.start)

    @cached_property
    def fresh(self) -> tuple[tuple[slice, ...], ...]:
        """For each item the columns that no item after it sees.

        A backward, which runs the items in reverse, writes their gradients, and adds all others.
        """
        done: list[Interval] = []
        fresh = []
        for item in reversed(self.items):
            columns = Interval(item.k_start, item.k_stop)
            fresh.append(tuple(slice(*span) for span in _subtract(columns, done)))
            done = union([*done, columns])
        return tuple(reversed(fresh))

    @cached_property
    def num_rows(self) -> int:
        """Query rows of all items."""
        return sum(item.q_stop - item.q_start for item in (*self.items, *self.in_place))


def gather_refusals(plan: Plan) -> tuple[str, ...]:
    """Why a plan cannot run over gathered keys; empty if it can."""
    reasons = {
        f"layout {plan.q_layout.name!r} assigns tokens one by one": plan.q_layout.stride > 1,
        "a predicate mask is planned in tiles of each rank's own keys": plan.blocks is not None,
    }
    return tuple(reason for reason, applies in reasons.items() if applies)


def gather_memory(plan: Plan, *, q_width: int, kv_width: int, itemsize: int) -> float:
    """What gathering takes in forward and backward, over what a ring does.

    A ring holds two slots of K/V, dQ and three dK/dV; gathering holds the keys of all ranks and the
    sums of their gradients, and twice the own ones. Sums take 4 bytes per number.

    Args:
        plan: The plan; it must be one that can gather.
        q_width: Numbers per query token, ``H * D``.
        kv_width: Numbers a key token, ``K * (D + Dv)``.
        itemsize: Bytes of a number of the inputs.
    """
    queries, keys = plan.q_layout.local_len, plan.k_layout.local_len
    ring = keys * kv_width * (2 * itemsize + 3 * 4) + queries * q_width * 4
    return (longest_gather(plan).length + keys) * kv_width * (itemsize + 4) / ring


def gather_program(plan: Plan, rank: int, *, own: bool = True) -> GatherProgram:
    """What a rank does with the keys of all ranks, or (``own=False``) of all others.

    The latter is the remote part of its work; ``plan.items(rank, rank)`` is the rest. Equal
    arguments return the same object, from a bounded cache.
    """
    check_kind("plan", plan, Plan)
    check_index("rank", rank, plan.cp_size)
    check_kind("own", own, bool)
    return _gather_program(plan, rank, own)


@lru_cache(maxsize=_KEPT)
def _gather_program(plan: Plan, rank: int, own: bool) -> GatherProgram:
    assert not gather_refusals(plan)
    by_position, in_place, spans = _needed(plan, rank, own=own)
    items = _merge_items([_in_columns(item, spans) for item in by_position])
    fetches: list[Fetch] = []
    waits_for: list[int] = []
    done: list[Interval] = []
    for item in items:
        columns = Interval(item.k_start, item.k_stop)
        needed = [
            one for span in _subtract(columns, done) for one in _fetches(plan.k_runs, spans, span)
        ]
        # From the rank before this one on: if all began with the same, they would share its links.
        fetches += sorted(needed, key=lambda one: (rank - one.rank) % plan.cp_size)
        done = union([*done, columns])
        waits_for.append(len(fetches))
    return GatherProgram(
        own, tuple(fetches), tuple(items), tuple(waits_for), tuple(spans), tuple(in_place)
    )


class Longest(NamedTuple):
    """What all ranks have to know of each other's gathers, their own keys among them.

    Attributes:
        length: Keys of the longest buffer.
        in_place: Whether some rank has work over own keys where they lie.
    """

    length: int
    in_place: bool


def longest_gather(plan: Plan) -> Longest:
    """What all ranks have to know of each other's gathers; from a bounded cache."""
    check_kind("plan", plan, Plan)
    return _longest_gather(plan)


@lru_cache(maxsize=_KEPT)
def _longest_gather(plan: Plan) -> Longest:
    """Without the fetches, of which there are as many as pairs of ranks."""
    needed = [_needed(plan, rank, own=True) for rank in range(plan.cp_size)]
    sizes = [sum(span.stop - span.start for span in spans) for _, _, spans in needed]
    return Longest(max(sizes), any(in_place for _, in_place, _ in needed))


def _needed(
    plan: Plan, rank: int, *, own: bool
) -> tuple[list[WorkItem], list[WorkItem], list[Interval]]:
    """A rank's items over positions, those in place, and the positions of the keys it gathers."""
    mine = [] if own else [Interval(*_ends(run)) for run in plan.k_layout.runs(rank)]
    items = [
        item
        for span in _subtract(Interval(0, plan.kv_seq_len), mine)
        for item in _items(plan, rank, span)
    ]
    items, in_place = split_own_key_rows(plan, rank, items) if own else (items, [])
    return items, in_place, union(Interval(item.k_start, item.k_stop) for item in items)


def _items(plan: Plan, rank: int, span: Interval) -> Iterator[WorkItem]:
    """A rank's queries against some neighbouring keys; columns are positions."""
    geometry = BandGeometry(
        plan.mask, plan.q_layout, Layout("contiguous", plan.kv_seq_len, 1), plan.q_offset
    )
    rows = geometry.rows_between(rank, *span)
    for row in zip(*(x.tolist() for x in (*rows.rect, *rows[1:])), strict=True):
        q_start, q_stop, k_start, k_stop, lo, hi, doc_start, doc_stop = row
        cu_q = cu_k = None
        if doc_stop > doc_start:
            cuts = not_none(geometry.boundaries)[doc_start : doc_stop + 1]
            cu_q = np.searchsorted(plan.q_positions(rank)[q_start:q_stop], cuts)
            cu_k = np.clip(cuts, k_start, k_stop) - k_start
        if q_stop > q_start:
            yield WorkItem(
                rank, rank, rank, q_start, q_stop, k_start, k_stop,
                None if lo == -UNBOUNDED else lo, None if hi == UNBOUNDED else hi, cu_q, cu_k,
            )  # fmt: skip


def _in_columns(item: WorkItem, spans: Sequence[Interval]) -> WorkItem:
    """An item over positions as one over the columns of a buffer that holds these spans."""
    before = sum(
        span.within(Interval(0, item.k_start)).stop - span.start
        for span in spans
        if span.start < item.k_start
    )
    return replace(item, k_start=before, k_stop=before + item.k_stop - item.k_start)


def _merge_items(items: Sequence[WorkItem]) -> list[WorkItem]:
    """Full items with a side in common as one; those that need the fewest columns come first."""
    rows: list[WorkItem] = []
    for item in sorted(items, key=lambda item: (item.q_start, item.k_start)):
        left = rows[-1] if rows else None
        if (
            left
            and left.is_full
            and item.is_full
            and left.q_slice == item.q_slice
            and left.k_stop == item.k_start
        ):
            rows[-1] = replace(left, k_stop=item.k_stop)
        else:
            rows.append(item)
    joined: list[WorkItem] = []
    for item in rows:
        above = joined[-1] if joined else None
        if (
            above
            and above.is_full
            and item.is_full
            and above.k_slice == item.k_slice
            and above.q_stop == item.q_start
        ):
            joined[-1] = replace(above, q_stop=item.q_stop)
        else:
            joined.append(item)
    return sorted(joined, key=lambda item: (item.k_stop, item.q_start))


def _fetches(
    runs: Sequence[tuple[Run, int]], spans: Sequence[Interval], columns: Interval
) -> Iterator[Fetch]:
    """Columns of the buffer as slices of the ranks that hold them, in order.

    ``runs`` are all, by position, with their ranks: equal pieces of the sequence.
    """
    length = runs[0][0].length
    at = 0
    for span in spans:
        inside = Interval(at, at + span.stop - span.start).within(columns)
        wanted = Interval(span.start + inside.start - at, span.start + inside.stop - at)
        for run, rank in runs[wanted.start // length : -(-wanted.stop // length)]:
            part = wanted.within(Interval(*_ends(run)))
            if part.start < part.stop:
                local, column = run.local_start - run.global_start, at - span.start
                yield Fetch(
                    rank, *(slice(part.start + by, part.stop + by) for by in (local, column))
                )
        at += span.stop - span.start


def _ends(run: Run) -> tuple[int, int]:
    return run.global_start, run.global_start + run.length


def _subtract(span: Interval, others: Sequence[Interval]) -> list[Interval]:
    """The parts of a span outside others, which are sorted and apart."""
    inside = [
        part for part in (other.within(span) for other in sorted(others)) if part.start < part.stop
    ]
    edges = [span.start, *(x for part in inside for x in part), span.stop]
    return [Interval(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def split_own_key_rows(
    plan: Plan, rank: int, items: Sequence[WorkItem]
) -> tuple[list[WorkItem], list[WorkItem]]:
    """Items over positions without the rows that see own keys only; and these, over local keys.

    Only where that leaves most of the own keys to them alone: else all stay as they are.
    """
    runs = _own_key_runs(plan, rank)
    tile = TILE if plan.k_layout.run_length % TILE == 0 else 1
    rest: list[WorkItem] = []
    in_place: list[WorkItem] = []
    for item in items:
        found = [(run, part) for run in runs if (part := _inside(item, run, tile))]
        if not found:
            rest.append(item)
            continue
        ((run, part),) = found  # no two can be most of it
        by = run.local_start - run.global_start
        in_place.append(replace(part, k_start=part.k_start + by, k_stop=part.k_stop + by))
        sides = item.rows(item.q_start, part.q_start), item.rows(part.q_stop, item.q_stop)
        rest += [side for side in sides if side is not None]
    parts = (
        span.within(Interval(*_ends(run)))
        for span in union(Interval(item.k_start, item.k_stop) for item in rest)
        for run in runs
    )
    needed = sum(part.stop - part.start for part in parts)
    return (list(items), []) if 2 * needed > plan.k_layout.local_len else (rest, in_place)


def _own_key_runs(plan: Plan, rank: int) -> list[Run]:
    """Own keys; neighbours in the sequence and in memory as one run."""
    found: list[Run] = []
    for run in plan.k_layout.runs(rank):
        last = found[-1] if found else None
        if (
            last
            and last.global_start + last.length == run.global_start
            and last.local_start + last.length == run.local_start
        ):
            found[-1] = last._replace(length=last.length + run.length)
        else:
            found.append(run)
    return found


def _inside(item: WorkItem, own: Run, tile: int) -> WorkItem | None:
    """The rows of an item that see these keys only, if they are most of it."""
    start, stop = _ends(own)
    from_first = item.cu_q is None and item.hi is None  # every row sees the first key
    to_last = item.cu_q is None and item.lo is None
    if (from_first and item.k_start < start) or (to_last and stop < item.k_stop):
        return None
    left, right = item.seen
    first = int(np.searchsorted(left, start - item.k_start))
    last = int(np.searchsorted(right, stop - item.k_start, side="right"))
    cuts = _cuts(item, tile)
    first = int(cuts[np.searchsorted(cuts, first)])
    last = int(cuts[np.searchsorted(cuts, last, side="right") - 1])
    if 2 * (last - first) <= item.q_stop - item.q_start:
        return None
    part = item.rows(item.q_start + first, item.q_start + last)
    inside = part is not None and start <= part.k_start and part.k_stop <= stop
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
