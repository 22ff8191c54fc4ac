"""The command line, in process and once as a user starts it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
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
from ring_core.tools import advice, doctor
from ring_core.tools.cli import main

PAIRS = ["contiguous/ring", "contiguous/balanced", "zigzag/ring", "striped/ring", "chunks/ring"]
SMALL = ("plan", "--seq-len", "64", "--cp", "4")


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.removesuffix("\n")


def error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("ring_core: error: ")
    return captured.err


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
    within, between = bytes_by_link(
        plan, Model(3, 3, 128), StrategyConfig("hybrid", outer="gather"), ranks_per_host=2
    )
    sums = max(between), sum(between[:2]), max(within)
    assert rows["hybrid, gather"].split()[:3] == [f"{n / 2**20:.1f}" for n in sums]
    assert "at most 3 ranks can split them, not 4" in rows["ulysses"]
    assert {*rows} >= {"ring", "gather", "hybrid, ring"}


def test_ranks_of_one_host_leave_the_strategy_to_auto(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *SMALL, "--advise", "--ranks-per-host", "4")
    assert 'take strategy="auto": all 4 ranks are on one host' in text
    assert "hybrid" not in text


def test_strategies_that_send_equally_much_between_hosts_are_told_apart() -> None:
    """Ties within 5 % are broken by the bytes sent within a host, then by memory."""
    a, b, c, d = (
        advice.Sent(name, between, 8, within, held)
        for name, between, within, held in (
            ("ring", 100, 50, 9), ("gather", 104, 40, 8), ("ulysses", 105, 40, 7),
            ("hybrid, ring", 106, 1, 1),
        )
    )  # fmt: skip
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


def test_table_says_which_layout_cannot_divide(capsys: pytest.CaptureFixture[str]) -> None:
    rows = printed(capsys, "plan", "--seq-len", "20", "--cp", "4", "--layout", "all").splitlines()
    assert rows[3].startswith("zigzag/ring ")
    assert "pad to 24 with zeros" in rows[3]
    assert rows[6].startswith("imbalance is")


def test_advice_counts_what_each_strategy_sends(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("plan", "--seq-len", "131072", "--cp", "4", "--advise", "--ranks-per-host", "2")
    text = printed(capsys, *argv)
    lines = text.splitlines()
    assert "131072 tokens over 4 ranks, mask: causal; 32 query and 8 key/value heads of 128" in text
    assert lines[1].startswith("take strategy=")
    header, *rows = lines[4:]
    assert header.split()[0] == "strategy" and rows[0].split(",")[0] in lines[1]
    assert "forward and backward" in text.lower()


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ("--layout zigzag", ("seq_len=64 cp_size=4 layout=zigzag", "take strategy=")),
        ("--layout all", ("layout/strategy", "take strategy=")),
        ("--heads 4 --kv-heads 2 --head-dim 64", ("4 query and 2 key/value heads of 64",)),
        ("--cp 2,4 --window 16,0", ("64 tokens over 2 ranks", "64 tokens over 4 ranks")),
    ],
    ids=["beside a plan", "beside a table", "of a model", "for several numbers of ranks"],
)
def test_advice(options: str, texts: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *SMALL, "--advise", *options.split())
    assert text.startswith(texts[0]) or "--layout" not in options
    assert all(x in text for x in texts)


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
    assert "\x1b[" in printed(capsys, *SMALL, "--color", "always")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--layout zagzig", "unknown layout 'zagzig'; known: contiguous, zigzag"),
        ("--window=-1,0", "never -1"),
        ("--cu-seqlens 0,32 --layout all", "must end at the sequence length 64"),
        ("--kv-seq-len 66", "66 is not a positive multiple of 8"),
        ("--kv-seq-len 66 --layout all", "66 is not a positive multiple of 4"),
        ("--kv-seq-len 66 --advise", "66 is not a positive multiple of 8"),
        ("--heads 32", "--heads has no effect without --advise; add that, or leave --heads out"),
        ("--ranks-per-host 2", "--ranks-per-host has no effect without --advise"),
        ("--advise --ranks-per-host 3", "ranks_per_host must divide the plan's 4 ranks, got 3"),
        ("--advise --heads 0", "num_q_heads must be at least 1"),
        ("--advise --heads 9", "multiple of num_kv_heads"),
        ("--layout all --png plan.png", "--png and --strategy are of one plan"),
        ("--advise --strategy balanced", "--png and --strategy are of one plan"),
        ("--cp 2,4", "a plan has one number of ranks"),
        ("--cp 2,4 --advise --layout contiguous", "a plan has one number"),
        ("--cp 0", "cp_size must be at least 1"),
        ("--cp 0 --layout all", "cp_size must be at least 1"),
        ("--cp 2,0 --advise", "cp_size must be at least 1"),
        ("--cp 3,5 --advise", "64 is not a positive multiple of 6"),
        ("--png plan.nonsense", "not supported"),
    ],
)
def test_mistakes_end_in_one_clear_line(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error(capsys, *SMALL, *options.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "usage"), ("plan", "--seq-len"), ("plan --seq-len many --cp 2", "such as"),
        ("plan --seq-len 8 --cp 2,x", "--cp"), ("plan --seq-len 64kb --cp 4", "such as"),
        ("plan --seq-len 1.5k --cp 4", "such as"), ("plan --seq-len 64 --cp 4 --cu-seqlens 0,x", "--cu"),
        ("plan --seq-len 64 --cp 4 --window 4096", "such as"),
        ("plan --seq-len 64 --cp 4 --window 3,2,1", "such as"),
    ],
)  # fmt: skip
def test_usage_errors_exit_with_2(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", [(), ("plan",), ("doctor",)])
def test_every_command_has_a_version(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"ring-core {__version__}\n"


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_the_example_of_every_command_runs(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    _, _, example = text.partition("example: python -m ring_core ")
    assert main(example.split()) == 0
    assert capsys.readouterr().out


def test_as_a_module() -> None:
    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ring_core", *argv]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    plan = make_plan(Mask(causal=True), seq_len=64, cp_size=4, layout="contiguous")
    right = run(*SMALL, "--layout", "contiguous", "--strategy", "balanced")
    assert (right.returncode, right.stderr) == (0, "")
    assert right.stdout == viz.describe(ring_program(plan, "balanced")) + "\n"
    wrong = run("plan", "--seq-len", "7", "--cp", "2")
    assert wrong.returncode == 2
    assert wrong.stderr == (
        "ring_core: error: sequence length 7 is not a positive multiple of 4, as the zigzag "
        "layout over 2 ranks needs; pad to 8 with zeros at the end, as shard(x, pad=True) does, and "
        "pass seq_len=7, in cross attention seq_len=(queries', keys'), by which no token sees them\n"
    )
