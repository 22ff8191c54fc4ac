"""Lists of the blocks of scores that a kernel visits, in order.

A block is empty, full, partial (needs its mask), or nonfinite: partial, with numbers that are not
finite, which weights of 0 do not keep out of products. The blocks that are not empty are listed one
after another, and the grid of a kernel walks along that list, whose length is known on the device
only: empty blocks are neither fetched nor computed, and cost no step.

A list lies in scalar memory, which is small. If there are more blocks, the kernel is launched
several times, each for some rows (or columns) of blocks, with a list of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ring_core.base.arguments import EMPTY, FULL, PARTIAL, TILE
from ring_jax.kernels.block_index import Flags, kinds_of
from ring_jax.records import Array, ItemTable, KeyBlock, QueryBlock
from ring_jax_tpu import block_sizes
from ring_jax_tpu.block_sizes import NUMBER_BITS, Blocks

NONFINITE = 3  # a kind of block beside ``EMPTY``, ``PARTIAL`` and ``FULL``

# A visit is one word: block of queries, block of keys, last and first of its row or column, kind.
_KIND, _FIRST, _LAST, _K_AT, _Q_AT = 3, 4, 8, 4, 4 + NUMBER_BITS


class BlockIndex(NamedTuple):
    """The lists of blocks to visit: one for all batch rows, or one each."""

    words: Array  # int32 [1 or B, length], see `unpack`
    steps: Array | int  # length of the longest list, traced unless there is a single block


class Visit(NamedTuple):
    """A step of a kernel's walk: the block it visits."""

    q_block: Any  # number of the block of queries
    k_block: Any  # number of the block of keys
    kind: Any
    is_first: Any  # the first visit of its row (or column): load the accumulator
    is_last: Any  # the last visit of its row (or column): write the accumulator back


def unpack(word: Any) -> Visit:
    """Unpack the visit that a word of a list encodes."""
    mask = (1 << NUMBER_BITS) - 1
    return Visit(
        (word >> _Q_AT) & mask,
        (word >> _K_AT) & mask,
        word & _KIND,
        (word & _FIRST) > 0,
        (word & _LAST) > 0,
    )


def block_kinds(
    rows: QueryBlock,
    columns: KeyBlock,
    work: ItemTable,
    blocks: Blocks,
    *,
    bias_masks: bool = False,
) -> Array:
    """Return the kind of each block, int32 ``[1 or B, I, J]``, as :func:`kinds_of`."""
    in_tiles = None if work.kinds is None else _in_tiles(work.kinds, blocks)
    return kinds_of(rows, columns, work, in_tiles, blocks.q, blocks.k, bias_masks=bias_masks)


def with_nonfinite(
    kinds: Array, rows: Array, columns: Array, blocks: Blocks, *, has_bias: bool = False
) -> Array:
    """Mark blocks as nonfinite that hide scores of tokens with NaN or infinite numbers.

    Args:
        kinds: int32 ``[1 or B, I, J]``.
        rows: Queries with such numbers, bool ``[B, T]``.
        columns: Keys with such numbers, bool ``[B, S]``.
        blocks: Sizes of blocks.
        has_bias: A bias may hide scores of full blocks, so that these are marked, too.
    """
    padded = (
        jnp.pad(x, ((0, 0), (0, length - x.shape[1])))
        for x, length in ((rows, blocks.q_len), (columns, blocks.k_len))
    )
    by_row_block, by_column_block = (
        x.reshape(x.shape[0], -1, size).any(axis=2)
        for x, size in zip(padded, (blocks.q, blocks.k), strict=True)
    )
    nonfinite = by_row_block[:, :, None] | by_column_block[:, None, :]
    nonfinite = nonfinite if kinds.shape[0] > 1 else nonfinite.any(axis=0, keepdims=True)
    hides = (kinds > EMPTY) if has_bias else (kinds == PARTIAL)
    return jnp.where(hides & nonfinite, NONFINITE, kinds)


def for_every_batch(kinds: Array) -> Array:
    """Merge the kinds of all batch rows into kinds that hold for each of them, ``[1, I, J]``."""
    full = (kinds == FULL).all(axis=0, keepdims=True)
    live = (kinds > EMPTY).any(axis=0, keepdims=True)
    return jnp.where(live, jnp.where(full, FULL, PARTIAL), EMPTY)


