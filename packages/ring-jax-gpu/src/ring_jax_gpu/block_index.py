"""Lists of the blocks of scores that a Triton kernel visits, and the tiles of a predicate mask."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from ring_core.base.arguments import EMPTY, FULL, PARTIAL, TILE
from ring_core.triton.tile_configs import parts_of_tiles
from ring_jax.kernels.block_index import Flags
from ring_jax.positions import searchsorted
from ring_jax.records import Array


class PredicateTiles(NamedTuple):
    """The tiles of a predicate mask between one rank's queries and one rank's keys.

    Attributes:
        bits: The distinct partial tiles as bits, uint8 ``[n, 128, 16]``.
        which: Index into ``bits`` of each tile, int32; -1 is a full tile, -2 an empty one.
    """

    bits: npt.NDArray[np.uint8]
    which: Array


def block_index(kinds: Array) -> tuple[Array, Array]:
    """List the inner blocks that each outer block visits, for kinds ``[1 or B, outer, inner]``.

    Returns:
        Their numbers, int32 ``[1 or B, outer, inner]``: partial ones, full ones, then empty ones,
        which are not visited. And the counts of partial and of full ones, int32
        ``[1 or B, outer, 2]``.
    """
    # PARTIAL < FULL, and empty ones behind both. Stable: blocks of a kind stay in their order, so
    # that a kernel fetches neighbours one after another.
    kind_order = jnp.where(kinds == EMPTY, FULL + 1, kinds)
    blocks = jnp.argsort(kind_order, axis=2, stable=True).astype(jnp.int32)
    counts = [(kinds == kind).sum(axis=2, dtype=jnp.int32) for kind in (PARTIAL, FULL)]
    return blocks, jnp.stack(counts, axis=2)


def segment_cells(outer: Array, inner: Array) -> tuple[Array, Array]:
    """Return where the segment of each outer token starts and stops among the inner tokens.

    A segment lies in one piece if ids ascend on both sides, as those of packed documents do; 0,
    which may be padding, then may come after all others. Negative ids see nothing.

    Args:
        outer, inner: Segment ids, int32 ``[B, n]`` and ``[B, m]``.

    Returns:
        ``cells``, int32 ``[B, 2, n]``, right only if ids ascend; and True if they do, bool ``[]``.
    """
    sides = [lax.bitcast_convert_type(x, jnp.uint32) for x in (outer, inner)]  # -1 comes last
    zero_last = [x - 1 for x in sides]
    ascend, zero_last_ascend = (
        jnp.array([(x[:, 1:] >= x[:, :-1]).all() for x in order]).all()
        for order in (sides, zero_last)
    )
    tokens, table = (jnp.where(ascend, x, y) for x, y in zip(sides, zero_last, strict=True))
    first, stop = (
        jax.vmap(partial(searchsorted, side=side))(table, tokens) for side in ("left", "right")
    )
    cells = jnp.stack([first, jnp.where(outer < 0, first, stop)], axis=1)
    return cells, ascend | zero_last_ascend


def in_tiles(tiles: PredicateTiles, lengths: tuple[int, int], block_q: int, block_k: int) -> Flags:
    """Return the flags of blocks under a predicate, ``[1, I, J]``.

    ``lengths`` are the numbers of queries and keys. Blocks smaller than a tile are told apart by
    the tile's bits.
    """
    grid = -(-lengths[0] // block_q), -(-lengths[1] // block_k)
    num_q_parts = tiles.which.shape[0] * (TILE // min(TILE, block_q))
    live, full = (
        jnp.asarray(parts)[tiles.which].swapaxes(1, 2).reshape(num_q_parts, -1)
        for parts in parts_of_tiles(tiles.bits, min(TILE, block_q), min(TILE, block_k))
    )
    # Parts are no larger than a block. A block shows something if one of its parts does, and all if
    # all of them do; parts beyond the last tile count as hidden.
    for axis, size in enumerate((block_q, block_k)):
        live, full = (_in_blocks(x, axis, grid[axis], size) for x in (live, full))
        live, full = live.any(axis=axis + 1), full.all(axis=axis + 1)
    return live[None], full[None]


def _in_blocks(parts: Array, axis: int, blocks: int, size: int) -> Array:
    """Group the flags of parts of tiles into blocks along an axis.

    The axis becomes two: ``blocks``, and the parts of each. ``size`` is the length of a block.
    """
    per_block = max(1, size // TILE)
    length, total = parts.shape[axis], blocks * per_block
    parts = jnp.pad(parts, [(0, max(0, total - length) if n == axis else 0) for n in range(2)])
    parts = parts[:total] if axis == 0 else parts[:, :total]
    return parts.reshape((*parts.shape[:axis], blocks, per_block, *parts.shape[axis + 1 :]))
