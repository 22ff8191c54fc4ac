"""Parts that both kernels for Hopper share: their constants, and the blocks of a work item."""


# The arguments and values of kernels have no types in Python.
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
        SOFTCAP: Soft cap of the scores, or ``None``.
        ALIBI: Scores have ALiBi's bias.
        DROPPED: The probability to drop a weight, times 2**32; ``None`` is no dropout.
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
    SOFTCAP: gl.constexpr
    ALIBI: gl.constexpr
    DROPPED: gl.constexpr


class Bands(NamedTuple):
    """Bands of the work items, and the documents within them: the keys that each query sees.

    The kernel's outer loop is over one side, the queries in the forward and the keys in the
    backward; its inner loop over the other one.

    Attributes:
        items: int32 ``[ITEMS, 6]``: ``q_start, q_stop, k_start, k_stop, lo, hi`` of each item.
        cells: int32 ``[2, outer_len]``: where the document of each outer token starts and stops
            among the inner tokens. Both ascend, as all layouts hold tokens in their order. ``None``
            where no item spans several documents. Where batch rows differ it is of the row at hand.
        outer_len: Number of outer tokens of a batch row; ``None`` without ``cells``.
        cells_batch: Stride of batch rows in ``cells``, 0 where they share it.
    """

    items: Any
    cells: Any
    outer_len: Any
    cells_batch: Any


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
def of_batch_row(bands, b):
    """Return the bands with the documents of a batch row."""
    if bands.cells is None:
        row = bands
    else:
        cells = bands.cells + b * bands.cells_batch
        row = Bands(bands.items, cells, bands.outer_len, bands.cells_batch)
    return row


@gluon.jit
def sides_of(bands, n, ROWS_OUTSIDE: gl.constexpr):
    """Load the bounds of item ``n``, those of the tokens of the kernel's outer loop first.

    Return ``(begin, end, start, stop, low, high)``: outer tokens ``[begin, end)`` see inner tokens
    of ``[start, stop)``. Counted from ``begin`` and ``start``, outer token ``o`` sees inner tokens
    ``o + low`` to ``o + high``. With ``ROWS_OUTSIDE`` queries are the outer side, else keys are.
    """
    item = bands.items + n * BOUNDS
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
def document_of(bands, outer):
    """Return the inner tokens ``[start, stop)`` of the document of each outer token."""
    known = (outer >= 0) & (outer < bands.outer_len)
    start = gl.load(bands.cells + outer, mask=known, other=0)
    return start, gl.load(bands.cells + bands.outer_len + outer, mask=known, other=0)


@gluon.jit
def visited(bands, n, outer, outer_stop, BLOCK: gl.constexpr, ROWS_OUTSIDE: gl.constexpr):
    """Return the range of inner blocks that a block of outer tokens visits for item ``n``.

    ``(low, whole_low, whole_high, high)`` are numbers of blocks: some of the outer tokens ``[outer,
    outer_stop)`` see something of blocks ``[low, high)``, and all of them see all of ``[whole_low,
    whole_high)``, which need no mask.
    """
    begin, end, start, stop, lo, hi = sides_of(bands, n, ROWS_OUTSIDE)
    shift = start - begin
    # From the first inner token that the first outer token sees to the last that the last one sees.
    top, bottom = gl.maximum(outer, begin), gl.minimum(outer_stop, end) - 1
    first = gl.maximum(top + shift + lo, start)
    last = gl.minimum(bottom + shift + hi + 1, stop)
    if bands.cells is not None:
        # Documents ascend, too: the first outer token's begins first, the last one's stops last.
        top_start, top_stop = document_of(bands, top)
        bottom_start, bottom_stop = document_of(bands, bottom)
        first, last = gl.maximum(first, top_start), gl.minimum(last, bottom_stop)
    some = (top <= bottom) & (first < last)
    low = gl.where(some, first // BLOCK, 0)
    high = gl.where(some, (last + BLOCK - 1) // BLOCK, 0)
    # Every outer token sees what lies between the last one's first and the first one's last.
    whole_first = gl.maximum(bottom + shift + lo, start)
    whole_last = gl.minimum(top + shift + hi + 1, stop)
    if bands.cells is not None:
        whole_first = gl.maximum(whole_first, bottom_start)
        whole_last = gl.minimum(whole_last, top_stop)
    whole = (outer >= begin) & (outer_stop <= end) & (whole_first < whole_last)
    whole_low = gl.where(whole, (whole_first + BLOCK - 1) // BLOCK, low)
    whole_high = gl.where(whole, whole_last // BLOCK, low)
    whole_low = gl.minimum(gl.maximum(whole_low, low), high)
    whole_high = gl.maximum(gl.minimum(whole_high, high), whole_low)
    return low, whole_low, whole_high, high


@gluon.jit
def seen_by(bands, n, outer, ROWS_OUTSIDE: gl.constexpr):
    """Return the inner tokens ``[first, stop)`` that each outer token sees of item ``n``.

    One that sees none has ``stop <= first``; outside of the item ``stop`` is 0.
    """
    begin, end, start, stop, lo, hi = sides_of(bands, n, ROWS_OUTSIDE)
    diagonal = outer + (start - begin)
    first = gl.maximum(diagonal + lo, start)
    last = gl.minimum(diagonal + hi + 1, stop)
    if bands.cells is not None:
        document_start, document_stop = document_of(bands, outer)
        first, last = gl.maximum(first, document_start), gl.minimum(last, document_stop)
    return first, gl.where((outer >= begin) & (outer < end), last, 0)
