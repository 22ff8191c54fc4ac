"""Which blocks of scores are computed, and in which order.

A block is empty, full, partial (needs its mask), or nonfinite: partial and holding numbers
that are not finite, which weights of 0 do not keep out of products. The blocks that are not empty
are written down one after another, and the grid of a kernel walks along that list, whose length is
known on the device only: empty blocks are neither fetched nor computed, and cost no step.

A list lies in scalar memory, which holds so many words. Where there are more blocks, a kernel is
launched for some rows (or columns) of blocks after others, each time with a list of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ring_core import EMPTY, FULL, PARTIAL, TILE, UnsupportedError
from ring_jax.kernels.block_index import Flags, kinds_of
from ring_jax.records import Array, ItemTable, KeyBlock, QueryBlock
from ring_jax_tpu.block_sizes import Blocks

NONFINITE = 3  # beside ``EMPTY``, ``PARTIAL`` and ``FULL``

# A visit is one word: block of queries, block of keys, last and first of its row or column, kind.
_KIND, _FIRST, _LAST, _K_AT, _Q_AT, _BITS = 3, 4, 8, 4, 17, 13
_MOST = 1 << 17  # words of a list in scalar memory; as many are compiled, for every generation


class BlockIndex(NamedTuple):
    """Lists of blocks to visit, int32 ``[1 or B, length]``, and the steps along the longest.

    The number is traced, except where there is one block in all.
    """

    words: Array
    steps: Array | int


class Visit(NamedTuple):
    """A word, taken apart."""

    q_block: Any
    k_block: Any
    kind: Any
    is_first: Any
    is_last: Any


def unpack(word: Any) -> Visit:
    """Take a word apart."""
    mask = (1 << _BITS) - 1
    return Visit(
        (word >> _Q_AT) & mask,
        (word >> _K_AT) & mask,
        word & _KIND,
        (word & _FIRST) > 0,
        (word & _LAST) > 0,
    )


def block_kinds(rows: QueryBlock, columns: KeyBlock, work: ItemTable, blocks: Blocks) -> Array:
    """The kind of each block, int32 ``[1 or B, I, J]``."""
    in_tiles = None if work.kinds is None else _in_tiles(work.kinds, blocks)
    return kinds_of(rows, columns, work, in_tiles, (blocks.q, blocks.k), blocks.grid)


def with_nonfinite(
    kinds: Array, rows: Array, columns: Array, blocks: Blocks, *, has_bias: bool = False
) -> Array:
    """Kinds where partial blocks that meet a nonfinite row or column, bool ``[B, T]``, are too.

    And full ones, some of which a bias may hide.
    """
    padded = (
        jnp.pad(x, ((0, 0), (0, length - x.shape[1])))
        for x, length in ((rows, blocks.q_len), (columns, blocks.k_len))
    )
    in_rows, in_columns = (
        x.reshape(x.shape[0], -1, size).any(axis=2)
        for x, size in zip(padded, (blocks.q, blocks.k), strict=True)
    )
    nonfinite = in_rows[:, :, None] | in_columns[:, None, :]
    nonfinite = nonfinite if kinds.shape[0] > 1 else nonfinite.any(axis=0, keepdims=True)
    hides = (kinds > EMPTY) if has_bias else (kinds == PARTIAL)
    return jnp.where(hides & nonfinite, NONFINITE, kinds)


def for_every_batch(kinds: Array) -> Array:
    """Kinds that hold for all batch rows together, ``[1, I, J]``."""
    full = (kinds == FULL).all(axis=0, keepdims=True)
    live = (kinds > EMPTY).any(axis=0, keepdims=True)
    return jnp.where(live, jnp.where(full, FULL, PARTIAL), EMPTY)


@dataclass(frozen=True, eq=False)
class Walk:
    """All blocks that are not empty, in order, in pieces of whole rows or columns.

    Attributes:
        kinds: int32 ``[1 or B, outer, inner]``: rows of columns, or columns of rows.
        outer_at, inner_at: Where a word holds the numbers of each.
    """

    kinds: Array
    outer_at: int
    inner_at: int

    @property
    def pieces(self) -> int:
        """How many lists it takes."""
        many, outer, inner = self.kinds.shape
        return -(-outer // max(1, _MOST // (many * inner)))

    @property
    def height(self) -> int:
        """Rows or columns of blocks in a piece; the last may have fewer."""
        return -(-self.kinds.shape[1] // self.pieces)

    @property
    def stride(self) -> int:
        """Words between the lists of two batch rows; 0 if they share one."""
        many, _, inner = self.kinds.shape
        return self.height * inner if many > 1 else 0

    def whole(self) -> BlockIndex:
        """The list, where there is one."""
        assert self.pieces == 1
        return _indexed(self.kinds, self.outer_at, self.inner_at)

    def piece(self, n: Array) -> BlockIndex:
        """The list of a piece."""
        kinds = jnp.pad(
            self.kinds,
            ((0, 0), (0, self.pieces * self.height - self.kinds.shape[1]), (0, 0)),
            constant_values=EMPTY,
        )
        kinds = lax.dynamic_slice_in_dim(kinds, n * self.height, self.height, axis=1)
        words, steps = _indexed(kinds, self.outer_at, self.inner_at)
        return BlockIndex(words + ((n * self.height) << self.outer_at), steps)


def q_major(kinds: Array) -> Walk:
    """Visit the blocks row by row."""
    return Walk(kinds, _Q_AT, _K_AT)


def k_major(kinds: Array) -> Walk:
    """Visit the blocks column by column."""
    return Walk(kinds.swapaxes(1, 2), _K_AT, _Q_AT)


def check_number(lists: int, blocks: Blocks) -> None:
    """Check that words can name the blocks, and a list holds a row or column of them at least.

    ``lists`` is 1, or where batch rows see differently how many there are.

    Raises:
        UnsupportedError: Not so.
    """
    rows, columns = blocks.grid
    most = min(1 << _BITS, _MOST // lists)
    if max(rows, columns) > most:
        raise UnsupportedError(
            f"kernel 'pallas': blocks of {blocks.q} queries and {blocks.k} keys are {rows} x "
            f"{columns}, and {most} along a side are the most"
            + (f" with {lists} batch rows that see differently" if lists > 1 else "")
            + ". Instead: choose larger block_q and block_k, or kernel='auto'"
        )


def _indexed(kinds: Array, outer_at: int, inner_at: int) -> BlockIndex:
    """Write down the live blocks of ``[N, outer, inner]`` kinds.

    A list that is shorter than the longest repeats its last block as an empty one, so that nothing
    is fetched; a list of nothing holds one empty block, first and last, so that what the kernel
    writes back is what it read.
    """
    many, outer, inner = kinds.shape
    flat = kinds.reshape(many, outer * inner)
    order = jnp.argsort(flat == EMPTY, axis=1, stable=True).astype(jnp.int32)
    count = (flat > EMPTY).sum(axis=1, keepdims=True).astype(jnp.int32)
    step = jnp.arange(outer * inner, dtype=jnp.int32)[None]
    at = jnp.take_along_axis(order, jnp.minimum(step, jnp.maximum(count - 1, 0)), axis=1)
    is_live, row = step < count, at // inner
    kind = jnp.where(is_live, jnp.take_along_axis(flat, at, axis=1), EMPTY)
    before, after = (jnp.roll(row, by, axis=1) != row for by in (1, -1))
    alone = (count == 0) & (step == 0)
    first = (is_live & (before | (step == 0))) | alone
    last = (is_live & (after | (step == count - 1))) | alone
    words = (row << outer_at) | ((at % inner) << inner_at) | kind
    words |= jnp.where(first, _FIRST, 0) | jnp.where(last, _LAST, 0)
    return BlockIndex(words, 1 if outer * inner == 1 else jnp.maximum(count.max(), 1))


def _in_tiles(kinds: Array, blocks: Blocks) -> Flags:
    """What the tiles of a block show; ``[1, I, J]``."""
    rows, cols = blocks.q // TILE, blocks.k // TILE
    shape = (blocks.grid[0] * rows, blocks.grid[1] * cols)
    edges = [(0, wanted - length) for wanted, length in zip(shape, kinds.shape, strict=True)]
    tiles = jnp.pad(kinds, edges).reshape(blocks.grid[0], rows, blocks.grid[1], cols)
    return (tiles > EMPTY).any(axis=(1, 3))[None], (tiles == FULL).all(axis=(1, 3))[None]
