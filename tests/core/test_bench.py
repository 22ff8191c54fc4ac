"""What the ``bench`` commands share."""

from __future__ import annotations

import argparse
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

    def one(n: int) -> tuple[float, float]:
        order.append(("one", n))
        return 4.0, 12.0

    def ring(n: int) -> tuple[float, float]:
        order.append(("ring", n))
        return 2.0 if n < 3 else 4.0, 4.0

    def checked(n: int) -> tuple[float, float]:
        order.append(("checked", n))
        return 4.0, 5.0

    forward, both = bench.timings(one, ring, checked, work_fraction=0.5, seconds=0)
    rounds = range(bench.LEAST_ROUNDS + 1)
    assert order == [(name, n) for n in rounds for name in ("one", "ring", "checked")]
    assert (forward.efficiencies, forward.efficiency) == ([0.5, 1.0, 1.0], 1.0)
    assert (both.name, both.efficiency) == ("forward and backward", 1.5)
    text = bench.report(DEFAULTS, "devices", (forward, both), {}, as_json=False)
    assert "forward                  4000.00   2000.00  1.00  (0.50 to 1.00, 3 rounds)" in text
    assert both.check_cost == 0.25
    added = "RING_CHECK=1 adds 25.0% to forward and backward, RING_CHECK=every:100 0.25%"
    assert added in text


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_watched_is_counted_for_people_alone(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert list(bench.watched(iter("abc"), 3, "letter")) == ["a", "b", "c"]
    assert ("letter" in capsys.readouterr().err) is terminal
