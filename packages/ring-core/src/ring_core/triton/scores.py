"""One block of scores on the chip: which part of it shows, and the options that change it.

A kernel keeps a block of one side in registers, its outer
side, and walks along the other, its inner side: queries and keys in the forward and for dQ, keys
and queries for dK and dV. Rows and columns come as index tensors that broadcast against each other,
``[q, 1]`` and ``[1, k]`` or ``[1, q]`` and ``[k, 1]``, so that the same functions serve either.
"""

# What a kernel works on has no type in Python.
# ruff: noqa: ANN001, ANN201, N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ring_core.triton.tile_configs import NAN_SAFE_BLOCK

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
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
        ITEMS: How many items there are.
        INDEXED: Blocks to visit come from a block index; otherwise they follow from the items.
        ALL_PARTIAL: Every block needs its mask.
        SCALE, SOFTCAP: Of the logits; ``None`` is no soft cap.
        DROPPED: The probability to drop a weight, times 2**32; ``None`` is no dropout.
        BLOCK_Q, BLOCK_K: Queries and keys per block.
        TMA: Tensors come as descriptors, for the copy engine of Hopper and later.
        Q_IS_MULTIPLE, K_IS_MULTIPLE: Lengths are multiples of the blocks.
        FUSED: The kernel for dK and dV adds to dQ as well.
        FRESH: Results hold nothing yet and are not read; but for dQ where ``FUSED`` adds to it.
        KV_PACKED: Values lie behind their keys, in the same rows, and so do their gradients.
        BIAS_BY_POSITION: A bias has a column for each position, not for each key at hand.
        ALIGNED8: Of positions of keys ``k_at[8 n]`` is a multiple of 8, and seven follow it.
        Q_STEP, K_STEP, V_STEP, OUT_STEP, DQ_STEP, DK_STEP, DV_STEP: From a token of a head to the
            next, in numbers; ``OUT_STEP`` is of the output or of its gradient.
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
    DROPPED: tl.constexpr
    BLOCK_Q: tl.constexpr
    BLOCK_K: tl.constexpr
    TMA: tl.constexpr
    Q_IS_MULTIPLE: tl.constexpr
    K_IS_MULTIPLE: tl.constexpr
    FUSED: tl.constexpr
    FRESH: tl.constexpr
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
    """Constants of the blocks that are done again, where numbers are not finite."""
    return consts._replace(
        BLOCK_Q=min(NAN_SAFE_BLOCK, consts.BLOCK_Q),
        BLOCK_K=min(NAN_SAFE_BLOCK, consts.BLOCK_K), TMA=False,
        Q_IS_MULTIPLE=False, K_IS_MULTIPLE=False, INDEXED=False, ALL_PARTIAL=True,
    )  # fmt: skip


def as_constants(consts: Constexprs) -> Constexprs:
    """Constants as Triton 3.6 and 3.7 take them, whose functions want constants of its own kind."""
    return Constexprs(*(x if x is None else tl.constexpr(x) for x in consts))


