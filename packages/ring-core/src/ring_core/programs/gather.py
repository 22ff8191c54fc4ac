"""The gather program of a plan: a rank fetches all keys it needs into one buffer, in natural order.

A ring passes K/V on in steps, and the parts of a row have to be merged. Where the keys of several
ranks may lie in memory at once, one launch sees all of them: fewer, larger kernels and no merge.
Each rank fetches just the keys its queries see, in the order in which they are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from ring_core.base.arguments import Ints, check_index, check_kind, check_size, numbers_as_python
from ring_core.layouts.layout import Run
from ring_core.plan.item import WorkItem
from ring_core.plan.plan import Plan
from ring_core.programs.gather_work import work_and_keys
from ring_core.programs.intervals import Interval, ends_of, subtract, union

_KEPT = 1024  # programs


class Fetch(NamedTuple):
    """A transfer of neighbouring keys from a rank's shard into the buffer of gathered keys.

    Attributes:
        rank: The rank that holds them.
        source: Their local indices there.
        target: Their columns in the buffer.
    """

    rank: int
    source: slice
    target: slice


@dataclass(frozen=True, eq=False)
class GatherProgram:
    """The transfers and the work of one rank that gathers keys.

    Make one with :func:`gather_program`.

    Attributes:
        own: The rank's own keys are in the buffer, too.
        fetches: Transfers into the buffer, in the order in which the items need them.
        items: Work over the buffer: ``k_start`` and ``k_stop`` count its columns; ``kv_rank`` is
            the rank itself.
        waits_for: For each item, how many of the fetches must have arrived before it starts.
        spans: The positions of the keys in the buffer, ascending.
        in_place: Work over the rank's own keys where they lie, which waits for nothing:
            ``k_start`` and ``k_stop`` count local indices.
        splits: Rows that see own keys only may be in ``in_place``; otherwise all work is over the
            buffer.
        tile: Items begin at positions that are multiples of this where a window allows it.
    """

    own: bool
    fetches: tuple[Fetch, ...]
    items: tuple[WorkItem, ...]
    waits_for: tuple[int, ...]
    spans: tuple[Interval, ...] = field(repr=False)
    in_place: tuple[WorkItem, ...] = ()
    splits: bool = True
    tile: int = 1

    @cached_property
    def length(self) -> int:
        """Number of keys in the buffer."""
        return sum(span.stop - span.start for span in self.spans)

    @property
    def positions(self) -> Ints:
        """Global index of each key of the buffer, int64 ``[length]``, ascending."""
        return np.concatenate([np.arange(*span) for span in self.spans] or [np.arange(0)])

    def is_before_last_item(self, fetch: Fetch) -> bool:
        """Return True if a backward is done with these keys before its last item.

        It runs the items in reverse, so the last one is ``items[0]``. The gradients of such keys
        can travel home while that item is computed.
        """
        last = self.items[0]
        return bool(fetch.target.stop <= last.k_start or last.k_stop <= fetch.target.start)

    @cached_property
    def overwritten(self) -> tuple[tuple[slice, ...], ...]:
        """Columns of each item that a backward overwrites: it has not written them before.

        It runs the items in reverse, so these are columns that no item behind it sees. There the
        item's dK/dV overwrite the buffer of gradients, which needs no zeros; elsewhere they are
        added.
        """
        written: list[Interval] = []
        overwritten = []
        # Until a launch writes its columns, they hold gradients of an earlier call, or garbage.
        for item in reversed(self.items):
            # What is in `written` holds sums of this backward already: there the item adds.
            columns = Interval(item.k_start, item.k_stop)
            overwritten.append(tuple(slice(*span) for span in subtract(columns, written)))
            written = union([*written, columns])
        return tuple(reversed(overwritten))

    @cached_property
    def num_rows(self) -> int:
        """Number of query rows of all items together."""
        return sum(item.q_stop - item.q_start for item in (*self.items, *self.in_place))


def column_segments(item: WorkItem, overwrite: Iterable[slice]) -> Iterator[tuple[int, int, bool]]:
    """Yield the columns of an item in spans ``(start, stop, add)``: added to, or overwritten.

    ``overwrite`` are spans as in :attr:`GatherProgram.overwritten`.
    """
    # Edges alternate: from the item's start to such a span, over it, to the next, ..., to its end.
    edges = [
        item.k_start,
        *(edge for span in overwrite for edge in (span.start, span.stop)),
        item.k_stop,
    ]
    for n, (start, stop) in enumerate(pairwise(edges)):
        # Two overwritten spans may touch, or lie at an end of the item: nothing is added between.
        if start < stop:
            yield start, stop, n % 2 == 0


def gather_refusals(plan: Plan) -> tuple[str, ...]:
    """Return every reason why a plan cannot run over gathered keys; empty if it can.

    >>> from ring_core import Mask, gather_refusals, make_plan
    >>> gather_refusals(make_plan(Mask(), seq_len=8, cp_size=2, layout="striped"))
    ("layout 'striped' assigns tokens one by one",)
    """
    reasons = {
        f"layout {plan.q_layout.name!r} assigns tokens one by one": plan.q_layout.stride > 1,
        "a predicate mask is planned in tiles of each rank's own keys": plan.blocks is not None,
    }
    return tuple(reason for reason, applies in reasons.items() if applies)


@numbers_as_python
def gather_program(
    plan: Plan, rank: int, *, own: bool = True, splits: bool = True, tile: int = 1
) -> GatherProgram:
    """Return what a rank fetches and computes with the keys of all ranks, in one buffer.

    >>> from ring_core import Mask, gather_program, make_plan
    >>> plan = make_plan(Mask(causal=True), seq_len=512, cp_size=2)
    >>> gather_program(plan, rank=1, own=False).fetches
    (Fetch(rank=0, source=slice(0, 256, None), target=slice(0, 256, None)),)

    Args:
        plan: The plan; it must be one that can gather (:func:`gather_refusals`).
        rank: The rank.
        own: With ``False`` the buffer holds the keys of other ranks alone, and the items are the
            remote part of the rank's work; ``plan.items(rank, rank)`` is the rest.
        splits: With ``False`` no work is done in place: where keys are few, copying the rank's own
            into the buffer costs less than more launches.
        tile: Keys of a tile, for kernels that need items of whole tiles: an item whose window
            begins inside a tile begins at that tile's first key, which no row of it sees. So up to
            ``tile - 1`` keys more are fetched for an item.

    Returns:
        The program; equal arguments return the same object, from a bounded cache.

    Raises:
        ValueError: There is no such rank.
    """
    check_kind("plan", plan, Plan)
    check_index("rank", rank, plan.cp_size)
    check_kind("own", own, bool)
    check_kind("splits", splits, bool)
    check_size("tile", tile)
    return _gather_program(plan, rank, own, splits, tile)


@lru_cache(maxsize=_KEPT)
def _gather_program(plan: Plan, rank: int, own: bool, splits: bool, tile: int) -> GatherProgram:
    """Make the program of :func:`gather_program`, which has checked the arguments."""
    assert not gather_refusals(plan)
    # Columns are positions of the whole sequence so far. Then the spans that some item needs are
    # laid into the buffer one behind the other, and items count columns of that.
    by_position, in_place, spans = work_and_keys(plan, rank, own=own, splits=splits, tile=tile)
    items = _merge_items([_in_columns(item, spans) for item in by_position])
    fetches: list[Fetch] = []
    waits_for: list[int] = []
    fetched: list[Interval] = []
    # Items come in the order of the columns they need, so each can start as soon as its own fetches
    # have arrived, while those of later items are on their way.
    for item in items:
        columns = Interval(item.k_start, item.k_stop)
        # Columns that an earlier item needs are fetched already.
        item_fetches = [
            fetch
            for span in subtract(columns, fetched)
            for fetch in _fetches(plan.k_runs, spans, span)
        ]
        fetches += _in_rounds(item_fetches, rank, plan.cp_size)
        fetched = union([*fetched, columns])
        # Fetches are waited for in this order, so the item waits for all that earlier items needed,
        # too; those have been waited for already.
        waits_for.append(len(fetches))
    return GatherProgram(
        own, tuple(fetches), tuple(items), tuple(waits_for), tuple(spans), tuple(in_place), splits,
        tile,
    )  # fmt: skip


def moved_keys(plan: Plan, *, like: GatherProgram) -> Ints:
    """Count the keys that each rank (row) sends to each other (column), int64 ``[P, P]``.

    >>> from ring_core import Mask, gather_program, make_plan
    >>> from ring_core.programs.gather import moved_keys
    >>> plan = make_plan(Mask(causal=True), seq_len=512, cp_size=2, layout="contiguous")
    >>> moved_keys(plan, like=gather_program(plan, 0)).tolist()
    [[0, 256], [0, 0]]

    Args:
        plan: The plan.
        like: A program of any rank; those of all ranks have its options.
    """
    keys = np.zeros((plan.cp_size, plan.cp_size), np.int64)
    for rank in range(plan.cp_size):
        program = gather_program(plan, rank, own=like.own, splits=like.splits, tile=like.tile)
        # Each rank knows every rank's program, so both ends count the same messages without asking.
        for fetch in program.fetches:
            keys[fetch.rank, rank] += fetch.source.stop - fetch.source.start
    np.fill_diagonal(keys, 0)  # own keys are copied, not sent
    return keys


class Longest(NamedTuple):
    """Length of the longest buffer over all ranks, and whether any rank reads own keys in place.

    Every rank has to know these of all others. They are of programs with own keys.

    Attributes:
        length: Number of keys in the longest buffer of any rank.
        in_place: Some rank has work over its own keys where they lie.
    """

    length: int
    in_place: bool


@numbers_as_python
def longest_gather(plan: Plan, *, splits: bool = True, tile: int = 1) -> Longest:
    """Return the longest gather over all ranks, from a bounded cache.

    >>> from ring_core import Mask, longest_gather, make_plan
    >>> longest_gather(make_plan(Mask(causal=True), seq_len=8, cp_size=2)).length
    8
    """
    check_kind("plan", plan, Plan)
    check_kind("splits", splits, bool)
    check_size("tile", tile)
    return _longest_gather(plan, splits, tile)


@lru_cache(maxsize=_KEPT)
def _longest_gather(plan: Plan, splits: bool, tile: int) -> Longest:
    """Compute them from all ranks' items alone: making all fetches would take long."""
    work_of_ranks = [
        work_and_keys(plan, rank, own=True, splits=splits, tile=tile)
        for rank in range(plan.cp_size)
    ]
    sizes = [sum(span.stop - span.start for span in spans) for _, _, spans in work_of_ranks]
    return Longest(max(sizes), any(in_place for _, in_place, _ in work_of_ranks))


