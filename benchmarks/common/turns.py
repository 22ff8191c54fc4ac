"""Methods whose results are right are timed in turns, and times are summarized."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any

from benchmarks.common.cases import OPTIONS_LENGTH, OURS, PASSES, ROUNDS, Rival, Row
from benchmarks.common.report import Report, reason_of, selected
from ring_core.tools.bench import watched

Run = Callable[[], Any]
Times = dict[str, list[float]]
Errors = dict[str, float | str | None]  # or why there is none; None for random results
Each = Callable[..., Iterable[Any]]  # ``map``, or that of a pool


def take_turns[Key](
    runs: Mapping[Key, Run], count: int, calls_of: Callable[[Run], int],
    time_of: Callable[[Run, int], float],
) -> dict[Key, list[float]]:  # fmt: skip
    """Time all runs in turns; return each one's time per call in every round.

    Every round times each run once, as what ran before leaves a GPU cooler or warmer; in a random
    order, which is the same on all ranks. ``calls_of`` returns how many calls of a run a turn has,
    ``time_of`` the time of each.
    """
    calls = {key: calls_of(run) for key, run in runs.items()}
    took: dict[Key, list[float]] = {key: [] for key in runs}
    orders = random.Random(0)
    for _ in range(count):
        for key in orders.sample(list(runs), len(runs)):
            took[key].append(time_of(runs[key], calls[key]))
    return took


def attempted[T](items: Iterable[T], make: Callable[[T], Any], each: Each = map) -> dict[T, Any]:
    """Return what is made of each item, or why it cannot be made, as text."""

    def attempt(item: T) -> tuple[T, Any]:
        try:
            return item, make(item)
        except Exception as error:  # noqa: BLE001 - a library's own; the row says so
            return item, reason_of(error)

    return dict(each(attempt, items))


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


def quartiles(times: Sequence[float]) -> list[float]:
    """Return the first quartile, the median and the third."""
    several = times if len(times) > 1 else [*times, *times]
    return [round(x, 5) for x in statistics.quantiles(several, n=4, method="inclusive")]


def timed_row(
    row: Row, wrong: Errors, run_of: Callable[[str, Rival], Run],
    rounds: Callable[[Mapping[str, Run]], Times], each: Each = map,
) -> dict[str, Any]:  # fmt: skip
    """Time both passes of the methods that are not ``wrong``, as ``rounds`` does; return the row.

    ``run_of`` returns a run of a pass of a method.
    """
    took: dict[str, Times] = {}
    for way in PASSES:
        right = [rival for rival in row.entrants if rival.name in passing(wrong)]
        made = attempted(right, partial(run_of, way), each)
        wrong |= {rival.name: run for rival, run in made.items() if isinstance(run, str)}
        runs = {rival.name: run for rival, run in made.items() if not isinstance(run, str)}
        took[way] = rounds(runs)
    return row_of(row, wrong, took)


def row_of(row: Row, wrong: Errors, took: Mapping[str, Times]) -> dict[str, Any]:
    """Return a row of the result file: times, ratios in the same round, the best other, goals."""
    result: dict[str, Any] = {"row": row.name, "goal": row.goal, "error": wrong}
    result |= {key: {} for key in ("milliseconds", "ratio", "best", "met")}
    for way, times in took.items():
        others = {name: x for name, x in times.items() if name != OURS}
        result["milliseconds"][way] = {name: quartiles(x) for name, x in times.items()}
        ratios = result["ratio"][way] = {
            name: quartiles([a / b for a, b in zip(times[OURS], x, strict=True)])
            for name, x in others.items() if OURS in times
        }  # fmt: skip
        best = min(others, key=lambda name: statistics.median(others[name]), default=None)
        result["best"][way] = best
        if row.goal is not None:
            result["met"][way] = best in ratios and ratios[best][1] <= row.goal
    return result


#: Arguments of the command line of a table of options.
ARGUMENTS: dict[str, Any] = {
    "--rows": {"nargs": "+", "metavar": "NAME"}, "--length": OPTIONS_LENGTH, "--rounds": ROUNDS,
}  # fmt: skip


def run_rows(
    options: Any, rows: Sequence[Row], measured: Callable[[Row, int, int], dict[str, Any]],
    environment: dict[str, Any],
) -> int:  # fmt: skip
    """Measure each row at a length in so many rounds; rows already in the JSON are kept."""
    report = Report(options, environment, keep=True)
    left = [row for row in selected(rows, options.rows) if not report.has(row=row.name)]
    for row in watched(left, len(left), "row"):
        report.add(measured(row, options.length, options.rounds))
    return 0
