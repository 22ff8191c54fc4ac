"""Triton kernels that exchange K/V or dK/dV of a short pass, or tokens for heads, in one launch.

They synchronise the ranks in it.

Each rank has a header of int64 numbers at the start of its symmetric memory. Its peers write there
to signal to it. Exchanges are numbered from 1, on all ranks alike:

====================  =============================================================================
``0``, ``1``          numbers of this rank's programs that have finished writing, and reading
``2``                 the number of the next exchange, or of the one in progress
``8 + 2 r``           the digest of the exchange that rank ``r`` takes part in
``8 + 2 r + 1``       the number of the last exchange for which rank ``r`` has written its part
``8 + 2 ranks + r``   the number of the last exchange for which rank ``r`` has finished reading
====================  =============================================================================

A rank overwrites its part only when all ranks have finished reading the exchange before. The kernel
that exchanges K/V waits for that itself; for dK/dV :func:`wait_reusable` does, before
they are computed.
Then the rank signals the exchange's number to all of them, and reads when it has the same number
from each. So no signal is overwritten before it was seen. An exchange by :class:`Blocks` is ended
by :func:`finish_reading`, when this rank has read all. Programs (thread blocks) wait for each
other, so no more are launched than run at once. State is in memory alone, none in arguments: a CUDA
graph with these kernels may be replayed.
"""

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
from ring_torch.transports.symm_buffer import MOST_RANKS

_RANKS = tl.constexpr(MOST_RANKS)
CHUNK = 1 << 16  # bytes that a program fetches at a time
NUMBERS = 1 << 13  # numbers that it adds at a time
_MOVED = 1 << 14  # numbers that it packs or unpacks at a time
# With `debug`, device asserts end the kernels of ranks that wait in vain or make different calls.
# Checks for integer overflow, which it would bring, too, are left out.
_OPTIONS = {"num_warps": 16, "debug": True, "sanitize_overflow": False}
# Indices of the arguments that change when a launch is repeated for tensors of the same shapes,
# strides and alignment: of all exchanges, of K/V, of dK/dV, and of tokens for heads.
DIGEST, K, V, TARGET, TOTAL, SOURCES, RESULTS, ORDERS = 2, 6, 7, 16, 8, 6, 9, 12


class ExchangeSetup(NamedTuple):
    """Fixed arguments of a rank's exchanges: addresses of headers, and launch sizes."""

    headers: Tensor  # int64 [ranks]: addresses of all ranks' headers
    header: int  # address of this rank's header
    rank: int
    programs: int  # thread blocks of a launch
    head_programs: int  # thread blocks of a launch that trades tokens for heads
    patience: int  # nanoseconds after which a rank that does not come is an error


class Blocks(NamedTuple):
    """Shape of blocks of K/V: some heads of some tokens, which lie apart in memory."""

    tokens: int  # at most
    words: int  # words of 8 bytes of a token, rounded up to a power of two
    stride: int  # words from token to token