def _in_rounds(fetches: Iterable[Fetch], rank: int, ranks: int) -> list[Fetch]:
    """Return an item's fetches in an order in which ranks seldom read from the same one at a time.

    Two that do share its links, and both take twice as long. Own keys, which no link carries, come
    first. Then there are rounds, each with one fetch from each rank that is left: the first from
    the rank before this one backwards, the next one from the rank after it forwards, and so on. In
    layout ``zigzag`` with a causal mask the n-th fetches of all ranks are from different ranks.
    """
    backwards = sorted(fetches, key=lambda fetch: (rank - fetch.rank) % ranks)
    own = [fetch for fetch in backwards if fetch.rank == rank]
    rounds: list[list[Fetch]] = []
    number_of: Counter[int] = Counter()  # fetches from each rank so far
    for fetch in backwards[len(own) :]:
        if number_of[fetch.rank] == len(rounds):
            rounds.append([])
        rounds[number_of[fetch.rank]].append(fetch)
        number_of[fetch.rank] += 1
    in_order = (x if n % 2 == 0 else x[::-1] for n, x in enumerate(rounds))
    return [*own, *chain.from_iterable(in_order)]


def _in_columns(item: WorkItem, spans: Sequence[Interval]) -> WorkItem:
    """Turn an item over positions into one over the columns of a buffer that holds these spans."""
    before = sum(
        span.within(Interval(0, item.k_start)).stop - span.start
        for span in spans
        if span.start < item.k_start
    )
    return replace(item, k_start=before, k_stop=before + item.k_stop - item.k_start)


