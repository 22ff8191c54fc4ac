"""The steps of a ring, and its stages: what to move, compute and send home, in which order.

Executors differ (streams, barriers, a loop over ranks in one process); the order does not, and it
is decided here. Forward, K/V of the next stage travel while a stage computes::

    step 0 (own block) | step 1 | ... | step n      K/V arrive from ever further behind

Backward, the stages run in reverse from the K/V that arrived last, so that the own block comes last
and hides the last hop of dK/dV home::

    step n | ... | step 1 | step 0                  dK/dV travel with K/V, one stage late
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ring_core.base.arguments import Ints
from ring_core.base.strategy import RingStrategy
from ring_core.plan.geometry import RectangleTable
from ring_core.plan.tile_mask import Geometry

HELP_PIECES = 4


@dataclass(frozen=True)
class Stage:
    """One stage: start the transfers named here, compute a step, then collect the transfers.

    Attributes:
        step: Compute the work items of this step.
        kv_hop: Before computing, start moving K/V to the rank this far ahead, for the next stage;
            ``None`` moves nothing.
        grad_hop: Backward: after computing, add the step's dK/dV to those that arrived and start
            moving them to the rank this far ahead.
        helps: Ranks compute for others in this step, after their own items. What belongs to the
            helped queries travels ``steps[step].shift`` ahead in ``HELP_PIECES`` pieces of rows
            (``WorkItem.cut``), each while the piece before is computed, the first one during the
            stage before; the results go back piece by piece.
    """

    step: int
    kv_hop: int | None = None
    grad_hop: int | None = None
    helps: bool = False


Help = Literal["none", "mirror", "half"]
_PAIRS_AT_ONCE = 1 << 15


@dataclass(frozen=True)
class Step:
    """A live step: rank ``r`` works with the K/V of rank ``r - shift``.

    ``helps`` says what ranks do beside that for the queries of rank ``r - shift``, which travel to
    them by the same shift and meet their own K/V: nothing; ``mirror``, all of the pair that the
    plain ring would run at distance ``cp_size - shift``; or ``half`` of it, at the distance that
    is its own mirror.
    """

    shift: int
    helps: Help = "none"


def active_steps(
    strategy: RingStrategy, geometry: Geometry, cp_size: int, num_runs: int
) -> tuple[tuple[Step, ...], Ints]:
    """The steps some rank needs, and the visible pairs ``[step, rank]`` each rank computes in them.

    ``num_runs`` are those of a rank. Step 0, the rank's own block, is always there.
    """
    if strategy == "balanced":
        found = _balanced_steps(geometry, cp_size)
    else:
        found = _ring_steps(geometry, cp_size, num_runs)
    live = [(step, row) for step, row in found if step.shift == 0 or row.any()]
    live.sort(key=lambda each: each[0].shift)
    return tuple(step for step, _ in live), np.stack([row for _, row in live])


def step_rows(
    helps: Help, geometry: Geometry, ranks: Ints, behind: Ints
) -> tuple[RectangleTable, RectangleTable | None]:
    """What ``ranks`` compute in steps that help alike: for their own queries, and for others'.

    ``behind`` are the ranks their K/V, or the queries they help, come from.
    """
    if helps == "half":
        return geometry.rows(ranks, behind, half=0), geometry.rows(behind, ranks, half=1)
    return geometry.rows(ranks, behind), geometry.rows(behind, ranks) if helps == "mirror" else None


def _ring_steps(geometry: Geometry, cp_size: int, num_runs: int) -> Iterator[tuple[Step, Ints]]:
    ranks = np.arange(cp_size)
    for shifts in _chunks(ranks, cp_size * num_runs**2):
        pairs = geometry.count(ranks, (ranks - shifts[:, None]) % cp_size)
        yield from zip(map(Step, shifts.tolist()), pairs, strict=True)


def _balanced_steps(geometry: Geometry, cp_size: int) -> Iterator[tuple[Step, Ints]]:
    """Fold the far half of the ring onto the near half wherever that shortens the slowest rank."""
    ranks = np.arange(cp_size)
    yield Step(0), geometry.count(ranks, ranks)
    for shifts in _chunks(np.arange(1, cp_size // 2 + 1), cp_size):
        behind = (ranks - shifts[:, None]) % cp_size
        own, others = geometry.count(ranks, behind), geometry.count(behind, ranks)
        for n, shift in enumerate(shifts.tolist()):
            if 2 * shift == cp_size:
                both = geometry.count(ranks, behind[n], half=0) + geometry.count(
                    behind[n], ranks, half=1
                )
                helps = both.max() < own[n].max()
                yield Step(shift, "half" if helps else "none"), both if helps else own[n]
            elif (own[n] + others[n]).max() < own[n].max() + others[n].max():
                yield Step(shift, "mirror"), own[n] + others[n]
            else:
                yield Step(shift), own[n]
                yield Step(cp_size - shift), np.roll(others[n], -shift)


def _chunks(shifts: Ints, pairs: int) -> Iterator[Ints]:
    """Shifts of so many pairs a few at a time, so that the arrays over all stay in cache."""
    size = max(1, _PAIRS_AT_ONCE // pairs)
    for start in range(0, shifts.size, size):
        yield shifts[start : start + size]
