"""Compute one block of scores on chip, with its mask and the options that change scores.

Scores are held transposed, keys along sublanes and queries along lanes: ``[k, q]``. Maxima and sums
over keys are then operations on whole registers, and per-query numbers are rows ``[1, q]`` that
need no padding to whole registers. Per-key numbers arrive as rows too, and are turned into columns
only if a mask needs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ring_core.base.arguments import FULL, PARTIAL
from ring_jax.dropout import dropout_keep
from ring_jax.kernels.rules import evaluated_rule
from ring_jax.records import CallSpec, Item
from ring_jax_tpu.block_index import NONFINITE, Visit

Ref = Any  # a reference to memory inside a kernel
SUBLANES = 8
ALL = slice(None)
_MOST_UNROLLED_ITEMS = 8  # more are visited in a loop, so that a kernel does not grow with them

_AXES = {"nn": (1, 0), "nt": (1, 1), "tn": (0, 0)}


class ScalarOperands(NamedTuple):
    """The operands prefetched to scalar memory; inside a kernel, references to them."""

    block_index: Any  # int32 [(1 or B) * length]
    bounds: Any  # int32 [R * 6]
    slopes: Any  # float32 [(1 or B) * H], or None
    dropout: Any  # int32 [3 + H]: seed low, seed high, first batch row, each head; or None


class TokenOperands(NamedTuple):
    """Per-token integers, int32 ``[1 or B, 1, T]`` or ``None``; inside a kernel ``[1, block]``."""

    positions: Any  # global position among the keys
    indices: Any  # global index among the queries
    cells: Any  # number of the document or chunk
    ids: Any  # segment id


@dataclass(frozen=True)
class Constants:
    """The static parameters of a kernel."""

    call: CallSpec
    heads: int
    group: int  # query heads per K/V head
    v_dim: int
    block_q: int
    block_k: int
    num_items: int
    slopes_stride: int  # from a batch row's slopes to the next one's; 0 if they share them
    part: tuple[int, int]  # queries and keys that are multiplied at once
    prefetches_scores: bool  # compute a part's scores before the softmax of the part before

    @property
    def unit(self) -> float:
        """Factor of logits and ``lse`` inside the kernels: ``log2(e)``, or 1 in float32.

        Chips compute ``2 ** x``, and the factor is part of the softmax scale. But ``lse`` lies in
        memory in natural units, and rounding it once more shows in float32 if scores are large.
        """
        return 1.0 if self.call.dtype == "float32" else math.log2(math.e)

    def exp(self, x: Any) -> Any:
        """Return the exponential of logits, or of their differences, that are times ``unit``."""
        return jnp.exp(x) if self.unit == 1 else jnp.exp2(x)


class Scores(NamedTuple):
    """The scores of a block, ``[k, q]``: the logits times :attr:`Constants.unit`."""

    scores: Any  # -inf where masked
    slope: Any | None  # derivative of the soft cap
    visible: Any | None  # bool; None if all are visible


@dataclass(frozen=True)
class Tile:
    """A block of scores of one head; references are to its own rows and columns."""

    consts: Constants
    scalars: ScalarOperands
    rows: TokenOperands
    columns: TokenOperands
    bias: Ref | None  # [q, k]
    bias_shift: Ref | None  # [1, q]
    batch: Any
    head: Any
    visit: Visit
    dropout_scratch: Ref | None = None  # int32 [k, q]; None without dropout

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the block, ``(keys, queries)``."""
        return self.consts.block_k, self.consts.block_q

    def when_kind(self, body: Callable[[int], None]) -> None:
        """Run ``body(kind)`` for the kind of the visit's block; nothing if that is empty.

        The kind is known on the device only, so there is code for each.
        """
        for kind in (FULL, PARTIAL, NONFINITE):
            pl.when(self.visit.kind == kind)(partial(body, kind))

    def scores(self, q: Any, k: Any, *, masked: bool) -> Scores:
        """Compute the scores of queries ``[q, D]`` and keys ``[k, D]``."""
        call, unit, slope = self.consts.call, self.consts.unit, None
        products = dot("nt", k, q)
        if call.softcap is None:
            x = products * (call.scale * unit)
        else:
            tanh_scores = jnp.tanh(products * (call.scale / call.softcap))
            x, slope = tanh_scores * (call.softcap * unit), 1 - tanh_scores * tanh_scores
        visible = self._visible() if masked else None
        if self.bias is not None:
            bias = self.bias[...].astype(jnp.float32).T
            shown = bias != -jnp.inf
            bias = bias if self.bias_shift is None else bias - self.bias_shift[...]
            x, visible = x + bias * unit, shown if visible is None else visible & shown
        if self.scalars.slopes is not None:
            index = self.batch * self.consts.slopes_stride + self.head
            distance = jnp.abs(self.rows.positions[...] - as_column(self.columns.positions))
            x -= (self.scalars.slopes[index] * unit) * distance.astype(jnp.float32)
        x = x if visible is None else jnp.where(visible, x, -jnp.inf)
        return Scores(x, slope, visible)

    def parts(self) -> Iterator[tuple[Tile, slice, slice]]:
        """Yield the block in parts that are multiplied at once, with slices of queries and keys.

        With dropout or a predicate, whose code is long, the block is its only part.
        """
        consts, whole = self.consts, self.consts.call.plan.mask.predicate is not None
        whole |= self.scalars.dropout is not None
        q_size = consts.block_q if whole else math.gcd(consts.block_q, consts.part[0])
        k_size = consts.block_k if whole else math.gcd(consts.block_k, consts.part[1])
        q_parts, k_parts = consts.block_q // q_size, consts.block_k // k_size
        for i, j in product(range(q_parts), range(k_parts)):
            q_slice = slice(i * q_size, (i + 1) * q_size)
            k_slice = slice(j * k_size, (j + 1) * k_size)
            part = replace(
                self,
                consts=replace(consts, block_q=q_size, block_k=k_size),
                rows=_views(self.rows, q_slice),
                columns=_views(self.columns, k_slice),
                bias=None if self.bias is None else self.bias.at[q_slice, k_slice],
                bias_shift=None if self.bias_shift is None else self.bias_shift.at[:, q_slice],
                visit=self.visit._replace(
                    q_block=self.visit.q_block * q_parts + i,
                    k_block=self.visit.k_block * k_parts + j,
                ),
            )
            yield part, q_slice, k_slice

    def dropout_factor(self) -> Any | None:
        """Return what dropout multiplies each weight by, 0 or ``1 / (1 - p)``, ``[k, q]``.

        ``None`` without dropout. The ten rounds of Philox run on strips of the block that fit in
        registers: unrolled over a whole block they would be a huge program.
        """
        p, words = self.consts.call.dropout_p, self.scalars.dropout
        if words is None or self.dropout_scratch is None:
            return None
        seed: Any = [jnp.asarray(words[n]).astype(jnp.uint32) for n in range(2)]
        batch, head = self.batch + words[2], words[3 + self.head]
        queries, dropout_scratch = self.rows.indices[...], self.dropout_scratch
        dropout_scratch[...] = jnp.broadcast_to(as_column(self.columns.positions), self.shape)

        # The scratch memory holds positions of keys; each strip overwrites its own by its flags.
        def fill_strip(n: Any, _: None) -> None:
            strip = pl.ds(pl.multiple_of(n * SUBLANES, SUBLANES), SUBLANES)
            keep = dropout_keep(p, seed, batch, head, queries, dropout_scratch[strip, :])
            dropout_scratch[strip, :] = keep.astype(jnp.int32)

        lax.fori_loop(0, self.shape[0] // SUBLANES, fill_strip, None)
        return jnp.where(dropout_scratch[...] > 0, 1 / (1 - p), 0.0)

    def _visible(self) -> Any:
        """Return which scores of the block are visible, bool ``[k, q]``, apart from the bias."""
        row = lax.broadcasted_iota(jnp.int32, (1, self.shape[1]), 1)
        row += self.visit.q_block * self.shape[1]
        col = lax.broadcasted_iota(jnp.int32, self.shape, 0) + self.visit.k_block * self.shape[0]
        visible, num_items = self._in_item(0, row, col), self.consts.num_items
        if num_items <= _MOST_UNROLLED_ITEMS:
            for item in range(1, num_items):
                visible |= self._in_item(item, row, col)
        else:  # a loop's carry cannot be booleans
            flags = lax.fori_loop(
                1, num_items,
                lambda item, flags: flags | self._in_item(item, row, col).astype(jnp.int32),
                visible.astype(jnp.int32),
            )  # fmt: skip
            visible = flags > 0
        if self.rows.cells is not None:
            visible &= self.rows.cells[...] == as_column(self.columns.cells)
        if self.rows.ids is not None:
            visible &= self.rows.ids[...] == as_column(self.columns.ids)
        if self.consts.call.plan.mask.predicate is not None:
            visible &= evaluated_rule(
                self.consts.call.plan, self.rows.positions[...], as_column(self.columns.positions)
            )
        return visible

    def _in_item(self, item: Any, row: Any, col: Any) -> Any:
        """Return which scores of the block an item shows: a range of columns for each row.

        The first column and their number are computed on a single row of registers. One difference
        and one comparison per score remain, of numbers offset so that columns before the first
        wrap to large ones.
        """
        q_start, q_stop, k_start, k_stop, lo, hi = (
            self.scalars.bounds[item * len(Item._fields) + n] for n in range(len(Item._fields))
        )
        diagonal = row - q_start + k_start
        first, stop = jnp.maximum(diagonal - hi, k_start), jnp.minimum(diagonal - lo + 1, k_stop)
        count = jnp.where((row >= q_start) & (row < q_stop), jnp.maximum(stop - first, 0), 0)
        least = jnp.int32(-(1 << 31))
        return col - (first + least) < count + least


def _views(tokens: TokenOperands, part: slice) -> TokenOperands:
    """Return references to a part of the tokens of a block."""
    return TokenOperands(*(None if ref is None else ref.at[:, part] for ref in tokens))


def as_column(ref: Ref) -> Any:
    """Transpose a row ``[1, n]`` to a column ``[n, 1]``."""
    return jnp.broadcast_to(ref[...], (SUBLANES, ref.shape[1])).T[:, :1]


def dot(form: str, a: Any, b: Any) -> Any:
    """Multiply matrices, accumulating in float32; products of float32 are exact.

    ``form`` has a letter for each side: ``n`` as it is, ``t`` transposed.
    """
    axes = _AXES[form]
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (((axes[0],), (axes[1],)), ((), ())), precision=exact,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def add_visible(
    acc: Ref, product: Callable[[Any, Any], Any], weights: Any, visible: Any, x: Any, *,
    keep_infinities: bool = False,
) -> None:  # fmt: skip
    """Add ``product(weights, x)``, reading ``x [n, D]`` only where ``weights [k, q]`` are visible.

    ``0 * nan`` is ``nan``: numbers that are not finite are left out of the product, and sums that
    see one become ``nan``. With ``keep_infinities``, for weights that are not negative, sums that
    see infinities of one sign become infinite.
    """
    value = x.astype(jnp.float32)
    finite = jnp.abs(value) < jnp.inf
    acc[...] += product(weights.astype(x.dtype), jnp.where(finite, x, jnp.zeros_like(x)))

    def count(a: Any, b: Any) -> Any:
        return product(jnp.where(a, 1.0, 0.0).astype(x.dtype), b.astype(x.dtype))

    num_nonfinite = count(visible, jnp.where(finite, 0.0, 1.0))
    result: Any = jnp.nan
    if keep_infinities:
        signs = jnp.where(value == jnp.inf, 1.0, jnp.where(value == -jnp.inf, -1.0, 0.0))
        net = count(visible & (weights > 0), signs)
        # Infinite if all of them are infinities of one sign, and none is multiplied by 0.
        result = jnp.where(
            net == num_nonfinite, jnp.inf, jnp.where(net == -num_nonfinite, -jnp.inf, jnp.nan)
        )
    acc[...] += jnp.where(num_nonfinite > 0, result, 0.0)
