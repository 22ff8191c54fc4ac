"""The autotuner, on interpreted kernels: the configuration it chooses, and its output."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import backends.triton_interpreter  # noqa: F401 - imported for its effect: it interprets the kernels
import pytest

from ring_core.triton import tile_configs as table
from ring_core.triton.tile_configs import Row
from ring_jax_gpu import tune
from ring_jax_gpu.tune import main

ROW = Row("fwd", 2, 64, per_score_inputs=False, q=128, k=128, warps=8, stages=3)


@pytest.fixture(autouse=True)
def _few_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "HEADS", 4)
    monkeypatch.setattr(tune, "KV_HEADS", 1)


def test_sizes_first_then_stages() -> None:
    asked: list[Row] = []

    def seconds(row: Row) -> float:
        asked.append(row)
        if row.q * row.k > 64 * 64:
            return math.inf  # no room
        return abs(row.q - 64) + abs(row.k - 32) + 10 / row.warps + row.stages

    best, gain = tune.tuned(ROW, seconds)
    assert best == replace(ROW, q=64, k=32, stages=1)
    assert gain == math.inf
    assert len(asked) == 18 + len(tune.STAGES) + 2
    assert asked[0] == ROW and asked[-2:] == [ROW, best]


def test_what_is_there_stays_where_nothing_is_faster() -> None:
    assert tune.tuned(ROW, lambda _: 1.0) == (ROW, 1.0)
    assert tune.tuned(ROW, lambda row: 1.0 if row == ROW else math.inf) == (ROW, 1.0)


@pytest.mark.parametrize(("again", "kept"), [(1.0, True), (0.5, True), (2.5, False)])
def test_a_winner_has_to_win_twice(again: float, kept: bool) -> None:
    times = {ROW: [3.0, again]}  # what is there was slow once, by chance or not
    best, gain = tune.tuned(ROW, lambda row: times[row].pop(0) if row in times else 1.0)
    assert (best == ROW) == kept
    assert gain == (1.0 if kept else again)


KERNELS = [row for row in table.default_table() if row.itemsize == 2 and row.head_dim == 128]


@pytest.mark.nightly(unless=["fwd, 2 bytes, head dims up to 128, per-score inputs"])
@pytest.mark.parametrize("row", KERNELS, ids=tune.name_of)
def test_calls_of_each_kernel_use_their_row(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(tune, "_seconds", lambda *_: 1.0)
    seconds = tune.timer(table.default_table(), row, 48, 1, said.append)
    assert seconds(replace(row, q=16, k=32)) == 1.0
    assert seconds(replace(row, q=7)) == math.inf
    assert "16 x 32" in said[0] and "1000.000 ms" in said[0]


def test_wrong_results_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    call, said = tune._call, list[str]()

    def broken(known: Any, row: Row, tokens: int) -> Any:
        run = call(known, row, tokens)
        wrong = any(x.q == 16 for x in known)
        return (lambda: tuple(2 * x for x in run())) if wrong else run

    monkeypatch.setattr(tune, "_call", broken)
    seconds = tune.timer(table.default_table(), ROW, 48, 1, said.append)
    assert seconds(replace(ROW, q=32)) < math.inf
    assert seconds(replace(ROW, q=16)) == math.inf
    assert "wrong by 1 of the norm" in said[-1]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    path = tmp_path / "blocks.json"
    monkeypatch.setattr(tune, "device", lambda: "a GPU")
    monkeypatch.setattr(tune, "SIZES", (16, 32))
    monkeypatch.setattr(tune, "WARPS", (4,))
    monkeypatch.setattr(tune, "STAGES", (2,))
    monkeypatch.setattr(tune, "_seconds", lambda *_: 2.0)
    arguments = ["tune", str(path), "--kernels", "fwd", "--head-dims", "64", "--tokens", "32"]
    assert main([*arguments, "--verbose"]) == 0
    assert table.read_table(str(path)) == table.default_table(), "nothing was faster"
    out = capsys.readouterr().out
    assert "fwd, 2 bytes, head dims up to 64, on a GPU" in out
    assert "16 x 32, 4 warps" in out and f"RING_TRITON_BLOCKS={path}" in out
    timer = tune.timer

    def timed(known: Any, row: Row, *rest: Any) -> Any:
        seconds = timer(known, row, *rest)
        return lambda row_timed: (
            seconds(row_timed) * (1.0 if row_timed.q == row_timed.k == 16 else 1.5)
        )

    monkeypatch.setattr(tune, "timer", timed)
    assert main(arguments) == 0
    assert "1.50 times as fast" in capsys.readouterr().out
    changed = [x for x in json.loads(path.read_text()) if x["q"] == x["k"] == 16]
    assert [(x["kernel"], x["head_dim"]) for x in changed] == [("fwd", 64)]
    before = path.read_text()
    monkeypatch.setattr(tune, "timer", timer)
    assert main([*arguments[:-3], "128", "--tokens", "32"]) == 0
    assert path.read_text() == before, "what was tuned before stays"


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert main(["tune", str(tmp_path / "x.json")]) == 2
    assert "jax runs on cpu here" in capsys.readouterr().err
    monkeypatch.setattr(tune, "device", lambda: "a GPU")
    assert main(["tune", str(tmp_path / "none" / "x.json")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["tune", str(tmp_path / "x.json"), "--head-dims", "96"]) == 2
    assert "no such rows" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()
    (tmp_path / "mine.txt").write_text("not a table")
    assert main(["tune", str(tmp_path / "mine.txt")]) == 2
    assert "is no table of blocks" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "not a table"
    with pytest.raises(SystemExit):
        main(["tune", str(tmp_path / "x.json"), "--rounds", "0"])
    assert "at least 1, got 0" in capsys.readouterr().err
