"""Passes over memory as Triton kernels: the merge of :func:`ring_core.merge`, and what travels."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_torch.buffers import HeadBuffer
from ring_torch.triton_launch import DirectKernel

_ROWS = 16
_MARK_ROWS = 1024
_MORE_ROWS = 64  # of one head, whose sum is one number
_NUMBERS = 2048  # a program adds
_SHIFTED_ROWS, _SHIFTED_COLUMNS = 8, 512  # of a bias, that a program looks at together
_AT_ONCE = 4  # parts that one kernel adds
_MOVED_NUMBERS, _MOVED_COLUMNS = 4096, 512  # that a program copies, and of one token at a time


def merge_on_gpu(acc: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge ``(out [B, n, H, D], lse [B, H, n])`` into float32 accumulators of these shapes."""
    _assert_unit_strides(acc, acc_lse, out, lse)
    batch, rows, heads, dim = acc.shape
    if acc.numel() > 0:
        _merge[(triton.cdiv(rows, _ROWS), heads, batch)](
            acc, acc_lse, out, lse, rows,
            *acc.stride()[:3], *acc_lse.stride()[:2], *out.stride()[:3], *lse.stride()[:2],
            DIM=dim, PADDED=triton.next_power_of_2(dim), ROWS=_ROWS,
        )  # fmt: skip


def mark_on_gpu(out: Tensor, lse: Tensor) -> None:
    """NaN for an ``lse [B, H, n]`` that is an infinity where ``out [B, n, H, D]`` is no number.

    And for each that is ``inf``.
    """
    _assert_unit_strides(lse)
    batch, heads, rows = lse.shape
    if lse.numel() > 0:
        _mark[(triton.cdiv(rows, _MARK_ROWS), heads, batch)](
            out, lse, rows, *out.stride()[:3], *lse.stride()[:2], ROWS=_MARK_ROWS
        )


def row_dots_on_gpu(x: Tensor, y: Tensor) -> Tensor:
    """``rowsum(x * y)`` of ``[B, n, H, D]`` in float32, ``[B, H, n]``."""
    _assert_unit_strides(x, y)
    batch, rows, heads, dim = x.shape
    dots = torch.empty(batch, heads, rows, dtype=torch.float32, device=x.device)
    if dots.numel() > 0:
        _row_dots[(triton.cdiv(rows, _ROWS), heads, batch)](
            x, y, dots, None, None, rows, *x.stride()[:3], *y.stride()[:3], *dots.stride()[:2],
            0, 0, DIM=dim, PADDED=triton.next_power_of_2(dim), ROWS=_ROWS, SUMS=False,
        )  # fmt: skip
    return dots


