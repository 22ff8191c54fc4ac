"""Triton kernel that trades tokens for heads in one launch, through memory that peers read."""

# Triton's decorator, and the arguments of kernels, have no types in Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ring_torch.buffers import HeadBuffer
from ring_torch.comm.head_exchange_kernel import HeadArguments, move_block
from ring_torch.launches.direct import DirectKernel, PreparedLaunch
from ring_torch.transports.exchange_kernel import (
    OPTIONS,
    ExchangeSetup,
    await_all,
    await_readers,
    finish,
    signal_peers,
)

_NUMBERS = 1 << 14  # numbers that a program copies at a time
_DIGEST, _SOURCES, _RESULTS, _ORDERS = 2, 6, 9, 12  # indices among the arguments of a launch


class PreparedHeadTrade(NamedTuple):
    """An exchange that was made before, for tensors of the same shapes, strides and alignment."""

    launch: PreparedLaunch

    def __call__(
        self, digest: int, sources: Sequence[Tensor], results: Sequence[Tensor],
        orders: Sequence[Tensor | None],
    ) -> None:  # fmt: skip
        """Run it as :func:`trade_heads` does."""
        changes = {_DIGEST: digest}
        for n, (source, result, order) in enumerate(zip(sources, results, orders, strict=True)):
            changes[_SOURCES + n], changes[_RESULTS + n] = source.data_ptr(), result.data_ptr()
            if order is not None:
                changes[_ORDERS + n] = order.data_ptr()
        self.launch(changes)


def trade_heads(
    setup: ExchangeSetup, header: int, digest: int, layout: HeadBuffer, sources: Sequence[Tensor],
    results: Sequence[Tensor], orders: Sequence[Tensor | None], *, splits_heads: bool,
) -> PreparedHeadTrade | None:  # fmt: skip
    """Write parts of ``sources`` where peers read them, and read parts of ``results`` from peers.

    Args:
        setup: Setup of this rank.
        header: Bytes before the messages in each rank's memory.
        digest: Identifies the exchange; a rank with another one ends in a device assert.
        layout: How the messages hold the tensors: row n of a rank's memory is for rank n.
        sources: Up to three tensors, ``[B, T_local, H, D]`` with ``splits_heads`` and else ``[B, T,
            H / P, D]``.
        results: Tensors of the other shape, to be written.
        orders: For each tensor the positions of rank 0's tokens, then those of rank 1, ..., int64
            ``[T]``; ``None`` if they are in natural order.
        splits_heads: True to trade tokens for heads, False for the way back.

    Returns:
        The same exchange for later calls, or ``None`` if it cannot be repeated directly.
    """
    sent = HeadArguments.of(layout, sources, orders, at_once=_NUMBERS)
    received = HeadArguments.of(layout, results, orders, at_once=_NUMBERS)
    arguments = (
        setup.headers, setup.header, digest, setup.rank, layout.ranks, setup.patience,
        *sent.tensors, *received.tensors, *sent.orders, *sent.sizes, *sent.strides,
        *received.strides, layout.parts[0].batch, layout.message.size,
        header + setup.rank * layout.message.size, sent.blocks,
    )  # fmt: skip
    constants = sent.constants | {
        "HEADER": header, "SPLITS_HEADS": splits_heads, **OPTIONS, "num_warps": 8,
    }  # fmt: skip
    launch = _trade_heads.launch((setup.head_programs,), *arguments, **constants)
    return None if launch is None else PreparedHeadTrade(launch)


@DirectKernel
@triton.jit(do_not_specialize=["digest"])
def _trade_heads(
    headers, header, digest, rank, ranks, patience,
    x0, x1, x2, y0, y1, y2, order0, order1, order2,
    length0, width0, offset0, length1, width1, offset1, length2, width2, offset2,
    x_batch0, x_row0, x_head0, x_batch1, x_row1, x_head1, x_batch2, x_row2, x_head2,
    y_batch0, y_row0, y_head0, y_batch1, y_row1, y_head1, y_batch2, y_row2, y_head2,
    batch, size, own_message, blocks,
    DIM0: tl.constexpr, DIM1: tl.constexpr, DIM2: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEADER: tl.constexpr, SPLITS_HEADS: tl.constexpr,
):  # fmt: skip
    """Run one exchange: write own parts, signal, wait for all ranks, and read theirs."""
    own_header = header.to(tl.pointer_type(tl.int64))
    number = tl.load(own_header + 2)
    programs = tl.num_programs(0)
    # Peers may still be reading what this rank wrote for the exchange before.
    await_readers(own_header, ranks, patience)
    # Write the message for each rank into own memory, some rows at a time in each program.
    for n in range(tl.program_id(0), ranks * blocks, programs):
        peer, block = n % ranks, n // ranks
        message = tl.multiple_of(header + HEADER + peer.to(tl.int64) * size, 16)
        move_block(
            message + offset0, x0, order0, peer, block, length0, width0, x_batch0, x_row0, x_head0,
            batch, DIM0, ROWS, COLUMNS, SPLITS_HEADS, True,
        )  # fmt: skip
        if x1 is not None:
            move_block(
                message + offset1, x1, order1, peer, block, length1, width1, x_batch1, x_row1,
                x_head1, batch, DIM1, ROWS, COLUMNS, SPLITS_HEADS, True,
            )  # fmt: skip
        if x2 is not None:
            move_block(
                message + offset2, x2, order2, peer, block, length2, width2, x_batch2, x_row2,
                x_head2, batch, DIM2, ROWS, COLUMNS, SPLITS_HEADS, True,
            )  # fmt: skip
    # The program that is the last to have written signals for all of them.
    tl.debug_barrier()
    num_written = tl.atomic_add(own_header, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if num_written == programs - 1:
        signal_peers(headers, digest, rank, ranks, number)
    # Each program waits for all ranks' signals. From here on all messages are there to be read,
    # and none is overwritten before this rank has signalled that it has finished reading.
    await_all(own_header, digest, ranks, number, patience)
    # Read the message for this rank from each, beginning with another rank on each of them.
    for n in range(tl.program_id(0), ranks * blocks, programs):
        peer, block = (n + rank) % ranks, n // ranks
        message = tl.multiple_of(tl.load(headers + peer) + own_message, 16)
        move_block(
            message + offset0, y0, order0, peer, block, length0, width0, y_batch0, y_row0, y_head0,
            batch, DIM0, ROWS, COLUMNS, not SPLITS_HEADS, False,
        )  # fmt: skip
        if y1 is not None:
            move_block(
                message + offset1, y1, order1, peer, block, length1, width1, y_batch1, y_row1,
                y_head1, batch, DIM1, ROWS, COLUMNS, not SPLITS_HEADS, False,
            )  # fmt: skip
        if y2 is not None:
            move_block(
                message + offset2, y2, order2, peer, block, length2, width2, y_batch2, y_row2,
                y_head2, batch, DIM2, ROWS, COLUMNS, not SPLITS_HEADS, False,
            )  # fmt: skip
    finish(headers, own_header, rank, ranks, number)
