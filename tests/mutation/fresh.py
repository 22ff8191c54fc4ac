"""The ``conftest.py`` beside mutmut's copy of the tests: a mutant starts with nothing kept.

Mutants run in forks of a process that has run all tests. Plans and results of the oracle that it
keeps would hide changes of what makes them.
"""

from __future__ import annotations

from cases import CASES
from internals.core import plan


def pytest_sessionstart() -> None:
    """Forget them."""
    plan._make_plan.cache_clear()
    for case in CASES.values():
        case.__dict__.pop("expected", None)
