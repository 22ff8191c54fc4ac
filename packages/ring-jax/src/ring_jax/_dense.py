"""A mask given as an array, row by row: for rules that no option says, where it is affordable.

It travels inside the bias, as ``-inf``, and beside it as the blocks that it hides wholly.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ring_jax._types import Array


def split_mask(mask: Any) -> tuple[Any, Any]:
    """A rule, and an array: what was given is one of them, the other is ``None``."""
    is_array = isinstance(mask, jax.Array | np.ndarray)
    return (None, mask) if is_array else (mask, None)


def with_mask(bias: Array | None, mask: Array | None, dtype: jnp.dtype) -> Array | None:
    """The bias ``[B or 1, H or 1, T, S]`` that says what a mask, alike in shape, says, too."""
    if mask is None:
        return bias
    shown = jnp.zeros((), dtype) if bias is None else bias
    masked: Array = jnp.where(mask, shown, -jnp.inf)
    return masked


def shown_in_blocks(bias: Array, block_q: int, block_k: int) -> tuple[Array, Array]:
    """Whether a bias shows some of each block to some head, and whether all to all heads.

    Bool ``[B or 1, I, J]``; blocks that reach beyond the lengths are not shown wholly.
    """
    shown = bias > -jnp.inf

    def by_block(x: Array) -> Array:
        edges = [
            (0, -length % size)
            for length, size in zip(x.shape[1:], (block_q, block_k), strict=True)
        ]
        x = jnp.pad(x, [(0, 0), *edges])
        return x.reshape(x.shape[0], x.shape[1] // block_q, block_q, -1, block_k)

    some, every = by_block(shown.any(axis=1)), by_block(shown.all(axis=1))
    return some.any(axis=(2, 4)), every.all(axis=(2, 4))