class Strides(NamedTuple):
    """From a batch row to the next and from a head to the next, in numbers.

    ``out`` stands for the output or its gradient, ``lse`` for ``lse`` and delta. A kernel has
    ``None`` for what it does not touch.
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
    """What masks and options read: pointers, ``None`` where a call has no such thing, and numbers.

    Attributes:
        items: int32 ``[items, 6]``, what each shows: rows, columns, and the band from its corner.
        cells: int32 ``[2, outer length]``, from where to where the inner tokens lie that share the
            document of each outer token.
        q_ids, k_ids: int32 ``[B, T]`` and ``[B, S]``: equal ones see each other, negative ones
            nothing.
        q_at, k_at: int32 ``[T]`` and ``[S]``, positions among the keys.
        q_index: int32 ``[T]``, indices among the queries.
        tiles: int32 ``[ceil(T / 128), ceil(S / 128)]``, which tile of ``bits``; -1 shows all, -2
            nothing.
        bits: int32 ``[n, 128, 4]``, tiles of a predicate, the first column in the lowest bit.
        bias: ``[B or 1, H or 1, T, S]`` with the strides ``bias_batch``, ``bias_head`` and
            ``bias_row``; with ``Constexprs.BIAS_BY_POSITION`` its columns are positions.
        bias_shift: float32 ``[B or 1, H or 1, T]`` with the strides ``bias_shift_batch`` and
            ``bias_shift_head``, taken off the bias of each row; ``lse`` is that of shifted scores.
        slopes: float32 ``[B or 1, H]`` with the stride ``slopes_batch``.
        dropout: int32 ``[4]``: the seed's low and high words, the first batch row and head.
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
    """A program's block among the ``blocks`` of its head, and which head, swizzled for the L2.

    The first blocks of all ``heads_per_swizzle`` heads come before the second ones. The longest
    come first, so that none of those is left when the GPU runs empty.
    """
    each = blocks * heads_per_swizzle
    within = tl.program_id(0) % each
    return within // heads_per_swizzle, (
        tl.program_id(0) // each
    ) * heads_per_swizzle + within % heads_per_swizzle


@triton.jit
def of_head(x, batch, head, batch_stride, head_stride, TMA: tl.constexpr):
    """Where a head begins; a descriptor knows them all."""
    if not TMA:
        x += batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
    return x


@triton.jit
def load_tile(
    x, flat, start, length, DIM: tl.constexpr, PADDED: tl.constexpr, AT: tl.constexpr,
    STEP: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr, IS_MULTIPLE: tl.constexpr,
):  # fmt: skip
    """Tokens ``start`` and on of one head, dims ``AT`` and on.

    What lies beyond the length, or beyond ``DIM``, is zero. ``x`` points at the head, or is a
    descriptor of ``[B * heads, length, dims]``, whose blocks the copy engine fetches.
    """
    if TMA:
        tile = x.load([flat, start, AT]).reshape(BLOCK, PADDED)
    else:
        token, dim = tl.arange(0, BLOCK), tl.arange(0, PADDED)
        first = x + tl.cast(start, tl.int64) * STEP + AT
        at = first + token[:, None] * STEP + dim[None, :]
        if IS_MULTIPLE and DIM == PADDED:
            tile = tl.load(at)
        else:
            inside = (start + token < length)[:, None] & (dim < DIM)[None, :]
            tile = tl.load(at, mask=inside, other=0.0)
    return tile


@triton.jit
def load_keys(k, flat, start, length, consts):
    """A block of keys ``[BLOCK_K, PADDED]``."""
    return load_tile(
        k, flat, start, length, consts.D, consts.PADDED, 0, consts.K_STEP, consts.BLOCK_K,
        consts.TMA, consts.K_IS_MULTIPLE,
    )  # fmt: skip


@triton.jit
def load_values(v, flat, start, length, consts):
    """A block of values ``[BLOCK_K, PADDED_V]``."""
    return load_tile(
        v, flat, start, length, consts.DV, consts.PADDED_V, consts.D if consts.KV_PACKED else 0,
        consts.V_STEP, consts.BLOCK_K, consts.TMA, consts.K_IS_MULTIPLE,
    )  # fmt: skip


@triton.jit
def load_queries(q, flat, start, length, consts):
    """A block of queries ``[BLOCK_Q, PADDED]``."""
    return load_tile(
        q, flat, start, length, consts.D, consts.PADDED, 0, consts.Q_STEP, consts.BLOCK_Q,
        consts.TMA, consts.Q_IS_MULTIPLE,
    )  # fmt: skip


@triton.jit
def load_gradient(dout, flat, start, length, consts):
    """A block of the gradient of the output ``[BLOCK_Q, PADDED_V]``."""
    return load_tile(
        dout, flat, start, length, consts.DV, consts.PADDED_V, 0, consts.OUT_STEP, consts.BLOCK_Q,
        consts.TMA, consts.Q_IS_MULTIPLE,
    )  # fmt: skip


