"""Command lines accept sizes as people write them, and fit a screen."""

from __future__ import annotations

import argparse
from itertools import chain

import pytest

from ring_core import Mask, make_plan, ring_program, viz
from ring_core.tools import bench
from ring_core.tools.case import Options
from ring_core.tools.cli import main
from ring_core.tools.commands import LAUNCHERS, Command, is_refused, main as main_of


def _said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", "--cp", "4", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ("--seq-len 1M", "--seq-len 1048576"),
        ("--seq-len 64k --window 4k,0", "--seq-len 65536 --window 4096,0 --layout zigzag"),
        ("--seq-len 64k --window 4k,none", "--seq-len 65536 --window 4096,none"),
        ("--seq-len 64k --chunk-size 8k", "--seq-len 65536 --chunk-size 8192"),
    ],
)
def test_sizes_and_defaults(written: str, plain: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _said(capsys, *written.split()) == _said(capsys, *plain.split())


def test_bench_shows_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    run: bench.TimedRound = lambda _: dict.fromkeys(bench.PASSES, 1.0)  # noqa: E731 - a type for three uses
    forward, both = bench.timings([run] * 3, work_fraction=0.5, seconds=0)
    assert forward.name == "forward"
    assert both.name == "forward and backward"
    assert "\rround 1 of 20\rround 2 of 20\rround 3 of 20\n" in capsys.readouterr().err


@pytest.mark.parametrize("cp_size", [1, 8, 64])
def test_figures_of_a_plan_fit_a_screen(cp_size: int) -> None:
    program = ring_program(
        make_plan(Mask(causal=True), seq_len=65536, cp_size=cp_size, layout="zigzag")
    )
    lines = viz.describe(program, pictures=False).splitlines()
    assert len(lines) <= 8
    assert max(map(len, lines)) <= 80
    assert set(lines) <= set(viz.describe(program).splitlines())


@pytest.mark.parametrize(("size", "rank"), LAUNCHERS.values(), ids=LAUNCHERS)
def test_one_process_of_a_launcher_says_why_it_is_refused(
    size: str, rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in chain(*LAUNCHERS.values()):
        monkeypatch.delenv(name, raising=False)
    assert not is_refused("ring_torch", "bench")
    monkeypatch.setenv(size, "4")
    monkeypatch.setenv(rank, "0")
    assert is_refused("ring_torch", "bench")
    arguments = capsys.readouterr().err
    assert f"4 processes ({size}=4)" in arguments
    assert "`python -m ring_torch bench` once on a machine" in arguments
    monkeypatch.setenv(rank, "3")
    assert is_refused("ring_torch", "bench")
    assert not capsys.readouterr().err


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
    command = Command("go", "Go on.", run, options, "--size 2")
    end = main_of(
        "ring_any", "Anything.", (command,), ["go", "--size", "3"], failures=(MachineError,)
    )
    said = capsys.readouterr()
    assert end == code
    assert said.out == ("3 ['size']\n" if error is None else "")
    assert said.err == (
        "" if error is None else f"ring_any: error: {' '.join(str(error).split())}\n"
    )
