"""Classify the blocks of scores of a launch as empty, partial or full.

An empty block shows nothing, a full one needs no mask, but for a bias that holds ``-inf``. Kernels
turn the kinds into lists of the blocks that they visit, each in its own format.
"""

from __future__ import annotations

import jax.numpy as jnp

from ring_core.base.arguments import EMPTY, FULL, PARTIAL
from ring_jax.records import Array, ItemTable, KeyBlock, QueryBlock

_FAR = 1 << 29  # beyond any local index; sums of a few do not overflow int32

Flags = tuple[Array, Array]  # bool for each block: some of it is visible, all of it is


def item_bounds(work: ItemTable) -> Array:
    """Return the bounds of each item, int32 ``[R, 6]`` in the order of :class:`Item`.

    They are clipped, so that a few of them can be added up.
    """
    return jnp.clip(work.items, -_FAR, _FAR)


def kinds_of(
    rows: QueryBlock, columns: KeyBlock, work: ItemTable, in_tiles: Flags | None,
    block_q: int, block_k: int, *, bias_masks: bool = False,
) -> Array:  # fmt: skip
    """Return the kind of each block, int32 ``[1 or B, I, J]``: ``EMPTY``, ``PARTIAL`` or ``FULL``.

    ``in_tiles`` are the flags of a predicate, ``None`` without one. They account for documents and
    chunks already. With ``bias_masks`` blocks that the bias hides entirely are empty; one that it
    hides in part keeps its kind, even ``FULL``.
    """
    grid = -(-rows.q.shape[2] // block_q), -(-columns.kv.shape[2] // block_k)
    live, full = _in_items(item_bounds(work), grid, block_q, block_k)
    cells = (rows.cells, columns.cells) if in_tiles is None else (None, None)
    # Documents, chunks and segments: a block is empty where ranges of numbers do not overlap. That
    # is a bound, as numbers in between may be missing; the kernel then finds nothing visible.
    for q_numbers, k_numbers in (cells, (rows.ids, columns.ids)):
        if q_numbers is not None and k_numbers is not None:
            may_be_equal, all_equal = _equal_numbers(
                _block_min_max(q_numbers, block_q), _block_min_max(k_numbers, block_k)
            )
            live, full = live & may_be_equal, full & all_equal
    if in_tiles is not None:
        live, full = live & in_tiles[0], full & in_tiles[1]
    kinds = jnp.where(live, jnp.where(full, FULL, PARTIAL), EMPTY).astype(jnp.int32)
    if bias_masks and rows.bias is not None:
        kinds = jnp.where(shown_in_blocks(rows.bias, block_q, block_k), kinds, EMPTY)
    return kinds


def shown_in_blocks(bias: Array, block_q: int, block_k: int) -> Array:
    """Return which blocks a bias ``[B or 1, H or 1, T, S]`` does not hide entirely.

    Bool ``[B or 1, I, J]``, True where some head has a value above ``-inf``. Other blocks are
    empty, whatever their kind.
    """
    shown = (bias != -jnp.inf).any(axis=1)
    edges = [(0, 0), (0, -shown.shape[1] % block_q), (0, -shown.shape[2] % block_k)]
    padded = jnp.pad(shown, edges)
    grid = (padded.shape[1] // block_q, padded.shape[2] // block_k)
    return padded.reshape(-1, grid[0], block_q, grid[1], block_k).any(axis=(2, 4))


def _in_items(bounds: Array, grid: tuple[int, int], block_q: int, block_k: int) -> Flags:
    """Return the flags of blocks from the items' rectangles and bands, ``[1, I, J]``."""
    q_start, q_stop, k_start, k_stop, lo, hi = (x[:, None, None] for x in bounds.T)
    top = (jnp.arange(grid[0], dtype=jnp.int32) * block_q)[None, :, None]
    left = (jnp.arange(grid[1], dtype=jnp.int32) * block_k)[None, None]
    bottom, right = top + block_q, left + block_k
    first_row, last_row = jnp.maximum(top, q_start), jnp.minimum(bottom, q_stop) - 1
    first_col, last_col = jnp.maximum(left, k_start), jnp.minimum(right, k_stop) - 1
    # The smallest and the largest i - j within the block; the band is lo <= i - j <= hi.
    least = (first_row - q_start) - (last_col - k_start)
    most = (last_row - q_start) - (first_col - k_start)
    overlaps = (first_row <= last_row) & (first_col <= last_col)
    inside = (top >= q_start) & (bottom <= q_stop) & (left >= k_start) & (right <= k_stop)
    live, full = overlaps & (most >= lo) & (least <= hi), inside & (least >= lo) & (most <= hi)
    # Items of one launch are disjoint, so a block is full if one of them fills it alone. A block
    # that several fill together counts as partial, which costs a mask and no error.
    return live.any(axis=0)[None], full.any(axis=0)[None]


def _block_min_max(numbers: Array, size: int) -> tuple[Array, Array]:
    """Return minima and maxima of the blocks of ``[T]`` or ``[B, T]``, as ``[1 or B, blocks]``."""
    numbers = jnp.atleast_2d(numbers)
    # The last block is filled up with its own last number, which changes neither.
    numbers = jnp.pad(numbers, ((0, 0), (0, -numbers.shape[1] % size)), mode="edge")
    blocks = numbers.reshape(len(numbers), -1, size)
    return blocks.min(axis=2), blocks.max(axis=2)


def _equal_numbers(q_range: tuple[Array, Array], k_range: tuple[Array, Array]) -> Flags:
    """Return in which blocks numbers of queries and keys may be equal, and in which all are.

    The ranges are minima and maxima of blocks. Negative numbers equal nothing; only segment ids
    can be negative, numbers of documents and chunks are not.
    """
    q_min, q_max = (x[:, :, None] for x in q_range)
    k_min, k_max = (x[:, None, :] for x in k_range)
    may_be_equal = (q_min <= k_max) & (k_min <= q_max) & (q_max >= 0) & (k_max >= 0)
    all_equal = (q_min == q_max) & (k_min == k_max) & (q_min == k_min) & (q_min >= 0)
    return may_be_equal, all_equal
