"""Passes without communication, which the GPU benchmark compares with."""

from __future__ import annotations

import json
import shutil
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor

from benchmarks.common.cases import CAUSAL, FA4, ROWS, Rival, Row
from benchmarks.common.tables import table
from benchmarks.common.turns import passing
from benchmarks.development import case_bits, host_time, old_and_new, same_bits
from benchmarks.development.old_and_new import HERE
from benchmarks.torch import model, options, recurrent
from benchmarks.torch.alone import as_rank
from benchmarks.torch.cases import OPTIONS, Case
from benchmarks.torch.methods import METHODS, Method, dense, exact, in_layers, through_autograd
from benchmarks.torch.over_gpus import method
from benchmarks.torch.scaling import ONE_THREAD, running, without_end
from ring_torch.kernels.eager import EagerKernel
from ring_torch.local import LocalRanks


@pytest.mark.nightly
@on_ranks
def test_alone_does_all_but_communicate(rank: int) -> None:
    """It has other, finite gradients than a normal call, and leaves those after it as they were."""
    torch.manual_seed(rank)
    q, k, v = (torch.randn(1, 64, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    grads = []
    for end in ("", "/alone", ""):
        way = method(f"zigzag/eager/gather/p2p{end}", CAUSAL, 128)
        with way.around():
            _, dq, dk, _ = way.both(q, k, v, torch.ones_like(q))
        grads.append(torch.cat([dq.flatten(), dk.flatten()]))
    right, without, after = grads
    assert without.isfinite().all() and (without - right).abs().max() > 0.01
    assert torch.equal(after, right)


@pytest.mark.nightly
def test_a_whole_model_is_checked_before_it_is_timed() -> None:
    widths = model.Widths(2, 64, 4, 2, 16, 128, 256)
    with LocalRanks(2) as ranks:
        ranks.run(model.check, model.Setting(widths, 256, recompute=True), "cpu")


def test_layers_take_the_output_before_as_their_q() -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 8, 2, 4, requires_grad=n < 3) for n in range(4))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return dense(q, k, v, visible=torch.ones(8, 8, dtype=torch.bool))

    way = in_layers(through_autograd(attend), 3)
    expected = attend(attend(attend(q, k, v), k, v), k, v)
    assert torch.equal(way.forward(q, k, v), expected)
    out, dq, *of_layers = way.both(q, k, v, dout)
    dq_expected, *kv_expected = torch.autograd.grad(expected, (q, k, v), dout)
    assert torch.equal(out, expected)
    torch.testing.assert_close(dq, dq_expected)
    # Each layer has its own k and v: their gradients add up to that of a shared pair.
    for n, grad in enumerate(kv_expected):
        torch.testing.assert_close(sum(of_layers[n::2]), grad)


def test_one_process_plays_the_ranks_of_a_ring() -> None:
    """A played rank makes its own launches, without the peers' keys."""

    def attend(rank: int) -> list[tuple[int, int]]:
        torch.manual_seed(rank)
        q, k, v = (torch.randn(1, 32, heads, 16, requires_grad=True) for heads in (4, 2, 2))
        way = method("zigzag/eager/gather/p2p/alone", CAUSAL, 128)
        pairs: list[tuple[int, int]] = []
        right = EagerKernel.attend

        def counted(
            kernel: Any, item: Any, params: Any, rows: Any, columns: Any, *rest: Any
        ) -> Any:
            pairs.append((rows.q.shape[1], columns.k.shape[1]))
            return right(kernel, item, params, rows, columns, *rest)

        with way.around(), patch.object(EagerKernel, "attend", counted):
            _, dq, *_ = way.both(q, k, v, torch.ones_like(q))
        assert bool(dq.isfinite().all())
        return sorted(pairs)

    assert not dist.is_initialized()
    results = [as_rank(rank, 4, attend, rank) for rank in range(4)]
    chunk = 128 // 8
    expected = [[(chunk, (n + 1) * chunk), (chunk, (8 - n) * chunk)] for n in range(4)]
    assert results == expected
    assert not dist.is_initialized()


@pytest.mark.parametrize("end", ["/graph", "/alone/graph", "/layers", "/alone/alone", "/"])
def test_an_unknown_end_of_a_method_is_refused(end: str) -> None:
    with pytest.raises(ValueError, match="behind a transport only 'alone' can follow"):
        method(f"zigzag/eager/gather/p2p{end}", CAUSAL, 128)


@pytest.mark.parametrize("end", ["", "/graph", "/layers", ONE_THREAD])
def test_a_method_is_told_from_how_its_calls_are_made(end: str) -> None:
    way = through_autograd(lambda *_: torch.ones(1))
    assert without_end(f"zigzag/auto/auto/auto{end}") == ("zigzag/auto/auto/auto", end)
    with running(way, end):
        assert torch._C._is_multithreading_enabled() == (end != ONE_THREAD)
    assert torch._C._is_multithreading_enabled()


def test_no_other_kernel_takes_the_place_of_flash_attn_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        host_time.main(["--gpus", "2"])
    assert "'by hand' is flash-attn-4's own function" in (said := capsys.readouterr().err)
    assert said.rstrip().endswith("name another one by --by-hand sdpa")
    q, k, v = (torch.randn(1, 8, heads, 4) for heads in (4, 2, 2))
    assert host_time.BY_HAND["sdpa"]()(q, k, v).shape == q.shape


