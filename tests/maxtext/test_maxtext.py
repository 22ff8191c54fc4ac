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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the runs of MaxText's attention on one and four devices, and of the ring on four."""
    results = []
    for devices, attention in ((1, "dot_product"), (4, "dot_product"), (4, "ring")):
        out = tmp_path_factory.mktemp("runs") / "results.json"
        command = (sys.executable, str(RUNS), str(devices), attention, str(out))
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        results.append(json.loads(out.read_text()))
    return results


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_one_device(name: str, runs: list[dict[str, Any]]) -> None:
    """Metrics differ from one device's at most twice as much as MaxText's do on four devices."""
    one_device, own, ring = (by_name[name] for by_name in runs)
    assert (one_device["rings"], own["rings"]) == (0, 0)
    assert ring["rings"] > 0
    expected, baseline, actual = (
        np.array([list(step.values()) for step in run["steps"]]).T
        for run in (one_device, own, ring)
    )
    assert expected.shape == (3, 4)
    assert expected[0, -1] < expected[0, 0] - 1  # the model learns
    for metrics in zip(actual, expected, baseline, strict=True):
        bad, error, bound = compare(*metrics, "float32")
        assert not bad
        assert error <= bound


def test_all_runs_are_compared(runs: list[dict[str, Any]]) -> None:
    assert list(runs[0]) == NAMES
