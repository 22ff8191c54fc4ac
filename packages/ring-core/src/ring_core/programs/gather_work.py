"""The work of a rank that gathers keys: what it computes, and which keys it needs.

A gather program lays these keys into its buffer, and finds the transfers that bring them. Rows of
queries that see no other rank's keys wait for no transfer, and read their keys where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ring_core.base.arguments import TILE, Ints, not_none
from ring_core.layouts.layout import Layout, Run
from ring_core.masks.band import UNBOUNDED
from ring_core.plan.geometry import BandGeometry, RectangleTable, rows_before
from ring_core.plan.item import WorkItem
from ring_core.plan.plan import Plan
from ring_core.programs.intervals import Interval, ends_of, subtract, union


def work_and_keys(
    plan: Plan, rank: int, *, own: bool, splits: bool, tile: int
) -> tuple[list[WorkItem], list[WorkItem], list[Interval]]:
    """Return a rank's items over positions, its items in place, and the keys to gather.

    Items over positions have global positions as columns, items in place have local indices. The
    keys to gather are spans of positions, in order.
    """
    # Without own keys a two-stage gather attends to them apart, in the shard, before anything
    # arrives.
    whole = Interval(0, plan.kv_seq_len)
    items = [*_items(plan, rank, whole)] if own else _remote_items(plan, rank, whole)
    # Rows that see own keys only can run while the first fetch is in flight. They are taken off
    # before the keys to fetch are known, so that what only they see is not copied into the buffer.
    items, in_place = _split_own_key_rows(plan, rank, items) if own and splits else (items, [])
    if plan.k_layout.run_length % tile == 0:  # else positions and local indices count other tiles
        items, in_place = ([_from_tile(item, tile) for item in work] for work in (items, in_place))
    return items, in_place, union(Interval(item.k_start, item.k_stop) for item in items)


def _remote_items(plan: Plan, rank: int, whole: Interval) -> list[WorkItem]:
    """Return the items of a rank's queries against all keys of other ranks; columns are positions.

    Kernels that mask causal squares alone can run these if they can run a ring. There a band meets
    one shard at a time, and what is seen of it may be a square; over several at once it is none.
    """
    own_runs = [Interval(*ends_of(run)) for run in plan.k_layout.runs(rank)]
    items = [item for span in subtract(whole, own_runs) for item in _items(plan, rank, span)]
    if not all(item.is_full or item.is_causal for item in items):
        runs = [whole.within(Interval(*ends_of(run))) for run, n in plan.k_runs if n != rank]
        by_run = [item for run in runs for item in _items(plan, rank, run)]
        if all(item.is_full or item.is_causal for item in by_run):
            return by_run
    return items


def _items(plan: Plan, rank: int, span: Interval) -> Iterator[WorkItem]:
    """Yield the items of a rank's queries against the keys of a span; columns are positions."""
    geometry, of_ranks = _by_position(plan)
    if span == (0, plan.kv_seq_len):
        parts = [x[rank] for x in (*of_ranks.rect, *of_ranks[1:])]
    else:
        rectangles = geometry.rectangles_between(rank, *span)
        parts = [*rectangles.rect, *rectangles[1:]]
    # The keys are counted by position, as if one rank held them all, in order.
    for row in zip(*(x.tolist() for x in parts), strict=True):
        q_start, q_stop, k_start, k_stop, lo, hi, doc_start, doc_stop = row
        cu_q = cu_k = None
        if doc_stop > doc_start:
            cuts = not_none(geometry.boundaries)[doc_start : doc_stop + 1]
            cu_q = rows_before(plan.q_layout, rank, q_start, q_stop, cuts - plan.q_offset)
            cu_k = np.clip(cuts, k_start, k_stop) - k_start
        if q_stop > q_start:
            yield WorkItem(
                rank, rank, rank, q_start, q_stop, k_start, k_stop,
                None if lo == -UNBOUNDED else lo, None if hi == UNBOUNDED else hi, cu_q, cu_k,
            )  # fmt: skip


@lru_cache(maxsize=128)
def _by_position(plan: Plan) -> tuple[BandGeometry, RectangleTable]:
    """Return the geometry of keys that one rank holds in order, and all ranks' rectangles there."""
    geometry = BandGeometry(
        plan.mask, plan.q_layout, Layout("contiguous", plan.kv_seq_len, 1), plan.q_offset
    )
    ranks = np.arange(plan.cp_size)
    return geometry, geometry.rectangles_between(ranks, 0, plan.kv_seq_len)


def _from_tile(item: WorkItem, tile: int) -> WorkItem:
    """Let an item begin with the tile of its first key, if its window hides the keys before that.

    A window does so if it shows the first row no key before the item's first: then it shows none to
    any row. Documents, and windows that begin before the first key, hide nothing in front of it.
    """
    before = item.k_start % tile
    if before == 0 or item.hi != 0 or item.cu_q is not None:
        return item
    lo = None if item.lo is None else item.lo - before
    return replace(item, k_start=item.k_start - before, lo=lo, hi=-before)


