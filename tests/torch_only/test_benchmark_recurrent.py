"""The benchmark of recurrent layers: emulated ranks have the whole layer's results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.torch import recurrent


@pytest.mark.parametrize("name", ["gated_delta_rule", "ssd"])
def test_emulated_ranks_are_the_whole_layer(name: str) -> None:
    kernel, inputs, grad = recurrent.layer_of(name, 256, 2, 8, torch.float64, "cpu")
    expected = recurrent.Group(kernel, "eager", inputs, grad, 1, "contiguous").results()
    for layout in recurrent.LAYOUTS:
        actual = recurrent.Group(kernel, "eager", inputs, grad, 4, layout).results()
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6 * float(y.abs().max()))


def test_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recurrent.json"
    sizes = ["--tokens=512", "--heads=2", "--width=16", "--repeats=1", "--dtype=float32"]
    monkeypatch.setattr(sys, "argv", ["recurrent", *sizes, f"--json={path}"])
    assert recurrent.main() == 0
    errors, *rows, last = json.loads(path.read_text())["rows"]
    assert "goals" in capsys.readouterr().out
    assert last["kernel"] == "eager" and "its kernels need CUDA" in last["reason"]
    assert [row["layout"] for row in rows] == ["whole", "contiguous", "zigzag"]
    assert all(ratio > 0 for name, ratio in last["ratios"].items() if "peak" not in name)
    assert errors["worst_ratio"] < recurrent.GOALS["error"]
    # What a zigzag rank sends: two runs of a transition and a state of each head, whatever T.
    assert rows[2]["sent_bytes"]["forward"] == 2 * 2 * 16 * (16 + 16) * 4
    monkeypatch.setattr(sys, "argv", ["recurrent", *sizes, "--kernel=fla"])
    assert recurrent.main() == 1
    text = capsys.readouterr().out
    assert "its kernels need CUDA" in text and "_ms" not in text
