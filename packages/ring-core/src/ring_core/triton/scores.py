"""Functions of the Triton kernels on one block of scores: its mask, and options that change it.

A kernel keeps a block of one side in registers, its *outer* side, and loops over blocks of the
other, its *inner* side: queries and keys in the forward and for dQ, keys and queries for dK and dV.
Rows and columns come as index tensors that broadcast against each other, ``[q, 1]`` and ``[1, k]``
or ``[1, q]`` and ``[k, 1]``, so that the same functions serve either.
"""

# The arguments and values of kernels have no types in Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ring_core.triton.tile_configs import NAN_SAFE_BLOCK

LOG2E = tl.constexpr(math.log2(math.e))
TILE = tl.constexpr(128)  # of a predicate mask
BOUNDS = tl.constexpr(6)  # numbers of an item: q_start, q_stop, k_start, k_stop, lo, hi
EXACT = tl.constexpr("tf32x3")  # float32 as products of its high and low parts
_FAR = tl.constexpr(1 << 30)
_INF = tl.constexpr(float("inf"))


class Constexprs(NamedTuple):
    """The constants that a kernel is compiled for.

    Attributes:
        D, DV: Head dims of queries and keys, and of values.
        PADDED, PADDED_V: The same, rounded up to powers of two.
        ITEMS: Number of work items (rectangles with a band) in the launch.
        INDEXED: Blocks to visit come from a block index; otherwise they follow from the items.
        ALL_PARTIAL: Every block needs its mask.
        SCALE, SOFTCAP: Scale and soft cap of the scores; ``None`` is no soft cap.
        UNIT: Kernels multiply logits and ``lse`` by this: ``log2(e)``, or 1
            (:func:`ring_core.triton.tile_configs.score_unit`).
        DROPPED: The probability to drop a weight, times 2**32; ``None`` is no dropout.
        BLOCK_Q, BLOCK_K: Queries and keys per block.
        TMA: Tensors come as descriptors, for the copy engine of Hopper and later.
        Q_IS_MULTIPLE, K_IS_MULTIPLE: Lengths are multiples of the block sizes.
        FUSED: The kernel for dK and dV adds to dQ as well.
        OVERWRITE: Results are overwritten, not read and added to; but for dQ where ``FUSED`` adds.
        KV_PACKED: Values lie behind their keys, in the same rows, and so do their gradients.
        BIAS_BY_POSITION: A bias has a column for each position, not for each key at hand.
        ALIGNED8: Keys come in groups of 8 with consecutive positions, the first a multiple of 8.
        Q_STEP, K_STEP, V_STEP, OUT_STEP, DQ_STEP, DK_STEP, DV_STEP: Elements from a token of a head
            to the next token; ``OUT_STEP`` is of the output or of its gradient.
    """

    D: tl.constexpr
    DV: tl.constexpr
    PADDED: tl.constexpr
    PADDED_V: tl.constexpr
    ITEMS: tl.constexpr
    INDEXED: tl.constexpr
    ALL_PARTIAL: tl.constexpr
    SCALE: tl.constexpr
    SOFTCAP: tl.constexpr
    UNIT: tl.constexpr
    DROPPED: tl.constexpr
    BLOCK_Q: tl.constexpr
    BLOCK_K: tl.constexpr
    TMA: tl.constexpr
    Q_IS_MULTIPLE: tl.constexpr
    K_IS_MULTIPLE: tl.constexpr
    FUSED: tl.constexpr
    OVERWRITE: tl.constexpr
    KV_PACKED: tl.constexpr
    BIAS_BY_POSITION: tl.constexpr
    ALIGNED8: tl.constexpr
    Q_STEP: tl.constexpr
    K_STEP: tl.constexpr
    V_STEP: tl.constexpr
    OUT_STEP: tl.constexpr
    DQ_STEP: tl.constexpr
    DK_STEP: tl.constexpr
    DV_STEP: tl.constexpr


def nan_safe_constexprs(consts: Constexprs) -> Constexprs:
    """Return the constants of a slower pass that recomputes blocks whose results are not finite.

    Its blocks are small and read by pointers; it masks every block, and finds them by the items.
    """
    return consts._replace(
        BLOCK_Q=min(NAN_SAFE_BLOCK, consts.BLOCK_Q),
        BLOCK_K=min(NAN_SAFE_BLOCK, consts.BLOCK_K), TMA=False,
        Q_IS_MULTIPLE=False, K_IS_MULTIPLE=False, INDEXED=False, ALL_PARTIAL=True,
    )  # fmt: skip


