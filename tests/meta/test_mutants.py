"""Tests of the test suite: it must fail on every mutant of a backend."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from cases import CASES
from mutants import ALL, MUTANTS, edited
from tolerances import assert_close

# A few cases that together detect every mutant. The table shows that they pass without one.
WITNESSES = (
    "causal-contiguous-cp2", "window-small-contiguous-cp3", "gqa-contiguous", "sinks-contiguous",
    "causal-balanced-cp4", "full-zigzag-cp4", "bias-very-negative-contiguous",
)  # fmt: skip
#: Case to run first for a mutant that the first of these does not detect; each takes time.
SEEN_IN = {
    "window-off-by-one": "window-small-contiguous-cp3", "ring-reversed": "sinks-contiguous",
    "sink-per-step": "sinks-contiguous", "lse-gradient-dropped": "sinks-contiguous",
    "merge-without-rescale": "causal-balanced-cp4", "wrong-kv-head": "gqa-contiguous",
    "help-not-returned": "causal-balanced-cp4", "bias-not-shifted": "bias-very-negative-contiguous",
}  # fmt: skip


@pytest.mark.nightly(
    "torch", unless=["window-off-by-one", "grads-not-sent-home", "local-positions"]
)
@pytest.mark.nightly("jax", unless=["last-step-dropped", "help-not-returned"])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_suite_goes_red(mutant: str, backend: Any) -> None:
    for name in sorted(WITNESSES, key=lambda name: name != SEEN_IN.get(mutant)):
        try:
            assert_close(CASES[name], backend.run(CASES[name], mutant=mutant))
        except (AssertionError, *backend.failures):
            return
    pytest.fail("no case notices it")


@pytest.mark.parametrize("mutant", ALL)
@pytest.mark.usefixtures("backend")  # which loads its packages
def test_every_edit_is_of_its_function(mutant: str) -> None:
    """Ranks that could not be edited would look as if the mutant had been noticed."""
    for function, edits in ALL[mutant].items():
        if function.partition(".")[0] in sys.modules:
            original, code = edited(function, edits)
            old, new = ((x.co_code, x.co_consts) for x in (original.__code__, code))
            assert old != new
