"""What both kernels for Hopper share: what they are compiled for, and which blocks an item has."""


# What a kernel works on has no type in Python.
# ruff: noqa: ANN001, ANN201, N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
BOUNDS = gl.constexpr(6)  # numbers of an item: q_start, q_stop, k_start, k_stop, lo, hi


class HopperConstexprs(NamedTuple):
    """What a kernel here is compiled for.

    Attributes:
        D: Head dim of queries, keys and values.
        ITEMS: How many items there are.
        SCALE: Of the logits, positive.
        BLOCK: Keys per block in the forward, queries per block in the backward.
        STAGES: Blocks on their way at once.
        FRESH: Results are new, nothing is merged into.
        KV_PACKED: Values lie behind their keys, in the same rows, and so do their gradients.
        PINGPONG: Groups of warps issue their products in turns, as FlashAttention-3 does.
        STREAM_K: The last tiles are split over programs, as in Stream-K.
    """

    D: gl.constexpr
    ITEMS: gl.constexpr
    SCALE: gl.constexpr
    BLOCK: gl.constexpr
    STAGES: gl.constexpr
    FRESH: gl.constexpr
    KV_PACKED: gl.constexpr
    PINGPONG: gl.constexpr
    STREAM_K: gl.constexpr


@gluon.jit
def swizzled_block_and_head(tile, blocks, heads_per_swizzle):
    """A tile's block among the ``blocks`` of its head, and which head, in the order for the L2.

    The first blocks of all ``heads_per_swizzle`` heads come before the second ones.
    """
    each = blocks * heads_per_swizzle
    within = tile % each
    return within // heads_per_swizzle, (
        tile // each
    ) * heads_per_swizzle + within % heads_per_swizzle


@gluon.jit
def columns_of(kv_head, consts: gl.constexpr):
    """Where in rows of memory the keys of a head begin, and where its values."""
    if consts.KV_PACKED:
        column = kv_head * (2 * consts.D)
        values = column + consts.D
    else:
        column = kv_head * consts.D
        values = column
    return column, values


@gluon.jit
def sides_of(items, n, ROWS_OUTSIDE: gl.constexpr):
    """Item ``n`` from outside: its outer tokens, its inner ones, and the band between them.

    ``(begin, end, start, stop, near, far)``: an outer token sees inner ones from ``near`` to
    ``far`` of its own place, counted from ``begin`` and ``start``.
    """
    at = items + n * BOUNDS
    lo, hi = gl.load(at + 4), gl.load(at + 5)
    if ROWS_OUTSIDE:
        begin, end, start, stop = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
        near, far = -hi, -lo
    else:
        start, stop, begin, end = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
        near, far = lo, hi
    return begin, end, start, stop, near, far


@gluon.jit
def visited(items, n, outer, outer_stop, BLOCK: gl.constexpr, ROWS_OUTSIDE: gl.constexpr):
    """Blocks of item ``n`` that tokens ``[outer, outer_stop)`` see, and those seen whole by all.

    ``(start, full_start, full_stop, end)``, ranges as ``inner_blocks`` has them.
    """
    begin, end, start, stop, near, far = sides_of(items, n, ROWS_OUTSIDE)
    shift = start - begin
    top, bottom = gl.maximum(outer, begin), gl.minimum(outer_stop, end) - 1
    first = gl.maximum(top + shift + near, start)
    last = gl.minimum(bottom + shift + far + 1, stop)
    some = (top <= bottom) & (first < last)
    low = gl.where(some, first // BLOCK, 0)
    high = gl.where(some, (last + BLOCK - 1) // BLOCK, 0)
    whole_first = gl.maximum(bottom + shift + near, start)
    whole_last = gl.minimum(top + shift + far + 1, stop)
    whole = (outer >= begin) & (outer_stop <= end) & (whole_first < whole_last)
    whole_low = gl.where(whole, (whole_first + BLOCK - 1) // BLOCK, low)
    whole_high = gl.where(whole, whole_last // BLOCK, low)
    whole_low = gl.minimum(gl.maximum(whole_low, low), high)
    whole_high = gl.maximum(gl.minimum(whole_high, high), whole_low)
    return low, whole_low, whole_high, high


@gluon.jit
def seen_by(items, n, outer, ROWS_OUTSIDE: gl.constexpr):
    """Which inner tokens ``[first, stop)`` each outer token sees of item ``n``."""
    begin, end, start, stop, near, far = sides_of(items, n, ROWS_OUTSIDE)
    diagonal = outer + (start - begin)
    first = gl.maximum(diagonal + near, start)
    last = gl.minimum(diagonal + far + 1, stop)
    return first, gl.where((outer >= begin) & (outer < end), last, 0)
