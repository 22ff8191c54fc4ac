"""Triton kernels that join partial results: attention over some keys, and partial gradients."""

# Triton's decorator, and the arguments of kernels, have no types in Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from ring_torch.launches.direct import (
    Arguments,
    DirectKernel,
    RepeatedLaunch,
    assert_unit_strides,
)
from ring_torch.records import Span

#: Most partial results that :class:`JoinOnGpu` merges: those of a zigzag layout over own keys, keys
#: of earlier tokens and, for half of the rows, keys of later ones.
MOST_PARTIALS = 3
_ROWS = 16
_LN_2: tl.constexpr = tl.constexpr(math.log(2.0))


def merge_on_gpu(acc: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge ``(out [B, n, H, D], lse [B, H, n])`` into float32 accumulators, in place.

    It is :func:`ring_core.merge`; ``acc`` and ``acc_lse`` have the same shapes.
    """
    if acc.numel() == 0:
        return
    assert_unit_strides(acc, acc_lse, out, lse)
    batch, rows, heads, dim = acc.shape
    _merge[(triton.cdiv(rows, _ROWS), heads, batch)](
        acc, acc_lse, out, lse, rows, *acc.stride()[:3], *acc_lse.stride()[:2], *out.stride()[:3],
        *lse.stride()[:2], DIM=dim, PADDED=triton.next_power_of_2(dim), ROWS=_ROWS,
    )  # fmt: skip


def merge_of_spans_on_gpu(spans: Sequence[Span], *, first: bool, last: bool) -> Callable[..., None]:
    """Return a merge ``(out, low, lse, *results)`` of one or two partial results.

    Each number is the one that :func:`merge_on_gpu` computes result by result. Until the last merge
    float32 sums are in ``out``; if that has 16 bits, it holds their upper halves, and ``low``, laid
    out alike, the lower ones. The last merge rounds them. A merge that is both first and last, or
    has an ``out`` in float32, does not access ``low``. In a first merge one result that has all
    rows may lie in ``out`` itself. It serves tensors that are alike.

    Args:
        spans: The rows of each result ``(out, lse)``. Every row of a result sees something, so an
            infinity in its ``lse`` says that a score is not finite, and NaN is merged.
        first: True if there are no sums yet: ``low`` and ``lse`` are not read. Rows that no result
            has are then those that see nothing.
        last: True if no other merge follows.
    """
    return RepeatedLaunch(_merge_spans, partial(_spans_arguments, spans, first=first, last=last))


def _spans_arguments(
    spans: Sequence[Span], out: Tensor, low: Tensor, lse: Tensor, *results: Tensor, first: bool, last: bool
) -> Arguments:  # fmt: skip
    tensors = out, lse, *results
    assert_unit_strides(*tensors)
    reads_low = out.element_size() == 2 and not (first and last)
    assert not reads_low or low.stride() == out.stride()
    batch, rows, heads, dim = out.shape
    missing = 2 - len(spans)  # results
    bounds = [bound for start, n in spans for bound in (start, start + n)] + [0, 0] * missing
    strides = [stride for x in tensors for stride in x.stride()[:-1]] + [0] * (5 * missing)
    constants = {
        "DIM": dim, "PADDED": triton.next_power_of_2(dim), "ROWS": _ROWS, "FIRST": first, "LAST": last,
    }  # fmt: skip
    integers = *[None] * (2 * missing), rows, *bounds, *strides
    return Arguments((triton.cdiv(rows, _ROWS), heads, batch), integers, constants)


class JoinOnGpu:
    """A merge of partial results in one launch, for tensors alike.

    Each number is read once, and rounded once. The first result has all rows, and is the merged one
    afterwards; others have a span of the rows each. The order of additions is that of merging, or
    adding, one by one in float32.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        """Prepare for partial results of these rows, of which the first has all."""
        assert 1 <= len(spans) <= MOST_PARTIALS
        assert spans[0][0] == 0
        assert all(start + n <= spans[0][1] for start, n in spans)
        self._missing = MOST_PARTIALS - len(spans)
        bounds = [bound for start, n in spans[1:] for bound in (start, start + n)]
        # Absent results have no rows. The kernel is compiled for the number that is there, and
        # reads no others.
        bounds += [0, 0] * self._missing
        self._merge = RepeatedLaunch(_merge_partials, partial(_join_arguments, bounds, len(spans)))
        self._sum = RepeatedLaunch(_sum_partials, partial(_join_arguments, bounds, len(spans)))

    def merge(self, partials: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Merge ``(out [B, n, H, D], lse [B, H, n])`` of all partial results.

        The first one is overwritten with the result. Every row of them sees something, so an
        infinity in ``lse`` says that a score is not finite; it becomes NaN, and so do the row's
        numbers in ``out``.
        """
        # Places of absent results are filled with the first one's tensors, which keeps strides and
        # alignment valid.
        self._merge(*(x for y in (*partials, *[partials[0]] * self._missing) for x in y))

    def sum(self, partials: Sequence[Tensor]) -> None:
        """Add up ``[B, n, H, D]`` of two or more partial results, the first one last.

        The first one is overwritten with the sum.
        """
        self._sum(*partials, *[partials[0]] * self._missing)


def _join_arguments(bounds: Sequence[int], num_partials: int, *tensors: Tensor) -> Arguments:
    """Return a kernel's arguments behind the tensors, ``num_partials`` of which it reads."""
    assert_unit_strides(*tensors)
    batch, rows, heads, dim = tensors[0].shape
    integers = rows, *bounds, *(stride for x in tensors for stride in x.stride()[:-1])
    constants = {
        "PARTIALS": num_partials,
        "DIM": dim,
        "PADDED": triton.next_power_of_2(dim),
        "ROWS": _ROWS,
    }
    return Arguments((triton.cdiv(rows, _ROWS), heads, batch), integers, constants)


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


@DirectKernel
@triton.jit
def _merge(
    acc, acc_lse, out, lse, rows,
    acc_batch, acc_row, acc_head, acc_lse_batch, acc_lse_head,
    out_batch, out_row, out_head, lse_batch, lse_head,
    DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge ``(out, lse)`` of a few rows of one head into the accumulators."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = row < rows
    mask = inside[:, None] & (column < DIM)[None, :]
    row = row.to(tl.int64)
    old_at = acc_lse + batch * acc_lse_batch + head * acc_lse_head + row
    new_at = lse + batch * lse_batch + head * lse_head + row
    old = tl.load(old_at, mask=inside, other=float("-inf"))
    new = tl.load(new_at, mask=inside, other=float("-inf"))
    old_weight, new_weight, both = _weights(old, new)
    acc_at = acc + batch * acc_batch + head * acc_head + row[:, None] * acc_row + column[None, :]
    out_at = out + batch * out_batch + head * out_head + row[:, None] * out_row + column[None, :]
    # Rows with lse = -inf have any numbers in out, NaN included: they are not loaded.
    x = tl.load(acc_at, mask=mask & (old_weight > 0)[:, None], other=0.0)
    y = tl.load(out_at, mask=mask & (new_weight > 0)[:, None], other=0.0).to(tl.float32)
    tl.store(acc_at, _weighted(x, old_weight, y, new_weight), mask=mask)
    # The program that has these rows of this head is the only one, but several of its warps read
    # lse, and one may be late.
    tl.debug_barrier()
    tl.store(old_at, both, mask=inside)


@triton.jit
def _merge_span(x, old, out, lse, row, start, stop, mask, batch, head, column, o_batch, o_row, o_head,
                l_batch, l_head):  # fmt: skip
    """Return ``(x, lse)`` of a few rows after a merge as by `_merge` with rows start to stop."""
    in_span = (row >= start) & (row < stop)
    local_row = row - start
    new = tl.load(lse + batch * l_batch + head * l_head + local_row, mask=in_span, other=0.0)
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
def _merge_spans(
    out, low, lse, out1, lse1, out2, lse2, rows, start1, stop1, start2, stop2,
    out_batch, out_row, out_head, lse_batch, lse_head,
    o1_batch, o1_row, o1_head, l1_batch, l1_head, o2_batch, o2_row, o2_head, l2_batch, l2_head,
    DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Merge one or two partial results into ``(out, lse)`` for a few rows of one head.

    With ``FIRST`` there is nothing to merge with. Without ``LAST`` an ``out`` of 16 bits is left
    with the upper halves of float32 sums, and ``low`` with the lower ones.
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
        x, top, out1, lse1, row, start1, stop1, mask, batch, head, column, o1_batch, o1_row, o1_head,
        l1_batch, l1_head,
    )  # fmt: skip
    if out2 is not None:
        x, top = _merge_span(
            x, top, out2, lse2, row, start2, stop2, mask, batch, head, column, o2_batch, o2_row,
            o2_head, l2_batch, l2_head,
        )  # fmt: skip
    # Each element depends on the same element of `out` alone, so working in place is safe. If
    # several threads hold an element, Triton lets one store it; another may load the new value
    # late, but never stores what it makes of it.
    if LAST or not is_split:
        tl.store(out_at, x.to(out.dtype.element_ty), mask=mask)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        tl.store(high_at, (bits >> 16).to(tl.uint16), mask=mask)
        tl.store(low_at, bits.to(tl.uint16), mask=mask)
    # As in `_merge`: all warps have read lse before one of them overwrites it.
    tl.debug_barrier()
    tl.store(lse_at, top, mask=inside)


@DirectKernel
@triton.jit
def _merge_partials(
    out, lse, out1, lse1, out2, lse2, rows, start1, stop1, start2, stop2,
    o_batch, o_row, o_head, l_batch, l_head, o1_batch, o1_row, o1_head, l1_batch, l1_head,
    o2_batch, o2_row, o2_head, l2_batch, l2_head,
    PARTIALS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge up to two partial results into one that has all rows, for a few rows of one head."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = row < rows
    mask = inside[:, None] & (column < DIM)[None, :]
    lse_at = lse + batch * l_batch + head * l_head + row
    out_at = out + batch * o_batch + head * o_head + row[:, None] * o_row + column[None, :]
    top = tl.load(lse_at, mask=inside, other=0.0)
    is_finite = tl.abs(top) < float("inf")
    # As every row sees something, an infinity says that a score was not finite.
    top = tl.where(is_finite, top, float("nan"))
    # With one result there is nothing to merge: it is final where it lies.
    if PARTIALS > 1:
        # Sums stay in registers, in float32, until they are rounded once.
        x = tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
        x, top = _merge_span(
            x, top, out1, lse1, row, start1, stop1, mask, batch, head, column, o1_batch, o1_row,
            o1_head, l1_batch, l1_head,
        )  # fmt: skip
        if PARTIALS > 2:
            x, top = _merge_span(
                x, top, out2, lse2, row, start2, stop2, mask, batch, head, column, o2_batch, o2_row,
                o2_head, l2_batch, l2_head,
            )  # fmt: skip
        tl.store(out_at, x.to(out.dtype.element_ty), mask=mask)
    else:
        # A row whose scores are not finite may have numbers in out: they become NaN, as in merges.
        nan = tl.full((ROWS, PADDED), float("nan"), tl.float32).to(out.dtype.element_ty)
        tl.store(out_at, nan, mask=mask & ~is_finite[:, None])
    # As in `_merge`: all warps have read lse before one of them overwrites it.
    tl.debug_barrier()
    tl.store(lse_at, top, mask=inside)


@DirectKernel
@triton.jit
def _sum_partials(
    x, x1, x2, rows, start1, stop1, start2, stop2,
    x_batch, x_row, x_head, x1_batch, x1_row, x1_head, x2_batch, x2_row, x2_head,
    PARTIALS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
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