def as_constants(consts: Constexprs) -> Constexprs:
    """Wrap constants in ``tl.constexpr``, as Triton 3.6 and 3.7 need to pass them to functions."""
    return Constexprs(*(x if x is None else tl.constexpr(x) for x in consts))


class Strides(NamedTuple):
    """Strides of batch rows and of heads, in elements.

    ``out`` is the output or its gradient, ``lse`` is ``lse`` and delta. Strides of tensors that a
    kernel does not touch are ``None``.
    """

    q_batch: Any
    q_head: Any
    k_batch: Any
    k_head: Any
    v_batch: Any
    v_head: Any
    out_batch: Any
    out_head: Any
    lse_batch: Any
    lse_head: Any
    dq_batch: Any
    dq_head: Any
    dk_batch: Any
    dk_head: Any
    dv_batch: Any
    dv_head: Any


class Options(NamedTuple):
    """The inputs of masks and options: pointers, ``None`` for options not used, and sizes.

    Attributes:
        items: int32 ``[items, 6]``: of each work item ``q_start, q_stop, k_start, k_stop``, and its
            band ``lo, hi``, counted from its corner.
        cells: int32 ``[2, outer length]``: of each outer token where its document starts and stops
            among the inner tokens.
        q_ids, k_ids: int32 ``[B, T]`` and ``[B, S]``: equal ones see each other, negative ones
            nothing.
        q_at, k_at: int32 ``[T]`` and ``[S]``, positions among the keys.
        q_index: int32 ``[T]``, indices among the queries.
        tiles: int32 ``[ceil(T / 128), ceil(S / 128)]``, numbers of tiles in ``bits``; -1 is a full
            tile, -2 an empty one.
        bits: int32 ``[n, 128, 4]``, tiles of a predicate, the first column in the lowest bit.
        bias: ``[B or 1, H or 1, T, S]`` with the strides ``bias_batch``, ``bias_head`` and
            ``bias_row``; with ``Constexprs.BIAS_BY_POSITION`` its columns are positions.
        bias_shift: float32 ``[B or 1, H or 1, T]`` with the strides ``bias_shift_batch`` and
            ``bias_shift_head``, taken off the bias of each row; ``lse`` is that of shifted scores.
        slopes: float32 ``[B or 1, H]`` with the stride ``slopes_batch``.
        dropout: int32 ``[3 + H]``: the seed's low and high words, the global index of the first
            batch row, and those of all heads.
    """

    items: Any
    cells: Any
    q_ids: Any
    k_ids: Any
    q_at: Any
    k_at: Any
    q_index: Any
    tiles: Any
    bits: Any
    bias: Any
    bias_batch: Any
    bias_head: Any
    bias_row: Any
    bias_shift: Any
    bias_shift_batch: Any
    bias_shift_head: Any
    slopes: Any
    slopes_batch: Any
    dropout: Any
    q_len: Any
    k_len: Any


@triton.jit
def swizzled_block_and_head(blocks, heads_per_swizzle):
    """Return a thread block's block number and head, swizzled so that the L2 serves more heads.

    The first blocks of all ``heads_per_swizzle`` heads come before the second ones. Blocks with
    most work should start first, so that none of them is left when the GPU runs empty: where these
    are the last ones, as of queries under a causal mask, the caller counts from the end.
    """
    per_swizzle = blocks * heads_per_swizzle
    within = tl.program_id(0) % per_swizzle
    return within // heads_per_swizzle, (
        tl.program_id(0) // per_swizzle
    ) * heads_per_swizzle + within % heads_per_swizzle


@triton.jit
def of_head(x, batch, head, batch_stride, head_stride, TMA: tl.constexpr):
    """Return the pointer to one head of a tensor; a descriptor (``TMA``) is of all heads."""
    if not TMA:
        x += batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
    return x


