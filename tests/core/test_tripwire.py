"""The tripwire's choice of calls and rows, and its limit for a row's error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ring_core.tripwire import SampledRows, every_of, peak_tflops, sampled


@pytest.mark.parametrize(
    ("setting", "every"),
    [
        (None, 0),
        ("", 0),
        ("0", 0),
        ("1", 1),
        (" 1 ", 1),
        ("every:100", 100),
        (7, 7),
        ("every:0", 0),
    ],
)
def test_settings(setting: str | int | None, every: int) -> None:
    assert every_of(setting) == every


@pytest.mark.parametrize("setting", ["2", "yes", "every", "every:", "every:-1", "every:1.5", "-1"])
def test_settings_that_mean_nothing(setting: str) -> None:
    with pytest.raises(ValueError, match="RING_CHECK must be 1"):
        every_of(setting)


def test_samples_differ_by_call_rank_and_kind() -> None:
    samples = [sampled("queries", call, rank, 1 << 20) for call in (1, 2) for rank in (0, 1)]
    samples.append(sampled("keys", 1, 0, 1 << 20))
    assert len({tuple(x) for x in samples}) == len(samples)
    assert all((np.diff(x) >= 0).all() and x.shape == (4,) and x.max() < 1 << 20 for x in samples)
    np.testing.assert_array_equal(samples[0], sampled("queries", 1, 0, 1 << 20))


def test_many_calls_reach_every_token() -> None:
    rows = np.concatenate([sampled("keys", call, 3, 50) for call in range(200)])
    assert np.unique(rows).size == 50


def rows(**changed: Any) -> SampledRows:
    exact = np.linspace(-1, 1, 2 * 3 * 4).reshape(2, 3, 4)
    results = {"got": exact, "exact": exact, "plain": exact, "terms": np.zeros(2)}
    return SampledRows(**results | {name: value(exact.copy()) for name, value in changed.items()})


def bumped(x: Any, by: float) -> Any:
    x[1, 2, 3] += by
    return x


def test_the_worst_entry_is_named() -> None:
    worst = rows(got=lambda x: bumped(x, 1e-3)).worst("float32")
    assert worst is not None and (worst.row, worst.head, worst.dim) == (1, 2, 3)
    assert worst.got == 1.001 and worst.exact == 1.0
    text = worst.describe("out", 0, 5, (1, 8, 3, 4))
    assert text.startswith("out[0, 5, 2, 3] of [1, 8, 3, 4] is 1.001, and 1.0 by the dense formula")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_limits_are_of_the_dtype(dtype: str) -> None:
    ulp = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}[
        dtype
    ]
    assert rows(got=lambda x: bumped(x, 3 * ulp)).worst(dtype) is None
    assert rows(got=lambda x: bumped(x, 5 * ulp)).worst(dtype) is not None


def test_twice_the_plain_error_is_allowed() -> None:
    assert (
        rows(got=lambda x: bumped(x, 0.19), plain=lambda x: bumped(x, 0.1)).worst("float32") is None
    )
    assert rows(got=lambda x: bumped(x, 0.21), plain=lambda x: bumped(x, 0.1)).worst("float32")


def test_terms_that_cancel_leave_their_rounding() -> None:
    some = rows(got=lambda x: bumped(x, 1e-4))
    assert some.worst("float32") is not None
    assert some._replace(terms=np.full(2, 1e3)).worst("float32") is None


def test_terms_with_rounded_weights_leave_theirs() -> None:
    some = rows(got=lambda x: bumped(x, 0.06))
    assert some.worst("bfloat16") is not None
    assert some._replace(rounded=np.full((2, 3, 4), 3.0)).worst("bfloat16") is None
    assert some._replace(rounded=np.full((2, 3, 4), np.nan)).worst("bfloat16") is not None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_the_smallest_numbers_may_be_lost(dtype: str) -> None:
    tiny = {"float64": 2.0**-1023, "float16": 2.0**-23}.get(dtype, 2.0**-127)
    zero = rows(exact=lambda x: 0 * x, plain=lambda x: 0 * x, got=lambda x: 0 * x)
    assert zero._replace(got=bumped(zero.got.copy(), tiny)).worst(dtype) is None
    assert zero._replace(got=bumped(zero.got.copy(), 4 * tiny)).worst(dtype) is not None


def test_what_is_not_finite() -> None:
    assert rows(got=lambda x: bumped(x, np.nan)).worst("float32") is not None
    assert rows(exact=lambda x: bumped(x, np.nan)).worst("float32") is None
    assert (
        rows(got=lambda x: bumped(x, np.inf), exact=lambda x: bumped(x, np.inf)).worst("float32")
        is None
    )


def test_a_row_that_sees_nothing_has_no_number() -> None:
    nothing = {"exact": lambda x: bumped(x, -np.inf), "plain": lambda x: bumped(x, -np.inf)}
    assert rows(**nothing, got=lambda x: bumped(x, -np.inf)).worst("float32") is None
    worst = rows(**nothing).worst("float32")
    assert worst is not None and (worst.got, worst.exact) == (1.0, -np.inf)


def test_peaks_by_name() -> None:
    assert peak_tflops("NVIDIA H200") == peak_tflops("NVIDIA H100 80GB HBM3") == 989.5
    assert peak_tflops("cpu") is None
