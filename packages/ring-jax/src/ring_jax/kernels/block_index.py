"""Which blocks of scores a kernel computes: those that are empty, partial or full.

An empty block shows nothing, a full one needs no mask. The kernels write down in their own ways
which blocks they visit.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from ring_core import EMPTY, FULL, PARTIAL, TABLE_COLUMNS
from ring_jax.records import Array, ItemTable, KeyBlock, QueryBlock

_FAR = 1 << 29  # beyond any local index; sums of a few do not overflow int32

Flags = tuple[Array, Array]  # of each block: whether some of it is shown, and whether all is


class Bounds(NamedTuple):
    """An item on the device, int32 scalars."""

    q_start: Array
    q_stop: Array
    k_start: Array
    k_stop: Array
    lo: Array
    hi: Array


def item_bounds(work: ItemTable) -> Array:
    """What each item shows, int32 ``[R, 6]`` in the order of :class:`Bounds`."""
    columns = [work.items[:, TABLE_COLUMNS.index(name)] for name in Bounds._fields]
    return jnp.clip(jnp.stack(columns, axis=1), -_FAR, _FAR)


def kinds_of(
    rows: QueryBlock, columns: KeyBlock, work: ItemTable, in_tiles: Flags | None,
    sizes: tuple[int, int], grid: tuple[int, int],
) -> Array:  # fmt: skip
    """The kind of each block, int32 ``[1 or B, I, J]``.

    ``in_tiles`` is what the tiles of a predicate show; they hold the cells.
    """
    block_q, block_k = sizes
    live, full = _in_items(item_bounds(work), grid, block_q, block_k)
    cells = (rows.cells, columns.cells) if in_tiles is None else (None, None)
    for mine, theirs in (cells, (rows.ids, columns.ids)):
        if mine is not None and theirs is not None:
            meets, alike = _alike(_block_min_max(mine, block_q), _block_min_max(theirs, block_k))
            live, full = live & meets, full & alike
    if in_tiles is not None:
        live, full = live & in_tiles[0], full & in_tiles[1]
    return jnp.where(live, jnp.where(full, FULL, PARTIAL), EMPTY).astype(jnp.int32)


def shown_in_blocks(bias: Array, block_q: int, block_k: int) -> Array:
    """Whether a bias ``[B or 1, H or 1, T, S]`` shows some of each block to some head.

    ``[B or 1, I, J]``: others are empty, whatever their kind.
    """
    shown = (bias > -jnp.inf).any(axis=1)
    edges = [(0, 0), (0, -shown.shape[1] % block_q), (0, -shown.shape[2] % block_k)]
    padded = jnp.pad(shown, edges)
    grid = (padded.shape[1] // block_q, padded.shape[2] // block_k)
    return padded.reshape(-1, grid[0], block_q, grid[1], block_k).any(axis=(2, 4))


def _in_items(bounds: Array, grid: tuple[int, int], block_q: int, block_k: int) -> Flags:
    """What any item shows; ``[1, I, J]``."""
    q_start, q_stop, k_start, k_stop, lo, hi = (x[:, None, None] for x in bounds.T)
    top = (jnp.arange(grid[0], dtype=jnp.int32) * block_q)[None, :, None]
    left = (jnp.arange(grid[1], dtype=jnp.int32) * block_k)[None, None]
    bottom, right = top + block_q, left + block_k
    first_row, last_row = jnp.maximum(top, q_start), jnp.minimum(bottom, q_stop) - 1
    first_col, last_col = jnp.maximum(left, k_start), jnp.minimum(right, k_stop) - 1
    near = (first_row - q_start) - (last_col - k_start)
    far = (last_row - q_start) - (first_col - k_start)
    meets = (first_row <= last_row) & (first_col <= last_col)
    inside = (top >= q_start) & (bottom <= q_stop) & (left >= k_start) & (right <= k_stop)
    live, full = meets & (far >= lo) & (near <= hi), inside & (near >= lo) & (far <= hi)
    return live.any(axis=0)[None], full.any(axis=0)[None]


def _block_min_max(numbers: Array, size: int) -> tuple[Array, Array]:
    """Smallest and largest of each block of ``[T]`` or ``[B, T]``; ``[1 or B, blocks]``."""
    numbers = jnp.atleast_2d(numbers)
    numbers = jnp.pad(numbers, ((0, 0), (0, -numbers.shape[1] % size)), mode="edge")
    blocks = numbers.reshape(len(numbers), -1, size)
    return blocks.min(axis=2), blocks.max(axis=2)


def _alike(mine: tuple[Array, Array], theirs: tuple[Array, Array]) -> Flags:
    """Whether numbers may be equal somewhere, and whether all are; negative ones never are.

    Cells are never negative.
    """
    q_min, q_max = (x[:, :, None] for x in mine)
    k_min, k_max = (x[:, None, :] for x in theirs)
    meets = (q_min <= k_max) & (k_min <= q_max) & (q_max >= 0) & (k_max >= 0)
    alike = (q_min == q_max) & (k_min == k_max) & (q_min == k_min) & (q_min >= 0)
    return meets, alike
