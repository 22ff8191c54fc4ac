"""The oracle is checked by hand, by finite differences and by published random vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import CASES

from ring_core import philox, reference


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        # Known-answer vectors of philox4x32-10 from the Random123 library (SC 2011).
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox(counter: Any, key: Any, words: Any) -> None:
    assert tuple(int(word) for word in philox.philox(counter, key)) == words


def test_dropout_depends_on_global_indices_alone() -> None:
    batch_and_heads = {"batch": np.arange(2), "heads": np.arange(3)}
    whole = philox.dropout_keep(
        0.25, 7, queries=np.arange(64), keys=np.arange(64), **batch_and_heads
    )
    part = philox.dropout_keep(
        0.25, 7, queries=np.arange(5, 60, 3), keys=np.arange(1, 64, 4), **batch_and_heads
    )
    np.testing.assert_array_equal(part, whole[:, :, 5:60:3, 1::4])
    assert abs(whole.mean() - 0.75) < 0.01
    other = philox.dropout_keep(
        0.25, 7 + (1 << 32), queries=np.arange(64), keys=np.arange(64), **batch_and_heads
    )
    assert (other != whole).any()


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


def test_two_keys_by_hand() -> None:
    q, k = np.array([[[[1.0]]]]), np.array([[[[0.0]], [[np.log(3.0)]]]])
    v = np.array([[[[0.0]], [[4.0]]]])
    out, lse = reference.attention(q, k, v, softmax_scale=1.0)
    assert out.item() == pytest.approx(3.0)
    assert lse.item() == pytest.approx(np.log(4.0))
    out, lse = reference.attention(q, k, v, softmax_scale=1.0, sinks=[0.0])
    assert out.item() == pytest.approx(12 / 5)
    assert lse.item() == pytest.approx(np.log(5.0))
    out, lse = reference.attention(q, k, v, softmax_scale=1.0, alibi_slopes=[np.log(3.0)])
    assert out.item() == pytest.approx(4 * 3 / (3 + 1 / 3))  # the query stands at position 1


def test_rows_that_see_nothing() -> None:
    q = np.ones((1, 2, 1, 4))
    ids = np.array([[0, -1]], dtype=np.int32)
    out, lse = reference.attention(q, q, q, segment_ids=ids)
    assert lse[0, 0, 1] == -np.inf and (out[0, 1] == 0).all()
    out, lse = reference.attention(q, q, q, segment_ids=ids, sinks=[0.5])
    assert lse[0, 0, 1] == 0.5 and (out[0, 1] == 0).all()


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
        inputs = x | changed
        options = case.options | {n: inputs[n] for n in ("sinks", "bias") if n in inputs}
        out, lse = reference.attention(
            inputs["q"], inputs["k"], inputs["v"], mask=case.mask, **options
        )
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


def test_nan_reaches_only_rows_that_see_it() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 8, 1, 4)) for _ in range(3))
    clean, _ = reference.attention(q, k, v, causal=True)
    for poisoned in (k, v):
        poisoned[0, 5] = np.nan
    out, _ = reference.attention(q, k, v, causal=True)
    np.testing.assert_array_equal(out[:, :5], clean[:, :5])
    assert np.isnan(out[:, 5:]).all()
