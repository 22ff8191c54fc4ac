"""Fuzz campaigns: trials run one by one, and are counted."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from tolerances import assert_shapes, findings

from fuzz import draw
from fuzz.draw import LIMITS, Trial
from fuzz.judge import Compared, judge
from ring_core import UnsupportedError


@dataclass
class Failure:
    """Failed seed: its trial, as Python, and the error."""

    seed: int
    trial: str
    error: str


@dataclass
class Tally:
    """Counts of a backend's trials, for seeds from ``first`` to before ``next``."""

    first: int
    next: int
    cases: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by kernel, strategy and so on
    redrawn: int = 0  # number of cases that were judged over several draws of the arrays
    seconds: float = 0.0
    worst: float = 0.0  # largest error over tolerance of the results that passed
    failures: list[Failure] = field(default_factory=list)

    def line(self) -> str:
        """Return the tally as a line of text."""
        return (
            f"{self.cases} cases in {self.seconds:.0f} s, {self.refused.total()} more refused by "
            f"name, {len(self.failures)} failed; worst error over tolerance {self.worst:.2f}, "
            f"{self.redrawn} times judged over several draws"
        )


class Campaign:
    """Fuzz run on one backend, with its tally."""

    def __init__(self, name: str, backend: Any, tally: Tally) -> None:
        self.tally = tally
        self._limits = LIMITS[name]
        self._backend = backend

    def run_next(self) -> Failure | None:
        """Run the next seed and return its failure, if it failed."""
        began, tally, failure = time.monotonic(), self.tally, None
        trial = draw.draw(tally.next, self._limits)
        try:
            verdict = judge(trial.case, lambda case: self._compared(replace(trial, case=case)))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            if is_refusal(error):
                tally.refused[" ".join(str(value) for _, value in trial.way) or "auto"] += 1
            else:
                is_found = isinstance(error, AssertionError) and str(error).startswith("fuzz-")
                text = str(error) if is_found else "".join(traceback.format_exception(error))
                failure = Failure(tally.next, str(trial), text[-4000:])
                tally.failures.append(failure)
        else:
            tally.cases += 1
            tally.redrawn += verdict.drawn_again
            tally.worst = max(tally.worst, verdict.ratio)
        tally.next += 1
        tally.seconds += time.monotonic() - began
        return failure

    def _compared(self, trial: Trial) -> Compared:
        """Return the error and the bound of each result.

        Raises:
            AssertionError: Other entries than the oracle's are not finite.
        """
        results = self._backend.run(trial.case, **dict(trial.way))
        assert_shapes(trial.case, results)
        compared = list(findings(trial.case, results))
        bad = [f"{x.name}: {x.bad} entries" for x in compared if x.bad]
        assert not bad, f"{trial.case.name}: not finite, or finite, unlike the oracle's: {bad}"
        return {x.name: (x.error, x.bound) for x in compared}


def is_refusal(error: Exception) -> bool:
    """Return True for an UnsupportedError, also in the traceback text that a rank sent."""
    is_sent = not isinstance(error, AssertionError) and "UnsupportedError: " in str(error)
    return isinstance(error, UnsupportedError) or is_sent
