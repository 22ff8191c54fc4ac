"""The demonstration agrees with itself, and would say so if it did not."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "train_bytes.py"
SMALL = ["--cp=2", "--seq-len=256", "--steps=4", "--layers=1", "--dim=64", "--out=none"]


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    """The example as a module, which its ranks find too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DEMO.parent)
        yield importlib.import_module("train_bytes")


def agrees(printed: str) -> None:
    """The losses that were printed do, as is said there."""
    assert "largest relative difference" in printed
    assert "In float64 ring and single process agree" in printed
    table = [line.split() for line in printed.splitlines()]
    losses = [row for row in table if len(row) == 4 and row[0].isdigit()]
    assert len(losses) == 4
    assert all(
        float(ring) == pytest.approx(float(single), rel=1e-5) for _, ring, single, _ in losses
    )


def test_demonstration_as_a_command() -> None:
    command = [sys.executable, str(DEMO), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    agrees(done.stdout)


def test_documents_of_a_window(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        demo.main([*SMALL, "--packed", "--window=20", "--layout=contiguous", "--strategy=balanced"])
        == 0
    )
    agrees(capsys.readouterr().out)


def test_wrong_losses_are_reported(demo: ModuleType) -> None:
    config = demo.Config(
        cp=2, layout="zigzag", strategy="auto", seq_len=256, window=None, packed=False, steps=60, dtype="float32",
        device="cpu", layers=1, dim=64, lr=1e-3, seed=0,
    )  # fmt: skip
    good = demo.Run(losses=tuple(5.0 - n / 30 for n in range(60)), seconds=1.0, grown=0, peak=0)
    assert list(demo.failures(config, good, good)) == []
    off = replace(good, losses=(good.losses[0] * (1 + 2e-5), *good.losses[1:]))
    assert "differ by" in next(demo.failures(config, off, good))
    flat = replace(good, losses=(5.0,) * 60)
    assert "the loss fell by 0.000" in next(demo.failures(config, flat, flat))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seq-len=257"], "pad to"),
        (["--window=-1"], "--window must be"),
        (["--dim=65"], "--dim"),
    ],
)
def test_wrong_arguments_get_one_line(
    demo: ModuleType, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        demo.main([*SMALL, *options])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
