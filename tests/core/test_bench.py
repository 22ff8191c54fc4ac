"""Tests of the code that the ``bench`` commands share."""

from __future__ import annotations

import argparse
import json
import sys

import pytest

from ring_core.tools import bench

DEFAULTS = bench.BenchCase(4, 4096, 8, 2, 64, "float32", None, "zigzag", "auto", "auto")


def setting(*command_line: str) -> bench.BenchCase:
    parser = argparse.ArgumentParser()
    bench.add_options(parser)
    return bench.setting_of(parser.parse_args(command_line), DEFAULTS)


def test_what_is_given_replaces_the_defaults() -> None:
    assert setting() == DEFAULTS
    command_line = ("--ranks", "2", "--seq-len", "64", "--heads", "4", "--dtype", "float64")
    more = ("--window", "9,0", "--layout", "contiguous", "--kernel", "eager")
    assert setting(*command_line, *more) == bench.BenchCase(
        2, 64, 4, 2, 64, "float64", (9, 0), "contiguous", "auto", "eager"
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
    results = forward, both, again = bench.timings(*runs, work_fraction=0.5, seconds=0)
    rounds = range(bench.LEAST_ROUNDS + 1)
    assert order == [(name, n) for n in rounds for name in ("one", "ring", "checked")]
    assert (forward.efficiencies, forward.efficiency) == ([0.5, 1.0, 1.0], 1.0)
    assert (both.name, both.efficiency, again.name) == ("forward and backward", 1.5, "again")
    text = bench.report(DEFAULTS, "devices", results, {}, as_json=False)
    assert "forward                  4000.00   2000.00  1.00  (0.50 to 1.00, 3 rounds)" in text
    assert both.check_cost == 0.25
    # A result without a comparison prints no line about one.
    assert text.endswith("\nRING_CHECK=1 adds 25.0% to forward and backward")


def test_checks_of_a_hundredth_are_timed_in_turns() -> None:
    order: list[int] = []

    def run(every: int) -> float:
        order.append(every)
        return 2.0 + len(order) / 100 if every else 2.0

    sparse = bench.sparse_checks(run, 3)
    assert order == [0, 100, 100, 0, 0, 100]
    assert (len(sparse.checked), sparse.unchecked) == (3, (2.0, 2.0, 2.0))
    assert [sparse.cost, sparse.costs[-1]] == pytest.approx([0.015, 0.03])
    timing = bench.Timing("forward and backward", (1.0,), (1.0,), (2.0,), 0.5)
    shown = bench.report(DEFAULTS, "devices", (timing,), {}, as_json=False, sparse=sparse)
    assert f"every:100 adds {sparse.cost:.2%} to 100 calls forward and backward" in shown
    read = json.loads(bench.report(DEFAULTS, "devices", (timing,), {}, as_json=True, sparse=sparse))
    assert read["sparse_checks"]["cost"] == sparse.cost


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_watched_is_counted_for_people_alone(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert list(bench.watched(iter("abc"), 3, "letter")) == ["a", "b", "c"]
    assert ("letter" in capsys.readouterr().err) is terminal
