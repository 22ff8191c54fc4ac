"""Fuzz campaigns: trials run one by one, and are counted."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from tolerances import assert_shapes, findings

from fuzz import draw
from fuzz.draw import LIMITS
from fuzz.judge import Compared, Verdict, judge
from fuzz.shrink import shrink
from fuzz.trial import Trial
from ring_core import UnsupportedError

_SHRINK_SECONDS = 60.0


@dataclass
class Failure:
    """Failed seed: its trial, the error and the simplest trial that fails alike."""

    seed: int
    trial: str
    error: str
    simplest: str = ""


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
    worst_trial: str = ""
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
        began = time.monotonic()
        trial = draw.draw(self.tally.next, self._limits)
        failure = self._tallied(self.tally.next, trial)
        self.tally.next += 1
        self.tally.seconds += time.monotonic() - began
        return failure

    def _tallied(self, seed: int, trial: Trial) -> Failure | None:
        try:
            verdict = self._attempt(trial)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            if is_refusal(error):
                self.tally.refused[" ".join(str(value) for _, value in trial.way) or "auto"] += 1
                return None
            failure = Failure(seed, str(trial), _described(error), str(self._shrunk(trial, error)))
            self.tally.failures.append(failure)
            return failure
        self.tally.cases += 1
        self.tally.redrawn += verdict.drawn_again
        if verdict.ratio > self.tally.worst:
            self.tally.worst, self.tally.worst_trial = verdict.ratio, str(trial)
        return None

    def _attempt(self, trial: Trial) -> Verdict:
        return judge(trial.case, lambda case: self._compared(replace(trial, case=case)))

    def _compared(self, trial: Trial) -> Compared:
        """Return the error and the bound of each result.

        Raises:
            AssertionError: Other entries than the oracle's are not finite.
        """
        results = self._backend.run(trial.case, **dict(trial.way))
        assert_shapes(trial.case, results)
        results_found = list(findings(trial.case, results))
        bad = [f"{finding.name}: {finding.bad} entries" for finding in results_found if finding.bad]
        assert not bad, f"{trial.case.name}: not finite, or finite, unlike the oracle's: {bad}"
        return {finding.name: (finding.error, finding.bound) for finding in results_found}

    def _shrunk(self, trial: Trial, error: Exception) -> Trial:
        """Return the simplest trial found that fails with the same type of error."""
        until = time.monotonic() + _SHRINK_SECONDS
        return shrink(
            trial,
            lambda candidate: time.monotonic() < until and self._fails(candidate, type(error)),
        )

    def _fails(self, trial: Trial, kind: type[Exception]) -> bool:
        try:
            self._attempt(trial)
        except Exception as error:  # noqa: BLE001 - compared with what it was before
            return type(error) is kind and not is_refusal(error)
        return False


def is_refusal(error: Exception) -> bool:
    """Return True for an UnsupportedError, also in the traceback text that a rank sent."""
    if isinstance(error, AssertionError):
        return False
    lines = str(error).splitlines()
    return isinstance(error, UnsupportedError) or any(
        "UnsupportedError: " in line for line in lines
    )


def _described(error: Exception) -> str:
    if isinstance(error, AssertionError) and str(error).startswith("fuzz-"):
        return str(error)
    return "".join(traceback.format_exception(error))[-4000:]
