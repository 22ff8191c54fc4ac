"""Time methods in turns, select those whose results are right, and summarize their times."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

from benchmarks.common.cases import OURS

Run = Callable[[], Any]
Times = dict[str, list[float]]
Errors = dict[str, float | str | None]  # or why there is none; None for random results


def take_turns[Key](
    runs: Mapping[Key, Run],
    count: int,
    calls_of: Callable[[Run], int],
    time_of: Callable[[Run, int], float],
    *,
    shuffled: bool = True,
) -> dict[Key, list[float]]:
    """Time all runs in turns; return each one's time per call in every round.

    Every round times each run once, as what ran before leaves a GPU cooler or warmer; in a random
    order if ``shuffled``. ``calls_of`` returns how many calls of a run a turn has, ``time_of`` the
    time of each.
    """
    calls = {key: calls_of(run) for key, run in runs.items()}
    took: dict[Key, list[float]] = {key: [] for key in runs}
    orders = random.Random(0)
    for _ in range(count):
        order: Iterable[Key] = orders.sample(list(runs), len(runs)) if shuffled else runs
        for key in order:
            took[key].append(time_of(runs[key], calls[key]))
    return took


def passing(wrong: Errors) -> list[str]:
    """Return the methods whose results are right, or random.

    A method is right if it errs at most twice as much as the best of the others.
    """
    numbers = {name: x for name, x in wrong.items() if isinstance(x, float) and isfinite(x)}
    right = {
        name for name, x in numbers.items()
        if x <= 2 * min((y for other, y in numbers.items() if other != name), default=x)
    }  # fmt: skip
    return [name for name, x in wrong.items() if x is None or name in right]


def kept(
    took: Mapping[str, Times], spread: Callable[[Sequence[float]], list[float]]
) -> dict[str, dict[str, Any]]:
    """Summarize times by pass and method, and ratios of our time to each in the same round.

    ``spread`` makes a summary of several numbers, such as quartiles.
    """
    ratios = {
        way: {
            name: [a / b for a, b in zip(times[OURS], x, strict=True)]
            for name, x in times.items() if name != OURS and OURS in times
        }
        for way, times in took.items()
    }  # fmt: skip
    return {
        key: {
            way: {name: spread(x) for name, x in times.items()} for way, times in measured.items()
        }
        for key, measured in (("milliseconds", took), ("ratio", ratios))
    }