def test_turns() -> None:
    order: list[tuple[str, bool]] = []

    def tree(name: str, times: list[float]) -> old_and_new.Timed:
        def timed(request: dict[str, Any]) -> dict[str, float]:
            order.append((name, request["first"]))
            return {"forward": times[0], "both": times[len([x for x in order if x[0] == name]) - 1]}

        return timed

    trees = tree("old", [2.0, 8.0, 8.0]), tree("new", [1.0, 8.0, 4.0])
    row = old_and_new.in_turns(*trees, {"row": "causal 8k 32/8"}, 2)
    turns = [("old", False), ("new", False), ("new", False), ("old", False)]
    assert order == [("old", True), ("new", True), *turns]
    assert row["forward"]["ratio"] == [0.5, 0.5, 0.5] and row["both"]["ratios"] == [0.5, 1.0]
    assert row["both"]["ratio"][1] == 0.75


@pytest.mark.nightly
def test_both_trees_run_in_processes_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "turns.json"
    here = str(old_and_new.HERE)
    arguments = ["--old", here, "--gpus", "2", "--json", str(path), "--rounds", "2"]
    assert old_and_new.main(arguments) == 0
    written = json.loads(path.read_text())
    assert written["environment"]["old"] == written["environment"]["new"]
    (row,) = written["rows"]
    assert min(row["both"]["ratios"]) > 0 and row["forward"]["old"][1] < row["both"]["old"][1]
    assert old_and_new.main(["--old", here, "--gpus", "2", "--rows", "no such row"]) == 1


@pytest.mark.parametrize("name", ["gated_delta_rule", "ssd"])
def test_emulated_ranks_are_the_whole_layer(name: str) -> None:
    kernel, inputs, grad = recurrent.layer_of(name, 256, 2, 8, torch.float64, "cpu")
    expected = recurrent.Group(kernel, "eager", inputs, grad, 1, "contiguous").results()
    for layout in recurrent.LAYOUTS:
        actual = recurrent.Group(kernel, "eager", inputs, grad, 4, layout).results()
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6 * float(y.abs().max()))


def test_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recurrent.json"
    sizes = ["--tokens=512", "--heads=2", "--width=16", "--repeats=1", "--dtype=float32"]
    monkeypatch.setattr(sys, "argv", ["recurrent", *sizes, f"--json={path}"])
    assert recurrent.main() == 0
    assert "gated_delta_rule by eager (not fla: its kernels need CUDA" in capsys.readouterr().out
    figures = json.loads(path.read_text())
    assert [row["layout"] for row in figures["rows"]] == ["whole", "contiguous", "zigzag"]
    assert all(ratio > 0 for name, ratio in figures["ratios"].items() if "peak" not in name)
    assert figures["errors"]["worst_ratio"] < recurrent.GOALS["error"]
    # What a zigzag rank sends: two runs of a transition and a state of each head, whatever T.
    assert figures["rows"][2]["sent_bytes"]["forward"] == 2 * 2 * 16 * (16 + 16) * 4
    monkeypatch.setattr(sys, "argv", ["recurrent", *sizes, "--kernel=fla"])
    with pytest.raises(SystemExit):
        recurrent.main()


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
    assert all(min(x["sent"].values()) > 0 for x in new["ranks"])
    assert same_bits.row_of(NAME, old, new, [], "")["result"] == "equal"

    path = case_bits.path_of(str(folders[1]), case, 1)
    tensors = torch.load(path)
    tensors["dk"][0, 0, 0, 0] += 0.5
    torch.save(tensors, path)
    changed = deepcopy(new)
    changed["ranks"][1]["digests"]["dk"] = case_bits.digest_of(tensors["dk"])
    (difference,) = found(changed)
    assert (difference.part, difference.text) == ("dk", "dk of rank 1 by 0.5")
    assert difference.largest == pytest.approx(0.5)
    assert same_bits.row_of(NAME, old, changed, [difference], "")["result"] == "differs"

    changed = deepcopy(new)
    changed["ranks"][0]["sent"]["forward"] += 4
    assert [x.part for x in found(changed)] == ["sent"]
    refused = {"ranks": [{"refused": "ValueError: no"}] * 2}
    assert [x.part for x in found(refused)] == ["refused"]
    assert same_bits.differences(refused, new, folders, 0) == []
    assert same_bits.row_of(NAME, refused, new, [], "")["result"] == "old refused"
    assert [x.part for x in found({"failed": "died"})] == ["failed"]


@pytest.mark.nightly
def test_a_tree_that_computes_otherwise_is_found(tmp_path: Path) -> None:
    arguments = ["--cases", "gather/zigzag/causal/*/2x32", "--json", str(tmp_path / "bits.json")]
    assert same_bits.main(["--old", str(HERE), *arguments]) == 0
    shutil.copytree(HERE / "packages", tmp_path / "packages")
    changed = tmp_path / "packages/ring-torch/src/ring_torch/autograd.py"
    text, line = changed.read_text(), "    return dq, dk, dv, None, None, dsinks"
    assert line in text
    changed.write_text(text.replace(line, "    dv = dv * 1.01\n" + line))
    assert same_bits.main(["--old", str(tmp_path), *arguments]) == 1
    rows = json.loads((tmp_path / "bits.json").read_text())["rows"]
    assert len(rows) == 3 and all(x["text"].startswith("dv of rank") for x in rows)
    assert all("; " not in x["text"] for x in rows)


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
    assert "fa4 2.00<br>cudnn 5.00<br>flex none | 0.75 **1.00** 1.25" in shown
    assert shown.endswith("| 1.10, missed |")
    alone = options.row_of(row, wrong, {"forward": {"fa4": [1.0, 1.0]}, "both": {}})
    assert alone["met"] == {"forward": False, "both": False}
    assert table([alone | {"kernel": None}])


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
