"""Time a ring against one device that computes everything: a short benchmark for all backends.

The ring is timed twice, also with ``RING_CHECK=1``. Rounds of the three alternate, so that a
machine that slows down slows all, and each round has new random inputs.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple, Self

from ring_core.tools.case import Case, Check, shown_checks

LEAST_ROUNDS, MOST_ROUNDS = 3, 20

#: Function that runs one round, given its number, and returns the seconds of a call by its pass:
#: of each of :data:`PASSES`, and of what else it times, under the same names in every round.
TimedRound = Callable[[int], Mapping[str, float]]
PASSES = ("forward", "forward and backward")
FROM_IDLE = ", from idle"  # behind a pass: the device had finished everything before the call


@dataclass(frozen=True)
class Timing:
    """Seconds of each round of a pass.

    Attributes:
        name: The pass, one of :data:`PASSES`; followed by :data:`FROM_IDLE` if calls did not follow
            each other but each started on an idle device.
        alone: Seconds on one device that computes everything.
        ring: Seconds on the ring.
        checked: Seconds on the ring with ``RING_CHECK=1``.
        work_fraction: Share of the work that each device of the ring has: 1 / ranks, or 1 where the
            ranks' devices are the same cores as the one device's.
    """

    name: str
    alone: tuple[float, ...]
    ring: tuple[float, ...]
    checked: tuple[float, ...]
    work_fraction: float

    @property
    def check_cost(self) -> float:
        """Time that ``RING_CHECK=1`` adds, as a share of the ring's: the median of all rounds."""
        return statistics.median(x / y - 1 for x, y in zip(self.checked, self.ring, strict=True))

    @property
    def efficiencies(self) -> list[float]:
        """Rate of a device of the ring over that of one alone, for each round, sorted."""
        pairs = zip(self.alone, self.ring, strict=True)
        return sorted(self.work_fraction * alone / ring for alone, ring in pairs)

    @property
    def efficiency(self) -> float:
        """Median of :attr:`efficiencies`."""
        return statistics.median(self.efficiencies)


def timings(
    runs: Sequence[TimedRound], *, work_fraction: float, seconds: float
) -> tuple[Timing, ...]:
    """Time one device, a ring and a checked ring in turns, with progress on stderr.

    The first round warms up, and is neither counted nor a part of ``seconds``. At least three timed
    ones follow, then as many as ``seconds`` allow, up to twenty.

    Args:
        runs: Run a round on one device that computes everything, on the ring, and on the ring with
            ``RING_CHECK=1``.
        work_fraction: As in :class:`Timing`.
        seconds: Time for all timed rounds; the one under way at its end is finished.
    """
    rounds: list[list[Mapping[str, float]]] = []
    with progress(MOST_ROUNDS, "round") as bar:
        for run in runs:
            run(0)
        end = time.monotonic() + seconds
        for n in range(1, MOST_ROUNDS + 1):
            rounds.append([run(n) for run in runs])
            bar.update()
            if n >= LEAST_ROUNDS and time.monotonic() >= end:
                break
    results = []
    for name in rounds[0][0]:
        alone, ring, checked = (tuple(x[name] for x in run) for run in zip(*rounds, strict=True))
        results.append(Timing(name, alone, ring, checked, work_fraction))
    return tuple(results)


class progress:  # noqa: N801 - used like a function
    """Count up to ``total`` on one line of stderr: ``with progress(9, "round") as bar``."""

    def __init__(self, total: int, unit: str) -> None:
        self.total, self.unit, self.done = total, unit, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        sys.stderr.write("\n" if self.done else "")

    def update(self) -> None:
        """Count one more as done."""
        self.done += 1
        sys.stderr.write(f"\r{self.unit} {self.done} of {self.total}")
        sys.stderr.flush()


def watched[T](items: Iterable[T], total: int, unit: str) -> Iterator[T]:
    """Yield items, with progress (of at most ``total``) where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    with progress(total, unit) as bar:
        for item in items:
            yield item
            bar.update()


class Result(NamedTuple):
    """Findings of a ``bench`` command: checks of a short sequence and, if they passed, timings."""

    case: Case
    where: str  # the devices of the ring, behind their number
    checks: Sequence[Check]
    timings: Sequence[Timing]
    versions: Mapping[str, str]  # of libraries, for JSON


def report(result: Result | str, *, as_json: bool) -> tuple[str, int]:
    """Return what a ``bench`` command prints, and its exit code.

    With ``as_json`` it is JSON with times in seconds, else a table in milliseconds. Text that a
    framework returned instead of a result is printed as it is.
    """
    if isinstance(result, str):
        return result, 0
    case, timings = result.case, result.timings
    if not timings:
        return "\n".join(shown_checks("the ring to be timed", result.checks, healthy=False)), 1
    if as_json:
        setting = {x.name: getattr(case, x.name) for x in fields(case) if x.name != "mask"}
        rows = [
            asdict(x) | {"efficiency": x.efficiency, "check_cost": x.check_cost} for x in timings
        ]
        return json.dumps({
            "versions": result.versions, "setting": setting | {"window": case.mask.window},
            "where": result.where, "timings": rows,
        }, indent=2), 0  # fmt: skip
    width = 2 + max(len(timing.name) for timing in timings)
    lines = [
        f"{case.describe()} {result.where}",
        f"{'pass':{width}}{'alone ms':>10}{'ring ms':>10}  efficiency (rate of a device of the ring / alone)",
    ]
    for timing in timings:
        alone, ring = (1e3 * statistics.median(x) for x in (timing.alone, timing.ring))
        lines.append(
            f"{timing.name:{width}}{alone:10.2f}{ring:10.2f}  {timing.efficiency:.2f}  "
            f"({timing.efficiencies[0]:.2f} to {timing.efficiencies[-1]:.2f}, {len(timing.alone)} rounds)"
        )
    both = next(timing for timing in timings if timing.name == PASSES[-1])
    lines.append(
        f"RING_CHECK=1 adds {both.check_cost:.1%} to {both.name}, RING_CHECK=every:100 a hundredth "
        f"of that"
    )
    return "\n".join(lines), 0
