"""The benchmark of head dims, masks and options: its check of results, and its rows."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from benchmarks.common import turns
from benchmarks.common.cases import FA4, ROWS, Rival, Row
from benchmarks.common.tables import table
from benchmarks.common.turns import passing
from benchmarks.torch import options
from benchmarks.torch.methods import Method
from benchmarks.torch.options import METHODS, OPTIONS, Case, exact

COMPARED = (
    "causal", "softcap", "alibi", "segment_ids", "cu_seqlens", "predicate", "sinks", "window",
    "bias",
)  # fmt: skip


def small(row: Any) -> Any:
    """Return a row small enough to run fast on a CPU."""
    return replace(
        row, heads=row.heads // 8, kv_heads=row.kv_heads // 8, dim=row.dim // 8,
        v_dim=row.v_dim // 8,
    )  # fmt: skip


@pytest.mark.nightly(only=["softcap", "alibi", "predicate", "bias"])
@pytest.mark.parametrize("option", COMPARED)
def test_ours_is_right_in_each_row_and_what_forgets_the_option_is_not(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgets(case: Case) -> Method:
        shown = "bias" if option == "causal" else "causal"
        return METHODS["ring"](case._replace(row=replace(case.row, option=shown)))

    monkeypatch.setattr(options, "GATE_LENGTH", 640)
    rivals = Rival("again", "ring"), Rival("forgets", "forgets")
    for row in [x for x in ROWS if x.option == option][:3:2]:
        compared = replace(small(row), rivals=rivals)
        wrong = options.errors(compared, "cpu", METHODS | {"forgets": forgets})
        assert passing(wrong) == ["ring", "again"], wrong
        assert isinstance(wrong["ring"], float) and wrong["ring"] < 0.01


def test_all_options_are_compared_but_random_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name for name, x in OPTIONS.items() if not x.random} == set(COMPARED)
    assert {row.option for row in ROWS} == OPTIONS.keys()
    monkeypatch.setattr(options, "GATE_LENGTH", 64)
    (row,) = (replace(small(x), rivals=()) for x in ROWS if x.option == "dropout")
    wrong = options.errors(row, "cpu", METHODS)
    assert wrong == {"ring": None}
    assert passing(wrong) == ["ring"]


def test_what_is_wrong_or_raises_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_the_scale(case: Case) -> Method:
        right = exact(case)
        return right._replace(both=lambda q, *rest: right.both(2 * q.float(), *as_float(rest)))

    def as_float(tensors: tuple[Tensor, ...]) -> list[Tensor]:
        return [x.float() for x in tensors]

    def refuses(_: Case) -> Method:
        raise ValueError("no such head dims\nand more")

    monkeypatch.setattr(options, "GATE_LENGTH", 256)
    rivals = tuple(Rival(x, x) for x in ("fa4", "cudnn", "other"))
    row = Row("a row", rivals, dim=24, v_dim=16, heads=4, kv_heads=2)
    methods = {"ring": METHODS["ring"], "fa4": METHODS["ring"], "cudnn": forgets_the_scale}
    wrong = options.errors(row, "cpu", methods | {"other": refuses})
    assert wrong["other"] == "ValueError: no such head dims"
    assert passing(wrong) == ["ring", "fa4"]


def test_a_row_is_met_by_the_best_other() -> None:
    row = Row("a row", (), goal=1.1)
    wrong: dict[str, float | str | None] = {
        "ring": 0.1, "fa4": 0.1, "cudnn": 0.1, "flex": "has none",
    }  # fmt: skip
    times = {"ring": [2.0, 3.0, 2.0], "fa4": [4.0, 2.0, 2.0], "cudnn": [5.0, 5.0, 5.0]}
    slow = times | {"ring": [3.0, 3.0, 3.0]}
    row_found = turns.row_of(row, wrong, {"forward": times, "both": slow})
    assert row_found["best"] == {"forward": "fa4", "both": "fa4"}
    assert row_found["ratio"]["forward"] == {"fa4": [0.75, 1.0, 1.25], "cudnn": [0.4, 0.4, 0.5]}
    assert row_found["met"] == {"forward": True, "both": False}
    shown = table([row_found | {"kernel": "fa4"}]).splitlines()[-1]
    assert "(1.00)<br>fa4 2.00<br>cudnn 5.00<br>flex none |" in shown
    assert shown.endswith("| 1.10, missed |")
    alone = turns.row_of(row, wrong, {"forward": {"fa4": [1.0, 1.0]}, "both": {}})
    assert alone["met"] == {"forward": False, "both": False}
    assert table([alone | {"kernel": None}])


def test_all_take_turns_in_an_order_of_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def measured(run: Any, calls: int) -> float:
        for _ in range(calls):
            run()
        return {"a": 5.0, "b": 50.0}[order[-1]]

    monkeypatch.setattr(options, "_milliseconds", measured)
    runs = {name: (lambda name=name: order.append(name)) for name in "ab"}
    times = options.rounds(runs, 16)
    assert times == {"a": [5.0] * 16, "b": [50.0] * 16}
    once = "".join(order)[8:]  # the first eight count the calls that fill a turn
    fives = [once[n : n + 5] for n in range(0, len(once), 5)]
    assert len(fives) == 16 and set(fives) == {"aaaab", "baaaa"}


def test_a_run_times_what_is_here_and_says_why_the_others_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tuple(replace(small(row), rivals=(FA4,)) for row in ROWS if row.name in {"80", "sinks"})
    for name, value in (
        ("ROWS", rows),
        ("DEVICE", "cpu"),
        ("GATE_LENGTH", 64),
        ("_milliseconds", lambda run, _: float(run() is not None)),
        ("_environment", lambda: {"gpu": "none"}),
    ):
        monkeypatch.setattr(options, name, value)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    path = tmp_path / "new" / "rows.json"
    arguments = ["--length", "128", "--rounds", "3", "--json", str(path)]
    assert options.main([*arguments, "--rows", "80"]) == 0
    capsys.readouterr()
    assert options.main(arguments) == 0
    assert capsys.readouterr().out.count('"row"') == 1  # the other one is there already
    written = json.loads(path.read_text())
    assert written["environment"] == {"gpu": "none", "length": 128, "rounds": 3}
    assert [(x["row"], x["kernel"]) for x in written["rows"]] == [
        ("80", "eager"),
        ("sinks", "eager"),
    ]
    for row in written["rows"]:
        assert row["milliseconds"] == {"forward": {"ring": [1.0] * 3}, "both": {"ring": [1.0] * 3}}
        assert "flash_attn" in row["error"]["fa4"]
    assert options.main(["--table", str(path)]) == 0
    assert "| sinks | `eager` | **1.00**<br>fa4 none |" in capsys.readouterr().out