@triton.jit
def interval(x, n, outer, inner_length, ROWS: tl.constexpr):
    """Which inner tokens ``[first, stop)`` each outer token sees of item ``n``.

    ``ROWS`` says that the outer side is the queries. A fully masked token has an interval that
    ends before it begins.
    """
    at = x.items + n * BOUNDS
    lo, hi = tl.load(at + 4), tl.load(at + 5)
    if ROWS:
        begin, end, start, stop = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        near, far = -hi, -lo
    else:
        start, stop, begin, end = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        near, far = lo, hi
    diagonal = outer - begin + start
    first = tl.maximum(diagonal + near, start)
    last = tl.minimum(diagonal + far + 1, stop)
    inside = (outer >= begin) & (outer < end)
    if x.cells is not None:
        length = x.q_len if ROWS else x.k_len
        known = outer < length
        first = tl.maximum(first, tl.load(x.cells + outer, mask=known, other=0))
        last = tl.minimum(last, tl.load(x.cells + length + outer, mask=known, other=0))
    return tl.where(inside, first, inner_length), tl.where(inside, last, 0)


@triton.jit
def inner_blocks(first, stop, is_real, BLOCK: tl.constexpr, consts):
    """The inner blocks that some outer token sees, and those that all of them see whole.

    Both are ranges, ``(start, full_start, full_stop, end)``; ``is_real`` says which outer tokens
    are any. What lies beyond them does not matter, so they do not make a block partial.
    """
    start = tl.min(first) // BLOCK
    end = tl.maximum((tl.max(stop) + BLOCK - 1) // BLOCK, start)
    if consts.ALL_PARTIAL:
        full_start, full_stop = start, start
    else:
        full_start = (tl.max(tl.where(is_real, first, 0)) + BLOCK - 1) // BLOCK
        full_stop = tl.min(tl.where(is_real, stop, _FAR)) // BLOCK
        full_start = tl.minimum(tl.maximum(full_start, start), end)
        full_stop = tl.maximum(tl.minimum(full_stop, end), full_start)
    return start, full_start, full_stop, end


@triton.jit
def indexed_blocks(block_index, counts, block_index_batch, batch, block, num_inner_blocks):
    """Where a block's list of inner blocks begins, and how many of them are partial and full."""
    count = counts + 2 * ((batch * block_index_batch) // num_inner_blocks + block)
    return (
        block_index + batch * block_index_batch + block * num_inner_blocks,
        tl.load(count),
        tl.load(count + 1),
    )


@triton.jit
def visible_cells(
    x, consts, batch, row_start, col_start, rows, cols, outer, inner, first, stop, added,
    ROWS: tl.constexpr,
):  # fmt: skip
    """What a block shows; ``outer`` and ``inner`` are its tokens as they broadcast.

    ``first`` and ``stop`` are the intervals of one item; a block of a list shows what any does.
    ``added`` is what its bias adds, if there is one.
    """
    if consts.INDEXED:
        visible = (outer < 0) & (inner < 0)
        limit = x.k_len if ROWS else x.q_len
        for n in tl.static_range(consts.ITEMS):
            begin, end = interval(x, n, outer, limit, ROWS)
            visible |= (inner >= begin) & (inner < end)
    else:
        visible = (inner >= first) & (inner < stop)
    if x.q_ids is not None:
        mine = tl.load(x.q_ids + batch * x.q_len + rows, mask=rows < x.q_len, other=-1)
        theirs = tl.load(x.k_ids + batch * x.k_len + cols, mask=cols < x.k_len, other=-1)
        visible &= (mine == theirs) & (mine >= 0)
    if x.bias is not None:
        if x.bits is not None:  # a number says both: Triton 3.9 cannot move single bits about
            added += tl.log2(in_tiles(x, consts, row_start, col_start, rows, cols).to(tl.float32))
        visible &= added > -_INF
    elif x.bits is not None:
        visible &= in_tiles(x, consts, row_start, col_start, rows, cols) > 0
    return visible


@triton.jit
def in_tiles(x, consts, row_start, col_start, rows, cols):
    """What a predicate shows: 1, else 0; beyond the lengths it may be either."""
    num_k_tiles = (x.k_len + TILE - 1) // TILE
    if consts.BLOCK_Q <= TILE and consts.BLOCK_K <= TILE:  # the block lies in one tile
        which = tl.load(x.tiles + (row_start // TILE) * num_k_tiles + col_start // TILE)
    else:
        real = (rows < x.q_len) & (cols < x.k_len)
        at = (rows // TILE) * num_k_tiles + cols // TILE
        which = tl.load(x.tiles + at, mask=real, other=-2)
    place = which * (TILE * TILE // 32) + (rows % TILE) * (TILE // 32) + (cols % TILE) // 32
    word = tl.load(x.bits + place, mask=place >= 0, other=0)  # no tile has a negative place
    return (tl.where(which == -1, -1, word) >> (cols % 32)) & 1


@triton.jit
def load_bias(x, consts, batch, head, rows, cols):
    """Load what a bias adds to a block of scores, float32: less the shift of each row.

    It is ``-inf`` beyond the lengths.
    """
    start = x.bias + batch.to(tl.int64) * x.bias_batch + head.to(tl.int64) * x.bias_head
    real = (rows < x.q_len) & (cols < x.k_len)
    place = rows.to(tl.int64) * x.bias_row + bias_columns(x, consts, cols)
    added = tl.load(start + place, mask=real, other=-_INF).to(tl.float32)
    if x.bias_shift is not None:
        shift = of_head(x.bias_shift, batch, head, x.bias_shift_batch, x.bias_shift_head, TMA=False)
        added -= tl.load(shift + rows, mask=rows < x.q_len, other=0.0)
    return added


@triton.jit
def bias_columns(x, consts, cols):
    """Which columns of the bias belong to keys."""
    if consts.BIAS_BY_POSITION:
        cols = tl.load(x.k_at + cols, mask=cols < x.k_len, other=0)
        if consts.ALIGNED8:  # so that a thread may load eight at once
            if cols.shape[0] == 1:
                cols = tl.max_contiguous(tl.multiple_of(cols, (1, 8)), (1, 8))
            else:
                cols = tl.max_contiguous(tl.multiple_of(cols, (8, 1)), (8, 1))
    return cols


@triton.jit
def modified_scores(x, consts, products, added, batch, head, rows, cols):
    """Scores in base 2, from products of queries and keys, and the slope of the soft cap.

    ``added`` is what the bias adds to the block, if there is one.
    """
    if consts.SOFTCAP is not None:
        # 1 - 2 / (exp(2 x) + 1): overflows to 1, where (e - 1) / (e + 1) would be NaN
        grown = tl.exp2(products * (2 * LOG2E * consts.SCALE / consts.SOFTCAP))
        tanh_scores = 1.0 - 2.0 / (grown + 1.0)
        # near 0 that cancels; the series of tanh does not
        small = products * (consts.SCALE / consts.SOFTCAP)
        y = small * small
        series = 1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835))))
        tanh_scores = tl.where(y < 0.0625, small * series, tanh_scores)
        scores, slope = tanh_scores * (consts.SOFTCAP * LOG2E), 1.0 - tanh_scores * tanh_scores
    else:
        scores = products * (consts.SCALE * LOG2E)
        slope = scores  # it is not read; Triton 3.6 cannot return None
    if x.bias is not None:
        scores += added * LOG2E
    if x.slopes is not None:
        slope_of_head = tl.load(x.slopes + batch * x.slopes_batch + head) * LOG2E
        q_at = tl.load(x.q_at + rows, mask=rows < x.q_len, other=0)
        k_at = tl.load(x.k_at + cols, mask=cols < x.k_len, other=0)
        scores -= slope_of_head * tl.abs(q_at - k_at).to(tl.float32)
    return scores, slope


@triton.jit
def dropout_keep(x, consts, batch, head, row_start, col_start, rows, cols, ROWS: tl.constexpr):
    """Dropout's factor for each score: Philox-4x32-10, keyed by global indices.

    Words below ``DROPPED`` drop; it is 2**32 times the probability. Four keys beside each other
    share their random words, if they lie so.
    """
    low = tl.load(x.dropout).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(x.dropout + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed = low | (high << 32)
    b, h = tl.load(x.dropout + 2) + batch, tl.load(x.dropout + 3) + head
    if consts.ALIGNED8:
        rows = row_start + tl.arange(0, consts.BLOCK_Q)[:, None]
        cols = col_start + 4 * tl.arange(0, consts.BLOCK_K // 4)[None, :]
        i = tl.load(x.q_index + rows, mask=rows < x.q_len, other=0)
        j = tl.load(x.k_at + cols, mask=cols < x.k_len, other=0)
        nothing = (rows + cols) * 0
        zero, one, two, three = tl.philox(
            seed, (j >> 2) + nothing, i + nothing, h + nothing, b + nothing
        )
        word = tl.join(tl.join(zero, two), tl.join(one, three))
        word = tl.reshape(word, (consts.BLOCK_Q, consts.BLOCK_K))
    else:
        i = tl.load(x.q_index + rows, mask=rows < x.q_len, other=0)
        j = tl.load(x.k_at + cols, mask=cols < x.k_len, other=0)
        nothing = (rows + cols) * 0
        zero, one, two, three = tl.philox(
            seed, (j >> 2) + nothing, i + nothing, h + nothing, b + nothing
        )
        at = j & 3
        word = tl.where(at < 2, tl.where(at == 0, zero, one), tl.where(at == 2, two, three))
    factor = tl.where(
        word.to(tl.uint64) >= consts.DROPPED, 1.0 / (1.0 - consts.DROPPED / 4294967296.0), 0.0
    )
    if consts.ALIGNED8 and not ROWS:
        factor = tl.trans(factor)
    return factor


@triton.jit
def has_nan(x):
    """Whether some number is NaN."""
    return tl.max(tl.where(x != x, 1, 0)) > 0  # noqa: PLR0124


@triton.jit
def has_nonfinite(x):
    """Whether some number is not finite."""
    return tl.max(tl.where(tl.abs(x.to(tl.float32)) < _INF, 0, 1)) > 0


@triton.jit
def add_product(acc, weights, visible, x, NAN_SAFE: tl.constexpr):
    """``acc + weights @ x``, in float32.

    With ``NAN_SAFE`` it reads ``x [n, D]`` only where it is seen, as ``0 * nan`` is ``nan``: what
    is not finite is left out of the product, and told to what sees it.
    """
    if NAN_SAFE:
        value = x.to(tl.float32)
        finite = tl.abs(value) < _INF
        infinite = tl.where(value == _INF, 1.0, tl.where(value == -_INF, -1.0, 0.0))
        pull = tl.where(weights > 0, 1.0, tl.where(weights < 0, -1.0, 0.0))
        pull = tl.where(visible, pull, 0.0).to(x.dtype)
        shown, nonfinite = tl.where(visible, 1.0, 0.0).to(x.dtype), tl.where(finite, 0.0, 1.0)
        seen = tl.dot(shown, nonfinite.to(x.dtype), input_precision=EXACT)
        many = tl.dot(tl.abs(pull), tl.abs(infinite).to(x.dtype), input_precision=EXACT)
        net = tl.dot(pull, infinite.to(x.dtype), input_precision=EXACT)
        # Infinities of one sign stay what they are; with others, with 0, or with nan they are nan.
        found = tl.where(net == many, _INF, tl.where(net == -many, -_INF, float("nan")))
        found = tl.where(seen > many, float("nan"), found)
        acc += tl.where(seen > 0, found, 0.0)
        x = tl.where(finite, value, 0.0).to(x.dtype)
    return tl.dot(weights.to(x.dtype), x, acc, input_precision=EXACT)
