"""The benchmark of a decode step times what is right, and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from benchmarks.torch import decode
from ring_torch.serving import kernels, paged

SIZES = ["--tokens=256", "--heads=2", "--kv-heads=1", "--width=16", "--repeats=1", "--turns=1"]


def test_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "decode.json"
    monkeypatch.setattr(sys, "argv", ["decode", *SIZES, f"--json={path}"])
    assert decode.main() == 0
    *rows, step = json.loads(path.read_text())["rows"]
    assert [row["row"] for row in rows] == [row.name for row in decode.ROWS]
    assert all(row["error"] < decode.MOST_ERROR and row["ratios"] for row in rows)
    assert step["row"] == "a step" and step["host_us"] > 0


def test_what_is_wrong_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["decode", *SIZES])
    with patch.object(kernels, "attend_by", lambda _: lambda *call: [1.1 * paged.attend(*call)[0]]):
        assert decode.main() == len(decode.ROWS)
    printed = capsys.readouterr().out
    assert "is WRONG" in printed
    assert "ratio" not in printed
