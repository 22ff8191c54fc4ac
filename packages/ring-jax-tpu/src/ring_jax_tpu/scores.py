"""One block of scores on chip: what it shows, and the options that change it.

Scores are held transposed, keys along sublanes and queries along lanes: ``[k, q]``. Maxima and sums
over keys are then sums of registers, and everything there is one of a query is a row ``[1, q]``
that needs no padding to whole registers. What there is one of a key arrives as a row too and is
turned into a column only where a mask asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ring_jax.dropout import dropout_keep
from ring_jax.kernels.block_index import Bounds
from ring_jax.records import Static
from ring_jax_tpu.block_index import Visit

Ref = Any  # a reference to memory inside a kernel
SUBLANES = 8
EVERY = slice(None)
LOG2E = math.log2(math.e)

_AXES = {"nn": (1, 0), "nt": (1, 1), "tn": (0, 0)}


class ScalarOperands(NamedTuple):
    """What is prefetched to scalar memory; inside a kernel, references to it."""

    block_index: Any  # int32 [(1 or B) * length]
    bounds: Any  # int32 [R * 6]
    slopes: Any  # float32 [(1 or B) * H], or None
    dropout: Any  # int32 [4]: seed low, seed high, first batch row, first head; or None


class TokenOperands(NamedTuple):
    """Numbers of tokens, int32 ``[1 or B, 1, T]`` or ``None``; inside a kernel ``[1, block]``."""

    positions: Any
    indices: Any
    cells: Any
    ids: Any


@dataclass(frozen=True)
class Constants:
    """What a kernel knows when it is traced."""

    static: Static
    heads: int
    group: int  # query heads a key/value head
    v_dim: int
    block_q: int
    block_k: int
    num_items: int
    slopes_stride: int  # from a batch row's slopes to the next one's; 0 if they share them
    part: tuple[int, int]  # queries and keys that stay in registers from product to product
    prefetches_scores: bool  # for the scores of the part after


class Scores(NamedTuple):
    """Masked scores, slope of the soft cap, what is shown (``None``: all); ``[k, q]``.

    Scores are in units of base 2, ``log2(e)`` times the logits: the factor costs nothing beside the
    softmax scale, and chips know ``2 ** x``.
    """

    scores: Any
    slope: Any | None
    visible: Any | None


@dataclass(frozen=True)
class Tile:
    """A block of scores of one head; references stand for its own rows and columns."""

    consts: Constants
    scalars: ScalarOperands
    rows: TokenOperands
    columns: TokenOperands
    bias: Ref | None  # [q, k]
    bias_shift: Ref | None  # [1, q]
    batch: Any
    head: Any
    visit: Visit
    dropout_scratch: Ref | None = None  # int32 [k, q], for dropout

    @property
    def shape(self) -> tuple[int, int]:
        """``(keys, queries)``."""
        return self.consts.block_k, self.consts.block_q

    def scores(self, q: Any, k: Any, *, masked: bool) -> Scores:
        """The scores of queries ``[q, D]`` against keys ``[k, D]``."""
        static, slope = self.consts.static, None
        products = dot("nt", k, q)
        if static.softcap is None:
            x = products * (static.scale * LOG2E)
        else:
            tanh_scores = jnp.tanh(products * (static.scale / static.softcap))
            x, slope = tanh_scores * (static.softcap * LOG2E), 1 - tanh_scores * tanh_scores
        visible = self._visible() if masked else None
        if self.bias is not None:
            bias = self.bias[...].astype(jnp.float32).T
            shown = bias > -jnp.inf
            bias = bias if self.bias_shift is None else bias - self.bias_shift[...]
            x, visible = x + bias * LOG2E, shown if visible is None else visible & shown
        if self.scalars.slopes is not None:
            place = self.batch * self.consts.slopes_stride + self.head
            distance = jnp.abs(self.rows.positions[...] - as_column(self.columns.positions))
            x -= (self.scalars.slopes[place] * LOG2E) * distance.astype(jnp.float32)
        x = x if visible is None else jnp.where(visible, x, -jnp.inf)
        return Scores(x, slope, visible)

    def parts(self) -> Iterator[tuple[Tile, slice, slice]]:
        """The block in parts, each with its queries and its keys.

        Masks that take a program of their own (dropout, predicates) are left whole.
        """
        consts, whole = self.consts, self.consts.static.plan.mask.predicate is not None
        whole |= self.scalars.dropout is not None
        q_size = consts.block_q if whole else math.gcd(consts.block_q, consts.part[0])
        k_size = consts.block_k if whole else math.gcd(consts.block_k, consts.part[1])
        q_parts, k_parts = consts.block_q // q_size, consts.block_k // k_size
        for i, j in product(range(q_parts), range(k_parts)):
            q_at, k_at = slice(i * q_size, (i + 1) * q_size), slice(j * k_size, (j + 1) * k_size)
            part = replace(
                self,
                consts=replace(consts, block_q=q_size, block_k=k_size),
                rows=_views(self.rows, q_at),
                columns=_views(self.columns, k_at),
                bias=None if self.bias is None else self.bias.at[q_at, k_at],
                bias_shift=None if self.bias_shift is None else self.bias_shift.at[:, q_at],
                visit=self.visit._replace(
                    q_block=self.visit.q_block * q_parts + i,
                    k_block=self.visit.k_block * k_parts + j,
                ),
            )
            yield part, q_at, k_at

    def dropout_keep(self) -> Any | None:
        """Dropout's factor for each score; ``None`` without dropout.

        Ten rounds of Philox over a whole block would be a program of its own size: they run strip
        by strip, on registers.
        """
        p, words = self.consts.static.dropout_p, self.scalars.dropout
        if words is None or self.dropout_scratch is None:
            return None
        seed: Any = [jnp.asarray(words[n]).astype(jnp.uint32) for n in range(2)]
        batch, head = self.batch + words[2], self.head + words[3]
        queries, dropout_scratch = self.rows.indices[...], self.dropout_scratch
        dropout_scratch[...] = jnp.broadcast_to(as_column(self.columns.positions), self.shape)

        def strip(n: Any, _: None) -> None:
            at = pl.ds(pl.multiple_of(n * SUBLANES, SUBLANES), SUBLANES)
            keep = dropout_keep(p, seed, batch, head, queries, dropout_scratch[at, :])
            dropout_scratch[at, :] = keep.astype(jnp.int32)

        lax.fori_loop(0, self.shape[0] // SUBLANES, strip, None)
        return jnp.where(dropout_scratch[...] > 0, 1 / (1 - p), 0.0)

    def _visible(self) -> Any:
        row = lax.broadcasted_iota(jnp.int32, (1, self.shape[1]), 1)
        row += self.visit.q_block * self.shape[1]
        col = lax.broadcasted_iota(jnp.int32, self.shape, 0) + self.visit.k_block * self.shape[0]
        visible = self._in_item(0, row, col)
        for item in range(1, self.consts.num_items):
            visible |= self._in_item(item, row, col)
        if self.rows.cells is not None:
            visible &= self.rows.cells[...] == as_column(self.columns.cells)
        if self.rows.ids is not None:
            visible &= self.rows.ids[...] == as_column(self.columns.ids)
        if self.consts.static.plan.mask.predicate is not None:
            visible &= self.consts.static.plan.mask.rule(
                self.rows.positions[...], as_column(self.columns.positions)
            )
        return visible

    def _in_item(self, item: int, row: Any, col: Any) -> Any:
        """What an item shows of the block: for each row the columns from one to another.

        The first and the number of them are worked out on a single row of registers; one difference
        and one comparison per score remain, of numbers shifted so that those below the first wrap.
        """
        q_start, q_stop, k_start, k_stop, lo, hi = (
            self.scalars.bounds[item * len(Bounds._fields) + n] for n in range(len(Bounds._fields))
        )
        diagonal = row - q_start + k_start
        first, stop = jnp.maximum(diagonal - hi, k_start), jnp.minimum(diagonal - lo + 1, k_stop)
        count = jnp.where((row >= q_start) & (row < q_stop), jnp.maximum(stop - first, 0), 0)
        least = jnp.int32(-(1 << 31))
        return col - (first + least) < count + least


def _views(tokens: TokenOperands, at: slice) -> TokenOperands:
    return TokenOperands(*(None if ref is None else ref.at[:, at] for ref in tokens))


def as_column(ref: Ref) -> Any:
    """A row ``[1, n]`` as a column ``[n, 1]``."""
    return jnp.broadcast_to(ref[...], (SUBLANES, ref.shape[1])).T[:, :1]


def dot(form: str, a: Any, b: Any) -> Any:
    """``a @ b`` with one side transposed (``t``), accumulated in float32; float32 stays exact."""
    axes = _AXES[form]
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (((axes[0],), (axes[1],)), ((), ())), precision=exact,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def add_seen(
    acc: Ref, product: Callable[[Any, Any], Any], weights: Any, visible: Any, x: Any, *,
    tell_infinities: bool = False,
) -> None:  # fmt: skip
    """Add ``product(weights, x)``, reading ``x [n, D]`` only where ``weights [k, q]`` are visible.

    ``0 * nan`` is ``nan``: what is not finite is left out of the product, and what sees it becomes
    ``nan``, or infinite if ``tell_infinities`` (of weights that are not negative).
    """
    value = x.astype(jnp.float32)
    finite = jnp.abs(value) < jnp.inf
    acc[...] += product(weights.astype(x.dtype), jnp.where(finite, x, jnp.zeros_like(x)))

    def count(a: Any, b: Any) -> Any:
        return product(jnp.where(a, 1.0, 0.0).astype(x.dtype), b.astype(x.dtype))

    seen = count(visible, jnp.where(finite, 0.0, 1.0))
    found: Any = jnp.nan
    if tell_infinities:
        signs = jnp.where(value == jnp.inf, 1.0, jnp.where(value == -jnp.inf, -1.0, 0.0))
        net = count(visible & (weights > 0), signs)
        # Where all that is seen are infinities of one sign, and none is multiplied with 0.
        found = jnp.where(net == seen, jnp.inf, jnp.where(net == -seen, -jnp.inf, jnp.nan))
    acc[...] += jnp.where(seen > 0, found, 0.0)
