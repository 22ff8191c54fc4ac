"""Parts that both kernels for Hopper share: their constants, and the blocks of a work item."""


# The arguments and values of kernels have no types in Python.
# ruff: noqa: ANN001, ANN201, N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
BOUNDS = gl.constexpr(6)  # integers of an item: q_start, q_stop, k_start, k_stop, lo, hi


class HopperConstexprs(NamedTuple):
    """The compile-time constants of a kernel for Hopper.

    Attributes:
        D: Head dim of queries, keys and values.
        ITEMS: Number of work items.
        SCALE: The softmax scale, positive.
        BLOCK: Keys per block in the forward, queries per block in the backward.
        STAGES: Number of blocks in flight at once.
        OVERWRITE: Results are overwritten, not merged into.
        KV_PACKED: Each row holds a key and its value after it; so do the gradients' rows.
        PINGPONG: Groups of warps issue their matrix products alternately, as in FlashAttention-3.
        STREAM_K: The last tiles are split over thread blocks, as in Stream-K.
    """

    D: gl.constexpr
    ITEMS: gl.constexpr
    SCALE: gl.constexpr
    BLOCK: gl.constexpr
    STAGES: gl.constexpr
    OVERWRITE: gl.constexpr
    KV_PACKED: gl.constexpr
    PINGPONG: gl.constexpr
    STREAM_K: gl.constexpr


class Sizes(NamedTuple):
    """The sizes of a launch: lengths, numbers of heads, and its Stream-K schedule.

    Attributes:
        q_len, k_len: Queries and keys of a batch row.
        batch: Batch rows.
        heads: Query heads.
        group: Query heads that share a K/V head.
        heads_per_swizzle: Heads whose blocks run side by side and share the L2 cache: query heads
            and their keys in the forward, K/V heads and their queries in the backward.
        stream_k: Pointer to the fields of the schedule, or None.
    """

    q_len: Any
    k_len: Any
    batch: Any
    heads: Any
    group: Any
    heads_per_swizzle: Any
    stream_k: Any


@gluon.jit
def swizzled_block_and_head(tile, blocks, heads_per_swizzle):
    """Return ``(block, head)`` of a tile, in an order in which neighbours share the L2 cache.

    Tiles of a head read the same keys in the forward, where they are blocks of queries, and the
    same queries in the backward, where they are blocks of keys.

    Heads come in groups of ``heads_per_swizzle``. In a group block 0 of all its heads comes first,
    then block 1 of all, and so on to ``blocks``.
    """
    per_swizzle = blocks * heads_per_swizzle
    within = tile % per_swizzle
    return within // heads_per_swizzle, (
        tile // per_swizzle
    ) * heads_per_swizzle + within % heads_per_swizzle


@gluon.jit
def columns_of(kv_head, consts: gl.constexpr):
    """Return the columns at which a head's keys and values begin in rows of memory."""
    if consts.KV_PACKED:
        column = kv_head * (2 * consts.D)
        values = column + consts.D
    else:
        column = kv_head * consts.D
        values = column
    return column, values


@gluon.jit
def sides_of(items, n, ROWS_OUTSIDE: gl.constexpr):
    """Load the bounds of item ``n``, those of the tokens of the kernel's outer loop first.

    Return ``(begin, end, start, stop, low, high)``: outer tokens ``[begin, end)`` see inner tokens
    of ``[start, stop)``. Counted from ``begin`` and ``start``, outer token ``o`` sees inner tokens
    ``o + low`` to ``o + high``. With ``ROWS_OUTSIDE`` queries are the outer side, else keys are.
    """
    item = items + n * BOUNDS
    lo, hi = gl.load(item + 4), gl.load(item + 5)
    if ROWS_OUTSIDE:
        begin, end = gl.load(item), gl.load(item + 1)
        start, stop = gl.load(item + 2), gl.load(item + 3)
        low, high = -hi, -lo
    else:
        start, stop = gl.load(item), gl.load(item + 1)
        begin, end = gl.load(item + 2), gl.load(item + 3)
        low, high = lo, hi
    return begin, end, start, stop, low, high


@gluon.jit
def visited(items, n, outer, outer_stop, BLOCK: gl.constexpr, ROWS_OUTSIDE: gl.constexpr):
    """Return the range of inner blocks that a block of outer tokens visits for item ``n``.

    ``(low, whole_low, whole_high, high)`` are numbers of blocks: some of the outer tokens ``[outer,
    outer_stop)`` see something of blocks ``[low, high)``, and all of them see all of ``[whole_low,
    whole_high)``, which need no mask.
    """
    begin, end, start, stop, lo, hi = sides_of(items, n, ROWS_OUTSIDE)
    shift = start - begin
    # From the first inner token that the first outer token sees to the last that the last one sees.
    top, bottom = gl.maximum(outer, begin), gl.minimum(outer_stop, end) - 1
    first = gl.maximum(top + shift + lo, start)
    last = gl.minimum(bottom + shift + hi + 1, stop)
    some = (top <= bottom) & (first < last)
    low = gl.where(some, first // BLOCK, 0)
    high = gl.where(some, (last + BLOCK - 1) // BLOCK, 0)
    # Every outer token sees what lies between the last one's first and the first one's last.
    whole_first = gl.maximum(bottom + shift + lo, start)
    whole_last = gl.minimum(top + shift + hi + 1, stop)
    whole = (outer >= begin) & (outer_stop <= end) & (whole_first < whole_last)
    whole_low = gl.where(whole, (whole_first + BLOCK - 1) // BLOCK, low)
    whole_high = gl.where(whole, whole_last // BLOCK, low)
    whole_low = gl.minimum(gl.maximum(whole_low, low), high)
    whole_high = gl.maximum(gl.minimum(whole_high, high), whole_low)
    return low, whole_low, whole_high, high


@gluon.jit
def seen_by(items, n, outer, ROWS_OUTSIDE: gl.constexpr):
    """Return the inner tokens ``[first, stop)`` that each outer token sees of item ``n``.

    One that sees none has ``stop <= first``; outside of the item ``stop`` is 0.
    """
    begin, end, start, stop, lo, hi = sides_of(items, n, ROWS_OUTSIDE)
    diagonal = outer + (start - begin)
    first = gl.maximum(diagonal + lo, start)
    last = gl.minimum(diagonal + hi + 1, stop)
    return first, gl.where((outer >= begin) & (outer < end), last, 0)
