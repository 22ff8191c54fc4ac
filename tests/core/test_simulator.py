"""Simulator and merging outside the table of cases: rounding, order, nonfinite numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from ring_core import Mask, finalize, make_plan, merge, reference, ring_program
from ring_core.reference import item_kernel

Part = tuple[npt.NDArray[Any], npt.NDArray[Any]]
CAUSAL = ring_program(make_plan(Mask(causal=True), seq_len=4, cp_size=2))


def ones() -> list[Any]:
    return [np.ones((1, 4, 1, 2)) for _ in range(4)]


@pytest.mark.parametrize(("precision", "unit"), [("bfloat16", 2.0**-7), ("float16", 2.0**-10)])
def test_rounded_to_the_nearest(precision: Any, unit: float) -> None:
    """Rounding is to nearest, ties to even; ``unit`` is the spacing of numbers above 1."""
    steps = [0, 0.25, 0.5, 0.5 + 2**-8, 1, 1.25, 1.5, 1.5 + 2**-8, 2.5, 3.5, 4.5]
    nearest = [0, 0, 0, 1, 1, 1, 2, 2, 2, 4, 4]
    x = item_kernel.round_to(1 + unit * np.array([steps, nearest]), precision)
    assert x.dtype == np.float32
    np.testing.assert_array_equal(x[0], x[1])
    np.testing.assert_array_equal(x[1], 1 + unit * np.array(nearest))
    odd = np.array([np.nan, np.inf, -np.inf, -0.0, -3.0])
    np.testing.assert_array_equal(item_kernel.round_to(odd, precision), odd)
    filled = np.array([0x7FFFFFFF, 0xFFFFFFFF], dtype=np.uint32).view(np.float32)
    assert np.isnan(item_kernel.round_to(filled, precision)).all(), "NaN, with whichever bits"


def test_sinks_that_take_nothing() -> None:
    """Sinks of -inf get no gradient from the last row, which sees no key."""
    q, k, v, dout = ones()
    options: Any = {"segment_ids": np.array([[0, 0, 0, -1]]), "sinks": [-np.inf]}
    simulated = reference.run(CAUSAL, q, k, v, dout=dout, **options)
    assert np.isneginf(simulated.lse[0, 0, 3])
    np.testing.assert_array_equal(simulated.dsinks, [0])


def test_gradients_that_are_nan_reach_keys_that_are_seen() -> None:
    q, k, v, dout = ones()
    dout[:, 1] = np.nan
    simulated = reference.run(CAUSAL, q, k, v, dout=dout)
    expected = reference.attention_grads(dout, q, k, v, causal=True)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(simulated, name), getattr(expected, name), atol=1e-15)
    assert simulated.dv is not None and np.isfinite(simulated.dv[:, 2:]).all()


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_what_overflows_warns_of_nothing(precision: Any) -> None:
    q, k, v, dout = (1e15 * x for x in ones())
    simulated = reference.run(CAUSAL, q, k, v, dout=dout, softmax_scale=1e10, precision=precision)
    assert np.isnan(simulated.out).all()


@st.composite
def parts(draw: st.DrawFn) -> Part:
    """Draw partial results with tiny to huge ``lse``; empty ones have garbage as output."""
    lse = draw(st.lists(st.floats(-1e3, 1e3) | st.just(-np.inf), min_size=3, max_size=3))
    out = draw(st.lists(st.floats(-4, 4), min_size=6, max_size=6))
    values = np.array(out).reshape(3, 2)
    values[np.isneginf(lse)] = draw(st.sampled_from([0.0, np.nan, np.inf]))
    return values, np.array(lse)


@given(parts())
def test_identity(part: Part) -> None:
    nothing = np.full((3, 2), np.nan), np.full(3, -np.inf)
    for merged in (merge(*part, *nothing), merge(*nothing, *part)):
        np.testing.assert_allclose(merged[1], part[1], rtol=1e-15)
        visible = ~np.isneginf(part[1])
        np.testing.assert_allclose(merged[0][visible], part[0][visible], rtol=1e-14)
        assert (merged[0][~visible] == 0).all()


@given(parts(), parts(), parts())
def test_order_does_not_matter(a: Part, b: Part, c: Part) -> None:
    left, right = merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c))
    other = merge(*merge(*c, *a), *b)
    for result in (right, other):
        np.testing.assert_allclose(result[1], left[1], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(result[0], left[0], rtol=1e-11, atol=1e-12)


def test_sinks_take_mass_and_fill_empty_rows() -> None:
    out, lse = np.ones((1, 2, 1, 3)), np.array([[[np.log(3.0), -np.inf]]])
    out[0, 1] = np.nan
    result, with_sink = finalize(out, lse, np.array([0.0]))
    np.testing.assert_allclose(with_sink[0, 0], [np.log(4.0), 0.0])
    np.testing.assert_allclose(result[0, :, 0, 0], [0.75, 0.0])
    several, folded = finalize(out, lse, np.log([[0.25, 0.75]]))
    np.testing.assert_allclose(folded, with_sink, atol=1e-15)
    np.testing.assert_allclose(several, result)


@pytest.mark.parametrize("sink", [-np.inf, -1e4])
def test_sinks_of_no_weight_in_rows_that_see_nothing(sink: float) -> None:
    """Rows that see nothing are zero, without NaN or overflow, whatever their memory holds."""
    out, lse = finalize(
        np.full((1, 1, 1, 2), np.nan), np.full((1, 1, 1), -np.inf), np.array([sink])
    )
    assert (out == 0).all()
    assert lse.item() == sink
