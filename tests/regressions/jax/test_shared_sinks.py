"""Sinks of foreign calls with two possible meanings: the call says which, or is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ring_core import reference
from ring_jax.compat import OperationMetadata, RingAttn, flash_attention, ring_attention

H = 4


def _operation(q: Any, k: Any, v: Any, softmax_aux: Any) -> Any:
    whole = RingAttn(OperationMetadata())(q, k, v, softmax_aux, causal=False)
    return whole.attention_outputs


CALLS = {"flash": flash_attention, "ring": ring_attention, "operation": _operation}


def _qkv(heads: int = H) -> Any:
    return [jax.random.normal(jax.random.key(n), (1, 8, heads, 4)) for n in range(3)]


@pytest.mark.parametrize("shape", [(H, 1), (H, 3), (1, 1), (1, 3), (1, H)], ids=str)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_is_said(call: Any, shape: tuple[int, ...]) -> None:
    sinks = jax.random.normal(jax.random.key(3), shape)
    wide = np.broadcast_to(np.asarray(sinks), (H, shape[1]))
    expected = reference.attention(*map(np.asarray, _qkv()), sinks=wide)[0]
    np.testing.assert_allclose(call(*_qkv(), softmax_aux=sinks), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_could_be_either(call: Any) -> None:
    with pytest.raises(ValueError, match=r"softmax_aux\[:, None\] is the former, .*\[None\]"):
        call(*_qkv(), softmax_aux=jnp.zeros(H))


def test_one_head_has_one_reading() -> None:
    sinks = jnp.ones(3)
    expected = reference.attention(*map(np.asarray, _qkv(1)), sinks=np.ones((1, 3)))[0]
    q, k, v = _qkv(1)
    actual = flash_attention(q, k, v, softmax_aux=sinks)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)
