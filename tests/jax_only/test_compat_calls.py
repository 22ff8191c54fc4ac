"""Documents of foreign calls whose queries and keys are padded to different lengths."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ring_jax
from ring_core import UnsupportedError, reference
from ring_jax.compat import OperationMetadata, RingAttn, flash_attention, ring_attention

H, K, D = 4, 2, 8
#: Offsets and batch size: documents packed into one row, or one per row.
PACKED, ROWS = (np.array([0, 7, 16, 30]), 1), (np.array([0, 30, 47]), 2)
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"sliding_window": (5, 2)},
    "causal window": {"causal": True, "sliding_window": (5, 0)},
    "none": {},
}
LENGTHS = {"keys longer": (34, 48), "queries longer": (48, 34), "equal": (48, 48)}


def _ids(offsets: Any, batch: int, length: int) -> Any:
    tokens = np.arange(length)
    if batch > 1:
        return np.where(tokens < np.diff(offsets)[:, None], 0, -1)
    return np.where(tokens < offsets[-1], np.searchsorted(offsets, tokens, "right") - 1, -1)[None]


def _shown(mask: dict[str, Any], ids: tuple[Any, Any]) -> Any:
    """Return the keys that a query sees; both are counted from the start of their rows."""
    rows, columns = np.arange(ids[0].shape[1])[:, None], np.arange(ids[1].shape[1])
    left, right = mask.get("sliding_window", (10**6, 10**6))
    shown = (columns >= rows - left) & (columns <= rows + right)
    if mask.get("causal"):
        shown &= columns <= rows
    same = (ids[0][:, :, None] == ids[1][:, None, :]) & (ids[0] >= 0)[:, :, None]
    return (shown & same)[:, None]


@pytest.mark.nightly(
    unless=["causal-packed-keys longer", "window-rows-equal", "none-packed-queries longer"]
)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("documents", [PACKED, ROWS], ids=["packed", "rows"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_padded_to_different_lengths(
    mask: dict[str, Any], documents: Any, lengths: tuple[int, int]
) -> None:
    (offsets, batch), rng = documents, np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((batch, length, heads, D))
        for length, heads in zip(lengths[:1] + lengths[1:] * 2, (H, K, K), strict=True)
    )
    bias, dout = rng.standard_normal((1, H, *lengths)), rng.standard_normal(q.shape)
    shown = _shown(mask, (_ids(offsets, batch, lengths[0]), _ids(offsets, batch, lengths[1])))
    dropout: dict[str, Any] = {"dropout_p": 0.25, "dropout_seed": 11}

    def loss(q: Any, k: Any, v: Any, bias: Any) -> Any:
        out = flash_attention(
            q, k, v, bias=bias, cum_seqlens_q=offsets, cum_seqlens_k=offsets, dropout_prob=0.25,
            dropout_seed=11, **mask,
        )  # fmt: skip
        return (out * jnp.asarray(dout, jnp.float32)).sum(), out

    inputs = [jnp.asarray(x, jnp.float32) for x in (q, k, v, bias)]
    actual, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*inputs)
    hidden = np.where(shown, bias, -np.inf)
    expected_value = reference.attention(q, k, v, bias=hidden, **dropout)[0]
    np.testing.assert_allclose(out, expected_value, rtol=2e-5, atol=2e-5)
    expected = reference.attention_grads(dout, q, k, v, bias=hidden, **dropout)
    for name, grad in zip(("dq", "dk", "dv", "dbias"), actual, strict=True):
        whole = getattr(expected, name)
        whole = whole.sum(0, keepdims=True) if name == "dbias" else whole
        np.testing.assert_allclose(grad, whole, rtol=5e-5, atol=5e-5)


HIGHEST = (lax.Precision.HIGHEST, "highest", "float32", (lax.Precision.HIGHEST, "highest"))


@pytest.mark.parametrize("precision", HIGHEST, ids=str)
def test_the_highest(precision: Any) -> None:
    x = jnp.ones((1, 4, 2, 8))
    narrow = x.astype(jnp.bfloat16)
    np.testing.assert_array_equal(flash_attention(x, x, x, precision=precision), x)
    with pytest.raises(UnsupportedError, match=r"precision: .* cast the inputs to bfloat16"):
        flash_attention(narrow, narrow, narrow, precision=precision)


@pytest.mark.parametrize("precision", [lax.Precision.HIGH, "bfloat16", "tensorfloat32"], ids=str)
def test_others(precision: Any) -> None:
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(UnsupportedError, match="products of float32 have the highest precision"):
        flash_attention(x, x, x, precision=precision)


def test_float64_of_numpy_is_what_jax_makes_of_it() -> None:
    """Without x64, float64 of numpy runs as float32, without a warning of JAX."""
    q: Any = np.zeros((1, 8, 2, 4))
    out = jax.eval_shape(lambda: ring_jax.ring_attention(q, q, q, axis_name=None, kernel="xla"))
    assert out.dtype == jnp.float32


def _operation(q: Any, k: Any, v: Any, softmax_aux: Any) -> Any:
    whole = RingAttn(OperationMetadata())(q, k, v, softmax_aux, causal=False)
    return whole.attention_outputs


CALLS = {"flash": flash_attention, "ring": ring_attention, "operation": _operation}


def _qkv(heads: int = H) -> Any:
    return [jax.random.normal(jax.random.key(n), (1, 8, heads, 4)) for n in range(3)]


@pytest.mark.parametrize("shape", [(H, 1), (H, 3), (1, 1), (1, 3), (1, H)], ids=str)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_sinks_that_say_what_they_are(call: Any, shape: tuple[int, ...]) -> None:
    sinks = jax.random.normal(jax.random.key(3), shape)
    wide = np.broadcast_to(np.asarray(sinks), (H, shape[1]))
    expected = reference.attention(*map(np.asarray, _qkv()), sinks=wide)[0]
    np.testing.assert_allclose(call(*_qkv(), softmax_aux=sinks), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_sinks_that_could_be_either(call: Any) -> None:
    with pytest.raises(ValueError, match=r"softmax_aux\[:, None\] is the former, .*\[None\]"):
        call(*_qkv(), softmax_aux=jnp.zeros(H))


def test_one_head_has_one_reading() -> None:
    sinks = jnp.ones(3)
    expected = reference.attention(*map(np.asarray, _qkv(1)), sinks=np.ones((1, 3)))[0]
    q, k, v = _qkv(1)
    actual = flash_attention(q, k, v, softmax_aux=sinks)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)
