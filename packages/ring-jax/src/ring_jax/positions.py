"""Global positions of a rank's tokens, and binary search among positions.

The rank is a traced number: the first position of each run of the layout is a line over the ranks,
or looked up.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array

from ring_core import Layout

DIGIT_BITS = 4  # of a search


def local_positions(layout: Layout, rank: Array) -> Array:
    """Return the global index of each token of a rank, int32 ``[T_local]``."""
    # A rank holds a few runs one behind the other. Each overwrites what the run before would have
    # gone on with, so no table of T positions is looked up.
    starts = _run_positions(layout, rank)
    index = jnp.arange(layout.local_len, dtype=jnp.int32)
    positions = starts[0] + layout.stride * index
    for n, run_start in enumerate(layout.run_starts[1:], start=1):
        positions = jnp.where(
            index >= run_start, starts[n] + layout.stride * (index - run_start), positions
        )
    return positions


def all_positions(layout: Layout) -> Array:
    """Return the global index of each token of every rank, int32 ``[P, T_local]``."""
    return jax.vmap(partial(local_positions, layout))(jnp.arange(layout.cp_size, dtype=jnp.int32))


def constant_bytes(layout: Layout) -> int:
    """Return the bytes of the table that :func:`local_positions` looks runs up in; 0 without."""
    starts = _run_starts(layout)
    return 0 if _is_even(starts) else starts.nbytes


def _run_positions(layout: Layout, rank: Array) -> Array:
    """Return the global index of the first token of each run of a rank, int32 ``[runs]``."""
    starts = _run_starts(layout)
    # Most layouts go on from rank to rank by equal distances; others are looked up.
    if _is_even(starts):
        first, distance = starts[0], (starts[-1] - starts[-2] if len(starts) > 1 else starts[0])
        return jnp.asarray(first) + jnp.asarray(distance) * rank
    return jnp.asarray(starts)[rank]


def _run_starts(layout: Layout) -> npt.NDArray[np.int32]:
    """Return the global index of the first token of each run of all ranks, int32 ``[P, runs]``."""
    return layout.run_positions(np.arange(layout.cp_size)).astype(np.int32)


def _is_even(starts: npt.NDArray[np.int32]) -> bool:
    """Return True if runs of neighbouring ranks begin at equal distances."""
    distances = np.diff(starts, axis=0)
    return bool((distances == distances[-1:]).all())


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
    digits = jnp.arange(1, 1 << DIGIT_BITS, dtype=jnp.int32).reshape((1,) * x.ndim + (-1,))
    # The count is found from its highest digit on, in base 16: a digit is the number of entries
    # that come before x among those that larger digits would count last. What all ask for of a
    # digit is one kernel. Indices beyond the table, or beyond int32, do not count.
    for shift in reversed(range(0, size.bit_length(), DIGIT_BITS)):
        larger = counts[..., None] + (digits << shift)
        entries = table[jnp.minimum(larger, size) - 1]
        before = entries < x[..., None] if side == "left" else entries <= x[..., None]
        digit = ((larger > 0) & (larger <= size) & before).sum(axis=-1, dtype=jnp.int32)
        counts += digit << shift
    return counts
