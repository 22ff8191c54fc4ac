"""``conftest.py`` for mutmut's copy of the tests: clears all caches before a mutant runs.

Mutants run in forks of a process that has run all tests. Its cached plans, programs and oracle
results would hide mutants in the code that makes them.
"""

from __future__ import annotations

import sys

from cases import CASES


def pytest_sessionstart() -> None:
    """Clear the caches of plans, programs and oracle results."""
    for name, module in list(sys.modules.items()):
        if name.startswith("ring_core"):
            for value in list(vars(module).values()):
                if clear := getattr(value, "cache_clear", None):
                    clear()
    for case in CASES.values():
        case.__dict__.pop("expected", None)
