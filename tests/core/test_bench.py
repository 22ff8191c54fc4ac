"""Tests of the code that the ``bench`` commands share."""

from __future__ import annotations

import argparse
import json
import sys

import pytest

from ring_core import Mask
from ring_core.tools import bench
from ring_core.tools.case import BENCH_OPTIONS, Case, timed_case
from ring_core.tools.doctor import Check

USUAL = Case(4, 4096, 8, 2, 64, "float32")


def setting(*command_line: str) -> Case:
    parser = argparse.ArgumentParser()
    for flag, arguments in BENCH_OPTIONS.items():
        parser.add_argument(flag, **arguments)
    return timed_case(parser.parse_args(command_line), 4, on_cpu=True)


def test_what_is_given_replaces_the_defaults() -> None:
    assert setting() == USUAL
    command_line = ("--ranks", "2", "--seq-len", "8k", "--heads", "4", "--dtype", "float64")
    more = ("--window", "4k,0", "--layout", "contiguous", "--kernel", "eager")
    mask = Mask(causal=True, window=(4096, 0))
    assert setting(*command_line, *more) == Case(
        2, 8192, 4, 2, 64, "float64", mask, "contiguous", "auto", "eager"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        ("--ranks 0", "--ranks must be at least 1, got 0"),
        ("--head-dim -8", "--head-dim must be at least 1"),
        ("--heads 3", "--heads must be a multiple of --kv-heads, got 3 and 2"),
        ("--seq-len 4100", "4100 is not a positive multiple of 8"),
        ("--window=-1,0", "never -1"),
    ],
)
def test_mistakes(command_line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        setting(*command_line.split())


def test_rounds_alternate_and_the_first_is_not_counted() -> None:
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


def test_a_wrong_result_has_no_times() -> None:
    checks = [Check("auto", "2 ranks", "out", 1.0, 0.1, passed=False)]
    text, code = bench.report(bench.Result(USUAL, "devices", checks, (), {}), as_json=True)
    assert code == 1 and "FAILED" in text and "efficiency" not in text


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_watched_is_counted_for_people_alone(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert list(bench.watched(iter("abc"), 3, "letter")) == ["a", "b", "c"]
    assert ("letter" in capsys.readouterr().err) is terminal