def _merge_items(items: Sequence[WorkItem]) -> list[WorkItem]:
    """Join full items with a side in common, and sort all by the last column that they need.

    Fewer items are fewer launches, and an item that needs only the first columns can start early.
    """
    # First join items of the same rows whose keys are neighbours, then the other way round.
    joined = sorted(items, key=lambda item: (item.q_start, item.k_start))
    joined = _joined(joined, lambda a, b: a.q_slice == b.q_slice and a.k_stop == b.k_start)
    joined = _joined(joined, lambda a, b: a.k_slice == b.k_slice and a.q_stop == b.q_start)
    return sorted(joined, key=lambda item: (item.k_stop, item.q_start))


def _joined(
    items: Sequence[WorkItem], is_one: Callable[[WorkItem, WorkItem], bool]
) -> list[WorkItem]:
    """Join full items that follow each other, where ``is_one`` says that two make a rectangle."""
    joined: list[WorkItem] = []
    for item in items:
        if joined and joined[-1].is_full and item.is_full and is_one(joined[-1], item):
            joined[-1] = replace(joined[-1], q_stop=item.q_stop, k_stop=item.k_stop)
        else:
            joined.append(item)
    return joined


def _fetches(
    runs: Sequence[tuple[Run, int]], spans: Sequence[Interval], columns: Interval
) -> Iterator[Fetch]:
    """Yield the fetches that fill some columns of the buffer, in order.

    Args:
        runs: All runs of keys with their ranks, by position: equal pieces of the sequence.
        spans: Positions of the keys in the buffer.
        columns: The columns to fill.
    """
    length = runs[0][0].length
    span_column = 0  # column at which the span begins
    for span in spans:
        # The columns asked for that lie in this span, then the positions of their keys.
        inside = Interval(span_column, span_column + span.stop - span.start).within(columns)
        column_to_position = span.start - span_column
        positions = Interval(inside.start + column_to_position, inside.stop + column_to_position)
        # Runs have equal lengths, so a division finds those that hold the keys.
        for run, rank in runs[positions.start // length : -(-positions.stop // length)]:
            part = positions.within(Interval(*ends_of(run)))
            if part.start < part.stop:
                to_local = run.local_start - run.global_start
                yield Fetch(
                    rank,
                    source=slice(part.start + to_local, part.stop + to_local),
                    target=slice(part.start - column_to_position, part.stop - column_to_position),
                )
        span_column += span.stop - span.start
