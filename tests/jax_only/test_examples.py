"""The examples check their own results, and notice wrong ones."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--seq-len=256", "--steps=4", "--layers=1", "--dim=64", "--cp=2"]


def run(name: str, *options: str) -> str:
    """Run an example as a user would, without this suite's host devices; return its output."""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment["RING_CHECK"] = "1"
    command = [sys.executable, str(EXAMPLES / name), *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def training() -> ModuleType:
    """Import the training example as a module."""
    spec = importlib.util.spec_from_file_location(
        "train_bytes_jax", EXAMPLES / "train_bytes_jax.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_bytes_jax"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        ["--cp=4"],
        [
            "--packed", "--window=20", "--layout=contiguous", "--strategy=balanced",
            "--dtype=float64",
        ],
    ],
)  # fmt: skip
def test_devices_and_one_device_agree(options: list[str]) -> None:
    printed = run("train_bytes_jax.py", *SMALL, *options)
    table = [line.split() for line in printed.splitlines()]
    losses = [row for row in table if len(row) == 4 and row[0].isdigit()]
    assert len(losses) == 4
    assert all(
        float(ring) == pytest.approx(float(single), rel=1e-5) for _, ring, single, _ in losses
    )
    assert "largest relative difference" in printed


@pytest.mark.nightly  # per change the pages on adapters run the same layers
@pytest.mark.parametrize("name", ["flax_nnx.py", "equinox_attention.py"])
def test_frameworks(name: str) -> None:
    last = run(name).splitlines()[-1]
    assert last.startswith("largest relative difference of loss and gradients:")
    assert 0 < float(last.split()[-1]) <= 1e-5


def test_wrong_losses_are_reported(training: ModuleType) -> None:
    config = training.arguments(["--steps=60"])
    good = training.Run(tuple(5.0 - n / 30 for n in range(60)), compiling=1.0, seconds=1.0)
    assert list(training.failures(config, good, good)) == []
    off = replace(good, losses=(*good.losses[:-1], good.losses[-1] * (1 + 2e-5)))
    assert "differ by 2.0e-05" in next(training.failures(config, off, good))
    flat = replace(good, losses=(5.0,) * 60)
    assert "the loss fell by 0.000" in next(training.failures(config, flat, flat))
    lost = replace(good, losses=(np.nan,) * 60)
    assert len(list(training.failures(config, lost, lost))) == 2


def test_packed_documents_end_where_topics_do(training: ModuleType) -> None:
    config = training.arguments(["--packed", "--seq-len=65536"])
    batch = training.sequence(config, 0)
    documents, labels = np.asarray(batch.documents)[0], np.asarray(batch.labels)[0]
    assert documents[0] == 0
    assert documents[-1] > 1
    ends = np.flatnonzero(np.diff(documents))
    assert (labels[ends] == training.IGNORED).all()
    assert (labels == training.IGNORED).sum() in (len(ends), len(ends) + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--seq-len=257"], "pad to"), (["--window=-1"], "--window must be"), (["--dim=65"], "--dim")],
)
def test_wrong_arguments_get_one_line(
    training: ModuleType, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        training.main([*SMALL, *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