@triton.jit
def load_tile(
    x, flat, start, length, DIM: tl.constexpr, PADDED: tl.constexpr, AT: tl.constexpr,
    STEP: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr, IS_MULTIPLE: tl.constexpr,
):  # fmt: skip
    """Load ``[BLOCK, PADDED]`` of one head: tokens from ``start`` on, dims from ``AT`` on.

    Elements beyond the length, or beyond ``DIM``, are zero. ``x`` points at the head, or is a
    descriptor of ``[B * heads, length, dims]``, whose blocks the copy engine fetches; then ``flat``
    is the batch row and head.
    """
    if TMA:
        tile = x.load([flat, start, AT]).reshape(BLOCK, PADDED)
    else:
        token, dim = tl.arange(0, BLOCK), tl.arange(0, PADDED)
        first = x + tl.cast(start, tl.int64) * STEP + AT
        pointers = first + token[:, None] * STEP + dim[None, :]
        if IS_MULTIPLE and DIM == PADDED:
            tile = tl.load(pointers)
        else:
            inside = (start + token < length)[:, None] & (dim < DIM)[None, :]
            tile = tl.load(pointers, mask=inside, other=0.0)
    return tile


@triton.jit
def load_keys(k, flat, start, length, consts):
    """Load a block of keys ``[BLOCK_K, PADDED]``."""
    return load_tile(
        k, flat, start, length, consts.D, consts.PADDED, 0, consts.K_STEP, consts.BLOCK_K,
        consts.TMA, consts.K_IS_MULTIPLE,
    )  # fmt: skip


@triton.jit
def load_values(v, flat, start, length, consts):
    """Load a block of values ``[BLOCK_K, PADDED_V]``."""
    return load_tile(
        v, flat, start, length, consts.DV, consts.PADDED_V, consts.D if consts.KV_PACKED else 0,
        consts.V_STEP, consts.BLOCK_K, consts.TMA, consts.K_IS_MULTIPLE,
    )  # fmt: skip


@triton.jit
def load_queries(q, flat, start, length, consts):
    """Load a block of queries ``[BLOCK_Q, PADDED]``."""
    return load_tile(
        q, flat, start, length, consts.D, consts.PADDED, 0, consts.Q_STEP, consts.BLOCK_Q,
        consts.TMA, consts.Q_IS_MULTIPLE,
    )  # fmt: skip


@triton.jit
def load_gradient(dout, flat, start, length, consts):
    """Load a block of the gradient of the output ``[BLOCK_Q, PADDED_V]``."""
    return load_tile(
        dout, flat, start, length, consts.DV, consts.PADDED_V, 0, consts.OUT_STEP, consts.BLOCK_Q,
        consts.TMA, consts.Q_IS_MULTIPLE,
    )  # fmt: skip


@triton.jit
def interval(x, n, outer, inner_length, ROWS: tl.constexpr):
    """Return the inner tokens ``[first, stop)`` that each outer token sees of item ``n``.

    ``ROWS`` says that the outer side is the queries. A fully masked token has an interval that
    does not end behind its begin; one outside of the item has ``[inner_length, 0)``.
    """
    item = x.items + n * BOUNDS
    lo, hi = tl.load(item + 4), tl.load(item + 5)
    # The outer side of the rectangle is [begin, end), its inner side [start, stop). The band is
    # lo <= i - j <= hi: query i sees keys i - hi to i - lo, and queries j + lo to j + hi see key j.
    if ROWS:
        begin, end = tl.load(item), tl.load(item + 1)
        start, stop = tl.load(item + 2), tl.load(item + 3)
        first_offset, last_offset = -hi, -lo
    else:
        start, stop = tl.load(item), tl.load(item + 1)
        begin, end = tl.load(item + 2), tl.load(item + 3)
        first_offset, last_offset = lo, hi
    diagonal = outer - begin + start
    first = tl.maximum(diagonal + first_offset, start)
    last = tl.minimum(diagonal + last_offset + 1, stop)
    inside = (outer >= begin) & (outer < end)
    if x.cells is not None:
        length = x.q_len if ROWS else x.k_len
        known = outer < length
        first = tl.maximum(first, tl.load(x.cells + outer, mask=known, other=0))
        last = tl.minimum(last, tl.load(x.cells + length + outer, mask=known, other=0))
    return tl.where(inside, first, inner_length), tl.where(inside, last, 0)


