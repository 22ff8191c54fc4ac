"""Triton kernels of memory-bound passes: packing of K/V, sums, row dots, NaN marks, bias maxima."""

# Triton's decorator, and the arguments of kernels, have no types in Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_core.base.merge import UNSHIFTED_BIAS
from ring_torch.launches.direct import (
    Arguments,
    DirectKernel,
    RepeatedKernel,
    assert_unit_strides,
)

_ROWS = 16
_MARK_ROWS = 1024
_SINK_ROWS = 4096  # rows of a head that a program loads at a time
_NUMBERS = 2048  # numbers that a program adds
_SHIFTED_ROWS, _SHIFTED_COLUMNS = 8, 512  # block of a bias that a program loads at a time
_AT_ONCE = 4  # most parts that one launch adds


def mark_on_gpu(out: Tensor, lse: Tensor) -> None:
    """Write NaN into ``lse [B, H, n]`` of rows whose scores are not finite, in place.

    Such rows are those whose ``lse`` is ``inf``, or is ``-inf`` while ``out [B, n, H, D]`` is NaN.
    A row that sees nothing has ``lse = -inf`` and numbers in ``out``; it is left as it is.
    """
    assert_unit_strides(lse)
    batch, heads, rows = lse.shape
    if lse.numel() > 0:
        _mark[(triton.cdiv(rows, _MARK_ROWS), heads, batch)](
            out, lse, rows, *out.stride()[:3], *lse.stride()[:2], ROWS=_MARK_ROWS
        )


def row_dots_on_gpu(x: Tensor, y: Tensor) -> Tensor:
    """Return ``rowsum(x * y)`` for ``x`` and ``y [B, n, H, D]``, float32 ``[B, H, n]``."""
    assert_unit_strides(x, y)
    batch, rows, heads, dim = x.shape
    dots = torch.empty(batch, heads, rows, dtype=torch.float32, device=x.device)
    if dots.numel() > 0:
        _row_dots[(triton.cdiv(rows, _ROWS), heads, batch)](
            x,
            y,
            dots,
            rows,
            *x.stride()[:3],
            *y.stride()[:3],
            *dots.stride()[:2],
            DIM=dim,
            PADDED=triton.next_power_of_2(dim),
            ROWS=_ROWS,
        )
    return dots


