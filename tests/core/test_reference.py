"""The oracle is checked by hand, by finite differences and by published random vectors.

It reads what is seen alone: no padding, and no number of a key that is hidden.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import CASES

from ring_core import Mask, philox, reference
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


def test_dropout_depends_on_global_indices_alone() -> None:
    def kept(seed: int, queries: slice, keys: slice) -> Any:
        n = np.arange(64)
        sides = {"queries": n[queries], "keys": n[keys]}
        return philox.dropout_keep(0.25, seed, batch=n[:2], heads=n[:3], **sides)

    every, rows, columns = slice(None), slice(5, 60, 3), slice(1, None, 4)
    whole = kept(7, every, every)
    np.testing.assert_array_equal(kept(7, rows, columns), whole[:, :, rows, columns])
    assert abs(whole.mean() - 0.75) < 0.01
    assert (kept(7 + (1 << 32), every, every) != whole).any()


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
    case = CASES[name]
    x, rng = dict(case.inputs), np.random.default_rng(1)
    dlse = np.where(
        np.isneginf(case.expected["lse"]), 0, rng.standard_normal(case.expected["lse"].shape)
    )

    def loss(**changed: Any) -> float:
        q, k, v, *_ = (inputs := x | changed).values()
        options = case.options | {n: inputs[n] for n in ("sinks", "bias") if n in inputs}
        out, lse = reference.attention(q, k, v, mask=case.mask, **options)
        return float((out * x["dout"]).sum() + (np.where(np.isneginf(lse), 0, lse) * dlse).sum())

    grads = reference.attention_grads(
        x["dout"], x["q"], x["k"], x["v"], dlse=dlse, mask=case.mask, **case.options
    )
    for argument, grad in zip(("q", "k", "v", "sinks", "bias"), grads, strict=True):
        if grad is None:
            continue
        direction, h = rng.standard_normal(grad.shape), 1e-6
        with np.errstate(invalid="ignore"):
            ahead, behind = (loss(**{argument: x[argument] + s * h * direction}) for s in (1, -1))
        slope = (ahead - behind) / (2 * h)
        assert slope == pytest.approx(float((grad * direction).sum()), rel=1e-6, abs=1e-7), argument


PADDED: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "documents": {"cu_seqlens": (0, 4, 9)},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 3},
    "predicate": {"mask": Mask(predicate=lambda i, j: (i + j) % 3 > 0)},
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_is_left_out(name: str) -> None:
    rng = np.random.default_rng(0)
    x = dict(zip(("q", "k", "v", "dout"), rng.standard_normal((4, 1, 12, 2, 4)), strict=True))
    rows = {"bias": rng.standard_normal((1, 2, 12, 9)), "dlse": rng.standard_normal((1, 2, 12))}
    for padded in (x["q"], x["k"], x["v"], rows["bias"].swapaxes(1, 2)):
        padded[:, 9:] = np.nan
    sinks = rng.standard_normal(2)

    def results(length: int, **options: Any) -> dict[str, Any]:
        tokens = {key: part[:, :length] for key, part in x.items()}
        bias, dlse = (part[:, :, :length] for part in rows.values())
        options |= {"sinks": sinks, "bias": bias, **PADDED[name]}
        dout = tokens.pop("dout")
        out, lse = reference.attention(**tokens, **options)
        grads = reference.attention_grads(dout, **tokens, dlse=dlse, **options)
        return {"out": out, "lse": lse, **grads._asdict()}

    expected = results(9)
    for key, result in results(12, seq_len=9).items():
        axis = {"lse": 2, "dbias": 2, "dsinks": 0}.get(key, 1)
        tokens, padding = np.split(result, [expected[key].shape[axis]], axis=axis)
        np.testing.assert_array_equal(tokens, expected[key])
        np.testing.assert_array_equal(padding, -np.inf if key == "lse" else 0.0)


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
