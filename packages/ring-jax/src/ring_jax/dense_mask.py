"""A mask given as an array, row by row: for rules that no option says, where it is affordable.

Inside a call the bias says it, by ``-inf``; kernels skip the blocks of which nothing else is left.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ring_jax.records import Array


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


def shown_in_blocks(bias: Array, block_q: int, block_k: int) -> Array:
    """Whether a bias ``[B or 1, H or 1, T, S]`` shows some of each block, ``[B or 1, I, J]``."""
    shown = (bias > -jnp.inf).any(axis=1)
    edges = [(0, 0), (0, -shown.shape[1] % block_q), (0, -shown.shape[2] % block_k)]
    padded = jnp.pad(shown, edges)
    down, across = (x // size for x, size in zip(padded.shape[1:], (block_q, block_k), strict=True))
    blocks: Array = padded.reshape(-1, down, block_q, across, block_k).any(axis=(2, 4))
    return blocks
