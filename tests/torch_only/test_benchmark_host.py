"""Benchmarks of host time: their baselines, the machine they report, and ``bench`` as a table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.development import host_time
from benchmarks.torch import bench_command
from ring_core.tools import bench
from ring_core.tools.case import Case


def test_no_other_kernel_takes_the_place_of_flash_attn_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        host_time.main(["--gpus", "2"])
    assert "'by hand' is flash-attn-4's own function" in (said := capsys.readouterr().err)
    assert said.rstrip().endswith("name another one by --by-hand sdpa")
    q, k, v = (torch.randn(1, 8, heads, 4) for heads in (4, 2, 2))
    assert host_time.BY_HAND["sdpa"]()(q, k, v).shape == q.shape


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
    assert (
        bench_command.main(["--lengths", "64", "8k", "--json", str(path), "--", "--seconds", "9"])
        == 0
    )
    assert [x[-3:] for x in commands] == [[length, "--seconds", "9"] for length in ("64", "8k")]
    rows = json.loads(path.read_text())["rows"]
    assert [x["bench_pass"] for x in rows] == 2 * [*bench.PASSES]
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("| tokens | ") and len(shown) == 2 + len(rows)
