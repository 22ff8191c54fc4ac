"""The table of versions agrees with the packages' requirements and with the dates of SPEC 0."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from pages import columns_of

ROOT = Path(__file__).parents[2]
PROJECTS: list[dict[str, Any]] = [
    tomllib.loads(path.read_text())["project"]
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
]
MONTHS = {"Python": 36}  # 24 for everything else
PYTHON = "Programming Language :: Python :: 3."


def rows() -> Iterator[dict[str, str]]:
    page = (ROOT / "docs" / "reliability.md").read_text()
    table = re.search(r"^\| what .*?\n\n", page, re.MULTILINE | re.DOTALL)
    assert table
    columns = columns_of(table[0].strip())
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def lower_bound(requirement: Requirement) -> str:
    (bound,) = (part.version for part in requirement.specifier if part.operator == ">=")
    return bound


def asked() -> dict[str, str]:
    """Return the lower bound of each dependency, and of transformers, by the row's name."""
    specifiers: dict[str, str] = {}
    for project in PROJECTS:
        hf = project.get("optional-dependencies", {}).get("hf", [])
        for text in (*project["dependencies"], *hf):
            requirement = Requirement(text)
            if requirement.name.startswith("ring-"):
                continue
            on = re.search(r"python_version >= \"(3\.\d+)\"", str(requirement.marker or ""))
            name = requirement.name + (f" on Python {on[1]}" if on else "")
            assert specifiers.setdefault(name, lower_bound(requirement)) == lower_bound(requirement)
    return specifiers


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


def pins(path: Path) -> dict[str, list[str]]:
    """Return each package's versions in a constraints file; Python 3.13 may have another one."""
    versions: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        name, is_pin, version = line.partition(" ")[0].partition("==")
        if is_pin:
            versions.setdefault(name, []).append(version)
    return versions


def minor(version: str) -> list[str]:
    return version.split(".")[:2]


def test_what_is_tested_is_what_is_pinned() -> None:
    pinned = pins(ROOT / "constraints.txt")
    for row in rows():
        name = row["what"].partition(" ")[0]
        (version,) = [row["oldest"]] if name == "Python" else pinned[name]
        first = row["tested with"].partition(", ")[0]  # others have sessions of their own
        assert minor(version) == first.split("."), row["what"]


LOWEST = {path.stem: pins(path) for path in sorted(ROOT.glob("constraints-lowest-*.txt"))}


def test_the_oldest_versions_are_tested() -> None:
    for row in rows():
        name = row["what"].partition(" ")[0]
        versions = [v for pinned in LOWEST.values() for v in pinned.get(name, ())]
        assert name == "Python" or minor(row["oldest"]) in map(minor, versions), row["what"]


def test_the_oldest_versions_are_those_that_are_asked_for() -> None:
    """Pinned oldest versions satisfy the requirements. If not, run `nox -s constraints`."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    asked = [x for project in PROJECTS for x in project["dependencies"]]
    asked += [x for name in ("test", "test-torch", "test-jax") for x in groups[name]]
    for text, (side, pinned) in product(asked, LOWEST.items()):
        requirement = Requirement(text)
        if "python_version" not in str(requirement.marker or ""):
            for version in pinned.get(requirement.name, ()):
                is_triton_of_torch = requirement.name == "triton" and "torch" in side
                assert version in requirement.specifier or is_triton_of_torch, (side, text)
