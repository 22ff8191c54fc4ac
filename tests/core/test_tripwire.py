"""The tripwire's choice of calls and rows, and its limit for a row's error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ring_core.tripwire import SampledRows, every_of, peak_tflops, sampled

SETTINGS = {None: 0, "": 0, "0": 0, "1": 1, " 1 ": 1, "every:100": 100, 7: 7, "every:0": 0}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(setting: str | int | None) -> None:
    assert every_of(setting) == SETTINGS[setting]


def test_samples_differ_by_call_rank_and_kind() -> None:
    samples = [sampled("queries", call, rank, 1 << 20) for call in (1, 2) for rank in (0, 1)]
    samples.append(sampled("keys", 1, 0, 1 << 20))
    assert len({tuple(x) for x in samples}) == len(samples)
    assert all((np.diff(x) >= 0).all() and x.shape == (4,) and x.max() < 1 << 20 for x in samples)
    np.testing.assert_array_equal(samples[0], sampled("queries", 1, 0, 1 << 20))
    assert len({*np.concatenate([sampled("keys", call, 3, 50) for call in range(200)])}) == 50


def rows(**changed: Any) -> SampledRows:
    exact = np.linspace(-1, 1, 2 * 3 * 4).reshape(2, 3, 4)
    results = {"got": exact, "exact": exact, "plain": exact, "terms": np.zeros(2)}
    return SampledRows(**results | {name: value(exact.copy()) for name, value in changed.items()})


def by(number: float, factor: float = 1) -> Any:
    """Return what adds a number to one entry of results, or of zeros."""

    def bumped(x: Any) -> Any:
        x *= factor
        x[1, 2, 3] += number
        return x

    return bumped


def test_the_worst_entry_is_named() -> None:
    worst = rows(got=by(1e-3)).worst("float32")
    assert worst is not None and (worst.row, worst.head, worst.dim) == (1, 2, 3)
    assert worst.got == 1.001 and worst.exact == 1.0
    text = worst.describe("out", 0, 5, (1, 8, 3, 4))
    assert text.startswith("out[0, 5, 2, 3] of [1, 8, 3, 4] is 1.001, and 1.0 by the dense formula")


def zero(number: float) -> dict[str, Any]:
    """Return results of zeros, and one of this number."""
    return {"exact": by(0, 0), "plain": by(0, 0), "got": by(number, 0)}


ULPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}
TINY = {"bfloat16": 2.0**-127, "float16": 2.0**-23, "float32": 2.0**-127, "float64": 2.0**-1023}
NOTHING = {"exact": by(-np.inf), "plain": by(-np.inf)}
#: Changes of right results, their dtype, and True if they are too far off.
LIMITS: dict[str, tuple[dict[str, Any], str, bool]] = {
    **{f"3 ulps of {dtype}": ({"got": by(3 * ulp)}, dtype, False) for dtype, ulp in ULPS.items()},
    **{f"5 ulps of {dtype}": ({"got": by(5 * ulp)}, dtype, True) for dtype, ulp in ULPS.items()},
    **{f"the smallest {dtype} is lost": (zero(tiny), dtype, False) for dtype, tiny in TINY.items()},
    **{f"four times the smallest {dtype}": (zero(4 * tiny), dtype, True) for dtype, tiny in TINY.items()},
    "less than twice the plain error": ({"got": by(0.19), "plain": by(0.1)}, "float32", False),
    "more than twice the plain error": ({"got": by(0.21), "plain": by(0.1)}, "float32", True),
    "terms that do not cancel": ({"got": by(1e-4)}, "float32", True),
    "terms that cancel leave their rounding": (
        {"got": by(1e-4), "terms": lambda _: np.full(2, 1e3)}, "float32", False
    ),
    "no rounded weights": ({"got": by(0.06)}, "bfloat16", True),
    "terms with rounded weights leave theirs": (
        {"got": by(0.06), "rounded": lambda _: np.full((2, 3, 4), 3.0)}, "bfloat16", False
    ),
    "nor of NaN": ({"got": by(0.06), "rounded": lambda _: np.full((2, 3, 4), np.nan)}, "bfloat16", True),
    "NaN": ({"got": by(np.nan)}, "float32", True),
    "NaN is exact": ({"exact": by(np.nan)}, "float32", False),
    "infinity where it is exact": ({"got": by(np.inf), "exact": by(np.inf)}, "float32", False),
    "a row that sees nothing": ({**NOTHING, "got": by(-np.inf)}, "float32", False),
    "a number where nothing is seen": (NOTHING, "float32", True),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_limits(name: str) -> None:
    changed, dtype, is_wrong = LIMITS[name]
    assert (rows(**changed).worst(dtype) is not None) == is_wrong


def test_peaks_by_name() -> None:
    assert peak_tflops("NVIDIA H200") == peak_tflops("NVIDIA H100 80GB HBM3") == 989.5
    assert peak_tflops("cpu") is None
