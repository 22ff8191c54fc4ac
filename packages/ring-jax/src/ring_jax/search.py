"""Binary search in sorted arrays."""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array


@partial(jax.jit, static_argnames="side")  # one function of a program for searches of equal sizes
def searchsorted(table: Array, x: Array, side: Literal["left", "right"]) -> Array:
    """Return how many entries of an ascending table come before each of ``x``, int32.

    It replaces ``jnp.searchsorted``, which cannot be traced where some axes of a mesh are manual
    and others are not.

    Args:
        table: Integers ``[n]``, ``n > 0``.
        x: Integers of any shape.
        side: Entries equal to one of ``x`` count as after it (``left``) or before it (``right``).
    """
    size = table.shape[0]
    counts = jnp.zeros(x.shape, jnp.int32)
    # The count is found from its highest bit on: a bit is set if the entry that it would count last
    # comes before x. Indices beyond the table are clamped, and their bit not set.
    for bit in reversed(range(size.bit_length())):
        with_bit = counts + (1 << bit)
        entry = table[jnp.minimum(with_bit, size) - 1]
        before = entry < x if side == "left" else entry <= x
        counts = jnp.where((with_bit <= size) & before, with_bit, counts)
    return counts
