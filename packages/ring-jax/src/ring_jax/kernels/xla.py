"""``xla``: blockwise attention in plain JAX, for any platform and dtype and with every option.

One block of scores lives at a time. The forward keeps a running softmax (Milakov and Gimelshein,
arXiv 1805.02867) that starts from what was accumulated, so that merging costs nothing; the backward
recomputes probabilities from the global ``lse`` (Dao et al., arXiv 2205.14135). Loops run over the
blocks that an item's bounds leave, which are known on the device only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jax import lax

from ring_core import TILE
from ring_core.base.config import EVERYTHING
from ring_jax.dropout import dropout_keep
from ring_jax.kernels.block_index import Bounds, item_bounds, shown_in_blocks
from ring_jax.records import (
    Array,
    AttentionState,
    BackwardInputs,
    Grads,
    ItemTable,
    Kernel,
    KeyBlock,
    QueryBlock,
    Static,
)
from ring_jax.search import searchsorted

BLOCK = 512
_ZERO = np.int32(0)  # starts of a slice share a dtype, also where ints are 64 bits wide


@dataclass(frozen=True)
class XlaKernel(Kernel):
    """See the module's text."""

    capabilities = replace(
        EVERYTHING, name="xla", dtypes=("float64", "float32", "bfloat16", "float16"),
        fused_backward=False,
    )  # fmt: skip

    def attend_into(
        self,
        static: Static,
        rows: QueryBlock,
        columns: KeyBlock,
        work: ItemTable,
        into: AttentionState,
    ) -> AttentionState:
        """Attend and merge into ``into``, block row by block row."""
        return ScoreBlocks.of(static, rows, columns, work).for_row_blocks(_attend, into)

    def grads_into(
        self, static: Static, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, work: ItemTable,
        into: Grads,
    ) -> Grads:  # fmt: skip
        """Add the items' gradients to ``into``, block row by block row."""
        body = partial(_differentiate, upstream)
        return ScoreBlocks.of(static, rows, columns, work).for_row_blocks(body, into)


class Block(NamedTuple):
    """A block's first row and column, and what it shows.

    ``start`` differs from ``first`` in the last block of a length that is no multiple of the size:
    it is moved back to lie inside, and rows before ``first`` belong to the block before.
    """

    start: Array
    first: Array


class Scores(NamedTuple):
    """Masked scores, slope of the soft cap, visible cells; ``[B, K, G, n, m]`` or broadcastable."""

    scores: Array
    slope: Array | None
    visible: Array


