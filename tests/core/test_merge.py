"""Merging has an identity, does not depend on the order, and never reads garbage."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from ring_core import finalize, merge

Part = tuple[npt.NDArray[Any], npt.NDArray[Any]]


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


def test_many_parts_are_one_softmax() -> None:
    rng = np.random.default_rng(0)
    logits, values = rng.standard_normal((5, 64)) * 30, rng.standard_normal((64, 3))
    out: npt.NDArray[Any] = np.zeros((5, 3))
    lse: npt.NDArray[Any] = np.full(5, -np.inf)
    for cut in np.split(np.arange(64), [1, 7, 30, 31]):
        out, lse = merge(out, lse, *softmax(logits[:, cut], values[cut]))
    for result, expected in zip((out, lse), softmax(logits, values), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-13)


def softmax(logits: Any, values: Any) -> Part:
    top = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(axis=1, keepdims=True)
    return weights / total @ values, (top + np.log(total))[:, 0]


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
