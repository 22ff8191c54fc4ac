"""Over gathered keys every case of the table is right, too, and a wrong way is found out."""

from __future__ import annotations

from typing import Any

import pytest
from cases import CASES, Case
from mutants import GATHERED_MUTANTS
from tolerances import assert_close

from ring_core import gather_refusals

GATHERED = [case for case in CASES.values() if case.cp_size > 1 and not gather_refusals(case.plan)]


@pytest.mark.parametrize("case", GATHERED, ids=[case.name for case in GATHERED])
def test_case(case: Case, backend: Any, request: pytest.FixtureRequest) -> None:
    mutant = request.config.getoption("--mutant")
    assert_close(case, backend.run(case, mutant=mutant, transport="gather"))


# In one launch a run of queries, and in two stages: the kernel knows bands, or it does not.
WITNESSES = (("window-both-zigzag-cp4", "eager"), ("causal-zigzag-cp4", "sdpa"))


@pytest.mark.parametrize("mutant", [*GATHERED_MUTANTS, "window-off-by-one"])
def test_suite_goes_red(mutant: str, backend: Any) -> None:
    """At least one case of the table fails."""
    assert any(_fails(*witness, mutant, backend) for witness in WITNESSES)


@pytest.mark.parametrize(("name", "kernel"), WITNESSES)
def test_witnesses_are_green_otherwise(name: str, kernel: str, backend: Any) -> None:
    """The cases fail because of the mutant alone."""
    assert not _fails(name, kernel, None, backend)


def _fails(name: str, kernel: str, mutant: str | None, backend: Any) -> bool:
    case = CASES[name]
    try:
        results = backend.run(case, mutant=mutant, kernel=kernel, transport="gather")
        assert_close(case, results)
    except (AssertionError, *backend.failures):
        return True
    return False
