"""The ``conftest.py`` beside mutmut's copy of the tests: a mutant starts with nothing kept.

Mutants run in forks of a process that has run all tests. Plans, programs and results of the oracle
that it keeps would hide changes of what makes them.
"""

from __future__ import annotations

import sys

from cases import CASES


def pytest_sessionstart() -> None:
    """Forget them."""
    for name, module in list(sys.modules.items()):
        if name.startswith("ring_core"):
            for value in list(vars(module).values()):
                if clear := getattr(value, "cache_clear", None):
                    clear()
    for case in CASES.values():
        case.__dict__.pop("expected", None)
