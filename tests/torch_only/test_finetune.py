"""The example that trains a model of transformers on a ring agrees with the whole model."""

from __future__ import annotations

import argparse
import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_transformers.py"


def test_ring_and_whole_model_agree() -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        str(EXAMPLE), "--compare", "--steps=4", "--seq-len=301", "--layers=1", "--schedule=balanced",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    losses = [line.split() for line in done.stdout.splitlines() if line[:4].strip().isdigit()]
    assert len(losses) == 4
    assert all(float(ring) == pytest.approx(float(whole), rel=1e-5) for _, ring, whole in losses)
    assert float(losses[-1][1]) < float(losses[0][1])


def test_wrong_losses_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("finetune_transformers", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    options = argparse.Namespace(dtype="float32")
    assert example.report(options, 2, [5.0, 4.0], [5.0, 4.00001]) == 0
    for wrong in (4.001, math.nan):
        assert example.report(options, 2, [5.0, wrong, 3.0], [5.0, 4.0, 3.0]) == 1
        assert "more than" in capsys.readouterr().err
