"""Segment ids of other types than int32: those that it holds are right, others are refused by name.

The class: an array that an adapter casts to int32 before anything looks at its type, by which two
documents become one, or a document padding. Lengths and offsets that are numbers of tokens are not
refused for their type: what is beyond int32 is beyond every sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ring_jax import Segments, compat, flax, nn, ring_attention

T = 8
Q = jax.random.normal(jax.random.key(0), (1, T, 1, 4))
IDS: Any = np.array([[0] * 4 + [1] * 3 + [7]])
attention = partial(ring_attention, axis_name=None)
in_flax = flax.make_attention_fn(attention)

CALLS: dict[str, Callable[[Any], Any]] = {
    "ring_attention": lambda ids: attention(Q, Q, Q, segment_ids=ids),
    "a pair": lambda ids: attention(Q, Q, Q, segment_ids=(ids, IDS.astype(np.int32))),
    "Segments": lambda ids: in_flax(Q, Q, Q, mask=Segments(ids)),
    "Segments of keys": lambda ids: in_flax(Q, Q, Q, mask=Segments(IDS.astype(np.int32), ids)),
    "compat": lambda ids: compat.ring_attention(Q, Q, Q, q_segment_ids=ids),
    "compat, keys": lambda ids: compat.flash_attention(
        Q, Q, Q, q_segment_ids=IDS.astype(np.int32), kv_segment_ids=ids
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["int64", "uint64", "uint32"])
@pytest.mark.parametrize("call", CALLS)
def test_ids_that_int32_does_not_hold(call: str, dtype: str) -> None:
    ids = IDS.astype(dtype)
    with pytest.raises(ValueError, match=rf"must be int32, or integers that it holds, got {dtype}"):
        CALLS[call](ids)


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "uint16"])
@pytest.mark.parametrize("call", CALLS)
def test_ids_that_it_holds(call: str, dtype: str) -> None:
    right = attention(Q, Q, Q, segment_ids=jnp.asarray(IDS, jnp.int32))
    for array in (IDS.astype(dtype), jnp.asarray(IDS, dtype)):
        np.testing.assert_allclose(CALLS[call](array), right, atol=1e-6)


def test_ids_of_64_bits_that_are_traced() -> None:
    with jax.enable_x64(True):
        ids = jnp.asarray(IDS, jnp.int64)
        with pytest.raises(ValueError, match="got int64"):
            jax.jit(CALLS["Segments"])(ids)


@pytest.mark.parametrize("length", [2**31 + 3, 2**40])
def test_lengths_beyond_int32_hide_nothing(length: int) -> None:
    offsets: Any = np.array([0, length])
    outs = [
        nn.make_dot_product_attention(attention)(Q, Q, Q, key_value_seq_lengths=offsets[1:]),
        compat.flash_attention(Q, Q, Q, cum_seqlens_q=offsets, cum_seqlens_k=offsets),
    ]
    for out in outs:
        np.testing.assert_allclose(out, attention(Q, Q, Q), atol=1e-6)
