"""Tables of options: methods whose results are right are timed in turns, and times summarized."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

from benchmarks.common.cases import OPTIONS_LENGTH, OURS, PASSES, ROUNDS, Row
from benchmarks.common.report import Report, command
from ring_core.tools.bench import watched

Run = Callable[[], Any]
Times = dict[str, list[float]]
Errors = dict[str, float | str | None]  # or why there is none; None for random results
Measure = Callable[[Row, int, int], dict[str, Any]]  # a row at a length, in so many rounds


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


def quartiles(times: Sequence[float]) -> list[float]:
    """Return the first quartile, the median and the third."""
    several = times if len(times) > 1 else [*times, *times]
    return [round(x, 5) for x in statistics.quantiles(several, n=4, method="inclusive")]


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


def run_rows(
    doc: str | None, rows: Sequence[Row], measure: Measure,
    environment: Callable[[], dict[str, Any]], argv: Sequence[str] | None,
) -> int:  # fmt: skip
    """Measure each row, and write it; rows already in the JSON are kept. Return the exit code."""

    def body(options: Any) -> int:
        where = environment() | {"length": options.length, "rounds": options.rounds}
        report = Report(options.json, lambda: where, keep=True)
        left = [row for row in rows if row.name in options.rows and not report.has(row=row.name)]
        for row in watched(left, len(left), "row"):
            report.add(measure(row, options.length, options.rounds))
        return 0

    names = [row.name for row in rows]
    return command(
        doc,
        {
            "--rows": {"nargs": "+", "choices": names, "default": names, "metavar": "NAME"},
            "--length": {"type": int, "default": OPTIONS_LENGTH},
            "--rounds": {"type": int, "default": ROUNDS},
        },
        body,
        argv,
    )


def timed_row(
    row: Row, wrong: Errors, programs: Callable[[str, list[str]], Mapping[str, Run | str]],
    rounds: Callable[[Mapping[str, Run]], Times],
) -> dict[str, Any]:  # fmt: skip
    """Time the methods whose results are right, and return the row.

    ``programs`` returns runs of a pass by method, or why there is none, for ``wrong``.
    """
    took: dict[str, Times] = {}
    for way in PASSES:
        made = programs(way, passing(wrong))
        wrong |= {name: run for name, run in made.items() if isinstance(run, str)}
        took[way] = rounds({name: run for name, run in made.items() if not isinstance(run, str)})
    return row_of(row, wrong, took)