@dataclass(frozen=True)
class ScoreBlocks:
    """What rows see of columns: which blocks, and each block's scores."""

    static: Static
    rows: QueryBlock
    columns: KeyBlock
    work: ItemTable
    shown: Array | None = None  # bool [I, J], which blocks a mask does not hide

    @classmethod
    def of(
        cls, static: Static, rows: QueryBlock, columns: KeyBlock, work: ItemTable
    ) -> ScoreBlocks:
        """With what a mask that is an array hides."""
        sight = cls(static, rows, columns, work)
        if not static.bias_masks or rows.bias is None:
            return sight
        return replace(
            sight, shown=shown_in_blocks(rows.bias, sight.block_q, sight.block_k).any(axis=0)
        )

    @property
    def block_q(self) -> int:
        """Rows per block."""
        return self._size(self.static.config.block_q, self.rows.q.shape[2])

    @property
    def block_k(self) -> int:
        """Columns per block."""
        return self._size(self.static.config.block_k, self.columns.kv.shape[2])

    def _size(self, wanted: int | None, length: int) -> int:
        unit = 1 if self.work.kinds is None else TILE  # blocks of a predicate are whole tiles
        return min(-(-(wanted or BLOCK) // unit) * unit, length)

    def for_row_blocks[T](self, body: Callable[[ScoreBlocks, Bounds, Array, T], T], state: T) -> T:
        """Run ``body(self, bounds, i, state)`` for each item and each block ``i`` of its rows."""
        every = item_bounds(self.work)

        def item(n: Array, state: T) -> T:
            bounds = Bounds(*every[n])
            start, stop = bounds.q_start // self.block_q, -(-bounds.q_stop // self.block_q)
            return _loop(start, stop, partial(body, self, bounds), state)

        return _loop(0, len(every), item, state)

    def for_column_blocks[T](
        self, bounds: Bounds, i: Array, body: Callable[[Array, T], T], state: T
    ) -> T:
        """Run ``body(j, state)`` for each block that rows of block ``i`` may see.

        But for those that a predicate or a mask hides.
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

        return _loop(*self._column_blocks(bounds, i), unless_empty, state)

    def _column_blocks(self, bounds: Bounds, i: Array) -> tuple[Array, Array]:
        """The numbers ``[start, stop)`` of the blocks that some rows of block ``i`` may see."""
        first = jnp.maximum(i * self.block_q, bounds.q_start) - bounds.q_start
        last = jnp.minimum((i + 1) * self.block_q, bounds.q_stop) - 1 - bounds.q_start
        start = bounds.k_start + jnp.maximum(first - bounds.hi, 0)
        stop = jnp.minimum(bounds.k_stop, bounds.k_start + last - bounds.lo + 1)
        start, stop = self._in_cells(first + bounds.q_start, last + bounds.q_start, start, stop)
        return start // self.block_k, -(-jnp.maximum(stop, start) // self.block_k)

    def _in_cells(
        self, first: Array, last: Array, start: Array, stop: Array
    ) -> tuple[Array, Array]:
        """Columns that lie in the documents of rows ``first`` to ``last``."""
        rows, cells = self.rows.cells, self.columns.cells
        if rows is None or cells is None:
            return start, stop
        low = searchsorted(cells, rows[first], "left")
        high = searchsorted(cells, rows[last], "right")
        return jnp.maximum(start, low), jnp.minimum(stop, high)

    def row_block(self, i: Array) -> Block:
        """Block ``i`` of rows."""
        return _block(i, self.block_q, self.rows.q.shape[2])

    def column_block(self, j: Array) -> Block:
        """Block ``j`` of columns."""
        return _block(j, self.block_k, self.columns.kv.shape[2])

    def take_rows(self, x: Array, i: Block) -> Array:
        """``[B, H, T, ...]`` at a block of rows, as ``[B, K, G, n, ...]``."""
        part = lax.dynamic_slice_in_dim(x, i.start, self.block_q, axis=2)
        kv_heads = self.columns.kv.shape[1]
        return part.reshape(x.shape[0], kv_heads, x.shape[1] // kv_heads, *part.shape[2:])

    def put_rows(self, x: Array, part: Array, i: Block) -> Array:
        """The reverse of :meth:`take_rows`."""
        return lax.dynamic_update_slice_in_dim(x, lax.collapse(part, 1, 3), i.start, axis=2)

    def take_columns(self, j: Block) -> tuple[Array, Array]:
        """Keys ``[B, K, m, D]`` and values ``[B, K, m, Dv]`` of a block."""
        kv = lax.dynamic_slice_in_dim(self.columns.kv, j.start, self.block_k, axis=2)
        return kv[..., : self.static.head_dim], kv[..., self.static.head_dim :]

    def _tiles(self, kinds: Array, i: Array, j: Array) -> Array:
        """The kinds of the tiles of a block; rows of tiles are padded as blocks are."""
        size = (-(-self.block_q // TILE), -(-self.block_k // TILE))
        padded = jnp.pad(kinds, ((0, size[0]), (0, size[1])))
        return lax.dynamic_slice(padded, (i * size[0], j * size[1]), size)

    def scores(self, q: Array, k: Array, bounds: Bounds, i: Block, j: Block) -> Scores:
        """The scores of a block, ``q [B, K, G, n, D]`` against ``k [B, K, m, D]``."""
        x = _dot("bkgnd,bkmd->bkgnm", q, k, self.static.wide) * self.static.scale
        slope = None
        if self.static.softcap is not None:
            squashed = jnp.tanh(x / self.static.softcap)
            x, slope = squashed * self.static.softcap, 1 - squashed * squashed
        visible = self._visible(bounds, i, j)
        if self.rows.bias is not None:
            bias = self._bias(self.rows.bias, i, j).astype(x.dtype)
            visible = visible & (bias > -jnp.inf)
            x = x + self._shifted(bias, i)
        if self.rows.slopes is not None:
            q_pos, k_pos = self._positions(self.rows.positions, self.columns.positions, i, j)
            distance = jnp.abs(q_pos - k_pos).astype(x.dtype)[None, None, None]
            slopes = self.rows.slopes.astype(x.dtype)  # [B or 1, H]
            x -= slopes.reshape(len(slopes), self.columns.kv.shape[1], -1, 1, 1) * distance
        return Scores(jnp.where(visible, x, -jnp.inf), slope, visible)

    def kept(self, i: Block, j: Block) -> Array | None:
        """Dropout's factor for a block of scores, ``[B, K, G, n, m]``; ``None`` without dropout."""
        p, rows = self.static.dropout_p, self.rows
        if p == 0:
            return None
        assert rows.seed is not None and rows.offsets is not None
        batch, heads = rows.q.shape[:2]
        b = jnp.arange(batch) + rows.offsets[0]
        h = (jnp.arange(heads) + rows.offsets[1]).reshape(self.columns.kv.shape[1], -1, 1, 1)
        q_at, k_at = self._positions(rows.indices, self.columns.positions, i, j)
        keep = dropout_keep(p, rows.seed, b[:, None, None, None, None], h, q_at, k_at)
        return keep.astype(self.static.wide) / (1 - p)

    def bias_grad(self, dbias: Array, dscores: Array, i: Block, j: Block) -> Array:
        """Add a block's gradient to the bias's, summed over the dimensions it broadcasts over."""
        shared = tuple(axis for axis in (0, 1) if dbias.shape[axis] == 1)
        grad = lax.collapse(dscores, 1, 3).sum(axis=shared, keepdims=True)
        at = (_ZERO, _ZERO, i.start, j.start)
        old = lax.dynamic_slice(dbias, at, grad.shape)
        return lax.dynamic_update_slice(dbias, old + grad, at)

    def _visible(self, bounds: Bounds, i: Block, j: Block) -> Array:
        """What a block shows, ``[B or 1, 1, 1, n, m]``."""
        row = (i.start + jnp.arange(self.block_q))[:, None]
        column = (j.start + jnp.arange(self.block_k))[None]
        visible = (row >= jnp.maximum(i.first, bounds.q_start)) & (row < bounds.q_stop)
        visible &= (column >= jnp.maximum(j.first, bounds.k_start)) & (column < bounds.k_stop)
        distance = (row - bounds.q_start) - (column - bounds.k_start)
        visible &= (distance >= bounds.lo) & (distance <= bounds.hi)
        rows, columns = self.rows, self.columns
        if rows.cells is not None and columns.cells is not None:
            q_cell, k_cell = self._positions(rows.cells, columns.cells, i, j)
            visible &= q_cell == k_cell
        if self.work.kinds is not None:
            q_pos, k_pos = self._positions(rows.positions, columns.positions, i, j)
            visible &= jnp.asarray(self.static.plan.mask.rule(q_pos, k_pos))
        if rows.ids is None or columns.ids is None:
            return visible[None, None, None]
        q_ids = lax.dynamic_slice_in_dim(rows.ids, i.start, self.block_q, axis=1)[:, :, None]
        k_ids = lax.dynamic_slice_in_dim(columns.ids, j.start, self.block_k, axis=1)[:, None]
        return (visible[None] & (q_ids == k_ids) & (q_ids >= 0))[:, None, None]

    def _positions(self, rows: Array, columns: Array, i: Block, j: Block) -> tuple[Array, Array]:
        """Numbers of a block's rows ``[n, 1]`` and columns ``[1, m]``."""
        return (
            lax.dynamic_slice_in_dim(rows, i.start, self.block_q)[:, None],
            lax.dynamic_slice_in_dim(columns, j.start, self.block_k)[None],
        )

    def _bias(self, bias: Array, i: Block, j: Block) -> Array:
        part = lax.dynamic_slice(
            bias, (_ZERO, _ZERO, i.start, j.start), (*bias.shape[:2], self.block_q, self.block_k)
        )
        kv_heads = 1 if bias.shape[1] == 1 else self.columns.kv.shape[1]
        return part.reshape(part.shape[0], kv_heads, -1, *part.shape[2:])

    def _shifted(self, bias: Array, i: Block) -> Array:
        """A bias ``[B or 1, K or 1, G or 1, n, m]`` less the shift of its rows."""
        if self.rows.bias_shift is None:
            return bias
        part = lax.dynamic_slice_in_dim(self.rows.bias_shift, i.start, self.block_q, axis=2)
        return bias - part.reshape(len(part), *bias.shape[1:4], 1)


def _attend(
    sight: ScoreBlocks, bounds: Bounds, number: Array, into: AttentionState
) -> AttentionState:
    i = sight.row_block(number)
    q = sight.take_rows(sight.rows.q, i)
    out, lse = sight.take_rows(into.out, i), sight.take_rows(into.lse, i)
    seen = (lse > -jnp.inf).astype(lse.dtype)

    def column(j_number: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = state
        j = sight.column_block(j_number)
        k, v = sight.take_columns(j)
        scores, _, visible = sight.scores(q, k, bounds, i, j)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        safe = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        shrink, weights = jnp.exp(top - safe), jnp.exp(scores - safe[..., None])
        total = total * shrink + weights.sum(axis=-1)
        keep = sight.kept(i, j)
        weights = weights if keep is None else weights * keep
        values = _seen_dot(weights, visible, v[:, :, None], acc.dtype)
        return new_top, total, acc * shrink[..., None] + values

    start = (lse, seen, jnp.where(seen[..., None] > 0, out, 0.0))
    top, total, acc = sight.for_column_blocks(bounds, number, column, start)
    out, lse = acc / jnp.where(total == 0, 1.0, total)[..., None], top + jnp.log(total)
    return AttentionState(sight.put_rows(into.out, out, i), sight.put_rows(into.lse, lse, i))


def _differentiate(
    upstream: BackwardInputs, sight: ScoreBlocks, bounds: Bounds, number: Array, into: Grads
) -> Grads:
    i, wide = sight.row_block(number), sight.static.wide
    q, dout = sight.take_rows(sight.rows.q, i), sight.take_rows(upstream.dout, i)
    lse, delta = sight.take_rows(upstream.lse, i), sight.take_rows(upstream.delta, i)[..., None]
    safe = jnp.where(lse == -jnp.inf, jnp.inf, lse)[..., None]  # nothing seen: probabilities are 0

    def column(j_number: Array, state: tuple[Array, Grads]) -> tuple[Array, Grads]:
        dq, grads = state
        j = sight.column_block(j_number)
        k, v = sight.take_columns(j)
        scores, slope, visible = sight.scores(q, k, bounds, i, j)
        probs = jnp.where(visible, jnp.exp(scores - safe), 0.0)
        keep = sight.kept(i, j)
        dprobs = _dot("bkgnd,bkmd->bkgnm", dout, v, wide)
        dprobs = dprobs if keep is None else dprobs * keep
        dscores = jnp.where(visible, probs * (dprobs - delta), 0.0)
        dbias = None if grads.dbias is None else sight.bias_grad(grads.dbias, dscores, i, j)
        dscores = dscores * sight.static.scale
        if slope is not None:  # where nothing is seen it may be NaN
            dscores = jnp.where(visible, dscores * slope, 0.0)
        weights = probs if keep is None else probs * keep
        dq += _seen_dot(dscores, visible, k[:, :, None], wide)
        by_column = jnp.swapaxes(visible, -1, -2)
        dk = _seen_dot(jnp.swapaxes(dscores, -1, -2), by_column, q, wide).sum(axis=2)
        dv = _seen_dot(jnp.swapaxes(weights, -1, -2), by_column, dout, wide).sum(axis=2)
        part = lax.dynamic_slice_in_dim(grads.dkv, j.start, sight.block_k, axis=2)
        part += jnp.concatenate([dk, dv], axis=-1)
        dkv = lax.dynamic_update_slice_in_dim(grads.dkv, part, j.start, axis=2)
        return dq, Grads(grads.dq, dkv, dbias)

    dq, grads = sight.for_column_blocks(bounds, number, column, (sight.take_rows(into.dq, i), into))
    return grads._replace(dq=sight.put_rows(grads.dq, dq, i))


def _loop[T](start: Array | int, stop: Array | int, body: Callable[[Array, T], T], state: T) -> T:
    return cast("T", lax.fori_loop(start, stop, body, state))


def _block(number: Array, size: int, length: int) -> Block:
    return Block(jnp.minimum(number * size, length - size), number * size)


def _dot(spec: str, a: Array, b: Array, wide: jnp.dtype) -> Array:
    """A product in the inputs' dtype, accumulated wide; float32 is not rounded to less."""
    exact = lax.Precision.HIGHEST if a.dtype.itemsize >= 4 else None
    return jnp.einsum(spec, a, b, precision=exact, preferred_element_type=wide)


def _seen_dot(weights: Array, visible: Array, x: Array, wide: jnp.dtype) -> Array:
    """``weights @ x`` reading rows of ``x`` only where they are seen: ``0 * nan`` is ``nan``.

    ``weights [B, K, G, n, m]``, ``x [B, K, G or 1, m, D]``. Rows of ``x`` that are not finite are
    left out of the product and added, where seen, one by one: by a loop of no turns if there are
    none, under ``vmap`` too, where a branch would always be taken.
    """
    odd = ~jnp.isfinite(x).all(axis=-1, keepdims=True)
    spec = "bkgnm,bkgmd->bkgnd" if x.shape[2] > 1 else "bkgnm,bkmd->bkgnd"
    clean = jnp.where(odd, 0, x)
    product = _dot(spec, weights.astype(x.dtype), clean if x.shape[2] > 1 else clean[:, :, 0], wide)

    def add(j: Array, product: Array) -> Array:
        weight, seen = (lax.dynamic_slice_in_dim(y, j, 1, axis=4) for y in (weights, visible))
        value, is_odd = (lax.dynamic_slice_in_dim(y, j, 1, axis=3) for y in (x, odd))
        return product + jnp.where(seen & is_odd, weight * value.astype(wide), 0.0)

    return _loop(0, jnp.where(odd.any(), x.shape[3], 0), add, product)
