"""The page of versions says what the packages ask for, and counts its dates as SPEC 0 does."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from pages import columns_of

ROOT = Path(__file__).parents[2]
PROJECTS: list[dict[str, Any]] = [
    tomllib.loads(path.read_text())["project"]
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
]
MONTHS = {"Python": 36}  # others: 24
PYTHON = "Programming Language :: Python :: 3."


def rows() -> Iterator[dict[str, str]]:
    page = (ROOT / "docs" / "versions.md").read_text()
    table = re.search(r"^\| what .*?\n\n", page, re.MULTILINE | re.DOTALL)
    assert table
    columns = columns_of(table[0].strip())
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def lower_bound(requirement: Requirement) -> str:
    (bound,) = (part.version for part in requirement.specifier if part.operator == ">=")
    return bound


def asked() -> dict[str, str]:
    """What the packages need, and transformers: the oldest version of each, by the row's name."""
    found: dict[str, str] = {}
    for project in PROJECTS:
        hf = project.get("optional-dependencies", {}).get("hf", [])
        for text in (*project["dependencies"], *hf):
            requirement = Requirement(text)
            if requirement.name.startswith("ring-"):
                continue
            on = re.search(r"python_version >= \"(3\.\d+)\"", str(requirement.marker or ""))
            name = requirement.name + (f" on Python {on[1]}" if on else "")
            assert found.setdefault(name, lower_bound(requirement)) == lower_bound(requirement)
    return found


def test_the_oldest_versions_are_those_that_the_packages_ask_for() -> None:
    shown = {row["what"]: row["oldest"] for row in rows()}
    pythons = {name: oldest for name, oldest in shown.items() if name.startswith("Python ")}
    assert {name: oldest for name, oldest in shown.items() if name not in pythons} == asked()
    for project in PROJECTS:
        named = [x.removeprefix(PYTHON) for x in project["classifiers"] if x.startswith(PYTHON)]
        assert [f"3.{minor}" for minor in named] == list(pythons.values())
        assert project["requires-python"] == f">=3.{named[0]}"


def test_dates_are_counted_as_spec_0_does() -> None:
    for row in rows():
        months = MONTHS.get(row["what"].partition(" ")[0], 24)
        released = date.fromisoformat(row["released"])
        until = released.replace(year=released.year + months // 12)
        assert row["supported at least until"] == until.isoformat(), row["what"]


def test_what_is_tested_is_what_is_pinned() -> None:
    pins = dict(
        line.partition(" ")[0].split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line.partition(" ")[0]
    )
    for row in rows():
        name = row["what"].partition(" ")[0]
        pinned = row["oldest"] if name == "Python" else pins[name]
        assert pinned.split(".")[:2] == row["tested with"].split("."), row["what"]