def sink_grads_on_gpu(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return ``-sum(exp(sink - lse) * delta)`` over the rows of each head, in the sinks' dtype.

    ``sinks`` are ``[H]``; ``lse``, which includes the sinks, and ``delta`` are float32 ``[B, H,
    n]``. One program sums up a head, in float32 and in a fixed order: results repeat bit for bit.
    """
    assert_unit_strides(sinks, lse, delta)
    batch, heads, rows = lse.shape
    grads = torch.empty_like(sinks)
    if heads > 0:
        _sum_sinks[(heads,)](
            sinks,
            lse,
            delta,
            grads,
            batch,
            rows,
            *lse.stride()[:2],
            *delta.stride()[:2],
            ROWS=_SINK_ROWS,
            num_warps=8,
        )
    return grads


def bias_shift_on_gpu(
    bias: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    q_ids: Tensor | None,
    k_ids: Tensor | None,
) -> Tensor:
    """Return the largest finite bias that each row sees, or 0 if it is small or there is none.

    Args:
        bias: ``[B or 1, H or 1, n, T_kv]``, contiguous in its last dimension.
        start: First column that each row may see, int32 ``[n]``; ``None`` is column 0.
        stop: Column after the last that each row may see, likewise; ``None`` is ``T_kv``.
        q_ids, k_ids: Segment ids of the rows and of all columns, int32 ``[B, n]`` and ``[B,
            T_kv]``.

    Returns:
        Float32 ``[B or 1, H or 1, n]``: the bias's dimensions, but the batch size with ids.
    """
    batch, heads, rows, columns = bias.shape
    batch, ids = batch if q_ids is None else len(q_ids), (q_ids, k_ids)
    shift = torch.empty(batch, heads, rows, dtype=torch.float32, device=bias.device)
    assert_unit_strides(bias, *[x for x in ids if x is not None])
    if shift.numel() > 0:
        _largest_bias[(triton.cdiv(rows, _SHIFTED_ROWS), heads, batch)](
            bias,
            start,
            stop,
            q_ids,
            k_ids,
            shift,
            rows,
            columns,
            bias.stride(0) if len(bias) > 1 else 0,
            *bias.stride()[1:3],
            *shift.stride()[:2],
            *[0 if x is None else x.stride(0) for x in ids],
            UNSHIFTED=UNSHIFTED_BIAS,
            ROWS=_SHIFTED_ROWS,
            COLUMNS=_SHIFTED_COLUMNS,
        )
    return shift


def _pack_arguments(k: Tensor, v: Tensor, packed: Tensor, *, add: bool) -> Arguments:
    assert_unit_strides(k, v, packed)
    batch, tokens, heads, dim = k.shape
    widths = heads * dim, heads * v.shape[3]
    # A token is a program: K and V may have any strides but the last.
    integers = *k.stride()[:3], *v.stride()[:3], *packed.stride()[:2]
    return (tokens, batch), integers, {
        "K": widths[0], "V": widths[1], "K_DIM": dim, "V_DIM": v.shape[3],
        "SIZE": triton.next_power_of_2(max(widths)), "ADD": add,
    }  # fmt: skip


def add_on_gpu(total: Tensor, summands: Sequence[Tensor]) -> None:
    """Add parts to ``total`` in place, in their order, all float32 ``[rows, n, m]``.

    A row has to be contiguous; rows may lie apart. Parts may be in peers' memory.
    """
    rows, size = total.shape[0], total.shape[1] * total.shape[2]
    if rows * size == 0:
        return
    # A kernel takes a fixed number of tensors: missing ones are filled up and not read.
    # Chunks follow each other on the stream, so the order of additions is that of the summands
    # whatever their number.
    for start in range(0, len(summands), _AT_ONCE):
        chunk = summands[start : start + _AT_ONCE]
        operands = [*chunk, *[total] * (_AT_ONCE - len(chunk))]
        _add[(triton.cdiv(size, _NUMBERS), rows)](
            total,
            *operands,
            total.stride(0),
            *(x.stride(0) for x in operands),
            size,
            PARTS=len(chunk),
            NUMBERS=_NUMBERS,
            num_warps=4,
        )


@DirectKernel
@triton.jit
def _pack_token(
    k,
    v,
    packed,
    k_batch,
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
    batch_stride,
    token_stride,
    K: tl.constexpr,
    V: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    ADD: tl.constexpr,
):
    """Copy K and V of one token side by side, or add them to what is there."""
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, SIZE)
    in_k, in_v = column < K, column < V
    dst = packed + batch * batch_stride + token * token_stride + column
    k_at = k + batch * k_batch + token * k_token + column // K_DIM * k_head + column % K_DIM
    v_at = v + batch * v_batch + token * v_token + column // V_DIM * v_head + column % V_DIM
    x, y = tl.load(k_at, mask=in_k), tl.load(v_at, mask=in_v)
    if ADD:
        # No other program has this token, and launches that add to it follow each other.
        x = tl.load(dst, mask=in_k) + x
        y = tl.load(dst + K, mask=in_v) + y
    tl.store(dst, x, mask=in_k)
    tl.store(dst + K, y, mask=in_v)


@DirectKernel
@triton.jit
def _add(
    total,
    a,
    b,
    c,
    d,
    total_row,
    a_row,
    b_row,
    c_row,
    d_row,
    size,
    PARTS: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """Add up to four parts to a stretch of one row."""
    row = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = index < size
    dst = total + row * total_row + index
    # Issue all loads before the first result is needed: they come from several peers at a time.
    x = tl.load(dst, mask=inside)
    y = tl.load(a + row * a_row + index, mask=inside)
    if PARTS > 1:
        z = tl.load(b + row * b_row + index, mask=inside)
    if PARTS > 2:
        u = tl.load(c + row * c_row + index, mask=inside)
    if PARTS > 3:
        w = tl.load(d + row * d_row + index, mask=inside)
    x += y
    if PARTS > 1:
        x += z
    if PARTS > 2:
        x += u
    if PARTS > 3:
        x += w
    tl.store(dst, x, mask=inside)


@DirectKernel
@triton.jit
def _largest_bias(
    bias,
    start,
    stop,
    q_ids,
    k_ids,
    shift,
    rows,
    columns,
    bias_batch,
    bias_head,
    bias_row,
    shift_batch,
    shift_head,
    q_ids_batch,
    k_ids_batch,
    UNSHIFTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Find the largest finite bias among the visible columns of a few rows of one head."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    inside = row < rows
    # Rows beyond the last see an empty range, so they widen no loop.
    row_start = tl.where(inside, 0, columns)
    row_stop = tl.where(inside, columns, 0)
    if start is not None:
        row_start = tl.load(start + row, mask=inside, other=columns)
    if stop is not None:
        row_stop = tl.load(stop + row, mask=inside, other=0)
    if q_ids is not None:
        q_id = tl.load(q_ids + batch * q_ids_batch + row, mask=inside, other=-1)
    row_base = bias + batch * bias_batch + head * bias_head + row.to(tl.int64)[:, None] * bias_row
    top = tl.full([ROWS], float("-inf"), tl.float32)
    begin = tl.min(row_start, axis=0) // COLUMNS * COLUMNS  # keeps loads as aligned as rows are
    # A running maximum over the columns that some row of the block may see.
    for block in range(begin, tl.max(row_stop, axis=0), COLUMNS):
        column = block + tl.arange(0, COLUMNS)
        visible = (column[None, :] >= row_start[:, None]) & (column[None, :] < row_stop[:, None])
        if q_ids is not None:
            k_ids_at = k_ids + batch * k_ids_batch + column
            k_id = tl.load(k_ids_at, mask=column < columns, other=-1)
            visible &= (q_id[:, None] == k_id[None, :]) & (q_id >= 0)[:, None]
        x = tl.load(row_base + column[None, :], mask=visible, other=float("-inf")).to(tl.float32)
        # -inf hides a key; inf and NaN cannot be shifted away, and show in the results.
        x = tl.where(tl.abs(x) < float("inf"), x, float("-inf"))
        top = tl.maximum(top, tl.max(x, axis=1))
    dst = shift + batch * shift_batch + head * shift_head + row
    # Small numbers lose nothing beside the scores: a shift of 0 leaves the kernels their fast path.
    is_needed = (top != float("-inf")) & (tl.abs(top) > UNSHIFTED)
    tl.store(dst, tl.where(is_needed, top, 0.0), mask=inside)


@DirectKernel
@triton.jit
def _mark(out, lse, rows, out_batch, out_row, out_head, lse_batch, lse_head, ROWS: tl.constexpr):
    """Write NaN into lse of rows whose scores are not finite, for a stretch of one head's rows."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    dst = lse + batch * lse_batch + head * lse_head + row
    x = tl.load(dst, mask=row < rows, other=0.0)
    # Only these rows of `out` are read: one number each tells NaN from "saw nothing".
    unseen = (x == float("-inf")) & (row < rows)
    out_at = out + batch * out_batch + head * out_head + row * out_row
    y = tl.load(out_at, mask=unseen, other=0.0).to(tl.float32)
    is_nonfinite = (x == float("inf")) | (unseen & (y != y))  # noqa: PLR0124 - true for NaN alone
    tl.store(dst, float("nan"), mask=is_nonfinite & (row < rows))


@DirectKernel
@triton.jit
def _row_dots(
    x,
    y,
    dots,
    rows,
    x_batch,
    x_row,
    x_head,
    y_batch,
    y_row,
    y_head,
    dots_batch,
    dots_head,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute ``rowsum(x * y)`` for a few rows of one head."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.arange(0, PADDED)
    # Dims are padded to a power of two, for which `arange` is made.
    mask = (row < rows)[:, None] & (column < DIM)[None, :]
    x_at = x + batch * x_batch + head * x_head + row[:, None] * x_row + column[None, :]
    y_at = y + batch * y_batch + head * y_head + row[:, None] * y_row + column[None, :]
    a = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(y_at, mask=mask, other=0.0).to(tl.float32)
    row_sums = tl.sum(a * b, axis=1)
    dst = dots + batch * dots_batch + head * dots_head
    tl.store(dst + row, row_sums, mask=row < rows)


@DirectKernel
@triton.jit
def _sum_sinks(
    sinks,
    lse,
    delta,
    grads,
    batch,
    rows,
    lse_batch,
    lse_head,
    delta_batch,
    delta_head,
    ROWS: tl.constexpr,
):
    """Sum up the gradient of one head's sink over all rows."""
    head = tl.program_id(0).to(tl.int64)
    sink = tl.load(sinks + head).to(tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    lse_at, delta_at = lse + head * lse_head, delta + head * delta_head
    for _ in range(batch):
        for start in range(0, rows, ROWS):
            row = start + tl.arange(0, ROWS)
            x = tl.load(lse_at + row, mask=row < rows, other=float("inf"))
            # A row that sees nothing, with lse = -inf, gives nothing to the sum.
            x = tl.where(x == float("-inf"), float("inf"), x)
            sums += tl.exp(sink - x) * tl.load(delta_at + row, mask=row < rows, other=0.0)
        lse_at += lse_batch
        delta_at += delta_batch
    tl.store(grads + head, -tl.sum(sums, axis=0))


#: Copies ``k [B, n, K, D]`` and ``v [B, n, K, Dv]`` side by side into one tensor that is not empty,
#: or adds them: ``pack_kv_on_gpu(k, v, packed, add=add)``. That is ``packed [B, n, K * (D + Dv)]``,
#: in their dtype or a wider one. All are contiguous in their last dimensions.
pack_kv_on_gpu = RepeatedKernel(_pack_token, _pack_arguments)
