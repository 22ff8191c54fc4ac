"""The command line, in process and once as a user starts it, and what ``bench`` commands share."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from ring_core import (
    Mask,
    StrategyConfig,
    __version__,
    balanced_layout,
    make_plan,
    reference,
    ring_program,
    viz,
)
from ring_core.cost import Model, bytes_by_link
from ring_core.tools import advice, bench, doctor
from ring_core.tools.case import BENCH_OPTIONS, Case, Options, timed_case
from ring_core.tools.cli import main
from ring_core.tools.commands import LAUNCHERS, Command, is_refused, main as main_of

PAIRS = ["contiguous/ring", "contiguous/balanced", "zigzag/ring", "striped/ring", "chunks/ring"]
SMALL = ("plan", "--seq-len", "64", "--cp", "4")


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.removesuffix("\n")


DOCUMENTS = Mask(causal=True, cu_seqlens=(0, 7, 64))
CHUNKS = balanced_layout(DOCUMENTS, seq_len=64, cp_size=4)
#: Options of `plan`, and the mask and sizes of what it prints.
PLANS: dict[str, tuple[str, Mask, dict[str, Any]]] = {
    "zigzag and causal by default": ("", Mask(causal=True), {}),
    "every option": (
        "--no-causal --window 9,none --chunk-size 20 --layout zigzag --kv-seq-len 96",
        Mask(window=(9, None), chunk_size=20), {"kv_seq_len": 96},
    ),
    "documents": ("--cu-seqlens 0,7,64", DOCUMENTS, {}),
    "sizes as people write them": (
        "--seq-len 64k --window 4k,0 --chunk-size 8k", Mask(True, (4096, 0), 8192), {"seq_len": 65536}
    ),
    "a megatoken": ("--seq-len 1M --window 4k,none", Mask(True, (4096, None)), {"seq_len": 1 << 20}),
    "chunks for the mask": ("--cu-seqlens 0,7,64 --layout chunks", DOCUMENTS, {"layout": CHUNKS}),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_plan(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    options, mask, sizes = PLANS[name]
    defaults: dict[str, Any] = {"seq_len": 64, "cp_size": 4, "layout": "zigzag"}
    plan = make_plan(mask, **defaults | sizes)
    text = printed(capsys, *SMALL, *options.split())
    assert text == viz.describe(ring_program(plan))
    assert "layout" not in sizes or f"layout={CHUNKS} " in text


def test_strategies_on_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    """The answer is spelled as in a call; the table has the page's names."""
    options = ("--advise", "--ranks-per-host", "2", "--heads", "3", "--kv-heads", "3")
    text = printed(capsys, *SMALL, *options)
    taken = 'take strategy=StrategyConfig("hybrid", outer="gather"), layout=\'zigzag\''
    assert text.splitlines()[1] == taken
    rows = dict(line.split("  ", 1) for line in text.splitlines() if "  " in line)
    plan = make_plan(Mask(causal=True), seq_len=64, cp_size=4, layout="zigzag")
    hybrid = StrategyConfig("hybrid", outer="gather")
    within, between = bytes_by_link(plan, Model(3, 3, 128), hybrid, ranks_per_host=2)
    sums = max(between), sum(between[:2]), max(within)
    assert rows["hybrid, gather"].split()[:3] == [f"{n / 2**20:.1f}" for n in sums]
    assert "at most 3 ranks can split them, not 4" in rows["ulysses"]
    assert {*rows} >= {"ring", "gather", "hybrid, ring"}


def test_strategies_that_send_equally_much_between_hosts_are_told_apart() -> None:
    """Ties within 5 % are broken by the bytes sent within a host, then by memory."""
    a, b = advice.Sent("ring", 100, 8, 50, 9), advice.Sent("gather", 104, 8, 40, 8)
    c, d = advice.Sent("ulysses", 105, 8, 40, 7), advice.Sent("hybrid, ring", 106, 8, 1, 1)
    assert advice.in_order([d, a, b, c]) == [c, a, b, d]
    text = advice.advice([c, a, b, d], num_hosts=2, ranks_per_host=2, layout="zigzag")
    assert text.startswith("take strategy=\"ulysses\", layout='zigzag'\nwhy: 2 hosts of 2 ranks")


