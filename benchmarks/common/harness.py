"""Frame of a benchmark: its command line, a gate, turns, and the file of rows that it measured."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from benchmarks.common.cases import OPTIONS_LENGTH, OURS, PASSES, ROUNDS, Rival, Row
from benchmarks.common.pages import line, parts_of
from ring_core.tools.bench import watched

Run = Callable[[], Any]
Times = dict[str, list[float]]
Errors = dict[str, float | str | None]  # or why there is none; None for random results
Each = Callable[..., Iterable[Any]]  # ``map``, or that of a pool


def command(
    doc: str | None, arguments: Mapping[str, Any]
) -> Callable[[Callable[[Any], int]], Callable[..., int]]:
    """Return a decorator of a benchmark, which gets the options of its command line.

    An argument is what ``add_argument`` takes, or its default, which says its type. All benchmarks
    have ``--json``. What is decorated returns the exit code, and takes words in place of the
    command line's. It stands last in its file: in the program that was started it runs at once.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    for name, argument in arguments.items():
        is_default = not isinstance(argument, dict)
        options = {"type": type(argument), "default": argument} if is_default else argument
        parser.add_argument(name, **options)

    def decorated(body: Callable[[Any], int]) -> Callable[..., int]:
        def main(argv: Sequence[str] | None = None) -> int:
            return body(parser.parse_args(argv))

        if body.__module__ == "__main__":
            sys.exit(main())
        return main

    return decorated


def selected(rows: Iterable[Any], names: Sequence[str] | None) -> list[Any]:
    """Return the rows of these names, in their order, or all rows without names."""
    by_name = {row.name: row for row in rows}
    if unknown := [name for name in names or () if name not in by_name]:
        sys.exit(f"no row is named {unknown}; there are {[*by_name]}")
    return [by_name[name] for name in names or by_name]


class Report:
    """Rows measured so far, printed and written to a file, so that a run cut short leaves some.

    With ``keep`` rows that the file has already stay, and need not be measured again. The file
    says in which environment they were measured, and with which options.
    """

    def __init__(self, options: Any, environment: dict[str, Any], *, keep: bool = False) -> None:
        self.path: Path | None = options.json
        plain = {name: x for name, x in vars(options).items() if isinstance(x, (int, float, str))}
        self.environment = environment | plain
        self.rows: list[dict[str, Any]] = []
        if keep and self.path and self.path.exists():
            self.rows = parts_of(self.path)[""]["rows"]

    def add(self, *rows: dict[str, Any]) -> None:
        """Add rows, print each, and write the file, into a new folder if need be."""
        self.rows += rows
        for row in rows:
            print(line(row), flush=True)
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            written = {"environment": self.environment, "rows": self.rows}
            self.path.write_text(json.dumps(written, indent=1) + "\n")

    def has(self, **key: Any) -> bool:
        """Return True if there is a row with these values."""
        return any(key.items() <= row.items() for row in self.rows)

    @property
    def failed(self) -> int:
        """Number of rows that were wrong, or could not be measured."""
        return sum("failed" in row for row in self.rows)


def environment(gpu: str, versions: Mapping[str, str], **more: Any) -> dict[str, Any]:
    """Return the GPU, the processors that this process may run on, the command, and versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [text.partition(":")[2].strip() for text in lines if text.startswith("model name")]
    cpu = f"{[*models, platform.processor()][0]}, {len(os.sched_getaffinity(0))} of them"
    return {"gpu": gpu, "cpu": cpu, "command": shlex.join(sys.orig_argv), **versions, **more}


def reason_of(error: BaseException) -> str:
    """Return an error as one line: its type, and the first line of its message."""
    lines = [text.strip() for text in str(error).splitlines() if text.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


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


def take_turns[Key, R, T](
    runs: Mapping[Key, R], count: int, calls_of: Callable[[R], int], time_of: Callable[[R, int], T]
) -> dict[Key, list[T]]:
    """Time all runs in turns; return each one's time per call in every round.

    Every round times each run once, as what ran before leaves a GPU cooler or warmer; in a random
    order, which is the same on all ranks. ``calls_of`` returns how many calls of a run a turn has,
    ``time_of`` the time of each.
    """
    calls = {key: calls_of(run) for key, run in runs.items()}
    took: dict[Key, list[T]] = {key: [] for key in runs}
    orders = random.Random(0)
    for _ in range(count):
        for key in orders.sample(list(runs), len(runs)):
            took[key].append(time_of(runs[key], calls[key]))
    return took


def quartiles(times: Sequence[float]) -> list[float]:
    """Return the first quartile, the median and the third."""
    several = times if len(times) > 1 else [*times, *times]
    return [round(x, 5) for x in statistics.quantiles(several, n=4, method="inclusive")]


def timed_row(
    row: Row, wrong: Errors, run_of: Callable[[str, Rival], Run],
    rounds: Callable[[Mapping[str, Run]], Times], each: Each = map,
) -> dict[str, Any]:  # fmt: skip
    """Time both passes of the methods that are not ``wrong``, as ``rounds`` does; return the row.

    ``run_of`` returns a run of a pass of a method. The row has times, ratios in the same round, the
    best other and whether goals are met.
    """
    result: dict[str, Any] = {"row": row.name, "goal": row.goal, "error": wrong}
    result |= {key: {} for key in ("milliseconds", "ratio", "best", "met")}
    for way in PASSES:
        right = [rival for rival in row.entrants if rival.name in passing(wrong)]
        made = attempted(right, partial(run_of, way), each)
        wrong |= {rival.name: run for rival, run in made.items() if isinstance(run, str)}
        times = rounds({rival.name: x for rival, x in made.items() if not isinstance(x, str)})
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
