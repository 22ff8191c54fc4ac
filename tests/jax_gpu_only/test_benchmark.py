"""The benchmark of JAX on GPUs runs end to end; what is wrong has no time."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.cases import Setting
from benchmarks.common.tables import table
from benchmarks.jax import methods, scaling


@pytest.mark.nightly
def test_the_whole_run_over_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The benchmark runs on host devices with XLA's kernel; a second run keeps the first's rows."""

    def wrong(*args: Any) -> Any:
        method = methods.all_gather(*args, implementation="xla")
        return method._replace(attend=lambda *x: method.attend(*x) * 2)

    ways = {
        "one": partial(methods.one, kernel="xla"), "ring": partial(methods.ours, kernel="xla"),
        "wrong": wrong, "gather": partial(methods.ours, strategy="gather", kernel="xla"),
        "all-gather": partial(methods.all_gather, implementation="xla"),
        "zigzag": partial(methods.zigzag, implementation="xla"),
    }  # fmt: skip
    settings = [Setting(2048, 4, 2, dim=16, mask=mask) for mask in ("causal", "window")]
    for name, value in (("METHODS", ways), ("JAX_SETTINGS", settings), ("GATE_LENGTH", 256)):
        monkeypatch.setattr(scaling, name, value)
    path = tmp_path / "figures.json"
    arguments = ["--json", str(path), "--gpus", "2", "--methods"]
    assert scaling.main([*arguments, "one", "ring"]) == 0
    assert scaling.main([*arguments, *ways]) == 0
    rows = json.loads(path.read_text())["rows"]
    # What is wrong or refused has its row at once, and all others when they are timed.
    assert [row["method"] for row in rows] == [
        *["one", "ring"] * 2, "wrong", "gather", "all-gather", "zigzag", "wrong", "zigzag",
        "gather", "all-gather",
    ]  # fmt: skip
    without = [n for n, row in enumerate(rows) if "forward" not in row]
    assert without == [4, 8, 9] and "causal masks" in rows[9]["failed"]
    assert {row["auto"] for row in rows if row["method"] == "ring"} == {"ring"}
    assert "`ring` (`auto`)" in table(rows)