def _split_own_key_rows(
    plan: Plan, rank: int, items: Sequence[WorkItem]
) -> tuple[list[WorkItem], list[WorkItem]]:
    """Split off the rows of items that see only keys of the rank's own shard.

    These rows can read the shard where it lies, and need not wait for anything. An item gives them
    up only where they are most of its rows and see one run of the shard. All this pays only if at
    least half of the rank's own keys then need not be copied into the buffer: otherwise nothing is
    split off.

    Args:
        plan: The plan.
        rank: The rank.
        items: Its items over positions; they are not changed.

    Returns:
        The remaining items, over positions; and those split off, whose columns are local indices.
    """
    runs = _own_key_runs(plan, rank)
    tile = TILE if plan.k_layout.run_length % TILE == 0 else 1
    remaining: list[WorkItem] = []
    in_place: list[WorkItem] = []
    for item in items:
        own_parts = [(run, part) for run in runs if (part := _inside(item, run, tile))]
        if not own_parts:
            remaining.append(item)
            continue
        ((run, part),) = own_parts  # a part is most of its item, so there are not two
        to_local = run.local_start - run.global_start
        in_place.append(
            replace(part, k_start=part.k_start + to_local, k_stop=part.k_stop + to_local)
        )
        # The rows above and below it may see keys of others.
        sides = item.rows(item.q_start, part.q_start), item.rows(part.q_stop, item.q_stop)
        remaining += [side for side in sides if side is not None]
    parts = (
        span.within(Interval(*ends_of(run)))
        for span in union(Interval(item.k_start, item.k_stop) for item in remaining)
        for run in runs
    )
    num_still_needed = sum(part.stop - part.start for part in parts)
    # The rows that remain fetch own keys into the buffer after all. If those are most of the shard,
    # the split has saved no copy and cost a launch.
    if 2 * num_still_needed > plan.k_layout.local_len:
        return list(items), []
    return remaining, in_place


def _own_key_runs(plan: Plan, rank: int) -> list[Run]:
    """Return the runs of a rank's keys, neighbours in the sequence and in memory joined."""
    joined: list[Run] = []
    for run in plan.k_layout.runs(rank):
        last = joined[-1] if joined else None
        if (
            last
            and last.global_start + last.length == run.global_start
            and last.local_start + last.length == run.local_start
        ):
            # One launch can read both runs where they lie.
            joined[-1] = last._replace(length=last.length + run.length)
        else:
            joined.append(run)
    return joined


def _inside(item: WorkItem, own: Run, tile: int) -> WorkItem | None:
    """Return the rows of an item that see keys of one run only, if they are most of its rows.

    Args:
        item: An item over positions.
        own: A run of the rank's own keys, contiguous in the sequence.
        tile: Rows are cut at multiples of this, of packed documents at their borders instead.
    """
    start, stop = ends_of(own)
    from_first = item.cu_q is None and item.hi is None  # every row sees the first key
    to_last = item.cu_q is None and item.lo is None
    if (from_first and item.k_start < start) or (to_last and stop < item.k_stop):
        return None
    # Both ascend from row to row: rows from ``first`` on see nothing before the run, rows before
    # ``last`` nothing behind it.
    first_seen, stop_seen = item.seen
    first = int(np.searchsorted(first_seen, start - item.k_start))
    last = int(np.searchsorted(stop_seen, stop - item.k_start, side="right"))
    cuts = _cuts(item, tile)
    # Cuts move inwards, so no row is taken off that sees a foreign key.
    first = int(cuts[np.searchsorted(cuts, first)])
    last = int(cuts[np.searchsorted(cuts, last, side="right") - 1])
    # Fewer rows than that are not worth a launch of their own.
    if 2 * (last - first) <= item.q_stop - item.q_start:
        return None
    part = item.rows(item.q_start + first, item.q_start + last)
    inside = part is not None and start <= part.k_start and part.k_stop <= stop
    return part if inside else None


def _cuts(item: WorkItem, tile: int) -> Ints:
    """Return the rows at which an item may be cut, counted from its corner, ascending.

    These are borders of documents, as a document that is cut would need another launch. Without
    documents they are both ends, and between them borders of tiles, in which kernels add up
    gradients, at least two tiles from either end; with ``tile=1`` they are all rows.
    """
    if item.cu_q is not None:
        return item.cu_q
    rows = item.q_stop - item.q_start
    margin = 1 if tile == 1 else 2 * tile
    return np.concatenate([[0], np.arange(margin, rows - margin + 1, tile), [rows]])
