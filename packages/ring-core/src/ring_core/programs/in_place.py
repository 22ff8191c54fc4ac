"""Find the work of a gather program that can read the rank's own keys where they lie.

Rows of queries that see no other rank's keys wait for no transfer, and their keys need no copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ring_core.base.arguments import TILE, Ints
from ring_core.layouts.layout import Run
from ring_core.plan.plan import Plan, WorkItem
from ring_core.programs.intervals import Interval, ends_of, union


def split_own_key_rows(
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