WHOLE = Blocks(1, CHUNK // 8, 0)  # whole tokens, contiguous: together they count as one


def exchange_keys(
    setup: ExchangeSetup,
    digest: int,
    k: Tensor,
    v: Tensor,
    own: Tensor,
    places: Tensor,
    target: Tensor,
    table: Tensor,
    blocks: Blocks = WHOLE,
    *,
    ends: bool = True,
) -> PreparedLaunch | None:
    """Write own K/V where peers read them, and fetch pieces of peers' K/V: one exchange.

    Args:
        setup: Setup of this rank.
        digest: Identifies the exchange; a rank with another one ends in a device assert.
        k: ``[B, n, K, D]``; the heads of a token are contiguous.
        v: ``[B, n, K, Dv]``, likewise.
        own: ``[B, n, K * (D + Dv)]``, contiguous, in memory that peers read.
        places: int64 ``[n, 1]``: the token of ``target`` to which each own token goes, or -1.
        target: The buffer to fill, ``[B, T, K * (D + Dv)]``, contiguous, at an address that is a
            multiple of 16.
        table: int64 ``[blocks, 4]``: the address of a block, its offset in ``target``, its tokens,
            and bytes of each; bytes are multiples of 16. :data:`WHOLE` tokens count as one, of at
            most :data:`CHUNK` bytes.
        blocks: The shape of blocks.
        ends: With False :func:`finish_reading` ends the exchange: until then this rank may read
            more of what peers wrote.

    Returns:
        The launch for later calls, in which ``DIGEST``, ``K``, ``V`` and ``TARGET`` change, or
        ``None`` if it cannot be repeated directly.
    """
    batch, tokens, heads, dim = k.shape
    widths = heads * dim, heads * v.shape[3]
    size = triton.next_power_of_2(max(*widths, 1))
    return _exchange_keys.launch(
        (setup.programs,),
        setup.headers,
        setup.header,
        digest,
        setup.rank,
        setup.headers.shape[0],
        setup.patience,
        k,
        v,
        own,
        *k.stride()[:2],
        *v.stride()[:2],
        tokens,
        batch * tokens,
        places,
        target,
        target.shape[1],
        table,
        table.shape[0],
        int(ends),
        K=widths[0],
        V=widths[1],
        SIZE=size,
        ROWS=max(1, _MOVED // size),
        TOKENS=blocks.tokens,
        WORDS=blocks.words,
        STRIDE=blocks.stride,
        **_OPTIONS,
    )


def finish_reading(setup: ExchangeSetup, *, ends: bool = True) -> None:
    """End an exchange: all that this rank reads of it has been read on this stream.

    With ``ends`` False this does no more than load the kernel, which a CUDA graph cannot do.
    """
    headers, header, rank, *_ = setup
    _finish_reading[(1,)](headers, header, rank, headers.shape[0], int(ends), **_OPTIONS)


def wait_reusable(setup: ExchangeSetup, sums: Tensor, *, zero: bool) -> PreparedLaunch | None:
    """Wait until all ranks have read this rank's part of the last exchange, which may be reused.

    With ``zero``, ``sums`` are then filled with zeros: float32, contiguous, in memory that peers
    read.

    Returns:
        The same launch for later calls, or ``None`` if it cannot be repeated directly.
    """
    programs, size = (setup.programs, sums.numel()) if zero else (1, 0)
    return _wait_reusable.launch(
        (programs,),
        setup.header,
        setup.headers.shape[0],
        setup.patience,
        sums,
        size,
        NUMBERS=NUMBERS,
        **_OPTIONS,
    )


def reduce_from_peers(
    setup: ExchangeSetup, digest: int, table: Tensor, total: Tensor
) -> PreparedLaunch | None:
    """Let peers read the sums that this rank holds, and add those of peers to ``total``.

    It is one exchange. What peers read has been written by earlier kernels of this stream, after
    :func:`wait_reusable`, which waits for the readers of the exchange before: this kernel does not.

    Args:
        setup: Setup of this rank.
        digest: Identifies the exchange; a rank with another one ends in a device assert.
        table: int64 ``[chunks, 2 + parts]``: an offset in ``total`` and a count, in numbers (at
            most :data:`NUMBERS`), and the addresses of what to add there, in this order; 0 is none.
        total: The sums of own keys, float32, contiguous, at an address that is a multiple of 16.

    Returns:
        The launch for later calls, in which ``DIGEST`` and ``TOTAL`` change, or ``None`` if it
        cannot be repeated directly.
    """
    return _add_peers.launch(
        (setup.programs,),
        setup.headers,
        setup.header,
        digest,
        setup.rank,
        setup.headers.shape[0],
        setup.patience,
        table,
        table.shape[0],
        total,
        PARTS=table.shape[1] - 2,
        NUMBERS=NUMBERS,
        **_OPTIONS,
    )


def trade_heads(
    setup: ExchangeSetup,
    header: int,
    digest: int,
    layout: HeadBuffer,
    sources: Sequence[Tensor],
    results: Sequence[Tensor],
    orders: Sequence[Tensor | None],
    *,
    splits_heads: bool,
) -> PreparedLaunch | None:
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
        The launch for later calls, in which ``DIGEST``, and tensors from ``SOURCES``, ``RESULTS``
        and ``ORDERS`` on change, or ``None`` if it cannot be repeated directly.
    """
    sent = HeadArguments.of(layout, sources, orders, at_once=_MOVED)
    received = HeadArguments.of(layout, results, orders, at_once=_MOVED)
    return _trade_heads.launch(
        (setup.head_programs,),
        setup.headers,
        setup.header,
        digest,
        setup.rank,
        layout.ranks,
        setup.patience,
        *sent.tensors,
        *received.tensors,
        *sent.orders,
        *sent.sizes,
        *sent.strides,
        *received.strides,
        layout.parts[0].batch,
        layout.message.size,
        header + setup.rank * layout.message.size,
        sent.blocks,
        HEADER=header,
        SPLITS_HEADS=splits_heads,
        **sent.constants | _OPTIONS | {"num_warps": 8},
    )


@triton.jit
def _now():
    """Return the GPU's timer in nanoseconds."""
    return tl.extra.cuda.globaltimer()


@triton.jit
def _missing(numbers, present, expected):
    """Return how many of the ranks that are ``present`` have not written the wanted number."""
    zeros = tl.zeros([_RANKS], tl.int64)
    current = tl.atomic_add(numbers, zeros, mask=present, sem="acquire", scope="sys")
    return tl.sum((present & (current != expected)).to(tl.int32))


@triton.jit
def _await(numbers, present, expected, patience):
    """Wait until peers have written the wanted number; then what they wrote before can be read.

    ``numbers`` points to one for each rank that is ``present``, and all are asked at once. After
    ``patience`` nanoseconds a device assert ends the kernel.
    """
    start = _now()
    while _missing(numbers, present, expected) > 0:
        tl.device_assert(_now() - start < patience, "a rank of a ring did not come in time")
    # Threads that asked for no rank may read what is there now, too.
    tl.debug_barrier()


@triton.jit
def _peer_slots(headers, ranks, offset):
    """Return a pointer into each rank's header, ``offset`` numbers from its start."""
    peer = tl.arange(0, _RANKS)
    addresses = tl.load(headers + peer, mask=peer < ranks, other=0)
    return addresses.to(tl.pointer_type(tl.int64)) + offset


@triton.jit
def await_readers(header, ranks, patience) -> None:
    """Wait until all ranks have finished reading the exchange before the next one."""
    number = tl.load(header + 2)
    rank = tl.arange(0, _RANKS)
    _await(header + 8 + 2 * ranks + rank, rank < ranks, number - 1, patience)


@triton.jit
def signal_peers(headers, digest, rank, ranks, number) -> None:
    """Tell all ranks at once that this one has written its part of an exchange."""
    # First the digest, then the number by which a peer knows that the digest is there.
    slots = _peer_slots(headers, ranks, 8 + 2 * rank)
    present = tl.arange(0, _RANKS) < ranks
    tl.store(slots, tl.zeros([_RANKS], tl.int64) + digest, mask=present)
    tl.debug_barrier()
    numbers = tl.zeros([_RANKS], tl.int64) + number
    tl.atomic_xchg(slots + 1, numbers, mask=present, sem="release", scope="sys")


@triton.jit
def await_all(header, digest, ranks, number, patience) -> None:
    """Wait until all ranks have written their parts, and assert that these are of one exchange."""
    rank = tl.arange(0, _RANKS)
    slots = header + 8 + 2 * rank
    _await(slots + 1, rank < ranks, number, patience)
    digests = tl.load(slots, mask=rank < ranks, other=digest, volatile=True)
    tl.device_assert(digests == digest, "ranks of a ring make different calls")


@triton.jit
def signal_and_await(headers, header, digest, rank, ranks, number, patience) -> None:
    """Tell all ranks that this one has written, and wait until all of them have."""
    # The program that is the last to have written signals for all of them.
    tl.debug_barrier()
    num_written = tl.atomic_add(header, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if num_written == tl.num_programs(0) - 1:
        signal_peers(headers, digest, rank, ranks, number)
    # Each program waits for all ranks' signals.
    await_all(header, digest, ranks, number, patience)


@triton.jit
def finish(headers, header, rank, ranks, number) -> None:
    """Count a program that has finished reading; the last one of the launch tells all ranks."""
    # All threads of this program have read.
    tl.debug_barrier()
    num_finished = tl.atomic_add(header + 1, 1, sem="acq_rel", scope="gpu")
    if num_finished == tl.num_programs(0) - 1:
        # No program of this launch looks at the counters any more: set them for the next exchange,
        # and then let peers overwrite their parts.
        tl.store(header, 0)
        tl.store(header + 1, 0)
        tl.store(header + 2, number + 1)
        tl.debug_barrier()
        slots = _peer_slots(headers, ranks, 8 + 2 * ranks + rank)
        numbers = tl.zeros([_RANKS], tl.int64) + number
        present = tl.arange(0, _RANKS) < ranks
        tl.atomic_xchg(slots, numbers, mask=present, sem="release", scope="sys")


@DirectKernel
@triton.jit(do_not_specialize=["digest", "chunks", "ends"])
def _exchange_keys(
    headers,
    header,
    digest,
    rank,
    ranks,
    patience,
    k,
    v,
    own,
    k_batch,
    k_token,
    v_batch,
    v_token,
    tokens,
    rows,
    places,
    target,
    length,
    table,
    chunks,
    ends,
    K: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Run one exchange of K/V: write own ones, signal, wait for all ranks, and read theirs."""
    header = header.to(tl.pointer_type(tl.int64))
    number = tl.load(header + 2)
    programs = tl.num_programs(0)
    # Peers may still be reading what this rank wrote for the exchange before.
    await_readers(header, ranks, patience)
    # Write own K/V side by side where peers read them, and into the gathered buffer: a share of the
    # tokens in each program.
    column = tl.arange(0, SIZE)[None, :]
    for start in range(tl.program_id(0) * ROWS, rows, programs * ROWS):
        row = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        batch, token = row // tokens, row % tokens
        in_k, in_v = (row < rows) & (column < K), (row < rows) & (column < V)
        x = tl.load(k + batch * k_batch + token * k_token + column, mask=in_k)
        y = tl.load(v + batch * v_batch + token * v_token + column, mask=in_v)
        tl.store(own + row * (K + V) + column, x, mask=in_k)
        tl.store(own + row * (K + V) + K + column, y, mask=in_v)
        place = tl.load(places + token, mask=row < rows, other=-1)
        dst = target + (batch * length + place) * (K + V) + column
        tl.store(dst, x, mask=in_k & (place >= 0))
        tl.store(dst + K, y, mask=in_v & (place >= 0))
    # From here on all parts are there to be read, and none is overwritten before this rank has
    # signalled that it has finished reading.
    signal_and_await(headers, header, digest, rank, ranks, number, patience)
    # Copy blocks in words of 8 bytes; programs that run at once read from different ranks. A block
    # is contiguous, or of TOKENS tokens that lie STRIDE words apart.
    memory = target.to(tl.pointer_type(tl.uint8))
    token, word = tl.arange(0, TOKENS)[:, None], tl.arange(0, WORDS)[None, :]
    for chunk in range(tl.program_id(0), chunks, programs):
        table_row = table + 4 * chunk
        source = tl.multiple_of(tl.load(table_row).to(tl.pointer_type(tl.int64)), 16)
        dst = tl.multiple_of((memory + tl.load(table_row + 1)).to(tl.pointer_type(tl.int64)), 16)
        inside = word < tl.multiple_of(tl.load(table_row + 3) // 8, 2)
        if STRIDE > 0:
            inside &= token < tl.load(table_row + 2)
        index = token * STRIDE + word
        tl.store(dst + index, tl.load(source + index, mask=inside), mask=inside)
    # Otherwise this rank reads more before its peers may overwrite what they wrote.
    if ends != 0:
        finish(headers, header, rank, ranks, number)


@DirectKernel
@triton.jit(do_not_specialize=["ends"])
def _finish_reading(headers, header, rank, ranks, ends):
    """End an exchange whose kernel did not."""
    header = header.to(tl.pointer_type(tl.int64))
    if ends != 0:
        finish(headers, header, rank, ranks, tl.load(header + 2))


@DirectKernel
@triton.jit
def _wait_reusable(header, ranks, patience, sums, numel, NUMBERS: tl.constexpr):
    """Wait until all ranks have finished reading the last exchange, then write zeros."""
    # Only then may this rank, and kernels after this one, write into memory that peers read.
    await_readers(header.to(tl.pointer_type(tl.int64)), ranks, patience)
    step = tl.num_programs(0) * NUMBERS
    for start in range(tl.program_id(0).to(tl.int64) * NUMBERS, numel, step):
        index = start + tl.arange(0, NUMBERS)
        tl.store(sums + index, tl.zeros([NUMBERS], tl.float32), mask=index < numel)


@DirectKernel
@triton.jit(do_not_specialize=["digest"])
def _add_peers(
    headers,
    header,
    digest,
    rank,
    ranks,
    patience,
    table,
    chunks,
    total,
    PARTS: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """Run one exchange of dK/dV: signal, wait for all ranks, and add their sums."""
    header = header.to(tl.pointer_type(tl.int64))
    number = tl.load(header + 2)
    # This rank's part was written by earlier kernels of the stream: it is complete.
    if tl.program_id(0) == 0:
        signal_peers(headers, digest, rank, ranks, number)
    # Then all ranks' sums are final. Peers read their own keys' sums of this rank meanwhile, but
    # not those that this kernel adds to.
    await_all(header, digest, ranks, number, patience)
    index = tl.arange(0, NUMBERS)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        row = table + (2 + PARTS) * chunk
        size = tl.load(row + 1)
        inside = index < size
        dst = total + tl.multiple_of(tl.load(row), 4) + index
        x = tl.load(dst, mask=inside)
        # Add in the table's order, so that sums repeat bit for bit. An address of 0 loads nothing.
        for n in tl.static_range(PARTS):
            address = tl.load(row + 2 + n)
            peer_sums = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
            x += tl.load(peer_sums + index, mask=index < tl.where(address == 0, 0, size), other=0.0)
        tl.store(dst, x, mask=inside)
    finish(headers, header, rank, ranks, number)


@DirectKernel
@triton.jit(do_not_specialize=["digest"])
def _trade_heads(
    headers,
    header,
    digest,
    rank,
    ranks,
    patience,
    x0,
    x1,
    x2,
    y0,
    y1,
    y2,
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
    x_batch0,
    x_row0,
    x_head0,
    x_batch1,
    x_row1,
    x_head1,
    x_batch2,
    x_row2,
    x_head2,
    y_batch0,
    y_row0,
    y_head0,
    y_batch1,
    y_row1,
    y_head1,
    y_batch2,
    y_row2,
    y_head2,
    batch,
    size,
    own_message,
    blocks,
    DIM0: tl.constexpr,
    DIM1: tl.constexpr,
    DIM2: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADER: tl.constexpr,
    SPLITS_HEADS: tl.constexpr,
):
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
        _move_parts(
            message,
            x0,
            x1,
            x2,
            order0,
            order1,
            order2,
            peer,
            block,
            length0,
            width0,
            offset0,
            length1,
            width1,
            offset1,
            length2,
            width2,
            offset2,
            x_batch0,
            x_row0,
            x_head0,
            x_batch1,
            x_row1,
            x_head1,
            x_batch2,
            x_row2,
            x_head2,
            batch,
            DIM0,
            DIM1,
            DIM2,
            ROWS,
            COLUMNS,
            SPLITS_HEADS,
            True,
        )
    # From here on all messages are there to be read, and none is overwritten before this rank has
    # signalled that it has finished reading.
    signal_and_await(headers, own_header, digest, rank, ranks, number, patience)
    # Read the message for this rank from each, beginning with another rank on each of them.
    for n in range(tl.program_id(0), ranks * blocks, programs):
        peer, block = (n + rank) % ranks, n // ranks
        message = tl.multiple_of(tl.load(headers + peer) + own_message, 16)
        _move_parts(
            message,
            y0,
            y1,
            y2,
            order0,
            order1,
            order2,
            peer,
            block,
            length0,
            width0,
            offset0,
            length1,
            width1,
            offset1,
            length2,
            width2,
            offset2,
            y_batch0,
            y_row0,
            y_head0,
            y_batch1,
            y_row1,
            y_head1,
            y_batch2,
            y_row2,
            y_head2,
            batch,
            DIM0,
            DIM1,
            DIM2,
            ROWS,
            COLUMNS,
            not SPLITS_HEADS,
            False,
        )
    finish(headers, own_header, rank, ranks, number)


@triton.jit
def _move_parts(
    message,
    x0,
    x1,
    x2,
    order0,
    order1,
    order2,
    peer,
    block,
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
    DIM0: tl.constexpr,
    DIM1: tl.constexpr,
    DIM2: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_HEADS: tl.constexpr,
    PACKS: tl.constexpr,
) -> None:
    """Copy some rows of up to three tensors' parts in the message to or from a rank."""
    move_block(
        message + offset0,
        x0,
        order0,
        peer,
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
    if x1 is not None:
        move_block(
            message + offset1,
            x1,
            order1,
            peer,
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
    if x2 is not None:
        move_block(
            message + offset2,
            x2,
            order2,
            peer,
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