@dataclass(frozen=True, eq=False)
class Walk:
    """The order in which a kernel visits all blocks that are not empty.

    It walks along one row (or column) of blocks after another. If there are too many blocks for one
    list, the walk is cut into pieces of whole rows or columns.

    Attributes:
        kinds: int32 ``[1 or B, outer, inner]``; the outer side are rows or columns of blocks.
        outer_at, inner_at: First bit of the block's number on each side within a word.
    """

    kinds: Array
    outer_at: int
    inner_at: int

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        num_lists, outer, inner = self.kinds.shape
        return -(-outer // max(1, block_sizes.MAX_WORDS // (num_lists * inner)))

    @property
    def height(self) -> int:
        """Number of rows (or columns) of blocks in a piece; the last piece may have fewer."""
        return -(-self.kinds.shape[1] // self.pieces)

    @property
    def stride(self) -> int:
        """Words from one batch row's list to the next one's; 0 if they share one."""
        num_lists, _, inner = self.kinds.shape
        return self.height * inner if num_lists > 1 else 0

    def whole(self) -> BlockIndex:
        """Return the lists of a walk that has one piece."""
        assert self.pieces == 1
        return _indexed(self.kinds, self.outer_at, self.inner_at)

    def piece(self, n: Array) -> BlockIndex:
        """Return the lists of piece ``n``, a traced number."""
        kinds = jnp.pad(
            self.kinds,
            ((0, 0), (0, self.pieces * self.height - self.kinds.shape[1]), (0, 0)),
            constant_values=EMPTY,
        )
        kinds = lax.dynamic_slice_in_dim(kinds, n * self.height, self.height, axis=1)
        # Rows (or columns) are numbered within the piece: from here on, within the whole walk.
        words, steps = _indexed(kinds, self.outer_at, self.inner_at)
        return BlockIndex(words + ((n * self.height) << self.outer_at), steps)


def q_major(kinds: Array) -> Walk:
    """Return the walk that visits blocks row by row."""
    return Walk(kinds, _Q_AT, _K_AT)


def k_major(kinds: Array) -> Walk:
    """Return the walk that visits blocks column by column."""
    return Walk(kinds.swapaxes(1, 2), _K_AT, _Q_AT)


def _indexed(kinds: Array, outer_at: int, inner_at: int) -> BlockIndex:
    """List the blocks of kinds ``[N, outer, inner]`` that are not empty.

    A list that is shorter than the longest one repeats its last block as an empty one, so that
    nothing is fetched. A list without blocks holds one empty block, first and last, so that the
    kernel writes back what it read.
    """
    num_lists, outer, inner = kinds.shape
    flat = kinds.reshape(num_lists, outer * inner)
    # Blocks that are not empty come first, in the order of rows: a row's visits follow one another.
    order = jnp.argsort(flat == EMPTY, axis=1, stable=True).astype(jnp.int32)
    count = (flat > EMPTY).sum(axis=1, keepdims=True).astype(jnp.int32)
    step = jnp.arange(outer * inner, dtype=jnp.int32)[None]
    block = jnp.take_along_axis(order, jnp.minimum(step, jnp.maximum(count - 1, 0)), axis=1)
    is_live, row = step < count, block // inner
    kind = jnp.where(is_live, jnp.take_along_axis(flat, block, axis=1), EMPTY)
    # A visit is the first of its row where the one before it is of another row; at the ends of the
    # list `roll` compares with the other end, so these are told apart by the step.
    before, after = (jnp.roll(row, by, axis=1) != row for by in (1, -1))
    only_empty = (count == 0) & (step == 0)
    first = (is_live & (before | (step == 0))) | only_empty
    last = (is_live & (after | (step == count - 1))) | only_empty
    words = (row << outer_at) | ((block % inner) << inner_at) | kind
    words |= jnp.where(first, _FIRST, 0) | jnp.where(last, _LAST, 0)
    return BlockIndex(words, 1 if outer * inner == 1 else jnp.maximum(count.max(), 1))


def _in_tiles(kinds: Array, blocks: Blocks) -> Flags:
    """Return the flags of blocks from the kinds of a predicate's tiles, ``[1, I, J]``."""
    rows, cols = blocks.q // TILE, blocks.k // TILE
    shape = (blocks.grid[0] * rows, blocks.grid[1] * cols)
    edges = [(0, padded - length) for padded, length in zip(shape, kinds.shape, strict=True)]
    tiles = jnp.pad(kinds, edges).reshape(blocks.grid[0], rows, blocks.grid[1], cols)
    return (tiles > EMPTY).any(axis=(1, 3))[None], (tiles == FULL).all(axis=(1, 3))[None]
