"""The host's cost of a repeated call over peers' memory, in calls of Python functions.

Functions of torch and of Python's frozen modules are left out: they differ between releases.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from benchmarks.common.cases import Setting
from benchmarks.development import host_causes, host_stubs
from benchmarks.development.host_causes import SETTINGS, STUBBED_TOKENS, Repeated
from ring_torch.launches import direct

#: Folders whose functions do not count: torch's, and that of the stubs in place of launches.
LEFT_OUT = (*(str(Path(str(x.__file__)).parent) for x in (torch, host_stubs)), "<frozen")
#: The most function calls of a repeated forward, and of its backward, by setting.
MOST = ((68, 65), (75, 67))


def counted(setting: Setting) -> tuple[int, int]:
    """Return the calls of one more forward like those before, and of its backward."""
    call, calls = Repeated(setting, "cpu"), 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        name = frame.f_code.co_filename
        calls += event == "call" and not name.startswith(LEFT_OUT)

    def calls_in[T](run: Callable[[], T]) -> tuple[int, T]:
        nonlocal calls
        calls = 0
        sys.setprofile(count)
        result = run()
        sys.setprofile(None)
        return calls, result

    for _ in range(3):
        call.backward(call.forward())
    forward, out = calls_in(call.forward)
    backward, _ = calls_in(partial(call.backward, out))
    return forward, backward


def test_a_repeated_call() -> None:
    for setting, most in zip(SETTINGS, MOST, strict=True):
        run = partial(counted, replace(setting, seq_len=STUBBED_TOKENS))
        counts = host_stubs.as_stubbed_rank(1, 4, run)
        for count, limit in zip(counts, most, strict=True):
            assert count <= limit, (setting, counts)
            assert count > limit - 5, f"it makes fewer calls, {counts}: say so above"


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