@triton.jit
def inner_blocks(first, stop, is_real, BLOCK: tl.constexpr, consts):
    """Return the inner blocks to visit ``[start, end)``, and those that need no mask in between.

    The latter, ``[full_start, full_stop)``, are seen whole by all outer tokens. Outer tokens beyond
    the length (not ``is_real``) see nothing, but their results are not kept, so they do not make a
    block partial.

    Returns:
        ``(start, full_start, full_stop, end)``.
    """
    start = tl.min(first) // BLOCK
    # A token outside of the item has stop = 0 and the length as first: it widens neither end.
    end = tl.maximum((tl.max(stop) + BLOCK - 1) // BLOCK, start)
    if consts.ALL_PARTIAL:
        full_start, full_stop = start, start
    else:
        # Whole blocks lie between the latest first and the earliest stop of all outer tokens.
        full_start = (tl.max(tl.where(is_real, first, 0)) + BLOCK - 1) // BLOCK
        full_stop = tl.min(tl.where(is_real, stop, _FAR)) // BLOCK
        full_start = tl.minimum(tl.maximum(full_start, start), end)
        full_stop = tl.maximum(tl.minimum(full_stop, end), full_start)
    return start, full_start, full_stop, end


@triton.jit
def indexed_blocks(block_index, counts, block_index_batch, batch, block, num_inner_blocks):
    """Return the pointer to a block's list of inner blocks, and how many are partial and full.

    Partial blocks, which need their mask, come first in the list. ``block_index_batch`` is the
    stride of batch rows in the list, 0 where they share it.
    """
    count = counts + 2 * ((batch * block_index_batch) // num_inner_blocks + block)
    return (
        block_index + batch * block_index_batch + block * num_inner_blocks,
        tl.load(count),
        tl.load(count + 1),
    )


@triton.jit
def visible_cells(
    x, consts, batch, row_start, col_start, rows, cols, outer, inner, first, stop, bias_block,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return the mask of a block of scores: True where the query sees the key.

    Args:
        x, consts, batch: Options, constants, batch row.
        row_start, col_start: First query and key of the block.
        rows, cols: Its queries and keys, as they broadcast.
        outer, inner: The same two by the side that the kernel loops over.
        first, stop: Intervals of the current item. A block of a list (``INDEXED``) may hold parts
            of several items, so it ignores them and takes those of all items.
        bias_block: The block's bias, or ``None``; ``-inf`` hides.
        ROWS: The outer side is the queries.
    """
    if consts.INDEXED:
        visible = (outer < 0) & (inner < 0)
        limit = x.k_len if ROWS else x.q_len
        # Items show disjoint cells, so their intervals are joined by or.
        for n in tl.static_range(consts.ITEMS):
            begin, end = interval(x, n, outer, limit, ROWS)
            visible |= (inner >= begin) & (inner < end)
    else:
        visible = (inner >= first) & (inner < stop)
    if x.q_ids is not None:
        q_id = tl.load(x.q_ids + batch * x.q_len + rows, mask=rows < x.q_len, other=-1)
        k_id = tl.load(x.k_ids + batch * x.k_len + cols, mask=cols < x.k_len, other=-1)
        # Of two equal ids either both are negative or none is: one comparison hides the padding of
        # both sides.
        visible &= (q_id == k_id) & (q_id >= 0)
    if x.bias is not None:
        # The tiles are added to the bias, as 0 or -inf: Triton 3.9 cannot move single bits about.
        if x.bits is not None:
            bias_block += tl.log2(
                in_tiles(x, consts, row_start, col_start, rows, cols).to(tl.float32)
            )
        visible &= bias_block != -_INF
    elif x.bits is not None:
        visible &= in_tiles(x, consts, row_start, col_start, rows, cols) > 0
    return visible


@triton.jit
def in_tiles(x, consts, row_start, col_start, rows, cols):
    """Return 1 where a predicate shows a cell, else 0; beyond the lengths it may be either."""
    num_k_tiles = (x.k_len + TILE - 1) // TILE
    if consts.BLOCK_Q <= TILE and consts.BLOCK_K <= TILE:  # the block lies in one tile
        tile = tl.load(x.tiles + (row_start // TILE) * num_k_tiles + col_start // TILE)
    else:
        inside = (rows < x.q_len) & (cols < x.k_len)
        tile_offset = (rows // TILE) * num_k_tiles + cols // TILE
        tile = tl.load(x.tiles + tile_offset, mask=inside, other=-2)
    word_offset = tile * (TILE * TILE // 32) + (rows % TILE) * (TILE // 32) + (cols % TILE) // 32
    # Full and empty tiles, -1 and -2, have negative offsets, and no words.
    word = tl.load(x.bits + word_offset, mask=word_offset >= 0, other=0)
    return (tl.where(tile == -1, -1, word) >> (cols % 32)) & 1


@triton.jit
def load_bias(x, consts, batch, head, rows, cols, SKIPS: tl.constexpr):
    """Load the bias of a block of scores as float32, less the shift of each row.

    Where no row of the block has a shift, as is usual, nothing is subtracted with ``SKIPS``: the
    forward is 16 % faster by it, and backward kernels slower, which are launched twice instead
    (:func:`ring_core.triton.backward.is_of_other_launch`). The bias is ``-inf`` beyond the lengths.
    """
    start = x.bias + batch.to(tl.int64) * x.bias_batch + head.to(tl.int64) * x.bias_head
    inside = (rows < x.q_len) & (cols < x.k_len)
    offset = rows.to(tl.int64) * x.bias_row + bias_columns(x, consts, cols)
    bias_block = tl.load(start + offset, mask=inside, other=-_INF).to(tl.float32)
    if x.bias_shift is not None:
        shift = of_head(x.bias_shift, batch, head, x.bias_shift_batch, x.bias_shift_head, TMA=False)
        row_shift = tl.load(shift + rows, mask=rows < x.q_len, other=0.0)
        if SKIPS:
            if tl.max(tl.abs(row_shift)) > 0.0:
                bias_block -= row_shift
        else:
            bias_block -= row_shift
    return bias_block


@triton.jit
def bias_columns(x, consts, cols):
    """Return the columns of the bias that belong to keys."""
    if consts.BIAS_BY_POSITION:
        cols = tl.load(x.k_at + cols, mask=cols < x.k_len, other=0)
        if consts.ALIGNED8:  # so that a thread may load eight at once
            if cols.shape[0] == 1:
                cols = tl.max_contiguous(tl.multiple_of(cols, (1, 8)), (1, 8))
            else:
                cols = tl.max_contiguous(tl.multiple_of(cols, (8, 1)), (8, 1))
    return cols


@triton.jit
def exp_of_scores(scores, consts):
    """Return the exponential of scores, or of their differences, which are times ``UNIT``."""
    return tl.exp2(scores * (LOG2E / consts.UNIT))


@triton.jit
def modified_scores(x, consts, products, bias_block, batch, head, rows, cols):
    """Return scores with soft cap, bias and ALiBi, times ``UNIT``; and the cap's derivative.

    ``products`` are those of queries and keys; ``bias_block`` is the block's bias, or ``None``.
    """
    if consts.SOFTCAP is not None:
        # 1 - 2 / (exp(2 x) + 1): overflows to 1, where (e - 1) / (e + 1) would be NaN
        grown = tl.exp2(products * (2 * LOG2E * consts.SCALE / consts.SOFTCAP))
        tanh_scores = 1.0 - 2.0 / (grown + 1.0)
        # Near 0 that cancels; the series of tanh does not.
        small = products * (consts.SCALE / consts.SOFTCAP)
        y = small * small
        series = 1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835))))
        tanh_scores = tl.where(y < 0.0625, small * series, tanh_scores)
        scores, slope = (
            tanh_scores * (consts.SOFTCAP * consts.UNIT),
            1.0 - tanh_scores * tanh_scores,
        )
    else:
        scores = products * (consts.SCALE * consts.UNIT)
        slope = scores  # it is not read; Triton 3.6 cannot return None
    if x.bias is not None:
        scores += bias_block * consts.UNIT
    if x.slopes is not None:
        slope_of_head = tl.load(x.slopes + batch * x.slopes_batch + head) * consts.UNIT
        q_at = tl.load(x.q_at + rows, mask=rows < x.q_len, other=0)
        k_at = tl.load(x.k_at + cols, mask=cols < x.k_len, other=0)
        scores -= slope_of_head * tl.abs(q_at - k_at).to(tl.float32)
    return scores, slope


@triton.jit
def dropout_factor(x, consts, batch, head, row_start, col_start, rows, cols, ROWS: tl.constexpr):
    """Return dropout's factor for each score, 0 or ``1 / (1 - p)``, by Philox and global indices.

    It is the same as :func:`ring_core.philox.dropout_keep`: words below ``DROPPED``, 2**32 times
    the probability, drop. One call of Philox gives the words of four neighbouring keys; where keys
    are neighbours (``ALIGNED8``) it is made once for the four. Rows and columns then count from
    ``row_start`` and ``col_start``, and ``rows`` and ``cols`` are not read; else these alone are.
    ``ROWS`` says that rows lie along the first dimension.
    """
    low = tl.load(x.dropout).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(x.dropout + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed = low | (high << 32)
    b, h = tl.load(x.dropout + 2) + batch, tl.load(x.dropout + 3 + head)
    if consts.ALIGNED8:
        rows = row_start + tl.arange(0, consts.BLOCK_Q)[:, None]
        cols = col_start + 4 * tl.arange(0, consts.BLOCK_K // 4)[None, :]
        i = tl.load(x.q_index + rows, mask=rows < x.q_len, other=0)
        j = tl.load(x.k_at + cols, mask=cols < x.k_len, other=0)
        zeros = (rows + cols) * 0  # broadcasts the others
        # The counter is (key // 4, query, head, batch), all global: every rank, kernel and block
        # size draws the same number for a cell.
        word0, word1, word2, word3 = tl.philox(
            seed, (j >> 2) + zeros, i + zeros, h + zeros, b + zeros
        )
        word = tl.join(tl.join(word0, word2), tl.join(word1, word3))
        word = tl.reshape(word, (consts.BLOCK_Q, consts.BLOCK_K))
    else:
        i = tl.load(x.q_index + rows, mask=rows < x.q_len, other=0)
        j = tl.load(x.k_at + cols, mask=cols < x.k_len, other=0)
        zeros = (rows + cols) * 0
        word0, word1, word2, word3 = tl.philox(
            seed, (j >> 2) + zeros, i + zeros, h + zeros, b + zeros
        )
        n = j & 3
        word = tl.where(n < 2, tl.where(n == 0, word0, word1), tl.where(n == 2, word2, word3))
    factor = tl.where(
        word.to(tl.uint64) >= consts.DROPPED, 1.0 / (1.0 - consts.DROPPED / 4294967296.0), 0.0
    )
    if consts.ALIGNED8 and not ROWS:
        factor = tl.trans(factor)
    return factor


@triton.jit
def has_nan(x):
    """Return True if any element is NaN."""
    return tl.max(tl.where(x != x, 1, 0)) > 0  # noqa: PLR0124 - true for NaN alone


@triton.jit
def has_nonfinite(x):
    """Return True if any element is NaN or infinite."""
    return tl.max(tl.where(tl.abs(x.to(tl.float32)) < _INF, 0, 1)) > 0


@triton.jit
def add_product(acc, weights, visible, x, NAN_SAFE: tl.constexpr):
    """Return ``acc + weights @ x`` in float32.

    Hidden weights are 0, and ``0 * nan`` is ``nan``. So with ``NAN_SAFE`` elements of ``x [n, D]``
    that are not finite are left out of the product, and added to the rows that see them alone.
    """
    if NAN_SAFE:
        value = x.to(tl.float32)
        finite = tl.abs(value) < _INF
        infinite = tl.where(value == _INF, 1.0, tl.where(value == -_INF, -1.0, 0.0))
        sign = tl.where(weights > 0, 1.0, tl.where(weights < 0, -1.0, 0.0))
        sign = tl.where(visible, sign, 0.0).to(x.dtype)
        shown, nonfinite = tl.where(visible, 1.0, 0.0).to(x.dtype), tl.where(finite, 0.0, 1.0)
        # For each result count the elements it sees that are not finite, count the infinities with
        # a weight that is not 0, and sum the signs of the products of the latter.
        # The factors are 0, 1 and -1, so these products are exact in every dtype.
        num_nonfinite = tl.dot(shown, nonfinite.to(x.dtype), input_precision=EXACT)
        num_infinite = tl.dot(tl.abs(sign), tl.abs(infinite).to(x.dtype), input_precision=EXACT)
        net = tl.dot(sign, infinite.to(x.dtype), input_precision=EXACT)
        # Infinities of one sign stay what they are; with others, with 0, or with nan they are nan.
        total = tl.where(
            net == num_infinite, _INF, tl.where(net == -num_infinite, -_INF, float("nan"))
        )
        total = tl.where(num_nonfinite > num_infinite, float("nan"), total)
        acc += tl.where(num_nonfinite > 0, total, 0.0)
        x = tl.where(finite, value, 0.0).to(x.dtype)
    return tl.dot(weights.to(x.dtype), x, acc, input_precision=EXACT)
