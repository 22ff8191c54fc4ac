"""Benchmarks time what is right, and nothing else; their tables say what was measured."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from on_ranks import on_ranks
from refused import refused

from benchmarks.common import harness, pages
from benchmarks.common.cases import CAUSAL, FA4, ROWS, Rival, Row
from benchmarks.development import case_bits, old_and_new, same_bits
from benchmarks.development.old_and_new import HERE
from benchmarks.torch import bench_command, decode, methods, model, options, recurrent
from benchmarks.torch.methods import Method, dense, method, sdpa
from benchmarks.torch.options import METHODS, Case, exact
from ring_core.tools import bench
from ring_core.tools.case import Case as BenchCase
from ring_torch.serving import kernels, paged

SMALL = {
    decode: "--tokens=256 --heads=2 --kv-heads=1 --width=16 --repeats=1 --turns=1",
    recurrent: "--tokens=512 --heads=2 --width=16 --repeats=1 --dtype=float32",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "rows.json"


def rows_of(path: Path) -> list[Any]:
    rows: list[Any] = json.loads(path.read_text())["rows"]
    return rows


def run(module: Any, path: Path, *more: str) -> tuple[int, list[Any]]:
    """Run a benchmark with small sizes; return its exit code and its rows."""
    return module.main([*SMALL[module].split(), f"--json={path}", *more]), rows_of(path)


def test_figures_of_decode(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, (*rows, step) = run(decode, path)
    assert code == 0 and [row["row"] for row in rows] == [row.name for row in decode.ROWS]
    assert all(row["error"] < decode.MOST_ERROR and row["ratios"] for row in rows)
    assert step["row"] == "a step" and step["host_us"] > 0
    capsys.readouterr()
    with patch.object(kernels, "attend_by", lambda _: lambda *call: [1.1 * paged.attend(*call)[0]]):
        assert run(decode, path.with_name("wrong"))[0] == len(decode.ROWS)
    text = capsys.readouterr().out
    assert "is WRONG" in text and "ratio" not in text


@pytest.mark.parametrize("name", ["gated_delta_rule", "ssd"])
def test_figures_of_recurrent_layers(
    name: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, (errors, *rows, _) = run(recurrent, path, f"--layer={name}")
    assert code == 0 and [row["ranks"] for row in rows] == [1, recurrent.RANKS]
    assert errors["worst_ratio"] < 1.1 and max(errors["zigzag"]) < 1e-5
    # What a zigzag rank sends of ssd: two runs of a transition, a number, and a state of each head.
    sent = 2 * 2 * 16 * (16 + 16) * 4 if name == "gated_delta_rule" else 2 * 2 * (16 * 16 + 1) * 4
    assert rows[1]["sent_bytes"]["forward"] == sent
    capsys.readouterr()
    assert run(recurrent, path, f"--layer={name}", "--kernel=fla")[0] == 1
    text = capsys.readouterr().out
    assert "its kernels need CUDA" in text and "_ms" not in text


# Head dims, masks and options.

OPTIONS = dict.fromkeys(row.option for row in ROWS if row.option != "dropout")


def small(row: Any, **changes: Any) -> Any:
    """Return a row small enough to run fast on a CPU."""
    sizes = {name: getattr(row, name) // 8 for name in ("heads", "kv_heads", "dim", "v_dim")}
    return replace(row, **sizes, **changes)


@pytest.mark.nightly(only=["softcap", "alibi", "predicate", "bias"])
@pytest.mark.parametrize("option", OPTIONS)
def test_ours_is_right_in_each_row_and_what_forgets_the_option_is_not(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgets(case: Case) -> Method:
        shown = "bias" if option == "causal" else "causal"
        return METHODS["ring"](case._replace(row=replace(case.row, option=shown)))

    def forgets_the_scale(case: Case) -> Method:
        right = exact(case).attend
        return Method(lambda q, k, v: right(2 * q.float(), k.float(), v.float()).to(q.dtype))

    def refuses(_: Case) -> Method:
        raise ValueError("no such head dims\nand more")

    monkeypatch.setattr(options, "GATE_LENGTH", 640)
    others = {"forgets": forgets, "scale": forgets_the_scale, "refuses": refuses}
    rivals = Rival("again", "ring"), *(Rival(name, name) for name in others)
    for row in [x for x in ROWS if x.option == option][:3:2]:
        wrong = options.errors(small(row, rivals=rivals), "cpu", METHODS | others)
        assert harness.passing(wrong) == ["ring", "again"], wrong
        assert wrong["refuses"] == "ValueError: no such head dims"


def test_a_row_is_met_by_the_best_other() -> None:
    wrong: harness.Errors = {"ring": 0.1, "fa4": 0.1, "cudnn": 0.1, "flex": "none"}
    times = {"ring": [2.0, 3.0, 2.0], "fa4": [4.0, 2.0, 2.0], "cudnn": [5.0, 5.0, 5.0]}
    of_passes = iter([times, times | {"ring": [3.0] * 3}])
    row, run = Row("a row", (), goal=1.1), lambda *_: int
    found = harness.timed_row(row, wrong, run, lambda _: next(of_passes))
    assert found["best"] == {"forward": "fa4", "both": "fa4"}
    assert found["ratio"]["forward"] == {"fa4": [0.75, 1.0, 1.25], "cudnn": [0.4, 0.4, 0.5]}
    assert found["met"] == {"forward": True, "both": False}
    shown = pages.table([found | {"kernel": "fa4"}]).splitlines()[-1]
    assert "(1.00)<br>fa4 2.00<br>cudnn 5.00<br>flex none |" in shown
    assert shown.endswith("| 1.10, missed |")


def test_a_run_times_what_is_here_and_says_why_the_others_are_not(
    monkeypatch: pytest.MonkeyPatch, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tuple(small(row, rivals=(FA4,)) for row in ROWS if row.name in {"80", "sinks"})
    for name, value in (
        ("ROWS", rows), ("DEVICE", "cpu"), ("GATE_LENGTH", 64), ("described", lambda: {"gpu": "none"}),
        ("_milliseconds", lambda run, _: float(run() is not None)),
    ):  # fmt: skip
        monkeypatch.setattr(options, name, value)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    arguments = ["--length", "128", "--rounds", "3", "--json", str(path)]
    assert options.main([*arguments, "--rows", "80"]) == 0
    capsys.readouterr()
    assert options.main(arguments) == 0
    assert capsys.readouterr().out.count("row ") == 1  # the other one is there already
    result = json.loads(path.read_text())
    assert result["environment"] == {"gpu": "none", "length": 128, "rounds": 3}
    assert [x["row"] + x["kernel"] for x in result["rows"]] == ["80eager", "sinkseager"]
    assert all("flash_attn" in row["error"]["fa4"] for row in result["rows"])
    with pytest.raises(SystemExit):
        options.main([*arguments, "--rows", "no such row"])
    path.write_text(json.dumps(result | {"environment": {"command": "this one"}}))
    text = pages.printed(path)
    assert "$ this one" in text and "| sinks | `eager` | **1.00**<br>fa4 none |" in text


# Methods that are timed.


@pytest.mark.nightly
@on_ranks
def test_a_whole_model_is_checked_before_it_is_timed(rank: int) -> None:
    model.check(rank, model.Setting(2, 256, True, False, 64, 4, 2, 16, 128, 256), "cpu")


def test_layers_take_the_output_before_as_their_q() -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 8, 2, 4, requires_grad=n < 3) for n in range(4))
    attend = partial(dense, visible=torch.ones(8, 8, dtype=torch.bool))
    expected = attend(attend(attend(q, k, v), k, v), k, v)
    out, dq, *of_layers = Method(attend, layers=3).both(q, k, v, dout)
    # Each layer has its own k and v: their gradients add up to that of a shared pair.
    results = out, dq, *(sum(of_layers[n::2]) for n in (0, 1))
    grads = torch.autograd.grad(expected, (q, k, v), dout)
    torch.testing.assert_close(results, (expected, *grads))


def test_the_end_of_a_name_says_how_its_calls_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "flash", lambda _: sdpa)
    for end, made in (
        ("", (False, 1, True)),
        ("/graph", (True, 1, True)),
        ("/layers", (False, 8, True)),
        ("/one-thread", (False, 1, False)),
    ):
        way = method(f"one{end}", CAUSAL, 128)
        with way.around():
            assert (way.in_graph, way.layers, torch._C._is_multithreading_enabled()) == made
    message = "layout/kernel/strategy/transport"
    refused(message, method, "zigzag/eager/gather/p2p/alone", CAUSAL, 128)


def test_what_bench_prints_becomes_a_table(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timings = [bench.Timing(name, (4.0,), (2.5,), (3.0,), 0.5) for name in bench.PASSES]
    result = bench.Result(BenchCase(2, 64, 2, 1, 8, "float32"), "GPUs", [], timings, {})
    text = f"noise of a library\n{bench.report(result, as_json=True)[0]}"
    answer = SimpleNamespace(returncode=0, stdout=text)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    assert bench_command.main(["--lengths", "64", "8k", "--json", str(path)]) == 0
    assert [x["bench_pass"] for x in rows_of(path)] == 2 * [*bench.PASSES]


# Two source trees: times in turns, and results bit for bit.


@pytest.mark.nightly
def test_both_trees_run_in_processes_of_their_own(path: Path) -> None:
    arguments = ["--old", str(HERE), "--gpus", "2", "--json", str(path), "--rounds", "2"]
    assert old_and_new.main(arguments) == 0
    (row,) = rows_of(path)
    assert min(row["both"]["ratios"]) > 0 and row["forward"]["old"][1] < row["both"]["old"][1]
    assert old_and_new.main([*arguments, "--rows", "no such row"]) == 1


def test_differences_are_found(tmp_path: Path) -> None:
    folders = [tmp_path / "old", tmp_path / "new"]
    ran, sent_more = {"ranks": [{"sent": 4}]}, {"ranks": [{"sent": 8}]}
    refusal = {"ranks": [{"refused": "ValueError: no"}]}
    for before, after, dk, result, text in (
        (ran, ran, 0.0, "equal", ""),
        (ran, ran, 0.5, "differs", "dk of rank 0 by 0.5"),
        (ran, ran, np.nan, "differs", "dk of rank 0 by inf"),
        (ran, sent_more, 0.0, "differs", "bytes sent by rank 0: 4 before, 8 now"),
        (ran, refusal, 0.0, "differs", "new refuses: ValueError: no"),
        (ran, {"failed": "died"}, 0.0, "differs", "new failed: died"),
        (refusal, ran, 0.0, "old refused", "ValueError: no"),
    ):
        for folder, value in zip(folders, (0.0, dk), strict=True):
            folder.mkdir(exist_ok=True)
            np.savez(case_bits.path_of(folder, 0), dk=np.full(3, value))
        row = same_bits.row_of("a case", before, after, folders)
        assert row == {"case": "a case", "result": result, "text": text}


@pytest.mark.nightly
def test_a_tree_that_computes_otherwise_is_found(tmp_path: Path, path: Path) -> None:
    arguments = ["--cases", "gather/scale-zigzag/*", "--json", str(path)]
    assert same_bits.main(["--old", str(HERE), *arguments]) == 0
    shutil.copytree(HERE / "packages", tmp_path / "packages")
    changed = tmp_path / "packages/ring-torch/src/ring_torch/autograd.py"
    text, line = changed.read_text(), "    return dq, dk, dv, None, None, dsinks"
    assert line in text
    changed.write_text(text.replace(line, "    dv = dv * 1.01\n" + line))
    assert same_bits.main(["--old", str(tmp_path), *arguments]) == 1
    rows = rows_of(path)
    assert len(rows) == 2 and all(x["text"].startswith("dv of rank") for x in rows)
