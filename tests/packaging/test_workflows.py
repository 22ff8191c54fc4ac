"""The GitHub workflows run sessions of the noxfile, and all that have to pass."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
ACTION = "./.github/actions/nox"

Json = dict[str, Any]


def jobs(path: Path) -> dict[str, Json]:
    by_name: dict[str, Json] = yaml.safe_load(path.read_text())["jobs"]
    return by_name


def cells(job: Json) -> Iterator[Json]:
    """Yield the combinations of a job's matrix."""
    matrix: Json = job.get("strategy", {}).get("matrix", {})
    lists = {name: values for name, values in matrix.items() if name != "include"}
    for values in product(*lists.values()):
        if lists or "include" not in matrix:
            yield dict(zip(lists, values, strict=True))
    yield from matrix.get("include", [])


def filled(text: str, cell: Json) -> str:
    return re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda match: str(cell.get(match[1], "")), text)


def calls(path: Path) -> Iterator[Json]:
    """Yield the inputs of each use of the nox action."""
    for job in jobs(path).values():
        for cell, step in product(cells(job), job["steps"]):
            if step.get("uses") == ACTION:
                yield {name: filled(value, cell) for name, value in step["with"].items()}


def sessions(path: Path) -> list[str]:
    return [call["session"] for call in calls(path)]


def listed(*options: str) -> set[str]:
    """Return the names of the sessions that nox selects; an unknown one is an error."""
    command = (sys.executable, "-m", "nox", "--list", "--json", *options)
    here = os.environ | {"NOX_SCRIPT_MODE": "none"}  # nox must not create an environment
    done = subprocess.run(
        command, cwd=ROOT, env=here, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {entry["session"] for entry in json.loads(done.stdout)}


def constant(name: str) -> ast.expr:
    """Return the expression that the noxfile assigns to a name."""
    (value,) = (
        node.value
        for node in ast.parse((ROOT / "noxfile.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )
    return value


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sessions_are_those_of_the_noxfile(path: Path) -> None:
    names = sessions(path)
    assert names
    listed_sessions = listed("--extra-pythons", "3.14", "--session", *names)
    for name in names:  # a session with one Python has a name without the version, too
        assert {name, f"{name}-3.12"} & listed_sessions, name


def test_files_of_the_noxfile_are_there() -> None:
    named = re.findall(
        r"(?:tests|examples|benchmarks)/[\w/.]+\.\w+", (ROOT / "noxfile.py").read_text()
    )
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_a_change_has_to_pass_on_every_backend_and_python() -> None:
    table = constant("BACKENDS")
    assert isinstance(table, ast.Dict)
    backends = [ast.literal_eval(key) for key in table.keys if key is not None]
    names = set(sessions(FOLDER / "ci.yml"))
    for name, python, backend in product(("tests", "smoke"), ("3.12", "3.13"), backends):
        assert f"{name}-{python}({backend})" in names
    for name, when in (("lowest", "weekly"), ("newest", "nightly")):
        ran = set(sessions(FOLDER / f"{when}.yml"))
        assert ran >= {f"{name}-3.12({backend})" for backend in backends}
    checks = {"lint", "types", "docs", "packaging", "workflows"}
    assert checks <= names
    text = ast.unparse(constant("CI"))  # sessions that run on one machine
    assert set(re.findall(r"'([a-z]+)'", text)) >= checks


def test_releases_of_transformers_run_a_part_for_each_change_and_all_at_night() -> None:
    table = constant("RELEASES")
    assert isinstance(table, ast.Dict)
    releases = [ast.literal_eval(key) for key in table.keys if key is not None]
    part = " ".join(ast.literal_eval(constant("ON_EACH")))
    for workflow, arguments in (("ci", part), ("nightly", "--all")):
        ran = {x["session"]: x.get("arguments") for x in calls(FOLDER / f"{workflow}.yml")}
        for release in releases:
            assert ran[f"transformers-3.12({release})"] == arguments


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_jobs_end_in_time_and_ask_for_no_more_than_they_need(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {}
    assert workflow["concurrency"]["group"]
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 360
        writes = {name for name, what in job["permissions"].items() if what == "write"}
        assert bool(writes) == ("environment" in job), "only what publishes writes"
