"""The blocks of scores of a launch in plain JAX: which are visited, and how each is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jax import lax

from ring_core.base.arguments import TILE
from ring_jax.dropout import dropout_keep
from ring_jax.kernels.block_index import item_bounds, shown_in_blocks
from ring_jax.kernels.rules import shown
from ring_jax.positions import searchsorted
from ring_jax.records import Array, CallSpec, Item, ItemTable, KeyBlock, QueryBlock

Bounds = Item[Array]  # of traced int32 scalars

BLOCK = 512
_ZERO = np.int32(0)  # starts of a slice share a dtype, also where ints are 64 bits wide


class Block(NamedTuple):
    """A range of rows, or of columns, as long as a block.

    The last block of a length that is no multiple of the block size is moved back to lie inside;
    its rows before ``first`` belong to the block before it.
    """

    start: Array  # index of its first row
    first: Array  # index of the first row that no other block has


class Scores(NamedTuple):
    """The scores of one block, ``[B, K, G, n, m]`` or broadcastable to that."""

    scores: Array  # -inf where masked
    slope: Array | None  # derivative of the soft cap
    visible: Array  # bool


@dataclass(frozen=True)
class ScoreBlocks:
    """The blocks of scores of one launch: which are visited, and how each is computed.

    Queries are rows, keys are columns; ``n`` and ``m`` are the rows and columns of a block.
    """

    call: CallSpec
    rows: QueryBlock
    columns: KeyBlock
    work: ItemTable
    shown: Array | None = None  # bool [I, J], False for blocks that an array mask hides entirely

    @classmethod
    def of(
        cls, call: CallSpec, rows: QueryBlock, columns: KeyBlock, work: ItemTable
    ) -> ScoreBlocks:
        """Make the blocks of a launch, and find those that an array mask hides entirely."""
        blocks = cls(call, rows, columns, work)
        if not call.bias_masks or rows.bias is None:
            return blocks
        return replace(
            blocks, shown=shown_in_blocks(rows.bias, blocks.block_q, blocks.block_k).any(axis=0)
        )

    @property
    def block_q(self) -> int:
        """Number of rows in a block."""
        return self._size(self.call.config.block_q, self.rows.q.shape[2])

    @property
    def block_k(self) -> int:
        """Number of columns in a block."""
        return self._size(self.call.config.block_k, self.columns.kv.shape[2])

    def _size(self, requested: int | None, length: int) -> int:
        """Return the length of a block: the wanted or default one, no longer than the side."""
        unit = 1 if self.work.kinds is None else TILE  # blocks of a predicate are whole tiles
        return min(-(-(requested or BLOCK) // unit) * unit, length)

    def for_row_blocks[T](self, body: Callable[[ScoreBlocks, Bounds, Array, T], T], state: T) -> T:
        """Run ``body(self, bounds, i, state)`` for each item and each block ``i`` of its rows."""
        items = item_bounds(self.work)

        # Items and blocks are done one after another: each merges into what those before it left.
        def run_item(n: Array, state: T) -> T:
            # Unused rows of the table are items of no queries, whose loop runs zero times.
            bounds = Bounds(*items[n])
            start, stop = bounds.q_start // self.block_q, -(-bounds.q_stop // self.block_q)
            return loop(start, stop, partial(body, self, bounds), state)

        return loop(0, len(items), run_item, state)

    def for_column_blocks[T](
        self, bounds: Bounds, i: Array, body: Callable[[Array, T], T], state: T
    ) -> T:
        """Run ``body(j, state)`` for each block of columns that rows of block ``i`` may see.

        Blocks that a predicate or an array mask hides entirely are skipped.
        """

        def unless_empty(j: Array, state: T) -> T:
            kinds, empty = self.work.kinds, []
            if kinds is not None:
                empty.append(~(self._tiles(kinds, i, j) > 0).any())
            if self.shown is not None:
                empty.append(~self.shown[i, j])
            run = partial(body, j)
            if not empty:
                return run(state)
            return cast("T", lax.cond(jnp.stack(empty).any(), lambda state: state, run, state))

        return loop(*self._column_blocks(bounds, i), unless_empty, state)

    def _column_blocks(self, bounds: Bounds, i: Array) -> tuple[Array, Array]:
        """Return the range ``[start, stop)`` of column blocks that rows of block ``i`` may see."""
        first = jnp.maximum(i * self.block_q, bounds.q_start) - bounds.q_start
        last = jnp.minimum((i + 1) * self.block_q, bounds.q_stop) - 1 - bounds.q_start
        # By the band, from the first row's first key to the last row's last one.
        start = bounds.k_start + jnp.maximum(first - bounds.hi, 0)
        stop = jnp.minimum(bounds.k_stop, bounds.k_start + last - bounds.lo + 1)
        rows, cells = self.rows.cells, self.columns.cells
        if rows is not None and cells is not None:
            first, last = first + bounds.q_start, last + bounds.q_start
            # Numbers of documents or chunks ascend: from the first row's one to the last row's one.
            low = searchsorted(cells, rows[first], "left")
            high = searchsorted(cells, rows[last], "right")
            start, stop = jnp.maximum(start, low), jnp.minimum(stop, high)
        # Where these rows see nothing, stop may lie before start: then there are no blocks.
        return start // self.block_k, -(-jnp.maximum(stop, start) // self.block_k)

    def row_block(self, i: Array) -> Block:
        """Return the row range of block ``i``."""
        return _block(i, self.block_q, self.rows.q.shape[2])

    def column_block(self, j: Array) -> Block:
        """Return the column range of block ``j``."""
        return _block(j, self.block_k, self.columns.kv.shape[2])

    def take_rows(self, x: Array, i: Block) -> Array:
        """Slice a block of rows out of ``[B, H, T, ...]``, as ``[B, K, G, n, ...]``."""
        part = lax.dynamic_slice_in_dim(x, i.start, self.block_q, axis=2)
        kv_heads = self.columns.kv.shape[1]
        return part.reshape(x.shape[0], kv_heads, x.shape[1] // kv_heads, *part.shape[2:])

    def put_rows(self, x: Array, part: Array, i: Block) -> Array:
        """Write a block of rows back into ``[B, H, T, ...]``, the reverse of :meth:`take_rows`."""
        return lax.dynamic_update_slice_in_dim(x, lax.collapse(part, 1, 3), i.start, axis=2)

    def take_columns(self, j: Block) -> tuple[Array, Array]:
        """Slice the keys ``[B, K, m, D]`` and values ``[B, K, m, Dv]`` of a block."""
        kv = lax.dynamic_slice_in_dim(self.columns.kv, j.start, self.block_k, axis=2)
        return kv[..., : self.call.head_dim], kv[..., self.call.head_dim :]

    def _tiles(self, kinds: Array, i: Array, j: Array) -> Array:
        """Return the kinds of the predicate tiles in block ``(i, j)``; padding tiles are empty."""
        size = (-(-self.block_q // TILE), -(-self.block_k // TILE))
        padded = jnp.pad(kinds, ((0, size[0]), (0, size[1])))
        return lax.dynamic_slice(padded, (i * size[0], j * size[1]), size)

    def scores(self, q: Array, k: Array, bounds: Bounds, i: Block, j: Block) -> Scores:
        """Compute the masked scores of ``q [B, K, G, n, D]`` against ``k [B, K, m, D]``."""
        x = dot("bkgnd,bkmd->bkgnm", q, k, self.call.wide) * self.call.scale
        slope = None
        if self.call.softcap is not None:
            squashed = jnp.tanh(x / self.call.softcap)
            x, slope = squashed * self.call.softcap, 1 - squashed * squashed
        visible = self._visible(bounds, i, j)
        if self.rows.bias is not None:
            bias = self._bias(self.rows.bias, i, j).astype(x.dtype)
            visible = visible & (bias != -jnp.inf)
            if (shift := self.rows.bias_shift) is not None:
                part = lax.dynamic_slice_in_dim(shift, i.start, self.block_q, axis=2)
                bias -= part.reshape(len(part), *bias.shape[1:4], 1)
            x = x + bias
        if self.rows.slopes is not None:
            q_pos, k_pos = self._pair_slices(self.rows.positions, self.columns.positions, i, j)
            distance = jnp.abs(q_pos - k_pos).astype(x.dtype)[None, None, None]
            slopes = self.rows.slopes.astype(x.dtype)  # [B or 1, H]
            x -= slopes.reshape(len(slopes), self.columns.kv.shape[1], -1, 1, 1) * distance
        return Scores(jnp.where(visible, x, -jnp.inf), slope, visible)

    def dropout_factor(self, i: Block, j: Block) -> Array | None:
        """Return what dropout multiplies a block of weights by, 0 or ``1 / (1 - p)``.

        ``[B, K, G, n, m]``, wide; ``None`` without dropout.
        """
        p, rows = self.call.dropout_p, self.rows
        if p == 0:
            return None
        assert rows.seed is not None and rows.numbers is not None
        b = jnp.arange(rows.q.shape[0], dtype=jnp.int32) + rows.numbers[0]
        h = rows.numbers[1:].reshape(self.columns.kv.shape[1], -1, 1, 1)
        q_index, k_index = self._pair_slices(rows.indices, self.columns.positions, i, j)
        keep = dropout_keep(p, rows.seed, b[:, None, None, None, None], h, q_index, k_index)
        return keep.astype(self.call.wide) / (1 - p)

    def add_bias_grad(self, dbias: Array, dscores: Array, i: Block, j: Block) -> Array:
        """Add a block's gradient of scores to ``dbias``, summed where the bias broadcasts."""
        shared = tuple(axis for axis in (0, 1) if dbias.shape[axis] == 1)
        grad = lax.collapse(dscores, 1, 3).sum(axis=shared, keepdims=True)
        # Blocks at the end overlap those before them, whose rows and columns are masked here: their
        # gradients are 0, and adding them again changes nothing.
        start = (_ZERO, _ZERO, i.start, j.start)
        old = lax.dynamic_slice(dbias, start, grad.shape)
        return lax.dynamic_update_slice(dbias, old + grad, start)

    def _visible(self, bounds: Bounds, i: Block, j: Block) -> Array:
        """Return which scores of a block are visible, bool ``[B or 1, 1, 1, n, m]``.

        It is made of the item, documents, the predicate and segment ids, and of no bias. Rows and
        columns that belong to the block before are hidden.
        """
        row = (i.start + jnp.arange(self.block_q, dtype=jnp.int32))[:, None]
        column = (j.start + jnp.arange(self.block_k, dtype=jnp.int32))[None]
        visible = (row >= jnp.maximum(i.first, bounds.q_start)) & (row < bounds.q_stop)
        visible &= (column >= jnp.maximum(j.first, bounds.k_start)) & (column < bounds.k_stop)
        distance = (row - bounds.q_start) - (column - bounds.k_start)
        visible &= (distance >= bounds.lo) & (distance <= bounds.hi)
        rows, columns = self.rows, self.columns
        if rows.cells is not None and columns.cells is not None:
            q_cell, k_cell = self._pair_slices(rows.cells, columns.cells, i, j)
            visible &= q_cell == k_cell
        if self.work.kinds is not None:
            q_pos, k_pos = self._pair_slices(rows.positions, columns.positions, i, j)
            visible &= shown(self.call.plan, q_pos, k_pos)
        if rows.ids is None or columns.ids is None:
            return visible[None, None, None]
        q_ids = lax.dynamic_slice_in_dim(rows.ids, i.start, self.block_q, axis=1)[:, :, None]
        k_ids = lax.dynamic_slice_in_dim(columns.ids, j.start, self.block_k, axis=1)[:, None]
        return (visible[None] & (q_ids == k_ids) & (q_ids >= 0))[:, None, None]

    def _pair_slices(self, rows: Array, columns: Array, i: Block, j: Block) -> tuple[Array, Array]:
        """Slice per-token arrays ``[T]`` and ``[S]`` for a block, as ``[n, 1]`` and ``[1, m]``."""
        return (
            lax.dynamic_slice_in_dim(rows, i.start, self.block_q)[:, None],
            lax.dynamic_slice_in_dim(columns, j.start, self.block_k)[None],
        )

    def _bias(self, bias: Array, i: Block, j: Block) -> Array:
        """Slice the bias of a block, ``[B or 1, K or 1, G or 1, n, m]``."""
        part = lax.dynamic_slice(
            bias, (_ZERO, _ZERO, i.start, j.start), (*bias.shape[:2], self.block_q, self.block_k)
        )
        kv_heads = 1 if bias.shape[1] == 1 else self.columns.kv.shape[1]
        return part.reshape(part.shape[0], kv_heads, -1, *part.shape[2:])


def loop[T](start: Array | int, stop: Array | int, body: Callable[[Array, T], T], state: T) -> T:
    """Run ``body(n, state)`` for ``n`` from ``start`` to ``stop``, and return the last state."""
    return cast("T", lax.fori_loop(start, stop, body, state))


def _block(number: Array, size: int, length: int) -> Block:
    """Return block ``number`` of a length, moved back where it would reach past the end."""
    return Block(jnp.minimum(number * size, length - size), number * size)


def dot(spec: str, a: Array, b: Array, wide: jnp.dtype) -> Array:
    """Multiply by ``einsum`` in the inputs' dtype, accumulating wide; float32 stays exact."""
    exact = lax.Precision.HIGHEST if a.dtype.itemsize >= 4 else None
    return jnp.einsum(spec, a, b, precision=exact, preferred_element_type=wide)
