"""The benchmark of the host's time: all time has a cause, and patched functions are restored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.development import host_causes
from ring_torch.launches import direct


def test_causes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = [
        (place, name, getattr(place, name))
        for _, place, names in host_causes._BEGIN
        for name in names
    ]
    launched: list[str] = []
    launch = direct.PreparedLaunch.__call__

    def counted(*args: Any) -> None:
        launched.append("")
        launch(*args)

    monkeypatch.setattr(direct.PreparedLaunch, "__call__", counted)
    for name, few in (("WARM_UP", 3), ("ROUNDS", 2), ("AT_ONCE", 2)):
        monkeypatch.setattr(host_causes, name, few)
    path = tmp_path / "causes.json"
    assert host_causes.main(["--stubs", "2", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    monkeypatch.undo()
    assert all(getattr(place, name) == value for place, name, value in replaced)
    # Repeated calls launch K/V, cleared dK/dV buffers and their exchange, in two settings, by two
    # ranks; three turns of three calls, and rounds of two.
    assert len(launched) >= 2 * 2 * 3 * (2 * 2) * 3
    for setting in {row["setting"] for row in rows}:
        took = {row["cause"]: row for row in rows if row["setting"] == setting}
        causes = [took[cause] for cause in (*host_causes.CAUSES, host_causes.MARKS)]
        for name in host_causes.PASSES:
            by_cause = [x[f"{name}_us"] for x in causes]
            assert sum(by_cause[:-1]) - by_cause[-1] == pytest.approx(
                took["in all"][f"{name}_us"], abs=1.0
            )
        for cause in (
            host_causes.FLASH,
            host_causes.TRITON,
            host_causes.EXCHANGE,
            host_causes.VIEWS,
        ):
            assert min(took[cause]["forward_us"], took[cause]["backward_us"]) > 0
        has_sinks = took[host_causes.SINKS]["backward_us"] > 0
        assert has_sinks == setting.endswith("sinks")


def test_time_counts_for_the_innermost_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 3.0, 7.0, 100.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = host_causes.Clock()
    inner: Callable[[], int] = clock.marked(host_causes.VIEWS, lambda: 5)
    outer = clock.marked(host_causes.PASS, inner, outermost=True)
    assert inner() == 5 and not any(clock.seconds.values())  # outside of any cause
    assert outer() == 5
    taken = {cause: seconds for cause, seconds in clock.seconds.items() if seconds}
    assert taken == {host_causes.PASS: 1.0 + 4.0, host_causes.VIEWS: 2.0}
    assert torch.empty(0).numel() == 0
