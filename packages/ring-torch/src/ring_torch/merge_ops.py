"""Triton kernels that join partial results: attention over some keys, and partial gradients."""

# Triton's decorator, and the arguments of kernels, have no types in Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ring_torch.launches.direct import (
    Arguments,
    DirectKernel,
    RepeatedKernel,
    assert_unit_strides,
)
from ring_torch.records import Span

_ROWS = 16
_LN_2: tl.constexpr = tl.constexpr(math.log(2.0))

#: Most results that one launch merges or adds: those of a zigzag layout over own keys, keys of
#: earlier tokens and, for half of the rows, keys of later ones.
MOST = 3


def _merge_arguments(
    out: Tensor,
    low: Tensor,
    lse: Tensor,
    *results: Tensor,
    spans: tuple[Span, ...],
    marks: int,
    first: bool,
    last: bool,
) -> Arguments:
    assert_unit_strides(out, lse, *results)
    reads_low = out.element_size() == 2 and not (first and last)
    assert not reads_low or low.stride() == out.stride()
    batch, rows, heads, dim = out.shape
    missing = MOST - len(spans)
    bounds = [bound for start, n in spans for bound in (start, start + n)] + [0, 0] * missing
    strides = [stride for x in (out, lse, *results) for stride in x.stride()[:-1]]
    integers = *[None] * (2 * missing), rows, *bounds, *strides, *[0] * (5 * missing)
    return (triton.cdiv(rows, _ROWS), heads, batch), integers, {
        "DIM": dim, "PADDED": triton.next_power_of_2(dim), "ROWS": _ROWS, "MARKS": marks,
        "FIRST": first, "LAST": last,
    }  # fmt: skip


def sum_on_gpu(dq: Tensor, others: Sequence[Tensor], spans: tuple[Span, ...]) -> None:
    """Replace ``dq [B, n, H, D]`` by the sum of one or two others, of spans of rows, and itself.

    Each number is read once, added in float32 in this order, and rounded once.
    """
    # The place of an absent one is filled with the first, which keeps strides and alignment valid.
    _sum(dq, *others, *[dq] * (MOST - 1 - len(others)), spans=spans)


def _sum_arguments(*tensors: Tensor, spans: tuple[Span, ...]) -> Arguments:
    assert_unit_strides(*tensors)
    batch, rows, heads, dim = tensors[0].shape
    missing = MOST - 1 - len(spans)
    bounds = [bound for start, n in spans for bound in (start, start + n)] + [0, 0] * missing
    integers = rows, *bounds, *(stride for x in tensors for stride in x.stride()[:-1])
    return (triton.cdiv(rows, _ROWS), heads, batch), integers, {
        "PARTIALS": 1 + len(spans), "DIM": dim, "PADDED": triton.next_power_of_2(dim), "ROWS": _ROWS,
    }  # fmt: skip


@triton.jit
def _weights(old, new):
    """Return the weights of two partial results of rows, and their joint lse, from the lse of each.

    Weights are relative to the larger lse; a row that neither has seen gets weights of 0.
    """
    top = tl.maximum(old, new)
    # Rows that neither has seen would subtract -inf from -inf.
    safe = tl.where(top == float("-inf"), 0.0, top)
    old_weight, new_weight = tl.exp(old - safe), tl.exp(new - safe)
    total = old_weight + new_weight
    divisor = tl.where(total == 0.0, 1.0, total)
    # Explicit, so that every kernel rounds alike, whatever its compiler would join.
    both = tl.where(total == 0.0, float("-inf"), tl.fma(tl.log2(divisor), _LN_2, safe))
    return old_weight / divisor, new_weight / divisor, both


@triton.jit
def _weighted(x, x_weight, y, y_weight):
    """Return the weighted sum of rows, rounded alike in every kernel."""
    return tl.fma(x, x_weight[:, None] + tl.zeros_like(x), y * y_weight[:, None])


@triton.jit
def _merge_span(
    x,
    old,
    out,
    lse,
    row,
    start,
    stop,
    mask,
    batch,
    head,
    column,
    o_batch,
    o_row,
    o_head,
    l_batch,
    l_head,
    MARK: tl.constexpr,
):
    """Return ``(x, lse)`` of a few rows after a merge with a result of rows start to stop."""
    in_span = (row >= start) & (row < stop)
    local_row = row - start
    new = tl.load(lse + batch * l_batch + head * l_head + local_row, mask=in_span, other=0.0)
    if MARK:  # every row sees something: an infinity says that a score is not finite
        new = tl.where(tl.abs(new) == float("inf"), float("nan"), new)
    old_weight, new_weight, both = _weights(old, new)
    out_at = out + batch * o_batch + head * o_head + local_row[:, None] * o_row + column[None, :]
    is_read = in_span & (new_weight > 0)
    y = tl.load(out_at, mask=mask & is_read[:, None], other=0.0).to(tl.float32)
    # Of a row of weight 0 nothing counts, whatever it holds. Rows outside stay as they are.
    known = tl.where((old_weight > 0)[:, None], x, 0.0)
    x = tl.where(in_span[:, None], _weighted(known, old_weight, y, new_weight), x)
    return x, tl.where(in_span, both, old)


