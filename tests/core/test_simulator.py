"""Simulator behaviour outside the table of cases: rounding, dtypes, nonfinite numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from cases import CASES

from ring_core import Mask, RingProgram, make_plan, reference, ring_program
from ring_core.reference import item_kernel

SINGLE: Any = ("float32", "bfloat16", "float16")


def causal(cp_size: int = 2) -> RingProgram:
    return ring_program(make_plan(Mask(causal=True), seq_len=4, cp_size=cp_size))


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


@pytest.mark.parametrize("precision", SINGLE)
def test_items_are_computed_in_single_precision(
    precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No option turns a single-precision call into float64."""
    case = CASES["everything-contiguous"]
    dtypes: set[Any] = set()

    def watched(right: Any, *args: Any) -> Any:
        results = right(*args)
        dtypes.update(x.dtype for x in results)
        return results

    for name in ("forward", "backward"):
        monkeypatch.setattr(item_kernel, name, partial(watched, getattr(item_kernel, name)))
    x = case.inputs
    result = reference.run(
        case.program, x["q"], x["k"], x["v"], dout=x["dout"], dlse=x.get("dlse"),
        precision=precision, **case.options | {"dropout_p": np.float64(0.25), "dropout_seed": 1},
    )  # fmt: skip
    assert dtypes == {x.dtype for x in vars(result).values()} == {np.dtype(np.float32)}


def test_a_key_of_no_weight_alone_in_an_item() -> None:
    """Keys with -inf logits may be all that a rank's queries see of another rank."""
    q, k, v, dout = ones()
    k[:, :2] = -np.inf
    both, alone = (reference.run(causal(), q, k, v, dout=x) for x in (dout, None))
    assert alone.dq is None is not both.dq
    assert (both.out.reshape(4, 2) == [[0], [0], [1], [1]]).all()
    for name, x in zip(("out", "lse"), reference.attention(q, k, v, causal=True), strict=True):
        for simulated in (both, alone):
            np.testing.assert_allclose(getattr(simulated, name), x, rtol=1e-15)


def test_a_bias_that_heads_share() -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, 4, 3, 2)) for _ in range(4))
    bias = rng.standard_normal((2, 1, 4, 4))
    simulated = reference.run(causal(), q, k, v, dout=dout, bias=bias)
    expected = reference.attention_grads(dout, q, k, v, causal=True, bias=bias)
    assert simulated.dbias is not None and expected.dbias is not None
    np.testing.assert_allclose(simulated.dbias, expected.dbias, atol=1e-14)


def test_sinks_that_take_nothing() -> None:
    """Sinks of -inf get no gradient from the last row, which sees no key."""
    q, k, v, dout = ones()
    options: Any = {"segment_ids": np.array([[0, 0, 0, -1]]), "sinks": [-np.inf]}
    simulated = reference.run(causal(), q, k, v, dout=dout, **options)
    assert np.isneginf(simulated.lse[0, 0, 3])
    np.testing.assert_array_equal(simulated.dsinks, [0])


def test_gradients_that_are_nan_reach_keys_that_are_seen() -> None:
    q, k, v, dout = ones()
    dout[:, 1] = np.nan
    simulated = reference.run(causal(), q, k, v, dout=dout)
    expected = reference.attention_grads(dout, q, k, v, causal=True)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(simulated, name), getattr(expected, name), atol=1e-15)
    assert simulated.dv is not None and np.isfinite(simulated.dv[:, 2:]).all()


@pytest.mark.parametrize("precision", SINGLE)
def test_what_overflows_warns_of_nothing(precision: Any) -> None:
    q, k, v, dout = (1e15 * x for x in ones())
    simulated = reference.run(causal(), q, k, v, dout=dout, softmax_scale=1e10, precision=precision)
    assert np.isnan(simulated.out).all()
