"""Which calls are checked: one in so many, told apart by the numbers in ``q``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Self

import jax.numpy as jnp
from jax import lax

from ring_jax.records import Array, Static

_SPREAD = 64  # tokens whose numbers tell calls apart


class Turn(NamedTuple):
    """A call that may be checked."""

    every: int
    number: Array  # the call's, equal on all ranks, uint32

    @classmethod
    def of(cls, static: Static, q: Array) -> Self:
        """Of a call that has queries."""
        taken = q[:, :: max(1, q.shape[1] // _SPREAD)]
        width = jnp.uint16 if taken.dtype.itemsize == 2 else jnp.uint32
        words = lax.bitcast_convert_type(taken, width).astype(jnp.uint32).reshape(-1)
        weights = 2 * jnp.arange(len(words), dtype=jnp.uint32) + 1
        own = (words * weights).sum(dtype=jnp.uint32)
        total = lax.bitcast_convert_type(own, jnp.int32)
        if static.axis_name is not None:
            total = lax.psum(total, static.axis_name)
        return cls(static.check, mixed(lax.bitcast_convert_type(total, jnp.uint32)))

    def run[T](self, checked: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """The one or the other."""
        if self.every == 1:
            return checked()
        result: T = lax.cond(self.number % jnp.uint32(self.every) == 0, checked, otherwise)
        return result


def mixed(x: Array) -> Array:
    """All bits of a word from all of its bits (the finalizer of MurmurHash3)."""
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return x ^ (x >> jnp.uint32(16))