@DirectKernel
@triton.jit
def _merge_results(
    out,
    low,
    lse,
    out1,
    lse1,
    out2,
    lse2,
    out3,
    lse3,
    rows,
    start1,
    stop1,
    start2,
    stop2,
    start3,
    stop3,
    out_batch,
    out_row,
    out_head,
    lse_batch,
    lse_head,
    o1_batch,
    o1_row,
    o1_head,
    l1_batch,
    l1_head,
    o2_batch,
    o2_row,
    o2_head,
    l2_batch,
    l2_head,
    o3_batch,
    o3_row,
    o3_head,
    l3_batch,
    l3_head,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    MARKS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """Merge up to three results into ``(out, lse)`` for a few rows of one head.

    With ``FIRST`` there is nothing to merge with. Without ``LAST`` an ``out`` of 16 bits is left
    with the upper halves of float32 sums, and ``low`` with the lower ones. Bits of ``MARKS`` say of
    each result that all of its rows see something.
    """
    is_split: tl.constexpr = out.dtype.element_ty.primitive_bitwidth == 16
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = row < rows
    mask = inside[:, None] & (column < DIM)[None, :]
    lse_at = lse + batch * lse_batch + head * lse_head + row
    offset = batch * out_batch + head * out_head + row[:, None] * out_row + column[None, :]
    out_at = out + offset
    if is_split:
        high_at = out.to(tl.pointer_type(tl.uint16), bitcast=True) + offset
        low_at = low.to(tl.pointer_type(tl.uint16), bitcast=True) + offset
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    x = tl.zeros((ROWS, PADDED), tl.float32)
    # The first results of a call find no values in memory: what is there is not read.
    if not FIRST:
        top = tl.load(lse_at, mask=inside, other=float("-inf"))
        if is_split:
            high = tl.load(high_at, mask=mask, other=0).to(tl.uint32)
            bits = (high << 16) | tl.load(low_at, mask=mask, other=0).to(tl.uint32)
            x = bits.to(tl.float32, bitcast=True)
        else:
            x = tl.load(out_at, mask=mask, other=0.0)
    # Sums stay in registers, in float32, in the order of merging result by result.
    x, top = _merge_span(
        x,
        top,
        out1,
        lse1,
        row,
        start1,
        stop1,
        mask,
        batch,
        head,
        column,
        o1_batch,
        o1_row,
        o1_head,
        l1_batch,
        l1_head,
        MARKS & 1,
    )
    if out2 is not None:
        x, top = _merge_span(
            x,
            top,
            out2,
            lse2,
            row,
            start2,
            stop2,
            mask,
            batch,
            head,
            column,
            o2_batch,
            o2_row,
            o2_head,
            l2_batch,
            l2_head,
            MARKS & 2,
        )
    if out3 is not None:
        x, top = _merge_span(
            x,
            top,
            out3,
            lse3,
            row,
            start3,
            stop3,
            mask,
            batch,
            head,
            column,
            o3_batch,
            o3_row,
            o3_head,
            l3_batch,
            l3_head,
            MARKS & 4,
        )
    # Each element depends on the same element of `out` alone, so working in place is safe. If
    # several threads hold an element, Triton lets one store it; another may load the new value
    # late, but never stores what it makes of it.
    if LAST or not is_split:
        tl.store(out_at, x.to(out.dtype.element_ty), mask=mask)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        tl.store(high_at, (bits >> 16).to(tl.uint16), mask=mask)
        tl.store(low_at, bits.to(tl.uint16), mask=mask)
    # The program that has these rows of this head is the only one, but several of its warps read
    # lse, and one may be late.
    tl.debug_barrier()
    tl.store(lse_at, top, mask=inside)


@DirectKernel
@triton.jit
def _sum_results(
    x,
    x1,
    x2,
    rows,
    start1,
    stop1,
    start2,
    stop2,
    x_batch,
    x_row,
    x_head,
    x1_batch,
    x1_row,
    x1_head,
    x2_batch,
    x2_row,
    x2_head,
    PARTIALS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Replace ``x`` by ``x1 + x2 + x``, in a few rows of a head.

    ``x1`` and ``x2``, which may be missing, have a span of rows each; ``x`` has all rows.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.arange(0, PADDED)
    mask = (row < rows)[:, None] & (column < DIM)[None, :]
    in_span = (row >= start1) & (row < stop1)
    address = (
        x1 + batch * x1_batch + head * x1_head + (row - start1)[:, None] * x1_row + column[None, :]
    )
    total = tl.load(address, mask=mask & in_span[:, None], other=0.0).to(tl.float32)
    if PARTIALS > 2:
        in_span = (row >= start2) & (row < stop2)
        address = x2 + batch * x2_batch + head * x2_head + (row - start2)[:, None] * x2_row
        address += column[None, :]
        total += tl.load(address, mask=mask & in_span[:, None], other=0.0).to(tl.float32)
    address = x + batch * x_batch + head * x_head + row[:, None] * x_row + column[None, :]
    total += tl.load(address, mask=mask, other=0.0).to(tl.float32)
    tl.store(address, total.to(x.dtype.element_ty), mask=mask)


#: Merges up to three results ``(out, lse)``, in their order, into float32 sums that are not empty,
#: in one launch: :func:`ring_torch.accumulate.merge` calls it with ``(out, low, lse, *results)``.
merge_on_gpu = RepeatedKernel(_merge_results, _merge_arguments)
_sum = RepeatedKernel(_sum_results, _sum_arguments)
