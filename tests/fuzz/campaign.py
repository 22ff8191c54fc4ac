"""Trials run one by one, and what is kept of them."""

from __future__ import annotations

import hashlib
import json
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
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
    """What went wrong with a seed."""

    seed: int
    trial: str
    error: str
    simplest: str = ""  # a trial that fails alike with less in it


@dataclass
class Tally:
    """What a backend has run; seeds ``first`` to before ``next``."""

    first: int
    next: int
    cases: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by the way that was asked for
    redrawn: int = 0  # how often an error was judged over several draws of the arrays
    seconds: float = 0.0
    worst: float = 0.0  # error over tolerance, of the results that passed
    worst_trial: str = ""
    failures: list[Failure] = field(default_factory=list)

    def line(self) -> str:
        """The tally in a line."""
        return (
            f"{self.cases} cases in {self.seconds:.0f} s, {self.refused.total()} more refused by "
            f"name, {len(self.failures)} failed; worst error over tolerance {self.worst:.2f}, "
            f"{self.redrawn} times judged over several draws"
        )


@cache
def generator() -> str:
    """What tells seeds of one generator from those of another."""
    return hashlib.blake2b(Path(draw.__file__).read_bytes(), digest_size=8).hexdigest()


def load(path: Path) -> dict[str, Tally]:
    """The tallies of a state file, by backend.

    Raises:
        ValueError: Its seeds meant other cases.
    """
    state = json.loads(path.read_text())
    if state["generator"] != generator():
        raise ValueError(f"{path} was written when seeds gave other cases: move it away")
    return {name: _tally(values) for name, values in state["backends"].items()}


def _tally(values: dict[str, Any]) -> Tally:
    failures = [Failure(**failure) for failure in values.pop("failures")]
    return Tally(**{**values, "refused": Counter(values["refused"]), "failures": failures})


def save(path: Path, tallies: dict[str, Tally]) -> None:
    """Write the state; a run that is cut off leaves the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new_file = path.with_suffix(".new")
    backends = {
        name: {**vars(tally), "failures": [vars(failure) for failure in tally.failures]}
        for name, tally in tallies.items()
    }
    new_file.write_text(
        json.dumps({"generator": generator(), "backends": backends}, indent=1) + "\n"
    )
    new_file.replace(path)


class Campaign:
    """Runs trials on one backend and tallies them."""

    def __init__(self, name: str, backend: Any, tally: Tally) -> None:
        self.tally = tally
        self._limits = LIMITS[name]
        self._backend = backend

    def run_next(self) -> Failure | None:
        """Run the next seed; its failure, if it failed."""
        began = time.monotonic()
        trial = draw.draw(self.tally.next, self._limits)
        failure = self._tallied(self.tally.next, trial)
        self.tally.next += 1
        self.tally.seconds += time.monotonic() - began
        return failure

    def run_failed_again(self) -> list[Failure]:
        """Run the seeds that failed before; those that fail still."""
        before, self.tally.failures = self.tally.failures, []
        trials = ((known.seed, draw.draw(known.seed, self._limits)) for known in before)
        failures = [self._tallied(seed, trial) for seed, trial in trials]
        return [failure for failure in failures if failure is not None]

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
        """The error of each result, and the error allowed; those not finite are the oracle's."""
        results = self._backend.run(trial.case, **dict(trial.way))
        assert_shapes(trial.case, results)
        results_found = list(findings(trial.case, results))
        bad = [f"{finding.name}: {finding.bad} entries" for finding in results_found if finding.bad]
        assert not bad, f"{trial.case.name}: not finite, or finite, unlike the oracle's: {bad}"
        return {finding.name: (finding.error, finding.bound) for finding in results_found}

    def _shrunk(self, trial: Trial, error: Exception) -> Trial:
        """The simplest trial found that fails with the same kind of error."""
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
    """Whether a backend said by name that it cannot do this; ranks hand on their tracebacks."""
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
