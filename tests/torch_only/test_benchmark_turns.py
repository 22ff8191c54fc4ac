"""Timing two source trees in turns: both trees' processes answer, and their times are recorded."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.development import old_and_new


def test_turns() -> None:
    order: list[tuple[str, bool]] = []

    def tree(name: str, times: list[float]) -> old_and_new.Timed:
        def timed(request: dict[str, Any]) -> dict[str, float]:
            order.append((name, request["first"]))
            return {"forward": times[0], "both": times[len([x for x in order if x[0] == name]) - 1]}

        return timed

    trees = tree("old", [2.0, 8.0, 8.0]), tree("new", [1.0, 8.0, 4.0])
    row = old_and_new.in_turns(*trees, {"row": "causal 8k 32/8"}, 2)
    turns = [("old", False), ("new", False), ("new", False), ("old", False)]
    assert order == [("old", True), ("new", True), *turns]
    assert row["forward"]["ratio"] == [0.5, 0.5, 0.5] and row["both"]["ratios"] == [0.5, 1.0]
    assert row["both"]["ratio"][1] == 0.75


@pytest.mark.nightly
def test_both_trees_run_in_processes_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "turns.json"
    here = str(old_and_new.HERE)
    arguments = ["--old", here, "--gpus", "2", "--json", str(path), "--rounds", "2"]
    assert old_and_new.main(arguments) == 0
    written = json.loads(path.read_text())
    assert written["environment"]["old"] == written["environment"]["new"]
    (row,) = written["rows"]
    assert min(row["both"]["ratios"]) > 0 and row["forward"]["old"][1] < row["both"]["old"][1]
    assert old_and_new.main(["--old", here, "--gpus", "2", "--rows", "no such row"]) == 1


def test_a_folder_within_a_checkout_has_no_commit(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert old_and_new.commit_of(tmp_path) == "no commit"
    author = "-c", "user.name=someone", "-c", "user.email=someone@example.com"
    for command in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    commit = old_and_new.commit_of(tmp_path)
    assert len(commit) == 8 and int(commit, 16) >= 0
    assert old_and_new.commit_of(tmp_path / "folder") == "no commit"
