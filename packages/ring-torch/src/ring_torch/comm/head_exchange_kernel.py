"""Triton kernel that packs or unpacks the messages of a ``HeadBuffer`` in one launch."""

# Triton's decorator, and the arguments of kernels, have no types in Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import triton
import triton.language as tl
from torch import Tensor

from ring_torch.buffers import HeadBuffer
from ring_torch.launches.cache import keep, tensors_key
from ring_torch.launches.direct import DirectKernel, has_launch_hooks

_BUFFER, _TENSORS, _ORDERS = 0, 1, 4  # indices among the arguments of a launch
_NUMBERS, _COLUMNS = 4096, 512  # numbers that a program copies at a time, and most of one token


def move_on_gpu(
    layout: HeadBuffer,
    buffer: Tensor,
    tensors: Sequence[Tensor],
    orders: Sequence[Tensor | None],
    *,
    by_heads: bool,
    packs: bool,
) -> None:
    """Do what :func:`ring_torch.transports.p2p.move` does, for up to three tensors.

    Their numbers must be contiguous along the last dimension.
    """
    key = by_heads, packs, buffer.get_device(), tensors_key(*tensors, *orders)
    launch = layout.launches.get(key)
    # A launch that was kept for tensors alike runs again with their addresses.
    if launch is not None and not has_launch_hooks():
        changes = {_BUFFER: buffer.data_ptr()}
        for n, (x, order) in enumerate(zip(tensors, orders, strict=True)):
            changes[_TENSORS + n] = x.data_ptr()
            if order is not None:
                changes[_ORDERS + n] = order.data_ptr()
        launch(changes)
        return
    arguments = HeadArguments.of(layout, tensors, orders, at_once=_NUMBERS)
    if arguments.blocks == 0:
        return
    values = (
        buffer, *arguments.tensors, *arguments.orders, *arguments.sizes, *arguments.strides,
        layout.parts[0].batch, layout.ranks, layout.message.size,
    )  # fmt: skip
    constants = arguments.constants | {"BY_HEADS": by_heads, "PACKS": packs}
    grid = layout.ranks * arguments.blocks, len(tensors)
    keep(layout.launches, key, _move_tensors.launch(grid, *values, **constants))


class HeadArguments(NamedTuple):
    """Arguments of a kernel that copies between messages and up to three tensors.

    Attributes:
        tensors: Three tensors; absent ones are ``None``.
        orders: For each the positions of its tokens in rank order; ``None`` for natural order.
        sizes: Of each tensor the number of tokens in a message, the numbers of a token there, and
            where its part begins in the message, in bytes.
        strides: Of each tensor the strides of batch, tokens and heads.
        constants: Compile-time constants.
        blocks: Most blocks of rows in a tensor's part of one message.
    """

    tensors: list[Tensor | None]
    orders: list[Tensor | None]
    sizes: list[int]
    strides: list[int]
    constants: dict[str, Any]
    blocks: int

    @classmethod
    def of(
        cls,
        layout: HeadBuffer,
        tensors: Sequence[Tensor],
        orders: Sequence[Tensor | None],
        *,
        at_once: int,
    ) -> Self:
        """Make the arguments for blocks of ``at_once`` numbers, a power of 2."""
        assert all(x.stride(-1) == 1 or x.numel() == 0 for x in tensors), "numbers lie together"
        num_absent = 3 - len(tensors)
        sizes: list[int] = []
        for shape, offset in zip(layout.parts, layout.message.offsets, strict=True):
            sizes += (shape.length, shape.heads * shape.dim, offset)
        widest = max(x.heads * x.dim for x in layout.parts)
        columns = min(triton.next_power_of_2(widest), _COLUMNS, at_once)
        dims = {f"DIM{n}": layout.parts[n % len(tensors)].dim for n in range(3)}
        return cls(
            [*tensors, *[None] * num_absent],
            [*orders, *[None] * num_absent],
            [*sizes, *[0] * (3 * num_absent)],
            [*(stride for x in tensors for stride in x.stride()[:3]), *[0] * (3 * num_absent)],
            dims | {"ROWS": at_once // columns, "COLUMNS": columns},
            triton.cdiv(max(x.batch * x.length for x in layout.parts), at_once // columns),
        )


@DirectKernel
@triton.jit
def _move_tensors(
    buffer,
    x0,
    x1,
    x2,
    order0,
    order1,
    order2,
    length0,
    width0,
    offset0,
    length1,
    width1,
    offset1,
    length2,
    width2,
    offset2,
    batch0,
    row0,
    head0,
    batch1,
    row1,
    head1,
    batch2,
    row2,
    head2,
    batch,
    ranks,
    size,
    DIM0: tl.constexpr,
    DIM1: tl.constexpr,
    DIM2: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_HEADS: tl.constexpr,
    PACKS: tl.constexpr,
):
    """Copy between a buffer ``[P, bytes]`` and up to three tensors; grid row n copies tensor n."""
    tensor_index = tl.program_id(1)
    # Neighbouring programs serve different ranks.
    rank, block = tl.program_id(0) % ranks, tl.program_id(0) // ranks
    message = buffer + rank.to(tl.int64) * size
    if tensor_index == 0:
        move_block(
            message + offset0,
            x0,
            order0,
            rank,
            block,
            length0,
            width0,
            batch0,
            row0,
            head0,
            batch,
            DIM0,
            ROWS,
            COLUMNS,
            BY_HEADS,
            PACKS,
        )
    if x1 is not None:  # noqa: SIM102 - what is None is not compiled
        if tensor_index == 1:
            move_block(
                message + offset1,
                x1,
                order1,
                rank,
                block,
                length1,
                width1,
                batch1,
                row1,
                head1,
                batch,
                DIM1,
                ROWS,
                COLUMNS,
                BY_HEADS,
                PACKS,
            )
    if x2 is not None:  # noqa: SIM102 - a compile-time condition
        if tensor_index == 2:
            move_block(
                message + offset2,
                x2,
                order2,
                rank,
                block,
                length2,
                width2,
                batch2,
                row2,
                head2,
                batch,
                DIM2,
                ROWS,
                COLUMNS,
                BY_HEADS,
                PACKS,
            )


@triton.jit
def move_block(
    message,
    x,
    order,
    rank,
    block,
    length,
    width,
    x_batch,
    x_row,
    x_head,
    batch,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_HEADS: tl.constexpr,
    PACKS: tl.constexpr,
) -> None:
    """Copy some rows of one tensor's part in the message to or from a rank.

    The part is ``[B, T_local, H / P, D]``, at the address ``message``; a row of the copy is a token
    of it, ``width = H / P * D`` numbers. With ``BY_HEADS`` the tensor is ``[B, T_local, H, D]``,
    and rank n's part is the n-th range of heads; otherwise it is ``[B, T, H / P, D]``, and rank n's
    part are the n-th ``T_local`` tokens that ``order`` names, if any, or those of the tensor.
    ``PACKS`` copies into the message.
    """
    row = block * ROWS + tl.arange(0, ROWS)
    is_row = row < batch * length
    b, token = (row // length).to(tl.int64), row % length
    places = message.to(tl.pointer_type(x.dtype.element_ty)) + row.to(tl.int64) * width
    if BY_HEADS:
        starts = x + b * x_batch + token.to(tl.int64) * x_row
        starts += rank.to(tl.int64) * (width // DIM) * x_head
    else:
        # Tokens of the whole sequence are in rank order in the messages; `order` says where each
        # belongs.
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
