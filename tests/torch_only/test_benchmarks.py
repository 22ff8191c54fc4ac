"""Benchmarks time what is right, and nothing else; their tables say what was measured."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from on_ranks import on_ranks

from benchmarks.common import turns
from benchmarks.common.cases import CAUSAL, FA4, ROWS, Rival, Row
from benchmarks.common.tables import table
from benchmarks.common.turns import passing
from benchmarks.development import case_bits, old_and_new, same_bits
from benchmarks.development.old_and_new import HERE
from benchmarks.torch import bench_command, decode, heads, methods, model, options, recurrent
from benchmarks.torch.methods import Method, dense, in_layers, method, sdpa, through_autograd
from benchmarks.torch.options import METHODS, OPTIONS, Case, exact
from benchmarks.torch.scaling import ONE_THREAD, running, without_end
from ring_core.tools import bench
from ring_core.tools.case import Case as BenchCase
from ring_torch.serving import kernels, paged
from ring_torch.training import token_log_probs

SMALL = {
    decode: "--tokens=256 --heads=2 --kv-heads=1 --width=16 --repeats=1 --turns=1",
    heads: "--tokens=96 --dim=16 --classes=50 --rounds=3",
    recurrent: "--tokens=512 --heads=2 --width=16 --repeats=1 --dtype=float32",
}


def run(monkeypatch: pytest.MonkeyPatch, module: Any, *more: str) -> int:
    """Run a benchmark as a command with small sizes; return its exit code."""
    monkeypatch.setattr(sys, "argv", [module.__name__, *SMALL[module].split(), *more])
    code: int = module.main()
    return code


def written(path: Path) -> Any:
    return json.loads(path.read_text())


def test_figures_of_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "decode.json"
    assert run(monkeypatch, decode, f"--json={path}") == 0
    *rows, step = written(path)["rows"]
    assert [row["row"] for row in rows] == [row.name for row in decode.ROWS]
    assert all(row["error"] < decode.MOST_ERROR and row["ratios"] for row in rows)
    assert step["row"] == "a step" and step["host_us"] > 0
    capsys.readouterr()
    with patch.object(kernels, "attend_by", lambda _: lambda *call: [1.1 * paged.attend(*call)[0]]):
        assert run(monkeypatch, decode) == len(decode.ROWS)
    printed = capsys.readouterr().out
    assert "is WRONG" in printed and "ratio" not in printed


def test_figures_of_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "heads.json"
    monkeypatch.setattr(heads, "PIECE", 40)
    assert run(monkeypatch, heads, f"--json={path}") == 0
    ours = [row for row in written(path)["rows"] if row["name"] == "ring"]
    assert [row["kind"] for row in ours] == ["loss", "log_probs"]
    assert all(row["error"] < heads.MOST_ERROR and len(row["rounds"]) == 3 for row in ours)
    right = token_log_probs
    for wrong in (lambda *x: 1.03 * right(*x), lambda *x: 1 / (0 * right(*x)), lambda *_: 1 / 0):
        monkeypatch.setattr(heads, "token_log_probs", wrong)
        assert run(monkeypatch, heads, f"--json={path}") == 1
        row = next(x for x in written(path)["rows"] if "failed" in x and x["name"] == "ring")
        assert row["kind"] == "log_probs" and "seconds" not in row


@pytest.mark.parametrize("name", ["gated_delta_rule", "ssd"])
def test_emulated_ranks_are_the_whole_layer(name: str) -> None:
    kernel, inputs, grad = recurrent.layer_of(name, 256, 2, 8, torch.float64, "cpu")
    expected = recurrent.Group(kernel, "eager", inputs, grad, 1, "contiguous").results()
    for layout in recurrent.LAYOUTS:
        actual = recurrent.Group(kernel, "eager", inputs, grad, 4, layout).results()
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6 * float(y.abs().max()))


def test_figures_of_recurrent_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recurrent.json"
    assert run(monkeypatch, recurrent, f"--json={path}") == 0
    errors, *rows, _ = written(path)["rows"]
    assert [row["layout"] for row in rows] == ["whole", "contiguous", "zigzag"]
    assert errors["worst_ratio"] < recurrent.GOALS["error"]
    # What a zigzag rank sends: two runs of a transition and a state of each head, whatever T.
    assert rows[2]["sent_bytes"]["forward"] == 2 * 2 * 16 * (16 + 16) * 4
    capsys.readouterr()
    assert run(monkeypatch, recurrent, "--kernel=fla") == 1
    text = capsys.readouterr().out
    assert "its kernels need CUDA" in text and "_ms" not in text


# Head dims, masks and options.

COMPARED = (
    "causal", "softcap", "alibi", "segment_ids", "cu_seqlens", "predicate", "sinks", "window",
    "bias",
)  # fmt: skip


def small(row: Any, **changes: Any) -> Any:
    """Return a row small enough to run fast on a CPU."""
    sizes = {name: getattr(row, name) // 8 for name in ("heads", "kv_heads", "dim", "v_dim")}
    return replace(row, **sizes, **changes)


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
        wrong = options.errors(small(row, rivals=rivals), "cpu", METHODS | {"forgets": forgets})
        assert passing(wrong) == ["ring", "again"], wrong


def test_what_is_wrong_or_raises_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name for name, x in OPTIONS.items() if not x.random} == set(COMPARED)
    assert {row.option for row in ROWS} == OPTIONS.keys()

    def forgets_the_scale(case: Case) -> Method:
        right = exact(case)
        return right._replace(
            both=lambda q, *rest: right.both(2 * q.float(), *(x.float() for x in rest))
        )

    def refuses(_: Case) -> Method:
        raise ValueError("no such head dims\nand more")

    monkeypatch.setattr(options, "GATE_LENGTH", 256)
    rivals = tuple(Rival(x, x) for x in ("fa4", "cudnn", "other"))
    row = Row("a row", rivals, dim=24, v_dim=16, heads=4, kv_heads=2)
    own = {"ring": METHODS["ring"], "fa4": METHODS["ring"], "cudnn": forgets_the_scale}
    wrong = options.errors(row, "cpu", own | {"other": refuses})
    assert wrong["other"] == "ValueError: no such head dims"
    assert passing(wrong) == ["ring", "fa4"]


def test_a_row_is_met_by_the_best_other() -> None:
    row = Row("a row", (), goal=1.1)
    wrong: dict[str, float | str | None] = {
        "ring": 0.1, "fa4": 0.1, "cudnn": 0.1, "flex": "has none",
    }  # fmt: skip
    times = {"ring": [2.0, 3.0, 2.0], "fa4": [4.0, 2.0, 2.0], "cudnn": [5.0, 5.0, 5.0]}
    found = turns.row_of(row, wrong, {"forward": times, "both": times | {"ring": [3.0] * 3}})
    assert found["best"] == {"forward": "fa4", "both": "fa4"}
    assert found["ratio"]["forward"] == {"fa4": [0.75, 1.0, 1.25], "cudnn": [0.4, 0.4, 0.5]}
    assert found["met"] == {"forward": True, "both": False}
    shown = table([found | {"kernel": "fa4"}]).splitlines()[-1]
    assert "(1.00)<br>fa4 2.00<br>cudnn 5.00<br>flex none |" in shown and shown.endswith(
        "| 1.10, missed |"
    )


def test_a_run_times_what_is_here_and_says_why_the_others_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tuple(small(row, rivals=(FA4,)) for row in ROWS if row.name in {"80", "sinks"})
    values = {
        "ROWS": rows, "DEVICE": "cpu", "GATE_LENGTH": 64, "_environment": lambda: {"gpu": "none"},
        "_milliseconds": lambda run, _: float(run() is not None),
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setattr(options, name, value)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    path = tmp_path / "new" / "rows.json"
    arguments = ["--length", "128", "--rounds", "3", "--json", str(path)]
    assert options.main([*arguments, "--rows", "80"]) == 0
    capsys.readouterr()
    assert options.main(arguments) == 0
    assert capsys.readouterr().out.count('"row"') == 1  # the other one is there already
    result = written(path)
    assert result["environment"] == {"gpu": "none", "length": 128, "rounds": 3}
    assert [(x["row"], x["kernel"]) for x in result["rows"]] == [
        ("80", "eager"),
        ("sinks", "eager"),
    ]
    assert all("flash_attn" in row["error"]["fa4"] for row in result["rows"])
    assert options.main(["--table", str(path)]) == 0
    assert "| sinks | `eager` | **1.00**<br>fa4 none |" in capsys.readouterr().out


# Methods that are timed.


@pytest.mark.nightly
@on_ranks
def test_a_whole_model_is_checked_before_it_is_timed(rank: int) -> None:
    widths = model.Widths(2, 64, 4, 2, 16, 128, 256)
    model.check(rank, model.Setting(widths, 256, recompute=True), "cpu")


def test_layers_take_the_output_before_as_their_q() -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 8, 2, 4, requires_grad=n < 3) for n in range(4))
    attend = partial(dense, visible=torch.ones(8, 8, dtype=torch.bool))
    way = in_layers(through_autograd(attend), 3)
    expected = attend(attend(attend(q, k, v), k, v), k, v)
    out, dq, *of_layers = way.both(q, k, v, dout)
    dq_expected, *kv_expected = torch.autograd.grad(expected, (q, k, v), dout)
    assert torch.equal(out, expected)
    torch.testing.assert_close(dq, dq_expected)
    # Each layer has its own k and v: their gradients add up to that of a shared pair.
    for n, grad in enumerate(kv_expected):
        torch.testing.assert_close(sum(of_layers[n::2]), grad)


@pytest.mark.parametrize("end", ["", "/graph", "/layers", ONE_THREAD])
def test_a_method_is_told_from_how_its_calls_are_made(end: str) -> None:
    assert without_end(f"zigzag/auto/auto/auto{end}") == ("zigzag/auto/auto/auto", end)
    with running(through_autograd(lambda *_: torch.ones(1)), end):
        assert torch._C._is_multithreading_enabled() == (end != ONE_THREAD)
    assert torch._C._is_multithreading_enabled()
    with pytest.raises(ValueError, match="layout/kernel/strategy/transport"):
        method("zigzag/eager/gather/p2p/alone", CAUSAL, 128)


@pytest.mark.nightly
@on_ranks
def test_ulysses_of_others_is_right() -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 32, n, 8, requires_grad=True) for n in (4, 2, 2, 4))
    with patch.object(methods, "flash", lambda mask: partial(sdpa, is_causal=mask.causal)):
        way = method("ulysses", CAUSAL, 32)
    leaves = (way.shard(x.detach()).requires_grad_() for x in (q, k, v))
    results = way.both(*leaves, way.shard(dout))
    expected = through_autograd(partial(sdpa, is_causal=True)).both(q, k, v, dout)
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x, way.shard(y), rtol=0, atol=1e-5)


def test_what_bench_prints_becomes_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = BenchCase(2, 64, 2, 1, 8, "float32")
    timings = [bench.Timing(name, (4.0,), (2.5,), (3.0,), 0.5) for name in bench.PASSES]
    printed, _ = bench.report(bench.Result(case, "GPUs", [], timings, {}), as_json=True)
    answer = SimpleNamespace(returncode=0, stdout=f"noise of a library\n{printed}")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    path = tmp_path / "bench.json"
    assert bench_command.main(["--lengths", "64", "8k", "--json", str(path)]) == 0
    rows = written(path)["rows"]
    assert [x["bench_pass"] for x in rows] == 2 * [*bench.PASSES]
    shown = [x for x in capsys.readouterr().out.splitlines() if x.startswith("|")]
    assert shown[0].startswith("| tokens | ") and len(shown) == 2 + len(rows)


# Two source trees: times in turns, and results bit for bit.


def test_trees_take_turns() -> None:
    order: list[tuple[str, bool]] = []

    def tree(name: str, times: list[float]) -> old_and_new.Timed:
        def timed(request: dict[str, Any]) -> dict[str, float]:
            order.append((name, request["first"]))
            return {"forward": times[0], "both": times[len([x for x in order if x[0] == name]) - 1]}

        return timed

    trees = tree("old", [2.0, 8.0, 8.0]), tree("new", [1.0, 8.0, 4.0])
    row = old_and_new.in_turns(*trees, {"row": "causal 8k 32/8"}, 2)
    later = [("old", False), ("new", False), ("new", False), ("old", False)]
    assert order == [("old", True), ("new", True), *later]
    assert row["forward"]["ratio"] == [0.5, 0.5, 0.5] and row["both"]["ratios"] == [0.5, 1.0]
    assert row["both"]["ratio"][1] == 0.75


@pytest.mark.nightly
def test_both_trees_run_in_processes_of_their_own(tmp_path: Path) -> None:
    path, here = tmp_path / "turns.json", str(HERE)
    arguments = ["--old", here, "--gpus", "2", "--json", str(path), "--rounds", "2"]
    assert old_and_new.main(arguments) == 0
    (row,) = written(path)["rows"]
    assert min(row["both"]["ratios"]) > 0 and row["forward"]["old"][1] < row["both"]["old"][1]
    assert old_and_new.main(["--old", here, "--gpus", "2", "--rows", "no such row"]) == 1


NAME = "ring/zigzag/all/auto/float32/2x32"


def test_differences_are_found(backend: Any, tmp_path: Path) -> None:
    case = same_bits.all_cases()[NAME]
    folders = tmp_path / "old", tmp_path / "new"
    for folder in folders:
        folder.mkdir()
    old, new = ({"ranks": backend.pool(2).run(case_bits.bits_of, case, str(x))} for x in folders)

    def found(changed: same_bits.Answer) -> list[same_bits.Difference]:
        return same_bits.differences(old, changed, folders, case["number"])

    assert found(new) == [] and "lse" in new["ranks"][1]["digests"]
    path = case_bits.path_of(str(folders[1]), case, 1)
    tensors = torch.load(path)
    tensors["dk"][0, 0, 0, 0] += 0.5
    torch.save(tensors, path)
    changed = deepcopy(new)
    changed["ranks"][1]["digests"]["dk"] = case_bits.digest_of(tensors["dk"])
    (difference,) = found(changed)
    assert (difference.part, difference.text) == ("dk", "dk of rank 1 by 0.5")
    changed = deepcopy(new)
    changed["ranks"][0]["sent"]["forward"] += 4
    refused = {"ranks": [{"refused": "ValueError: no"}] * 2}
    for answer, part in ((changed, "sent"), (refused, "refused"), ({"failed": "died"}, "failed")):
        assert [x.part for x in found(answer)] == [part]
    for before, after, differing, result in (
        (old, new, [], "equal"), (old, changed, [difference], "differs"), (refused, new, [], "old refused"),
    ):  # fmt: skip
        assert same_bits.row_of(NAME, before, after, differing)["result"] == result


@pytest.mark.nightly
def test_a_tree_that_computes_otherwise_is_found(tmp_path: Path) -> None:
    path = tmp_path / "bits.json"
    arguments = ["--cases", "gather/zigzag/causal/*/2x32", "--json", str(path)]
    assert same_bits.main(["--old", str(HERE), *arguments]) == 0
    shutil.copytree(HERE / "packages", tmp_path / "packages")
    changed = tmp_path / "packages/ring-torch/src/ring_torch/autograd.py"
    text, line = changed.read_text(), "    return dq, dk, dv, None, None, dsinks"
    assert line in text
    changed.write_text(text.replace(line, "    dv = dv * 1.01\n" + line))
    assert same_bits.main(["--old", str(tmp_path), *arguments]) == 1
    rows = written(path)["rows"]
    assert len(rows) == 3 and all(x["text"].startswith("dv of rank") for x in rows)
