"""Benchmarks of host time say on which machine they ran, and ``bench`` becomes a table."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.torch import bench_command
from benchmarks.torch.methods import described
from ring_core.tools import bench
from ring_core.tools.case import Case


def test_a_file_says_what_ran_and_on_which_processors() -> None:
    environment = described(gpus=4)
    libraries = {"flash-attn-4", "torch", "triton", "cuda"}
    assert {"cpu", "gpus", "gpu", "command", *libraries} <= {*environment}
    assert environment["cpu"].endswith("of them")


def test_what_bench_prints_becomes_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(2, 64, 2, 1, 8, "float32")
    timings = [bench.Timing(name, (4.0,), (2.5,), (3.0,), 0.5) for name in bench.PASSES]
    printed, _ = bench.report(bench.Result(case, "GPUs", [], timings, {}), as_json=True)
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=0, stdout=f"noise of a library\n{printed}")

    monkeypatch.setattr(subprocess, "run", run)
    path = tmp_path / "bench.json"
    arguments = ["--lengths", "64", "8k", "--json", str(path), "--", "--seconds", "9"]
    assert bench_command.main(arguments) == 0
    assert [x[-3:] for x in commands] == [[length, "--seconds", "9"] for length in ("64", "8k")]
    rows = json.loads(path.read_text())["rows"]
    assert [x["bench_pass"] for x in rows] == 2 * [*bench.PASSES]
    shown = [x for x in capsys.readouterr().out.splitlines() if x.startswith("|")]
    assert shown[0].startswith("| tokens | ") and len(shown) == 2 + len(rows)
