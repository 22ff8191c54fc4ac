"""Random numbers of dropout: :mod:`ring_core.philox` in 32-bit words, for any device; its seed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ring_core import checks
from ring_core.philox import KEY_STEPS, MULTIPLIERS, ROUNDS, dropout_threshold

Words = tuple[Array, Array, Array, Array]


def dropout_keep(
    p: float, seed: Array, batch: Array, heads: Array, queries: Array,
    keys: Array,
) -> Array:  # fmt: skip
    """Return which softmax weights dropout keeps, bool, like :func:`ring_core.philox.dropout_keep`.

    Args:
        p: Probability to drop a weight.
        seed: uint32 ``[2]``, low word first.
        batch, heads, queries, keys: Global indices, arrays that broadcast against each other; the
            result has their common shape.
    """
    indices = (batch, heads, queries, keys)
    ndim = max(x.ndim for x in indices)
    b, h, i, j = (x.astype(jnp.uint32).reshape((1,) * (ndim - x.ndim) + x.shape) for x in indices)
    shape = jnp.broadcast_shapes(b.shape, h.shape, i.shape, j.shape)
    # Four neighbouring keys share a counter, of whose four words each takes its own. An element
    # computes all four and drops three, which keeps it independent of its neighbours.
    words = philox((jnp.broadcast_to(j >> 2, shape), i, h, b), (seed[0], seed[1]))
    lane = j & 3
    even, odd = jnp.where(lane < 2, words[0], words[2]), jnp.where(lane < 2, words[1], words[3])
    return jnp.where(lane % 2 == 0, even, odd) >= jnp.uint32(dropout_threshold(p))


def philox(counter: Words, key: tuple[Array, Array]) -> Words:
    """Compute Philox-4x32-10 of four uint32 counter words, which broadcast, and a two-word key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + jnp.uint32(KEY_STEPS[0]), k1 + jnp.uint32(KEY_STEPS[1])
    return c0, c1, c2, c3


def _multiply(x: Array, factor: int) -> tuple[Array, Array]:
    """Return the 64-bit product as ``(high, low)`` words, from products of 16-bit halves."""
    half, mask = 16, jnp.uint32(0xFFFF)
    f_low, f_high = jnp.uint32(factor & 0xFFFF), jnp.uint32(factor >> half)
    x_low, x_high = x & mask, x >> half
    low = x_low * f_low
    middle = x_high * f_low + (low >> half)  # at most 2**32 - 2**16: no carry
    cross = x_low * f_high + (middle & mask)
    high = x_high * f_high + (middle >> half) + (cross >> half)
    return high, x * jnp.uint32(factor)


def seed_words(seed: int | Array) -> Array:
    """Split a dropout seed into its low and high 32 bits, uint32 ``[2]``.

    A traced seed that is negative cannot be refused; its bits are taken as they are.

    Raises:
        ValueError: Not an integer below 2**64, nor an integer scalar, nor uint32 ``[2]``.
    """
    seed = _on_host(seed)
    if not isinstance(seed, jax.Array | np.ndarray | np.generic):
        checks.check_seed(seed)
        return jnp.array([seed & 0xFFFFFFFF, seed >> 32], jnp.uint32)
    shape, dtype = jnp.shape(seed), jnp.result_type(seed)
    if dtype == jnp.uint32 and shape == (2,):
        return jnp.asarray(seed)
    if shape != () or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"dropout_seed must be an integer in [0, 2**64), an integer scalar or uint32 [2] "
            f"(low word first), got {dtype} {list(shape)}; of a key "
            f"pass jax.random.bits(key, (2,), jnp.uint32)"
        )
    x = jnp.asarray(seed)
    high = x >> 32 if dtype.itemsize == 8 else jnp.zeros_like(x)
    return jnp.stack([x, high]).astype(jnp.uint32)


def _on_host(seed: Any) -> Any:
    """Convert a seed to a Python integer if its value is known and could be wide or negative.

    JAX would cut numpy's integers to 32 bits. Its own unsigned arrays need no conversion.
    """
    known = isinstance(seed, np.ndarray | np.generic) or (
        isinstance(seed, jax.Array) and not isinstance(seed, jax.core.Tracer)
    )
    if not known or seed.shape != () or not jnp.issubdtype(seed.dtype, np.integer):
        return seed
    is_own_unsigned = isinstance(seed, jax.Array) and seed.dtype.kind == "u"
    return seed if is_own_unsigned else int(seed)
