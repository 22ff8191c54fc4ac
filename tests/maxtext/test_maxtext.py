"""MaxText's training program gives the same losses on the ring as with its own attention."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tolerances import compare

RUNS = Path(__file__).with_name("runs.py")
NAMES = [
    "cp", "dp-cp-packed", "fsdp-cp-explicit", "tensor-cp-no-scan", "window-sinks",
    "chunks-softcap", "mla",
]  # fmt: skip


def results(folder: Path, devices: int, attention: str) -> dict[str, Any]:
    """Run ``runs.py`` in a process of its own, and return its results by run."""
    out = folder / f"{attention}-{devices}.json"
    command = (sys.executable, str(RUNS), str(devices), attention, str(out))
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    by_name: dict[str, Any] = json.loads(out.read_text())
    return by_name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], ...]:
    """Return the runs of MaxText's attention on one and four devices, and of the ring on four."""
    folder = tmp_path_factory.mktemp("runs")
    expected = ((1, "dot_product"), (4, "dot_product"), (4, "ring"))
    return tuple(results(folder, *arguments) for arguments in expected)


def numbers(run: dict[str, Any]) -> Any:
    """Return the metrics of each step, ``[steps, metrics]``."""
    return np.array([list(step.values()) for step in run["steps"]])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_one_device(name: str, runs: tuple[dict[str, Any], ...]) -> None:
    """Metrics differ from one device's at most twice as much as MaxText's do on four devices."""
    one_device, own, ring = (by_name[name] for by_name in runs)
    assert (one_device["rings"], own["rings"]) == (0, 0)
    assert ring["rings"] > 0
    expected, baseline, actual = (numbers(run) for run in (one_device, own, ring))
    assert expected.shape == (4, 3)
    assert expected[-1, 0] < expected[0, 0] - 1  # the model learns
    for column in range(3):
        bad, error, bound = compare(
            actual[:, column], expected[:, column], baseline[:, column], "float32"
        )
        assert not bad
        assert error <= bound


def test_all_runs_are_compared(runs: tuple[dict[str, Any], ...]) -> None:
    assert list(runs[0]) == NAMES
