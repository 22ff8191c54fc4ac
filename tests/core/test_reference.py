"""The oracle is checked by hand, by finite differences and by published random vectors.

It reads what is seen alone: no padding, and no number of a key that is hidden.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from cases import CASES

from ring_core import philox, reference
from ring_core.reference.item_kernel import masked_matmul


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        # Known-answer vectors of philox4x32-10 from the Random123 library (SC 2011).
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
         (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)  # fmt: skip
def test_philox(counter: Any, key: Any, words: Any) -> None:
    assert tuple(int(word) for word in philox.philox(counter, key)) == words


def test_dropout_element_by_element() -> None:
    """Element ``j`` uses word ``j & 3`` of the counter that four neighbours share."""
    p, seed, keys = 0.375, 0x1234_5678_9ABC_DEF0, np.arange(64)
    kept = philox.dropout_keep(p, seed, batch=[3], heads=[5], queries=[7], keys=keys)
    for j in keys.tolist():
        words = philox.philox((j >> 2, 7, 5, 3), (0x9ABC_DEF0, 0x1234_5678))
        assert {word.dtype for word in words} == {np.dtype(np.uint32)}
        assert kept[0, 0, 0, j] == (int(words[j & 3]) >= p * 2**32)


def test_dropout_keeps_words_from_the_threshold_on() -> None:
    element = {"batch": [0], "heads": [0], "queries": [0], "keys": [0]}
    word = int(philox.philox((0, 0, 0, 0), (7, 0))[0])
    assert philox.dropout_keep(word / 2**32, 7, **element).all()
    assert not philox.dropout_keep((word + 1) / 2**32, 7, **element).any()
    assert philox.dropout_keep(0, 0, **element).all()


@pytest.mark.parametrize(
    ("options", "value", "total"),
    [
        ({}, 3, 4),
        ({"sinks": [0.0]}, 12 / 5, 5),
        # The query stands at position 1, so the slope of log(3) divides the first weight by 3.
        ({"alibi_slopes": [np.log(3.0)]}, 12 / (3 + 1 / 3), 3 + 1 / 3),
    ],
)
def test_two_keys_by_hand(options: dict[str, Any], value: float, total: float) -> None:
    q, k = np.array([[[[1.0]]]]), np.array([[[[0.0]], [[np.log(3.0)]]]])
    v = np.array([[[[0.0]], [[4.0]]]])
    out, lse = reference.attention(q, k, v, softmax_scale=1.0, **options)
    np.testing.assert_allclose([out.item(), lse.item()], [value, np.log(total)])


@pytest.mark.parametrize(
    "name", ["everything-contiguous", "keys80-window-contiguous", "sinks-contiguous"]
)
def test_gradients_by_finite_differences(name: str) -> None:
    """Gradients of all inputs agree with finite differences along a random direction."""
    case, h, rng = CASES[name], 1e-6, np.random.default_rng(1)

    def loss(**changed: Any) -> float:
        x = case.inputs | changed
        options = case.options | {n: x[n] for n in ("sinks", "bias") if n in x}
        out, lse = reference.attention(x["q"], x["k"], x["v"], mask=case.mask, **options)
        seen = np.where(np.isneginf(lse), 0, lse)
        return float((out * x["dout"]).sum() + (seen * x.get("dlse", 0)).sum())

    for argument in [x for x in ("q", "k", "v", "sinks", "bias") if x in case.inputs]:
        x, grad = case.inputs[argument], case.expected[f"d{argument}"]
        direction = rng.standard_normal(grad.shape)
        with np.errstate(invalid="ignore"):
            ahead, behind = (loss(**{argument: x + s * h * direction}) for s in (1, -1))
        slope = (ahead - behind) / (2 * h)
        assert slope == pytest.approx(float((grad * direction).sum()), rel=1e-6, abs=1e-7), argument


@pytest.mark.parametrize(
    "name", [x for x in CASES if re.match("padded(45|299|41)(?!-shown).*-(cont|rand)", x)]
)
def test_padding_is_left_out(name: str) -> None:
    """Numbers behind the length change no result, and results there are zero."""
    case = CASES[name]
    x = {key: case.padded(key) for key in case.inputs}
    ids = (x["q_ids"], x["k_ids"]) if case.segments else None
    options = case.options | {"bias": x.get("bias"), "segment_ids": ids}
    options |= {"mask": case.mask, "seq_len": (case.seq_len, case.keys)}
    out, lse = reference.attention(x["q"], x["k"], x["v"], **options)
    grads = reference.attention_grads(
        x["dout"], x["q"], x["k"], x["v"], dlse=x.get("dlse"), **options
    )
    results = {"out": out, "lse": lse, **grads._asdict()}
    for key, expected in case.expected.items():
        tokens = case.without_padding(key, results[key])
        np.testing.assert_allclose(tokens, expected, rtol=1e-12, atol=1e-12, err_msg=key)


def test_what_is_finite_in_a_row_that_is_not_counts_as_it_is() -> None:
    """Finite entries of a row with a nonfinite one count unless the nonfinite one is seen."""
    weights = np.array([[2.0, 3.0], [5.0, 0.0]])
    visible = np.array([[True, True], [True, False]])
    x = np.array([[1.0, 10.0, 100.0], [np.inf, 7.0, np.nan]])
    product = masked_matmul(weights, visible, x)
    np.testing.assert_array_equal(product, [[np.inf, 41.0, np.nan], [5.0, 50.0, 500.0]])
    # `inf * 0` gives NaN without a warning, in finite and in nonfinite rows.
    product = masked_matmul(np.array([[np.inf, 0]]), visible[:1], np.array([[0.0], [np.inf]]))
    assert np.isnan(product).all()