def sink_sums_on_gpu(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """``sum(exp(sink - lse) * rowsum(dout * out))`` over all rows, float32 ``[H]``.

    ``dout`` and ``out [B, n, H, D]``, ``lse [B, H, n]`` with the sinks ``[H]`` in it, float32.
    """
    _assert_unit_strides(dout, out, lse, sinks)
    batch, rows, heads, dim = out.shape
    parts = triton.cdiv(rows, _MORE_ROWS)
    sums = torch.zeros(batch, heads, parts, dtype=torch.float32, device=out.device)
    if sums.numel() > 0:
        _row_dots[(parts, heads, batch)](
            dout, out, sums, lse, sinks, rows, *dout.stride()[:3], *out.stride()[:3],
            *sums.stride()[:2], *lse.stride()[:2],
            DIM=dim, PADDED=triton.next_power_of_2(dim), ROWS=_MORE_ROWS, SUMS=True,
        )  # fmt: skip
    return sums.sum(dim=(0, 2))


def bias_shift_on_gpu(
    bias: Tensor, start: Tensor | None, stop: Tensor | None, ids: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Return the largest finite bias that each row sees, or 0, float32 ``[B, H, n]``.

    Args:
        bias: ``[B or 1, H or 1, n, T_kv]``, whose last dimension is contiguous.
        start: The first column that each row may see, int32 ``[n]``; ``None`` is column 0.
        stop: The column after the last, likewise; ``None`` is ``T_kv``.
        ids: Segment ids of the rows and of all columns, int32 ``[B, n]`` and ``[B, T_kv]``.
    """
    batch, heads, rows, columns = bias.shape
    batch = batch if ids is None else len(ids[0])
    shift = torch.empty(batch, heads, rows, dtype=torch.float32, device=bias.device)
    _assert_unit_strides(bias, *(ids or ()))
    q_ids, k_ids = (None, None) if ids is None else ids
    if shift.numel() > 0:
        _largest[(triton.cdiv(rows, _SHIFTED_ROWS), heads, batch)](
            bias, start, stop, q_ids, k_ids, shift, rows, columns,
            bias.stride(0) if len(bias) > 1 else 0, *bias.stride()[1:3], *shift.stride()[:2],
            *((0, 0) if ids is None else (ids[0].stride(0), ids[1].stride(0))),
            ROWS=_SHIFTED_ROWS, COLUMNS=_SHIFTED_COLUMNS,
        )  # fmt: skip
    return shift


def pack_on_gpu(k: Tensor, v: Tensor, both: Tensor) -> None:
    """Put ``k [B, n, K, D]`` and ``v [B, n, K, Dv]`` side by side: ``both [B, n, K * (D + Dv)]``.

    The heads of a token have to lie together in each.
    """
    _assert_unit_strides(k, v)
    batch, tokens, heads, dim = k.shape
    widths = heads * dim, heads * v.shape[3]
    if both.numel() > 0:
        _pack[(tokens, batch)](
            k, v, both, *k.stride()[:2], *v.stride()[:2], *both.stride()[:2],
            K=widths[0], V=widths[1], SIZE=triton.next_power_of_2(max(widths)),
        )  # fmt: skip


def add_on_gpu(total: Tensor, parts: Sequence[Tensor]) -> None:
    """Add float32 ``[rows, n, m]``, in their order; rows may lie apart, in peers' memory, too."""
    rows, size = total.shape[0], total.shape[1] * total.shape[2]
    if rows * size == 0:
        return
    for start in range(0, len(parts), _AT_ONCE):
        some = parts[start : start + _AT_ONCE]
        given = [*some, *[total] * (_AT_ONCE - len(some))]
        _add[(triton.cdiv(size, _NUMBERS), rows)](
            total, *given, total.stride(0), *(x.stride(0) for x in given), size,
            PARTS=len(some), NUMBERS=_NUMBERS, num_warps=4,
        )  # fmt: skip


def pack_heads_on_gpu(
    layout: HeadBuffer, buffer: Tensor, tensors: Sequence[Tensor],
    orders: Sequence[Tensor | None], *, by_heads: bool,
) -> None:  # fmt: skip
    """Put the part for rank n of each tensor, a range of its heads or of its tokens, into row n."""
    _exchange_heads(layout, buffer, tensors, orders, by_heads=by_heads, packs=True)


def unpack_heads_on_gpu(
    layout: HeadBuffer, buffer: Tensor, tensors: Sequence[Tensor],
    orders: Sequence[Tensor | None], *, by_heads: bool,
) -> None:  # fmt: skip
    """Put row n of a buffer, which came from rank n, where its heads or tokens belong."""
    _exchange_heads(layout, buffer, tensors, orders, by_heads=by_heads, packs=False)


def _exchange_heads(
    layout: HeadBuffer, buffer: Tensor, tensors: Sequence[Tensor],
    orders: Sequence[Tensor | None], *, by_heads: bool, packs: bool,
) -> None:  # fmt: skip
    _assert_unit_strides(*tensors)
    sizes: list[int] = []
    for part, offset in zip(layout.parts, layout.message.offsets, strict=True):
        sizes += (part.length, part.heads * part.dim, offset)
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    rows = layout.ranks * max(x.batch * x.length for x in layout.parts)
    widest = max(x.heads * x.dim for x in layout.parts)
    columns = min(triton.next_power_of_2(widest), _MOVED_COLUMNS)
    at_once = _MOVED_NUMBERS // columns
    if rows == 0:
        return
    none = 3 - len(tensors)  # the kernel takes up to three
    _move_heads[(triton.cdiv(rows, at_once), len(tensors))](
        buffer, *tensors, *[None] * none, *orders, *[None] * none, *sizes, *[0] * (3 * none),
        *strides, *[0] * (3 * none), layout.parts[0].batch, layout.ranks,
        layout.message.size,
        DIM0=layout.parts[0].dim, DIM1=layout.parts[1 % len(tensors)].dim,
        DIM2=layout.parts[2 % len(tensors)].dim,
        ROWS=at_once, COLUMNS=columns, BY_HEADS=by_heads, PACKS=packs,
    )  # fmt: skip


def _assert_unit_strides(*tensors: Tensor) -> None:
    """The kernels read and write the last dimension as if it were contiguous."""
    assert all(x.stride(-1) == 1 or x.shape[-1] == 1 or not x.numel() for x in tensors)


@DirectKernel
@triton.jit  # type: ignore[untyped-decorator]
def _pack(
    k, v, both, k_batch, k_token, v_batch, v_token, batch_stride, token_stride,
    K: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, SIZE)
    place = both + batch * batch_stride + token * token_stride + at
    x = tl.load(k + batch * k_batch + token * k_token + at, mask=at < K)
    y = tl.load(v + batch * v_batch + token * v_token + at, mask=at < V)
    tl.store(place, x, mask=at < K)
    tl.store(place + K, y, mask=at < V)


@DirectKernel
@triton.jit  # type: ignore[untyped-decorator]
def _move_heads(
    buffer, x0, x1, x2, order0, order1, order2,
    length0, width0, offset0, length1, width1, offset1, length2, width2, offset2,
    batch0, row0, head0, batch1, row1, head1, batch2, row2, head2,
    batch, ranks, size,
    DIM0: tl.constexpr, DIM1: tl.constexpr, DIM2: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_HEADS: tl.constexpr, PACKS: tl.constexpr,
):  # fmt: skip
    """Copy between a buffer ``[P, bytes]`` and up to three tensors, one a row of the grid."""
    which = tl.program_id(1)
    if which == 0:
        _move_part(
            buffer, x0, order0, length0, width0, offset0, batch0, row0, head0, batch, ranks, size,
            DIM0, ROWS, COLUMNS, BY_HEADS, PACKS,
        )  # fmt: skip
    if x1 is not None:  # noqa: SIM102 - what is None is not compiled
        if which == 1:
            _move_part(
                buffer, x1, order1, length1, width1, offset1, batch1, row1, head1, batch, ranks,
                size, DIM1, ROWS, COLUMNS, BY_HEADS, PACKS,
            )  # fmt: skip
    if x2 is not None:  # noqa: SIM102
        if which == 2:
            _move_part(
                buffer, x2, order2, length2, width2, offset2, batch2, row2, head2, batch, ranks,
                size, DIM2, ROWS, COLUMNS, BY_HEADS, PACKS,
            )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _move_part(
    buffer, x, order, length, width, offset, x_batch, x_row, x_head, batch, ranks, size,
    DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_HEADS: tl.constexpr,
    PACKS: tl.constexpr,
):  # fmt: skip
    """Copy one tensor's blocks ``[P, B, T_local, H / P, D]``: rows of ``width = H / P * D``.

    ``BY_HEADS``: the tensor is ``[B, T_local, H, D]``, and rank n has the n-th range of its heads;
    otherwise it is ``[B, T, H / P, D]``, and rank n has the tokens that ``order`` names.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own_rows = batch * length
    is_row = rows < ranks * own_rows
    rank, row = rows // own_rows, rows % own_rows
    b, token = (row // length).to(tl.int64), row % length
    places = (buffer + rank.to(tl.int64) * size + offset).to(tl.pointer_type(x.dtype.element_ty))
    places += row.to(tl.int64) * width
    if BY_HEADS:
        starts = x + b * x_batch + token.to(tl.int64) * x_row
        starts += rank.to(tl.int64) * (width // DIM) * x_head
    else:
        position = rank * length + token
        if order is not None:
            position = tl.load(order + position, mask=is_row, other=0)
        starts = x + b * x_batch + position.to(tl.int64) * x_row
    for start in range(0, width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = is_row[:, None] & (columns < width)[None, :]
        at_place = places[:, None] + columns[None, :]
        at_x = starts[:, None] + ((columns // DIM) * x_head + columns % DIM)[None, :]
        if PACKS:
            tl.store(at_place, tl.load(at_x, mask=inside), mask=inside)
        else:
            tl.store(at_x, tl.load(at_place, mask=inside), mask=inside)


@DirectKernel
@triton.jit  # type: ignore[untyped-decorator]
def _add(
    total, a, b, c, d, total_row, a_row, b_row, c_row, d_row, size,
    PARTS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = at < size
    place = total + row * total_row + at
    # All are asked for before the first is needed: they come from several peers at a time.
    x = tl.load(place, mask=inside)
    y = tl.load(a + row * a_row + at, mask=inside)
    if PARTS > 1:
        z = tl.load(b + row * b_row + at, mask=inside)
    if PARTS > 2:
        u = tl.load(c + row * c_row + at, mask=inside)
    if PARTS > 3:
        w = tl.load(d + row * d_row + at, mask=inside)
    x += y
    if PARTS > 1:
        x += z
    if PARTS > 2:
        x += u
    if PARTS > 3:
        x += w
    tl.store(place, x, mask=inside)


@DirectKernel
@triton.jit  # type: ignore[untyped-decorator]
def _largest(
    bias, start, stop, q_ids, k_ids, shift, rows, columns, bias_batch, bias_head, bias_row,
    shift_batch, shift_head, q_ids_batch, k_ids_batch, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    inside = row < rows
    first = tl.where(inside, 0, columns)
    last = tl.where(inside, columns, 0)
    if start is not None:
        first = tl.load(start + row, mask=inside, other=columns)
    if stop is not None:
        last = tl.load(stop + row, mask=inside, other=0)
    if q_ids is not None:
        q_id = tl.load(q_ids + batch * q_ids_batch + row, mask=inside, other=-1)
    of_rows = bias + batch * bias_batch + head * bias_head + row.to(tl.int64)[:, None] * bias_row
    top = tl.full([ROWS], float("-inf"), tl.float32)
    begin = tl.min(first, axis=0) // COLUMNS * COLUMNS  # blocks are aligned as rows are
    for block in range(begin, tl.max(last, axis=0), COLUMNS):
        column = block + tl.arange(0, COLUMNS)
        seen = (column[None, :] >= first[:, None]) & (column[None, :] < last[:, None])
        if q_ids is not None:
            k_at = k_ids + batch * k_ids_batch + column
            k_id = tl.load(k_at, mask=column < columns, other=-1)
            seen &= (q_id[:, None] == k_id[None, :]) & (q_id >= 0)[:, None]
        x = tl.load(of_rows + column[None, :], mask=seen, other=float("-inf")).to(tl.float32)
        x = tl.where(tl.abs(x) < float("inf"), x, float("-inf"))
        top = tl.maximum(top, tl.max(x, axis=1))
    place = shift + batch * shift_batch + head * shift_head + row
    tl.store(place, tl.where(top == float("-inf"), 0.0, top), mask=inside)


@DirectKernel
@triton.jit  # type: ignore[untyped-decorator]
def _mark(out, lse, rows, out_batch, out_row, out_head, lse_batch, lse_head, ROWS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    place = lse + batch * lse_batch + head * lse_head + row
    x = tl.load(place, mask=row < rows, other=0.0)
    unseen = (x == float("-inf")) & (row < rows)
    first = out + batch * out_batch + head * out_head + row * out_row
    y = tl.load(first, mask=unseen, other=0.0).to(tl.float32)
    odd = (x == float("inf")) | (unseen & (y != y))  # noqa: PLR0124 - is no number
    tl.store(place, float("nan"), mask=odd & (row < rows))


@DirectKernel
@triton.jit  # type: ignore[untyped-decorator]
def _row_dots(
    x, y, dots, lse, sinks, rows, x_batch, x_row, x_head, y_batch, y_row, y_head, dots_batch,
    dots_head, lse_batch, lse_head,
    DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.arange(0, PADDED)
    both = (row < rows)[:, None] & (column < DIM)[None, :]
    x_at = x + batch * x_batch + head * x_head + row[:, None] * x_row + column[None, :]
    y_at = y + batch * y_batch + head * y_head + row[:, None] * y_row + column[None, :]
    a = tl.load(x_at, mask=both, other=0.0).to(tl.float32)
    b = tl.load(y_at, mask=both, other=0.0).to(tl.float32)
    found = tl.sum(a * b, axis=1)
    place = dots + batch * dots_batch + head * dots_head
    if SUMS:
        at = lse + batch * lse_batch + head * lse_head + row
        beside = tl.load(at, mask=row < rows, other=float("inf"))
        beside = tl.where(beside == float("-inf"), float("inf"), beside)
        part = tl.exp(tl.load(sinks + head) - beside)
        tl.store(place + tl.program_id(0), tl.sum(part * found, axis=0))
    else:
        tl.store(place + row, found, mask=row < rows)


@DirectKernel
@triton.jit  # type: ignore[untyped-decorator]
def _merge(
    acc, acc_lse, out, lse, rows,
    acc_batch, acc_row, acc_head, acc_lse_batch, acc_lse_head,
    out_batch, out_row, out_head, lse_batch, lse_head,
    DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = row < rows
    both = inside[:, None] & (column < DIM)[None, :]
    row = row.to(tl.int64)
    old_at = acc_lse + batch * acc_lse_batch + head * acc_lse_head + row
    new_at = lse + batch * lse_batch + head * lse_head + row
    old = tl.load(old_at, mask=inside, other=float("-inf"))
    new = tl.load(new_at, mask=inside, other=float("-inf"))
    top = tl.maximum(old, new)
    safe = tl.where(top == float("-inf"), 0.0, top)
    old_part, new_part = tl.exp(old - safe), tl.exp(new - safe)
    total = old_part + new_part
    divisor = tl.where(total == 0.0, 1.0, total)
    acc_at = acc + batch * acc_batch + head * acc_head + row[:, None] * acc_row + column[None, :]
    out_at = out + batch * out_batch + head * out_head + row[:, None] * out_row + column[None, :]
    # Outputs whose lse is -inf may be anything: they are not read.
    x = tl.load(acc_at, mask=both & (old_part > 0)[:, None], other=0.0)
    y = tl.load(out_at, mask=both & (new_part > 0)[:, None], other=0.0).to(tl.float32)
    merged = x * (old_part / divisor)[:, None] + y * (new_part / divisor)[:, None]
    tl.store(acc_at, merged, mask=both)
    tl.store(old_at, safe + tl.log(total), mask=inside)