def test_table_of_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    rows = printed(capsys, *SMALL, "--layout", "all").splitlines()
    # The last of four contiguous ranks computes 16 * 48 + 136 of 2080 pairs; of striped ones, 544.
    assert [row.split() for row in rows[1:6]] == [
        ["contiguous/ring", "1.738", "1.738", "4", "of", "4", "0", "3"],
        ["contiguous/balanced", "1.000", "1.000", "3", "of", "4", "2", "2"],
        ["zigzag/ring", "1.000", "1.000", "4", "of", "4", "0", "3"],
        ["striped/ring", "1.046", "1.046", "4", "of", "4", "0", "3"],
        ["chunks/ring", "1.000", "1.000", "4", "of", "4", "0", "3"],
    ]
    assert re.split("  +", rows[0]) == [
        "layout/strategy", "imbalance", "imbalance by step", "steps with work", "offloaded steps",
        "K/V messages",
    ]  # fmt: skip
    assert rows[6].startswith("imbalance is the busiest rank's")
    indivisible = printed(capsys, *SMALL, "--seq-len", "20", "--layout", "all").splitlines()[3]
    assert indivisible.startswith("zigzag/ring ") and "pad to 24 with zeros" in indivisible


ADVICE: dict[str, tuple[str, tuple[str, ...]]] = {
    "beside a plan": ("--layout zigzag", ("seq_len=64 cp_size=4 layout=zigzag", "take strategy=")),
    "beside a table": ("--layout all", ("layout/strategy", "take strategy=")),
    "of a model": ("--heads 4 --kv-heads 2 --head-dim 64", ("4 query and 2 key/value heads of 64",)),
    "for several numbers of ranks": (
        "--cp 2,4 --window 16,0", ("64 tokens over 2 ranks", "64 tokens over 4 ranks")
    ),
    "on one host": ("--ranks-per-host 4", ('take strategy="auto": all 4 ranks are on one host',)),
    "what each strategy sends": (
        "--seq-len 131072 --ranks-per-host 2",
        ("131072 tokens over 4 ranks, mask: causal; 32 query and 8 key/value heads of 128",
         '\ntake strategy=StrategyConfig("hybrid", outer="gather")', "\nhybrid, gather ", "orward and backward"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ADVICE)
def test_advice(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    options, texts = ADVICE[name]
    text = printed(capsys, *SMALL, "--advise", *options.split())
    assert text.startswith(texts[0]) or "--layout" not in options
    assert all(x in text for x in texts)
    assert ("hybrid" in text) == (name == "what each strategy sends")


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] and report["versions"].keys() >= {"python", "numpy", "ring-core"}
    tested = [(check["name"], check["result"]) for check in report["checks"]]
    assert tested == [(name, what) for name in PAIRS[:-1] for what in doctor.RESULTS]
    assert all(0 < check["error"] <= check["limit"] < 1e-13 for check in report["checks"])


def test_doctor_finds_a_wrong_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = reference.simulate

    def wrong(*args: Any, **options: Any) -> tuple[Any, ...]:
        out, lse, dq, dk, dv = right(*args, **options)
        return out, lse, dq * (1 + 1e-9), dk * float("nan"), dv

    monkeypatch.setattr(reference, "simulate", wrong)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if "numpy, 2 ranks" in line]
    # The longest name, too, is followed by a space.
    assert {row[0] for row in rows} == set(PAIRS[:-1])
    states = {row[4]: row[5] for row in rows if row[0] == "contiguous/balanced"}
    assert states == {"out": "ok", "dq": "FAILED", "dk": "FAILED", "dv": "ok"}
    assert lines[-1] == "something is wrong"


def test_doctor_finds_versions_at_odds(monkeypatch: pytest.MonkeyPatch) -> None:
    has = {"torch": "2.99.0", "triton": "3.1.0", "ring-core": "0.2.0", "ring-torch": "0.1.0"}
    asked = {"torch": ["triton~=3.9.0; python_version >= '3'", "optree>9; extra == 'optree'"]}
    monkeypatch.setattr(doctor, "installed", has.get)
    monkeypatch.setattr(doctor, "requires", asked.get)
    assert doctor.clashes(has) == (
        "packages of unlike releases: ring-core 0.2.0, ring-torch 0.1.0",
        "torch 2.99.0 asks for triton~=3.9.0, and there is 3.1.0",
    )


def test_picture_and_color(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.png"
    text = printed(capsys, *SMALL, "--png", str(file))
    assert "layout=zigzag" in text and "\x1b[" not in text  # captured output is no terminal
    assert file.read_bytes().startswith(b"\x89PNG")
    colored = printed(capsys, *SMALL, "--color", "always")
    assert "\x1b[30;48;5;75m0 \x1b[0m" in colored
    plain = re.sub(r"\x1b\[[0-9;]*m", "", colored)
    assert [line.rstrip() for line in plain.splitlines()] == printed(capsys, *SMALL).splitlines()


MISTAKES = (
    ("--layout zagzig", "unknown layout 'zagzig'; known: contiguous, zigzag"),
    ("--cu-seqlens 0,32 --layout all", "must end at the sequence length 64"),
    ("--heads 32", "--heads has no effect without --advise; add that, or leave --heads out"),
    ("--ranks-per-host 2", "--ranks-per-host has no effect without --advise"),
    ("--advise --ranks-per-host 3", "ranks_per_host must divide the plan's 4 ranks, got 3"),
    ("--advise --heads 9", "multiple of num_kv_heads"),
    ("--layout all --png plan.png", "--png and --strategy are of one plan"),
    ("--advise --strategy balanced", "--png and --strategy are of one plan"),
    ("--cp 2,4", "a plan has one number of ranks"),
    ("--cp 3,5 --advise", "64 is not a positive multiple of 6"),
    ("--png plan.nonsense", "not supported"),
)
#: Command lines that no command takes, and a word of what is said.
USAGE = (
    ("", "usage"), ("plan", "--seq-len"), ("plan --seq-len many --cp 2", "such as"),
    ("plan --seq-len 8 --cp 2,x", "--cp"), ("plan --seq-len 64kb --cp 4", "such as"),
    ("plan --seq-len 1.5k --cp 4", "such as"), ("plan --seq-len 64 --cp 4 --cu-seqlens 0,x", "--cu"),
    ("plan --seq-len 64 --cp 4 --window 4096", "such as"),
    ("plan --seq-len 64 --cp 4 --window 3,2,1", "such as"),
)  # fmt: skip


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_mistakes_end_in_one_clear_line(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *options.split()]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("ring_core: error: ") and message in said.err


def stopped(capsys: pytest.CaptureFixture[str], code: int, *argv: str) -> str:
    """Return what a command line says that ends in this code."""
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == code
    return "".join(capsys.readouterr())


@pytest.mark.parametrize(("arguments", "words"), USAGE)
def test_usage_errors_exit_with_2(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in stopped(capsys, 2, *arguments.split())


@pytest.mark.parametrize("command", ["", "plan", "doctor"])
def test_every_command_has_a_version_and_an_example_that_runs(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stopped(capsys, 0, *command.split(), "--version") == f"ring-core {__version__}\n"
    if command:
        text = " ".join(stopped(capsys, 0, command, "--help").split())
        assert main(text.partition("example: python -m ring_core ")[2].split()) == 0
        assert capsys.readouterr().out


def test_as_a_module() -> None:
    """The code of a process is that of its command. Those that end well are run by pages."""
    command = [sys.executable, "-m", "ring_core", "plan", "--seq-len", "7", "--cp", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "ring_core: error: sequence length 7 is not a positive multiple of 4, as the zigzag "
        "layout over 2 ranks needs; pad to 8 with zeros at the end, as shard(x, pad=True) does, and "
        "pass seq_len=7, in cross attention seq_len=(queries', keys'), by which no token sees them\n"
    )


@pytest.mark.parametrize(("size", "rank"), LAUNCHERS.values(), ids=LAUNCHERS)
def test_one_process_of_a_launcher_says_why_it_is_refused(
    size: str, rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in chain(*LAUNCHERS.values()):
        monkeypatch.delenv(name, raising=False)
    assert not is_refused("ring_torch", "bench")
    monkeypatch.setenv(size, "4")
    said = {}
    for number in ("0", "3"):
        monkeypatch.setenv(rank, number)
        assert is_refused("ring_torch", "bench")
        said[number] = capsys.readouterr().err
    assert f"4 processes ({size}=4)" in said["0"] and said["3"] == ""
    assert "`python -m ring_torch bench` once on a machine" in said["0"]


class MachineError(RuntimeError):
    """An error of the machine."""


ENDS: dict[str, tuple[Exception | None, int]] = {
    "right": (None, 0), "a mistake": (ValueError("no\n such"), 2), "no file": (OSError("none"), 2),
    "the machine": (MachineError("a rank died"), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_a_command_ends_in_one_line_and_its_code(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error, code = ENDS[name]

    def run(args: argparse.Namespace, given: set[str]) -> tuple[str, int]:
        if error is not None:
            raise error
        return f"{args.size} {sorted(given)}", 0

    options: Options = {"--size": {"type": int, "default": 1}, "--other": {"default": "x"}}
    command, line = Command("go", "Go on.", run, options, "--size 2"), ["go", "--size", "3"]
    end = main_of("ring_any", "Anything.", (command,), line, failures=(MachineError,))
    message = "" if error is None else f"ring_any: error: {' '.join(str(error).split())}\n"
    expected = "3 ['size']\n" if error is None else ""
    assert (end, *capsys.readouterr()) == (code, expected, message)


USUAL = Case(4, 4096, 8, 2, 64, "float32")


def setting(command_line: str) -> Case:
    parser = argparse.ArgumentParser()
    for flag, arguments in BENCH_OPTIONS.items():
        parser.add_argument(flag, **arguments)
    return timed_case(parser.parse_args(command_line.split()), 4, on_cpu=True)


def test_what_is_given_replaces_the_defaults() -> None:
    assert setting("") == USUAL
    given = setting(
        "--ranks 2 --seq-len 8k --heads 4 --dtype float64 --window 4k,0 --layout contiguous --kernel eager"
    )
    mask = Mask(causal=True, window=(4096, 0))
    assert given == Case(2, 8192, 4, 2, 64, "float64", mask, "contiguous", "auto", "eager")


def test_heads_in_no_groups() -> None:
    with pytest.raises(ValueError, match="--heads must be a multiple of --kv-heads, got 3 and 2"):
        setting("--heads 3")


def test_rounds_alternate_and_the_first_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    order: list[tuple[str, int]] = []

    def timed(name: str, forward: float, both: float) -> bench.TimedRound:
        def run(n: int) -> dict[str, float]:
            order.append((name, n))
            late = 2.0 if (name, n) == ("ring", 3) else 1.0
            return {"forward": late * forward, "forward and backward": both, "again": both}

        return run

    runs = timed("one", 4.0, 12.0), timed("ring", 2.0, 4.0), timed("checked", 4.0, 5.0)
    results = forward, both, again = bench.timings(runs, work_fraction=0.5, seconds=0)
    rounds = range(bench.LEAST_ROUNDS + 1)
    assert order == [(name, n) for n in rounds for name in ("one", "ring", "checked")]
    assert "\rround 1 of 20\rround 2 of 20\rround 3 of 20" in capsys.readouterr().err
    assert (forward.efficiencies, forward.efficiency) == ([0.5, 1.0, 1.0], 1.0)
    assert (both.name, both.efficiency, again.name) == ("forward and backward", 1.5, "again")
    result = bench.Result(USUAL, "devices", [], results, {})
    text, code = bench.report(result, as_json=False)
    assert code == 0
    assert "forward                  4000.00   2000.00  1.00  (0.50 to 1.00, 3 rounds)" in text
    assert both.check_cost == 0.25
    assert text.splitlines()[-1].startswith("RING_CHECK=1 adds 25.0% to forward and backward, ")
    read = json.loads(bench.report(result, as_json=True)[0])
    assert read["timings"][1]["check_cost"] == 0.25 and read["setting"]["window"] is None


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_watched_is_counted_for_people_alone(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert list(bench.watched(iter("abc"), 3, "letter")) == ["a", "b", "c"]
    assert ("letter" in capsys.readouterr().err) is terminal
