"""Tables that tell exchange kernels what a rank reads of its peers, and where it goes, in int64."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ring_core.programs.gather import Fetch
from ring_torch.buffers import KeyGradBuffer, KVPayload
from ring_torch.transports.exchange_kernel import CHUNK, NUMBERS, Blocks, interleaved

Rows = Sequence[Sequence[int]]
Sources = Iterable[tuple[Fetch, Tensor]]  # fetches, and what they read of a peer, [B, n, width]
HeadColumns = tuple[slice, slice]  # where K and V of some heads lie in K/V side by side


def own_places(fetches: Iterable[Fetch], length: int) -> Rows:
    """Return the token of the gathered buffer to which each own token goes, or -1 for none.

    ``fetches`` are those of this rank's own K/V, of ``length`` tokens.
    """
    places = [-1] * length
    for fetch in fetches:
        places[fetch.source] = range(fetch.target.start, fetch.target.stop)
    return [(place,) for place in places]


def pieces(keys: KVPayload, length: int, sources: Sources) -> Rows:
    """Return the table by which :func:`exchange_keys` fetches whole tokens of peers.

    ``length`` are the tokens of the gathered buffer.
    """
    token = keys.width * keys.dtype.itemsize
    rows: dict[int, list[Sequence[int]]] = {}
    # A row of a peer's batch is contiguous there and here. It is cut into chunks, which programs of
    # the kernel take in turns.
    for fetch, source in sources:
        for n, keys_of_rank in enumerate(source):
            size, offset = len(keys_of_rank) * token, (n * length + fetch.target.start) * token
            rows.setdefault(fetch.rank, []).extend(
                (keys_of_rank.data_ptr() + start, offset + start, min(CHUNK, size - start))
                for start in range(0, size, CHUNK)
            )
    return interleaved(list(rows.values()))


def columns_of_halves(keys: KVPayload) -> list[HeadColumns]:
    """Return the columns of each half of the heads."""
    k, v = keys.heads // 2 * keys.dim, keys.heads // 2 * keys.v_dim
    return [
        (slice(n * k, (n + 1) * k), slice(2 * k + n * v, 2 * k + (n + 1) * v)) for n in range(2)
    ]


def shape_of_blocks(keys: KVPayload) -> Blocks:
    """Return the shape of the blocks in which half of the heads of some tokens is fetched."""
    most = keys.heads // 2 * max(keys.dim, keys.v_dim) * keys.dtype.itemsize // 8
    words = 1 << (most - 1).bit_length()
    tokens = max(1, CHUNK // (8 * words))
    return Blocks(tokens, words, keys.width * keys.dtype.itemsize // 8)


def blocks(keys: KVPayload, length: int, sources: Sources, halves: Sequence[HeadColumns]) -> Rows:
    """Return the table by which :func:`exchange_keys` fetches halves of the heads of peers."""
    itemsize, at_once = keys.dtype.itemsize, shape_of_blocks(keys).tokens
    token = keys.width * itemsize
    rows: dict[int, list[Sequence[int]]] = {}
    for fetch, source in sources:
        for n, keys_of_rank in enumerate(source):
            tokens, offset = len(keys_of_rank), (n * length + fetch.target.start) * token
            rows.setdefault(fetch.rank, []).extend(
                (
                    keys_of_rank.data_ptr() + start * token + columns.start * itemsize,
                    offset + start * token + columns.start * itemsize,
                    min(at_once, tokens - start), (columns.stop - columns.start) * itemsize,
                )
                for start in range(0, tokens, at_once)
                for half in halves
                for columns in half
            )  # fmt: skip
    return interleaved(list(rows.values()))


class PeerSums(NamedTuple):
    """dK/dV that a peer has summed up for what it fetched of this rank."""

    fetch: Fetch
    flat: Tensor  # all sums of the peer, in its memory
    length: int  # tokens of the peer's gathered buffer


def sums_of_peers(
    sums: KeyGradBuffer, dtype: torch.dtype, length: int, spans: Iterable[tuple[slice, int]],
    parts: Sequence[PeerSums], width: int,
) -> Rows:  # fmt: skip
    """Return the table of :func:`reduce_from_peers`, with ``width`` addresses in a row.

    Args:
        sums: The shape of the sums.
        dtype: Their dtype.
        length: Tokens of ``total``, to which they are added.
        spans: Spans of own keys, each with its first column in ``total``; a fetch covers a span
            wholly or not at all.
        parts: The peers' sums, in the order in which they are added.
        width: Most peers that have sums for a span.
    """
    like = torch.empty(sums.numel(length), dtype=dtype, device="meta")
    rows: list[list[Sequence[int]]] = []
    # Each number of `total` is in one row of the table: one program adds all peers' sums to it, in
    # the order of the parts, so sums are repeatable.
    for span, start in spans:
        tokens = span.stop - span.start
        peer_sums = []
        for fetch, flat, peer_length in parts:
            if fetch.source.start <= span.start and span.stop <= fetch.source.stop:
                first = fetch.target.start + span.start - fetch.source.start
                columns = slice(first, first + tokens)
                peer_sums.append(sums.strided_views(flat, peer_length, columns))
        own_sums = sums.strided_views(like, length, slice(start, start + tokens))
        absent = [0] * (width - len(peer_sums))
        # A span is cut into runs that are contiguous in `total` and on all peers.
        rows.append([
            (
                row.storage_offset() + offset, min(NUMBERS, row.numel() - offset),
                *(x.data_ptr() + offset * x.itemsize for x in peers), *absent,
            )
            for total_rows, *parts_of_row in zip(own_sums, *peer_sums, strict=True)
            for row, *peers in zip(total_rows, *parts_of_row, strict=True)
            for offset in range(0, row.numel(), NUMBERS)
        ])  # fmt: skip
    return interleaved(rows)
