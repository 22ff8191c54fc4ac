"""The GitHub workflows run sessions of the noxfile, and all that have to pass."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import noxfile
import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = {path.stem: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
ACTION = "./.github/actions/nox"


def cells(matrix: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the combinations of a job's matrix."""
    lists = {name: values for name, values in matrix.items() if name != "include"}
    if lists or "include" not in matrix:
        yield from (dict(zip(lists, x, strict=True)) for x in product(*lists.values()))
    yield from matrix.get("include", [])


def filled(text: str, cell: dict[str, Any]) -> str:
    return re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda match: str(cell.get(match[1], "")), text)


def calls(workflow: str) -> Iterator[dict[str, str]]:
    """Yield the inputs of each use of the nox action."""
    for job in yaml.safe_load(FILES[workflow].read_text())["jobs"].values():
        for cell, step in product(cells(job.get("strategy", {}).get("matrix", {})), job["steps"]):
            if step.get("uses") == ACTION:
                yield {name: filled(value, cell) for name, value in step["with"].items()}


def sessions(workflow: str) -> set[str]:
    return {call["session"] for call in calls(workflow)}


@pytest.mark.parametrize("workflow", FILES)
def test_sessions_are_those_of_the_noxfile(workflow: str) -> None:
    names = sessions(workflow)
    command = (sys.executable, "-m", "nox", "--list", "--json", "--extra-pythons", "3.14")
    here = os.environ | {"NOX_SCRIPT_MODE": "none"}  # nox must not create an environment
    done = subprocess.run(
        [*command, "--session", *names], cwd=ROOT, env=here, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert names and done.returncode == 0, done.stderr
    listed = {entry["session"] for entry in json.loads(done.stdout)}
    for name in names:  # a session with one Python has a name without the version, too
        assert {name, f"{name}-3.12"} & listed, name


def test_files_of_the_noxfile_are_there() -> None:
    named = re.findall(
        r"(?:tests|examples|benchmarks)/[\w/.]+\.\w+", (ROOT / "noxfile.py").read_text()
    )
    assert named and [name for name in named if not (ROOT / name).exists()] == []


def test_a_change_has_to_pass_on_every_backend_and_python() -> None:
    expected = {
        "ci": {f"{name}-{python}" for name in ("tests", "smoke") for python in ("3.12", "3.13")},
        "weekly": {"lowest-3.12"}, "nightly": {"newest-3.12"},
    }  # fmt: skip
    for workflow, names in expected.items():
        assert sessions(workflow) >= {f"{name}({x})" for name in names for x in noxfile.BACKENDS}
    checks = {"lint", "types", "docs", "packaging", "workflows"}
    assert checks <= sessions("ci") and checks <= {*noxfile.CI}


def test_releases_of_transformers_run_a_part_for_each_change_and_all_at_night() -> None:
    for workflow, arguments in (("ci", " ".join(noxfile.ON_EACH)), ("nightly", "--all")):
        ran = {x["session"]: x.get("arguments") for x in calls(workflow)}
        for release in noxfile.RELEASES:
            assert ran[f"transformers-3.12({release})"] == arguments
