"""The benchmark of heads: every library's gradients are those of plain logits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.torch import heads


def test_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "heads.json"
    sizes = ["--tokens=64", "--dim=8", "--classes=50", "--repeats=1", "--dtype=float32"]
    monkeypatch.setattr(sys, "argv", ["heads", *sizes, f"--json={path}"])
    assert heads.main() == 0
    rows = json.loads(path.read_text())["rows"]
    assert {"ring linear_cross_entropy", "ring token_log_probs, entropy", "plain logits"} <= {
        row["name"] for row in rows
    }
    assert all(row["ms"] > 0 and row["error"] < 1e-5 for row in rows)


def test_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.json"
    sizes = ["--step", "--tokens=64", "--dim=16", "--classes=50", "--repeats=1", "--dtype=float32"]
    monkeypatch.setattr(sys, "argv", ["heads", *sizes, f"--json={path}"])
    assert heads.main() == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == ["step, logits='local'", "step, logits='none'"]
    assert all(row["ms"] > 0 for row in rows)
