"""Who computes what in which step: the live steps of a schedule and their work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from ring_core._arguments import check_size
from ring_core._geometry import Geometry, Rows
from ring_core._layout import Dealt, Layout, LayoutName
from ring_core.checks import check_choice

Ints = npt.NDArray[np.int64]
ScheduleName = Literal["plain", "zigzag", "striped", "balanced"]
Schedule = ScheduleName | Dealt
Help = Literal["none", "mirror", "half"]

SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
_PAIRS_AT_ONCE = 1 << 15


def layout_of(schedule: Schedule) -> LayoutName | Dealt:
    """The layout the tokens of a schedule are in, the first argument of a :class:`Layout`.

    Raises:
        ValueError: No such schedule.
    """
    if isinstance(schedule, Dealt):
        return schedule
    try:
        check_choice("schedule", schedule, SCHEDULES)
    except ValueError as error:
        raise ValueError(f"{error}, or what ring_core.deal returns") from None
    layouts: dict[ScheduleName, LayoutName] = {
        "plain": "contiguous",
        "zigzag": "zigzag",
        "striped": "striped",
        "balanced": "contiguous",
    }
    return layouts[schedule]


def divisor_of(schedule: Schedule, cp_size: int) -> int:
    """Sequence lengths must be a multiple of this under a schedule.

    Raises:
        ValueError: No such schedule, or it is dealt to another number of ranks.
    """
    layout, ranks = layout_of(schedule), check_size("cp_size", cp_size)
    runs = layout.chunks_a_rank if isinstance(layout, Dealt) else 2  # at most
    return Layout(layout, ranks * runs, ranks).divisor


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


def live_steps(
    schedule: Schedule, geometry: Geometry, cp_size: int
) -> tuple[tuple[Step, ...], Ints]:
    """The steps some rank needs, and the visible pairs ``[step, rank]`` each rank computes in them.

    Step 0, the rank's own block, is always there.
    """
    ranks = np.arange(cp_size)
    steps: list[Step] = []
    work: list[Ints] = []
    if schedule != "balanced":
        runs = schedule.chunks_a_rank if isinstance(schedule, Dealt) else 1
        for shifts in _chunks(np.arange(cp_size), cp_size * runs**2):
            pairs = geometry.count(ranks, (ranks - shifts[:, None]) % cp_size)
            for shift, row in zip(shifts.tolist(), pairs, strict=True):
                if shift == 0 or row.any():
                    steps.append(Step(shift))
                    work.append(row)
        return tuple(steps), np.stack(work)
    for step, row in _balanced_steps(geometry, cp_size):
        if step.shift == 0 or row.any():
            steps.append(step)
            work.append(row)
    order = sorted(range(len(steps)), key=lambda n: steps[n].shift)
    return tuple(steps[n] for n in order), np.stack([work[n] for n in order])


def step_rows(
    helps: Help, geometry: Geometry, ranks: Ints, behind: Ints
) -> tuple[Rows, Rows | None]:
    """What ``ranks`` compute in steps that help alike: for their own queries, and for others'.

    ``behind`` are the ranks their K/V, or the queries they help, come from.
    """
    if helps == "half":
        return geometry.rows(ranks, behind, half=0), geometry.rows(behind, ranks, half=1)
    return geometry.rows(ranks, behind), geometry.rows(behind, ranks) if helps == "mirror" else None


def _balanced_steps(geometry: Geometry, cp_size: int) -> Iterator[tuple[Step, Ints]]:
    """Fold the far half of the ring onto the near half wherever that shortens the slowest rank."""
    ranks = np.arange(cp_size)
    yield Step(0), geometry.count(ranks, ranks)
    for shifts in _chunks(np.arange(1, cp_size // 2 + 1), cp_size):
        behind = (ranks - shifts[:, None]) % cp_size
        own, mirrored = geometry.count(ranks, behind), geometry.count(behind, ranks)
        for n, shift in enumerate(shifts.tolist()):
            if 2 * shift == cp_size:
                split = geometry.count(ranks, behind[n], half=0) + geometry.count(
                    behind[n], ranks, half=1
                )
                folds = split.max() < own[n].max()
                yield Step(shift, "half" if folds else "none"), split if folds else own[n]
            elif (own[n] + mirrored[n]).max() < own[n].max() + mirrored[n].max():
                yield Step(shift, "mirror"), own[n] + mirrored[n]
            else:
                yield Step(shift), own[n]
                yield Step(cp_size - shift), np.roll(mirrored[n], -shift)


def _chunks(shifts: Ints, pairs: int) -> Iterator[Ints]:
    """Shifts of so many pairs a few at a time, so that the arrays over all stay in cache."""
    size = max(1, _PAIRS_AT_ONCE // pairs)
    for start in range(0, shifts.size, size):
        yield shifts[start : start + size]
