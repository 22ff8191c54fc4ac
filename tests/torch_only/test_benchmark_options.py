"""The benchmark of head dims, masks and options: its check, its rows, and its block lists."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.common.cases import FA4, ROWS, Rival, Row
from benchmarks.common.tables import table
from benchmarks.common.turns import passing
from benchmarks.torch import fa4_by_hand, options
from benchmarks.torch.cases import OPTIONS, Case, striped
from benchmarks.torch.methods import METHODS, Method, exact

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
    row_found = options.row_of(row, wrong, {"forward": times, "both": slow})
    assert row_found["best"] == {"forward": "fa4", "both": "fa4"}
    assert row_found["ratio"]["forward"] == {"fa4": [0.75, 1.0, 1.25], "cudnn": [0.4, 0.4, 0.5]}
    assert row_found["met"] == {"forward": True, "both": False}
    shown = table([row_found | {"kernel": "fa4"}]).splitlines()[-1]
    assert "(1.00)<br>fa4 2.00<br>cudnn 5.00<br>flex none |" in shown
    assert shown.endswith("| 1.10, missed |")
    alone = options.row_of(row, wrong, {"forward": {"fa4": [1.0, 1.0]}, "both": {}})
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
    turns = [once[n : n + 5] for n in range(0, len(once), 5)]
    assert len(turns) == 16 and set(turns) == {"aaaab", "baaaa"}


def test_rows_of_runs_are_kept_beside_each_other(tmp_path: Path) -> None:
    names = [row.name for row in ROWS]
    parts = [options.chosen(names, f"{n}/3") for n in (1, 2, 3)]
    assert sorted(row.name for part in parts for row in part) == sorted(names)
    assert options.chosen(["96", "80"], "2/2")[0].name == "80"
    with pytest.raises(ValueError, match="1/2"):
        options.chosen(names, "0/2")
    path = tmp_path / "new" / "rows.json"
    for name, where in (("80", "here"), ("96", "here"), ("80", "there")):
        options.keep(path, {"row": name}, {"gpu": where})
    kept = json.loads(path.read_text())["rows"]
    assert [(kept_row["row"], kept_row["environment"]["gpu"]) for kept_row in kept] == [
        ("96", "here"), ("80", "there"),
    ]  # fmt: skip


def test_a_run_times_what_is_here_and_says_why_the_others_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tuple(replace(small(row), rivals=(FA4,)) for row in ROWS if row.name in {"80", "sinks"})
    for name, value in (
        ("ROWS", rows),
        ("DEVICE", "cpu"),
        ("GATE_LENGTH", 64),
        ("_milliseconds", lambda run, _: float(run() is not None)),
        ("environment", lambda *arguments: {"given": arguments}),
    ):
        monkeypatch.setattr(options, name, value)
    for module in ("flash_attn.cute.interface", "benchmarks.torch.fa4_mods"):
        monkeypatch.setitem(sys.modules, module, None)
    path = tmp_path / "rows.json"
    arguments = ["--length", "128", "--rounds", "3", "--json", str(path)]
    assert options.main([*arguments, "--part", "2/2"]) == 0
    assert options.main([*arguments, "--rows", "80"]) == 0
    kept = json.loads(path.read_text())["rows"]
    assert [(row["row"], row["kernel"]) for row in kept] == [("80", "eager"), ("sinks", "eager")]
    for row in kept:
        assert row["milliseconds"] == {"forward": {"ring": [1.0] * 3}, "both": {"ring": [1.0] * 3}}
        assert "flash_attn" in row["error"]["fa4"] and row["environment"] == {"given": [128, 3]}
    assert "sinks: 100%" in capsys.readouterr().err
    assert options.main(["--table", str(path)]) == 0
    assert "| sinks | `eager` | **1.00**<br>fa4 none |" in capsys.readouterr().out
    assert options.main(["--compile", "--rows", "80", "--length", "64"]) == 0
    assert not capsys.readouterr().out


def blocks_of(shown: Tensor, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Return the blocks with a visible pair, and those with only visible pairs, by brute force."""
    tiles = shown.unflatten(1, (-1, keys)).unflatten(0, (-1, queries)).transpose(1, 2).flatten(2)
    return tiles.any(2), tiles.all(2)


def listed(count: Tensor, index: Tensor) -> list[list[int]]:
    return [index[0, 0, n, :c].tolist() for n, c in enumerate(count[0, 0].tolist())]


@pytest.mark.parametrize("lengths", [(16,), (5, 1, 26, 16, 16), (8, 8, 8, 40)])
@pytest.mark.parametrize("ordered", [True, False])
def test_blocks_of_segment_ids_are_those_of_brute_force(
    lengths: tuple[int, ...], *, ordered: bool
) -> None:
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
    if not ordered:
        ids = ids.view(-1, 8)[torch.randperm(len(ids) // 8, generator=torch.manual_seed(3))]
        ids = torch.cat([ids[:1].flip(1), ids[1:]]).flatten()
    shown = (ids[:, None] == ids).tril()
    any_visible, all_visible = blocks_of(shown, 8, 8)
    blocks_found = fa4_by_hand.segment_blocks(ids[None], size=8)
    assert torch.equal(blocks_found.full, all_visible)
    assert bool(((blocks_found.partial | blocks_found.full) | ~any_visible).all())
    if ordered:
        assert torch.equal(blocks_found.partial, any_visible & ~all_visible)
    for lists, blocks in zip(
        fa4_by_hand.lists_of(blocks_found, blocks_found.transposed),
        (blocks_found, blocks_found.transposed),
        strict=True,
    ):
        assert lists.partial.dtype == lists.full_count.dtype == torch.int32
        for config, expected in (
            ((lists[0], lists[1]), blocks[0]),
            ((lists[2], lists[3]), blocks[1]),
        ):
            assert listed(*config) == [row.nonzero().flatten().tolist() for row in expected]


@pytest.mark.parametrize("keys", [64, 128])
def test_blocks_of_the_predicate_are_those_of_brute_force(keys: int) -> None:
    positions = torch.arange(1536)
    any_visible, all_visible = blocks_of(striped(positions[:, None], positions), 128, keys)
    blocks = fa4_by_hand.predicate_blocks(striped, 1536, 128, keys, "cpu")
    assert torch.equal(blocks.full, all_visible)
    assert torch.equal(blocks.partial, any_visible & ~all_visible)
    assert bool(all_visible.any()) and not bool(any_visible.all())
