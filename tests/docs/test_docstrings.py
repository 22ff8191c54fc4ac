"""Doctests: examples in the docstrings of the backend's packages show what they return."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2] / "packages"
OF_BACKEND = {"core": "ring_core"}

FINDER = doctest.DocTestFinder(exclude_empty=True)


def modules_with_examples(package: str) -> list[str]:
    """Return the modules of a package that have an example in their text."""
    (source,) = PACKAGES.glob(f"*/src/{package}")
    return [
        ".".join(path.relative_to(source.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(source.rglob("*.py"))
        if ">>> " in path.read_text()
    ]


@pytest.fixture
def package(request: pytest.FixtureRequest) -> str:
    return OF_BACKEND[request.config.getoption("--backend")]


def test_examples_show_what_they_return(package: str) -> None:
    names = modules_with_examples(package)
    assert names
    failures = []
    for name in names:
        for test in FINDER.find(importlib.import_module(name)):
            report: list[str] = []
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
            runner.run(test, out=report.append)
            failures += report
    assert not failures, "\n".join(failures)
