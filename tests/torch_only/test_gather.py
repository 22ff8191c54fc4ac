"""Gathered keys: every case of the table is right, and mutants of the code fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import CASES, Case
from mutants import GATHERED_MUTANTS, GROUP_MUTANTS
from tolerances import assert_close

from ring_core import gather_refusals

GATHERED = [case for case in CASES.values() if case.cp_size > 1 and not gather_refusals(case.plan)]


@pytest.mark.nightly(only=[case.name for case in GATHERED if "again" in case.nightly])
@pytest.mark.parametrize("case", GATHERED, ids=[case.name for case in GATHERED])
def test_case(case: Case, backend: Any, request: pytest.FixtureRequest) -> None:
    mutant = request.config.getoption("--mutant")
    assert_close(case, backend.run(case, mutant=mutant, strategy="gather"))


# One launch per run of queries, and two stages: for kernels with and without band masks.
WITNESSES = (("window-both-zigzag-cp4", "eager"), ("causal-zigzag-cp4", "sdpa"))


@pytest.mark.parametrize("mutant", [*GATHERED_MUTANTS, "window-off-by-one"])
def test_suite_goes_red(mutant: str, backend: Any) -> None:
    """A mutant fails at least one case of the table."""
    assert any(_fails(*witness, mutant, backend) for witness in WITNESSES)


@pytest.mark.parametrize(("name", "kernel"), WITNESSES)
def test_witnesses_are_green_otherwise(name: str, kernel: str, backend: Any) -> None:
    """Without a mutant the same cases pass."""
    assert not _fails(name, kernel, None, backend)


#: Cases that run in groups of heads, if they have enough of them.
IN_GROUPS = (
    "causal-zigzag-cp4", "window-both-contiguous-cp3", "documents-window-chunks-cp3", "keys80-causal-zigzag",
    "v-dim-zigzag", "sinks-zigzag",
)  # fmt: skip


@pytest.mark.parametrize("name", IN_GROUPS)
def test_heads_in_groups(name: str, backend: Any) -> None:
    """Two groups of heads forward and four backward give the results of one launch."""
    case = replace(CASES[name], heads=(8, 4))
    assert_close(case, backend.run(case, mutant="in-groups", strategy="gather"))


@pytest.mark.parametrize("mutant", GROUP_MUTANTS)
def test_wrong_groups_are_found_out(mutant: str, backend: Any) -> None:
    case = replace(CASES["causal-zigzag-cp4"], heads=(8, 4))
    results = backend.run(case, mutant=mutant, kernel="eager", strategy="gather")
    with pytest.raises(AssertionError):
        assert_close(case, results)


def _fails(name: str, kernel: str, mutant: str | None, backend: Any) -> bool:
    case = CASES[name]
    try:
        results = backend.run(case, mutant=mutant, kernel=kernel, strategy="gather")
        assert_close(case, results)
    except (AssertionError, *backend.failures):
        return True
    return False
