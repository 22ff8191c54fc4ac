"""Which blocks of scores are computed, where bands alone do not say.

A block is empty, partial (needs its mask) or full. For bands and documents a kernel works out from
the items which blocks to visit; where segment ids, a predicate or a mask that is an array decide,
the blocks that are not empty are listed, for each block of the outer side: partial ones first, then
full ones.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ring_core import TABLE_COLUMNS, TILE
from ring_core.triton.tile_sizes import parts_of_tiles
from ring_jax.dense_mask import shown_in_blocks
from ring_jax.records import Array, ItemTable, KeyBlock, QueryBlock

EMPTY, PARTIAL, FULL = 0, 1, 2
BOUNDS = ("q_start", "q_stop", "k_start", "k_stop", "lo", "hi")
_FAR = 1 << 29  # beyond any local index; sums of a few do not overflow int32


class BlockIndex(NamedTuple):
    """Which inner blocks each outer block visits, int32.

    Attributes:
        blocks: Their numbers, ``[1 or B, outer, inner]``.
        counts: How many of them are partial and how many full, ``[1 or B, outer, 2]``.
    """

    blocks: Array
    counts: Array


def item_bounds(work: ItemTable) -> Array:
    """What each item shows, int32 ``[R, 6]`` in the order of ``BOUNDS``."""
    picked = jnp.stack([work.items[:, TABLE_COLUMNS.index(name)] for name in BOUNDS], axis=1)
    return jnp.clip(picked, -_FAR, _FAR)


def in_documents(outer: Array, inner: Array) -> Array:
    """From where to where the inner tokens lie in the document of each outer one, int32 [2, T].

    Cells grow along both sides.
    """
    sides = [jnp.searchsorted(inner, outer, side=side) for side in ("left", "right")]
    return jnp.stack(sides).astype(jnp.int32)


class Tiles(NamedTuple):
    """A predicate's.

    Attributes:
        bits: The partial ones, each once, uint8 ``[n, 128, 16]``.
        which: Which of them lies where, int32; -1 shows all, -2 nothing.
    """

    bits: npt.NDArray[np.uint8]
    which: Array


def block_kinds(
    rows: QueryBlock,
    columns: KeyBlock,
    work: ItemTable,
    tiles: Tiles | None,
    block_q: int,
    block_k: int,
) -> Array:
    """The kind of each block, int32 ``[1 or B, I, J]``."""
    grid = (-(-rows.q.shape[2] // block_q), -(-columns.kv.shape[2] // block_k))
    live, full = _in_items(item_bounds(work), grid, block_q, block_k)
    for mine, theirs in _numbered(rows, columns, work):
        meets, alike = _alike(_extremes(mine, block_q), _extremes(theirs, block_k))
        live, full = live & meets, full & alike
    if tiles is not None:
        some, every = _in_tiles(tiles, grid, block_q, block_k)
        live, full = live & some, full & every
    return jnp.where(live, jnp.where(full, FULL, PARTIAL), EMPTY).astype(jnp.int32)


def under_mask(kinds: Array, bias: Array, block_q: int, block_k: int) -> Array:
    """Kinds where what a bias ``[B or 1, H or 1, T, S]`` hides from all heads is empty."""
    return jnp.where(shown_in_blocks(bias, block_q, block_k), kinds, EMPTY)


def _numbered(rows: QueryBlock, columns: KeyBlock, work: ItemTable) -> list[tuple[Array, Array]]:
    """Numbers ``[1 or B, T]`` and ``[1 or B, S]`` that have to be equal; tiles hold the cells."""
    found = []
    if rows.ids is not None and columns.ids is not None:
        found.append((rows.ids, columns.ids))
    if rows.cells is not None and columns.cells is not None and work.kinds is None:
        found.append((rows.cells[None], columns.cells[None]))
    return found


def by_rows(kinds: Array) -> BlockIndex:
    """What each block of queries visits."""
    kind_order = jnp.where(kinds == EMPTY, FULL + 1, kinds)
    blocks = jnp.argsort(kind_order, axis=2, stable=True).astype(jnp.int32)
    counts = [(kinds == kind).sum(axis=2, dtype=jnp.int32) for kind in (PARTIAL, FULL)]
    return BlockIndex(blocks, jnp.stack(counts, axis=2))


def by_columns(kinds: Array) -> BlockIndex:
    """What each block of keys visits."""
    return by_rows(kinds.swapaxes(1, 2))


def _in_items(
    bounds: Array, grid: tuple[int, int], block_q: int, block_k: int
) -> tuple[Array, Array]:
    """Whether some item shows something of a block, and whether one shows all; ``[1, I, J]``."""
    q_start, q_stop, k_start, k_stop, lo, hi = (x[:, None, None] for x in bounds.T)
    top = (jnp.arange(grid[0], dtype=jnp.int32) * block_q)[None, :, None]
    left = (jnp.arange(grid[1], dtype=jnp.int32) * block_k)[None, None]
    bottom, right = top + block_q, left + block_k
    first_row, last_row = jnp.maximum(top, q_start), jnp.minimum(bottom, q_stop) - 1
    first_col, last_col = jnp.maximum(left, k_start), jnp.minimum(right, k_stop) - 1
    nearest = (first_row - q_start) - (last_col - k_start)
    furthest = (last_row - q_start) - (first_col - k_start)
    overlaps = (first_row <= last_row) & (first_col <= last_col)
    live = overlaps & (furthest >= lo) & (nearest <= hi)
    inside = (top >= q_start) & (bottom <= q_stop) & (left >= k_start) & (right <= k_stop)
    full = inside & (nearest >= lo) & (furthest <= hi)
    return live.any(axis=0)[None], full.any(axis=0)[None]


def _extremes(ids: Array, size: int) -> tuple[Array, Array]:
    """Smallest and largest id of each block of ``[B, T]``, ``[B, blocks]``."""
    ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % size)), mode="edge")
    parts = ids.reshape(ids.shape[0], -1, size)
    return parts.min(axis=2), parts.max(axis=2)


def _alike(mine: tuple[Array, Array], theirs: tuple[Array, Array]) -> tuple[Array, Array]:
    """Whether ids may be equal somewhere, and whether all are; negative ones never are."""
    q_min, q_max = (x[:, :, None] for x in mine)
    k_min, k_max = (x[:, None, :] for x in theirs)
    meets = (q_min <= k_max) & (k_min <= q_max) & (q_max >= 0) & (k_max >= 0)
    alike = (q_min == q_max) & (k_min == k_max) & (q_min == k_min) & (q_min >= 0)
    return meets, alike


def _in_tiles(
    tiles: Tiles, grid: tuple[int, int], block_q: int, block_k: int
) -> tuple[Array, Array]:
    """Whether a predicate shows some of a block, and whether all; ``[1, I, J]``.

    Finer than its tiles where blocks are.
    """
    down = tiles.which.shape[0] * (TILE // min(TILE, block_q))
    some, every = (
        jnp.asarray(parts)[tiles.which].swapaxes(1, 2).reshape(down, -1)
        for parts in parts_of_tiles(tiles.bits, min(TILE, block_q), min(TILE, block_k))
    )
    for axis, size in enumerate((block_q, block_k)):
        some, every = (_regrouped(x, axis, grid[axis], size) for x in (some, every))
        some, every = some.any(axis=axis + 1), every.all(axis=axis + 1)
    return some[None], every[None]


def _regrouped(parts: Array, axis: int, blocks: int, size: int) -> Array:
    """Flags of parts as ``blocks`` groups along an axis, the parts of a group along the next."""
    each = max(1, size // TILE)
    have, want = parts.shape[axis], blocks * each
    edges = [(0, max(0, want - have) if n == axis else 0) for n in range(2)]
    parts = jnp.pad(parts, edges)
    parts = parts[:want] if axis == 0 else parts[:, :want]
    shape = (*parts.shape[:axis], blocks, each, *parts.shape[axis + 1 :])
    return parts.reshape(shape)
