"""Which blocks of scores are visited, where bands alone do not say.

For bands and documents a kernel works out from the items which blocks to visit; where segment ids,
a predicate or a mask that is an array decide, the blocks that are not empty are indexed, for each
block of the outer side: partial ones first, then full ones.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ring_core import EMPTY, FULL, PARTIAL, TILE
from ring_core.triton.tile_configs import parts_of_tiles
from ring_jax.kernels.block_index import Flags, kinds_of
from ring_jax.records import Array, ItemTable, KeyBlock, QueryBlock


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
    in_tiles = None if tiles is None else _in_tiles(tiles, grid, block_q, block_k)
    return kinds_of(rows, columns, work, in_tiles, (block_q, block_k), grid)


def block_index(kinds: Array) -> tuple[Array, Array]:
    """Which inner blocks each outer block visits, int32, for kinds ``[1 or B, outer, inner]``.

    Returns:
        Their numbers, ``[1 or B, outer, inner]``, and how many of them are partial and how many
        full, ``[1 or B, outer, 2]``.
    """
    kind_order = jnp.where(kinds == EMPTY, FULL + 1, kinds)
    blocks = jnp.argsort(kind_order, axis=2, stable=True).astype(jnp.int32)
    counts = [(kinds == kind).sum(axis=2, dtype=jnp.int32) for kind in (PARTIAL, FULL)]
    return blocks, jnp.stack(counts, axis=2)


def _in_tiles(tiles: Tiles, grid: tuple[int, int], block_q: int, block_k: int) -> Flags:
    """What a predicate shows; ``[1, I, J]``.

    Finer than its tiles where blocks are.
    """
    num_q_parts = tiles.which.shape[0] * (TILE // min(TILE, block_q))
    some, every = (
        jnp.asarray(parts)[tiles.which].swapaxes(1, 2).reshape(num_q_parts, -1)
        for parts in parts_of_tiles(tiles.bits, min(TILE, block_q), min(TILE, block_k))
    )
    for axis, size in enumerate((block_q, block_k)):
        some, every = (_in_blocks(x, axis, grid[axis], size) for x in (some, every))
        some, every = some.any(axis=axis + 1), every.all(axis=axis + 1)
    return some[None], every[None]


def _in_blocks(parts: Array, axis: int, blocks: int, size: int) -> Array:
    """Flags of parts as ``blocks`` groups along an axis, the parts of a group along the next."""
    each = max(1, size // TILE)
    length, wanted = parts.shape[axis], blocks * each
    parts = jnp.pad(parts, [(0, max(0, wanted - length) if n == axis else 0) for n in range(2)])
    parts = parts[:wanted] if axis == 0 else parts[:, :wanted]
    return parts.reshape((*parts.shape[:axis], blocks, each, *parts.shape[axis + 1 :]))
