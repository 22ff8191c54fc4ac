"""Triton kernel that packs or unpacks a :class:`ring_torch.buffers.HeadBuffer` in one launch."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ring_torch.buffers import HeadBuffer
from ring_torch.launch_cache import keep, tensors_key
from ring_torch.triton_launch import DirectKernel, has_launch_hooks

_BUFFER, _TENSORS, _ORDERS = 0, 1, 4  # indices among the arguments of a launch
_NUMBERS, _COLUMNS = 4096, 512  # numbers that a program copies at a time, and most of one token


def pack_on_gpu(
    layout: HeadBuffer, buffer: Tensor, tensors: Sequence[Tensor],
    orders: Sequence[Tensor | None], *, by_heads: bool,
) -> None:  # fmt: skip
    """Copy the part for rank n of each tensor, a range of heads or of tokens, into row n."""
    _move(layout, buffer, tensors, orders, by_heads=by_heads, packs=True)


def unpack_on_gpu(
    layout: HeadBuffer, buffer: Tensor, tensors: Sequence[Tensor],
    orders: Sequence[Tensor | None], *, by_heads: bool,
) -> None:  # fmt: skip
    """Copy row n of a buffer, which came from rank n, to the heads or tokens that it holds."""
    _move(layout, buffer, tensors, orders, by_heads=by_heads, packs=False)


def _move(
    layout: HeadBuffer, buffer: Tensor, tensors: Sequence[Tensor],
    orders: Sequence[Tensor | None], *, by_heads: bool, packs: bool,
) -> None:  # fmt: skip
    """Launch the copy between up to three tensors and a buffer, into it if ``packs``."""
    key = by_heads, packs, buffer.get_device(), tensors_key(*tensors, *orders)
    launch = layout.launches.get(key)
    if launch is not None and not has_launch_hooks():
        changes = {_BUFFER: buffer.data_ptr()}
        for n, (x, order) in enumerate(zip(tensors, orders, strict=True)):
            changes[_TENSORS + n] = x.data_ptr()
            if order is not None:
                changes[_ORDERS + n] = order.data_ptr()
        launch(changes)
        return
    assert all(x.stride(-1) == 1 for x in tensors), "numbers of a head lie together"
    sizes: list[int] = []
    for shape, offset in zip(layout.parts, layout.message.offsets, strict=True):
        sizes += (shape.length, shape.heads * shape.dim, offset)
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    rows = layout.ranks * max(x.batch * x.length for x in layout.parts)
    widest = max(x.heads * x.dim for x in layout.parts)
    columns = min(triton.next_power_of_2(widest), _COLUMNS)
    at_once = _NUMBERS // columns
    if rows == 0:
        return
    num_absent = 3 - len(tensors)  # the kernel takes up to three
    grid = triton.cdiv(rows, at_once), len(tensors)
    arguments = (
        buffer, *tensors, *[None] * num_absent, *orders, *[None] * num_absent, *sizes, *[0] * (3 * num_absent),
        *strides, *[0] * (3 * num_absent), layout.parts[0].batch, layout.ranks,
        layout.message.size,
    )  # fmt: skip
    dims = {f"DIM{n}": layout.parts[n % len(tensors)].dim for n in range(3)}
    constants = dims | {
        "ROWS": at_once, "COLUMNS": columns, "BY_HEADS": by_heads, "PACKS": packs,
    }  # fmt: skip
    _move_tensors[grid](*arguments, **constants)
    keep(layout.launches, key, _move_tensors.prepared(grid, *arguments, **constants))


@DirectKernel
@triton.jit  # type: ignore[untyped-decorator]
def _move_tensors(
    buffer, x0, x1, x2, order0, order1, order2,
    length0, width0, offset0, length1, width1, offset1, length2, width2, offset2,
    batch0, row0, head0, batch1, row1, head1, batch2, row2, head2,
    batch, ranks, size,
    DIM0: tl.constexpr, DIM1: tl.constexpr, DIM2: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_HEADS: tl.constexpr, PACKS: tl.constexpr,
):  # fmt: skip
    """Copy between a buffer ``[P, bytes]`` and up to three tensors; grid row n copies tensor n."""
    tensor_index = tl.program_id(1)
    if tensor_index == 0:
        _move_part(
            buffer, x0, order0, length0, width0, offset0, batch0, row0, head0, batch, ranks, size,
            DIM0, ROWS, COLUMNS, BY_HEADS, PACKS,
        )  # fmt: skip
    if x1 is not None:  # noqa: SIM102 - what is None is not compiled
        if tensor_index == 1:
            _move_part(
                buffer, x1, order1, length1, width1, offset1, batch1, row1, head1, batch, ranks,
                size, DIM1, ROWS, COLUMNS, BY_HEADS, PACKS,
            )  # fmt: skip
    if x2 is not None:  # noqa: SIM102
        if tensor_index == 2:
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
    """Copy one tensor's parts of all messages, ``[P, B, T_local, H / P, D]``.

    A row of the copy is a token of one rank's part: ``width = H / P * D`` numbers. With
    ``BY_HEADS`` the tensor is ``[B, T_local, H, D]``, and rank n's part is the n-th range of heads;
    otherwise it is ``[B, T, H / P, D]``, and rank n's part are the tokens that ``order`` names.
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
    # Every number of the tensor lies in exactly one part: no two programs write the same address.
    for start in range(0, width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = is_row[:, None] & (columns < width)[None, :]
        at_place = places[:, None] + columns[None, :]
        at_x = starts[:, None] + ((columns // DIM).to(tl.int64) * x_head + columns % DIM)[None, :]
        if PACKS:
            tl.store(at_place, tl.load(at_x, mask=inside), mask=inside)
        else:
            tl.store(at_x, tl.load(at_place, mask=inside), mask=inside)
