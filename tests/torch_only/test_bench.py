"""``python -m ring_torch bench``: no speed without right results."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ring_torch.__main__ import main
from ring_torch.local import LocalRanks

SMALL = ("--seq-len", "256", "--heads", "4", "--kv-heads", "2", "--head-dim", "16")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_bench(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--window", "40", "--transport", "gather", "--kernel", "eager", "--seconds", "0")
    assert main(["bench", *SMALL, *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["setting"]["ranks"] == 2 and found["setting"]["window"] == 40
    assert [row["what"] for row in found["timings"]] == ["forward", "forward and backward"]
    for row in found["timings"]:
        assert len(row["one"]) == len(row["ring"]) == 3
        assert row["share"] == 0.5 and row["eta"] > 0


def test_no_speed_without_right_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = LocalRanks.run

    def wrong(*args: Any) -> list[Any]:
        return [[1.01 * x for x in results] for results in right(*args)]

    monkeypatch.setattr(LocalRanks, "run", wrong)
    assert main(["bench", *SMALL, "--ranks", "1"]) == 1
    text = capsys.readouterr().out
    assert "FAILED" in text and text.endswith("something is wrong\n")
    assert "eta" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--seq-len 255", "255 is not a positive multiple of 4"),
        ("--ranks 0", "--ranks must be at least 1"),
    ],
)
def test_mistakes(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words.split()]) == 2
    assert message in capsys.readouterr().err
