"""Keys and gradients of short passes, each moved by one Triton kernel, and how ranks meet in it.

Each rank has a header of int64 numbers that its peers write to, at the start of memory that they
read. Exchanges count from 1, on all ranks alike:

====================  =============================================================================
``0``, ``1``          how many programs have put all they had to put, have read all they had to read
``2``                 the number of the exchange that comes next, or is going on
``8 + 2 r``           what rank ``r`` is exchanging: a digest
``8 + 2 r + 1``       the number of the last exchange for which rank ``r`` has put its part
``8 + 2 ranks + r``   the number of the last exchange for which rank ``r`` has read all
====================  =============================================================================

A rank writes its part of an exchange when all have read that of the one before, and then its number
to all of them; so no number is overtaken. Programs wait for each other: there are no more than run
at once. All that is in memory, nothing in arguments, counts: a CUDA graph may be replayed.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_torch.triton_launch import DirectKernel

CHUNK = 1 << 16  # bytes that a program fetches at a time
NUMBERS = 1 << 13  # that it adds at a time
_PACKED = 1 << 14  # that it packs at a time
# Asserts end kernels of ranks that wait in vain, or make other calls. Not of numbers too large.
_OPTIONS = {"num_warps": 16, "debug": True, "sanitize_overflow": False}


class Place(NamedTuple):
    """Where a rank takes part in exchanges."""

    headers: Tensor  # int64 [ranks], addresses of all ranks' headers
    header: int  # that of this rank's
    rank: int
    programs: int
    patience: int  # nanoseconds until a rank that does not come is an error


def exchange_keys(
    place: Place, digest: int, k: Tensor, v: Tensor, own: Tensor, table: Tensor, target: Tensor
) -> None:
    """Put the own keys where peers read them, and fetch pieces of all ranks'.

    Args:
        place: Of this rank.
        digest: What all ranks have to be exchanging.
        k: ``[B, n, K, D]``; the heads of a token lie together.
        v: ``[B, n, K, Dv]``, likewise.
        own: ``[B, n, K * (D + Dv)]``, contiguous, in memory that peers read.
        table: int64 ``[chunks, 3]``: the address of a piece, its offset in ``target`` and its
            length, in bytes, multiples of 16; at most :data:`CHUNK`.
        target: Contiguous, at an address that is a multiple of 16.
    """
    batch, tokens, heads, dim = k.shape
    widths = heads * dim, heads * v.shape[3]
    size = triton.next_power_of_2(max(*widths, 1))
    _exchange_keys[(place.programs,)](
        place.headers, place.header, digest, place.rank, place.headers.shape[0], place.patience,
        k, v, own, *k.stride()[:2], *v.stride()[:2], tokens, batch * tokens,
        table, table.shape[0], target.view(-1).view(torch.uint8),
        K=widths[0], V=widths[1], SIZE=size, ROWS=max(1, _PACKED // size), WORDS=CHUNK // 8,
        **_OPTIONS,
    )  # fmt: skip


def clear(place: Place, room: Tensor, *, zero: bool) -> None:
    """Wait until all have read what was put before, and fill a place for new with zeros."""
    _clear[(place.programs if zero else 1,)](
        place.header, place.headers.shape[0], place.patience, room, room.numel() if zero else 0,
        NUMBERS=NUMBERS, **_OPTIONS,
    )  # fmt: skip


def reduce_from_peers(place: Place, digest: int, table: Tensor, total: Tensor) -> None:
    """Let peers read what was put, and add theirs.

    Args:
        place: Of this rank.
        digest: What all ranks have to be exchanging.
        table: int64 ``[chunks, 2 + parts]``: an offset in ``total``, how many numbers (at most
            :data:`NUMBERS`), and the addresses of what to add there, in their order; 0 is none.
        total: float32, contiguous.
    """
    _add_peers[(place.programs,)](
        place.headers, place.header, digest, place.rank, place.headers.shape[0], place.patience,
        table, table.shape[0], total, PARTS=table.shape[1] - 2, NUMBERS=NUMBERS, **_OPTIONS,
    )  # fmt: skip


@triton.jit
def _now():
    return tl.extra.cuda.globaltimer()


@triton.jit
def _await(number, wanted, patience):
    """Wait for a number that a peer writes; what it wrote before can be read then."""
    start = _now()
    seen = tl.atomic_add(number, 0, sem="acquire", scope="sys")
    while seen != wanted:
        tl.device_assert(_now() - start < patience, "a rank of a ring did not come in time")
        seen = tl.atomic_add(number, 0, sem="acquire", scope="sys")


@triton.jit
def _await_readers(header, ranks, patience):
    """Wait until all have read what was put before."""
    number = tl.load(header + 2)
    for rank in range(ranks):
        _await(header + 8 + 2 * ranks + rank, number - 1, patience)


@triton.jit
def _signal_peers(headers, digest, rank, ranks, number):
    """Tell all ranks that this one has put its part."""
    for peer in range(ranks):
        theirs = tl.load(headers + peer).to(tl.pointer_type(tl.int64)) + 8 + 2 * rank
        tl.store(theirs, digest)
        tl.debug_barrier()
        tl.atomic_xchg(theirs + 1, number, sem="release", scope="sys")


@triton.jit
def _await_all(header, digest, ranks, number, patience):
    """Wait until all have put their parts, of the same."""
    for rank in range(ranks):
        _await(header + 8 + 2 * rank + 1, number, patience)
        theirs = tl.load(header + 8 + 2 * rank, volatile=True)
        tl.device_assert(theirs == digest, "ranks of a ring make different calls")


@triton.jit
def _finish(headers, header, rank, ranks, number):
    """Count a program that has read all it had to; the last one tells all ranks."""
    tl.debug_barrier()
    before = tl.atomic_add(header + 1, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        tl.store(header, 0)
        tl.store(header + 1, 0)
        tl.store(header + 2, number + 1)
        tl.debug_barrier()
        for peer in range(ranks):
            theirs = tl.load(headers + peer).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(theirs + 8 + 2 * ranks + rank, number, sem="release", scope="sys")


@DirectKernel
@triton.jit  # type: ignore[untyped-decorator]
def _exchange_keys(
    headers, header, digest, rank, ranks, patience,
    k, v, own, k_batch, k_token, v_batch, v_token, tokens, rows,
    table, chunks, target,
    K: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    header = header.to(tl.pointer_type(tl.int64))
    number = tl.load(header + 2)
    programs = tl.num_programs(0)
    _await_readers(header, ranks, patience)
    column = tl.arange(0, SIZE)[None, :]
    for start in range(tl.program_id(0) * ROWS, rows, programs * ROWS):
        row = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        batch, token = row // tokens, row % tokens
        in_k, in_v = (row < rows) & (column < K), (row < rows) & (column < V)
        x = tl.load(k + batch * k_batch + token * k_token + column, mask=in_k)
        y = tl.load(v + batch * v_batch + token * v_token + column, mask=in_v)
        tl.store(own + row * (K + V) + column, x, mask=in_k)
        tl.store(own + row * (K + V) + K + column, y, mask=in_v)
    tl.debug_barrier()
    before = tl.atomic_add(header, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if before == programs - 1:
        _signal_peers(headers, digest, rank, ranks, number)
    _await_all(header, digest, ranks, number, patience)
    at = tl.arange(0, WORDS)
    for chunk in range(tl.program_id(0), chunks, programs):
        piece = table + 3 * chunk
        source = tl.multiple_of(tl.load(piece).to(tl.pointer_type(tl.int64)), 16)
        place = tl.multiple_of((target + tl.load(piece + 1)).to(tl.pointer_type(tl.int64)), 16)
        inside = at < tl.multiple_of(tl.load(piece + 2) // 8, 2)
        tl.store(place + at, tl.load(source + at, mask=inside), mask=inside)
    _finish(headers, header, rank, ranks, number)


@DirectKernel
@triton.jit  # type: ignore[untyped-decorator]
def _clear(header, ranks, patience, room, numel, NUMBERS: tl.constexpr):
    _await_readers(header.to(tl.pointer_type(tl.int64)), ranks, patience)
    step = tl.num_programs(0) * NUMBERS
    for start in range(tl.program_id(0).to(tl.int64) * NUMBERS, numel, step):
        at = start + tl.arange(0, NUMBERS)
        tl.store(room + at, tl.zeros([NUMBERS], tl.float32), mask=at < numel)


@DirectKernel
@triton.jit  # type: ignore[untyped-decorator]
def _add_peers(
    headers, header, digest, rank, ranks, patience, table, chunks, total,
    PARTS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    header = header.to(tl.pointer_type(tl.int64))
    number = tl.load(header + 2)
    if tl.program_id(0) == 0:
        _signal_peers(headers, digest, rank, ranks, number)
    _await_all(header, digest, ranks, number, patience)
    at = tl.arange(0, NUMBERS)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        row = table + (2 + PARTS) * chunk
        size = tl.load(row + 1)
        inside = at < size
        place = total + tl.multiple_of(tl.load(row), 4) + at
        x = tl.load(place, mask=inside)
        for part in tl.static_range(PARTS):
            address = tl.load(row + 2 + part)
            theirs = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
            x += tl.load(theirs + at, mask=at < tl.where(address == 0, 0, size), other=0.0)
        tl.store(place, x, mask=inside)
    _finish(headers, header, rank, ranks, number)
