"""Chunks of the sequence assigned to ranks by what their queries see."""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush
from typing import cast

import numpy as np

from ring_core.base.arguments import Ints, check_choice, check_kind, check_size
from ring_core.base.errors import UnsupportedError
from ring_core.layouts.layout import LAYOUTS, ChunkLayout, Layout, LayoutName, LayoutSpec
from ring_core.masks.mask import Mask, check_documents
from ring_core.plan.geometry import BandGeometry

#: Names of all layouts, those made for a mask among them.
ALL_LAYOUTS = (*LAYOUTS, "chunks")

EVEN = 1.02  # of the busiest rank over the mean: more chunks than this takes cost launches
_CHUNKS_PER_RANK = (1, 2, 4, 8, 16)
_MOST_CHUNKS = 1024  # over all ranks: plans look at every pair of them


def balance_chunks(
    mask: Mask, *, seq_len: int, cp_size: int, kv_seq_len: int | None = None
) -> ChunkLayout:
    """A layout whose ranks see equally many pairs under a mask, packed documents above all.

    The sequence is cut into equal chunks, and these are assigned to the ranks, those that see most
    first. The same arguments give the same layout, on every rank. Each chunk that a rank holds is a
    launch or more, so there are as few of them as bring the busiest rank to 1.02 times the mean,
    of 1, 2, 4, 8 and 16 a rank. Where none do, it is the most even. Chunks are multiples of 128
    tokens, which kernels work in, where a length is a multiple of 128 times the number of chunks.

    Args:
        mask: Which query sees which key; any but a predicate.
        seq_len: Queries, over all ranks.
        cp_size: Ranks.
        kv_seq_len: Keys, over all ranks, where they are not as many as queries.

    Returns:
        What ``layout`` takes, with data of this length on this number of ranks.

    Raises:
        ValueError: A length that ``cp_size`` does not divide; ``cu_seqlens`` that do not end at
            ``seq_len`` or come with other keys than queries.
        UnsupportedError: The mask has a predicate.
    """
    check_kind("mask", mask, Mask)
    seq_len, cp_size = check_size("seq_len", seq_len), check_size("cp_size", cp_size)
    keys = seq_len if kv_seq_len is None else check_size("kv_seq_len", kv_seq_len)
    if mask.predicate is not None:
        raise UnsupportedError(
            "mask: balance_chunks counts what causal, window, chunk_size and cu_seqlens show, and "
            "cannot count a predicate; balance for the mask without it, or give a "
            "ring_core.ChunkLayout your own chunks"
        )
    return _balance(mask, seq_len, cp_size, keys)


def layout_for(
    name: str, mask: Mask, *, seq_len: int, cp_size: int, kv_seq_len: int | None = None
) -> LayoutSpec:
    """A layout by its name; ``chunks`` are balanced for the mask.

    Raises:
        ValueError: No such name, or chunks cannot be balanced.
    """
    check_choice("layout", name, ALL_LAYOUTS)
    if name == "chunks":
        return balance_chunks(mask, seq_len=seq_len, cp_size=cp_size, kv_seq_len=kv_seq_len)
    return cast("LayoutName", name)


@lru_cache(maxsize=128)
def _balance(mask: Mask, seq_len: int, cp_size: int, keys: int) -> ChunkLayout:
    for length in (seq_len, keys):
        Layout("contiguous", length, cp_size)  # refuses what cannot be divided
    check_documents(mask, seq_len, keys)
    counts = [
        n
        for n in _CHUNKS_PER_RANK
        if seq_len % (cp_size * n) == keys % (cp_size * n) == 0
        and (n <= 2 or cp_size * n <= _MOST_CHUNKS)
    ]
    queries = Layout("contiguous", seq_len, cp_size * counts[-1])
    geometry = BandGeometry(mask, queries, Layout("contiguous", keys, 1), keys - seq_len)
    pairs = geometry.count(np.arange(queries.cp_size), 0)
    found: list[tuple[float, ChunkLayout]] = []
    for count in counts:
        weights = pairs.reshape(cp_size * count, -1).sum(axis=1)
        chunks = _swap_until_even(_assign(weights, cp_size), weights)
        load = weights[chunks].sum(axis=1)
        balance = float(load.max() / load.mean())
        # Early chunks on early ranks, as in ``contiguous`` and ``zigzag``.
        by_first_chunk = tuple(sorted(tuple(sorted(one)) for one in chunks.tolist()))
        found.append((balance, ChunkLayout(by_first_chunk)))
        if balance <= EVEN:
            break
    return min(found, key=lambda one: one[0])[1]


def _assign(weights: Ints, cp_size: int) -> Ints:
    """Chunks ``[cp_size, n]``: the heaviest first, each to the least loaded rank with room."""
    chunks: list[list[int]] = [[] for _ in range(cp_size)]
    ranks = [(0, rank) for rank in range(cp_size)]
    for chunk in np.argsort(-weights, kind="stable").tolist():
        load, rank = heappop(ranks)
        chunks[rank].append(chunk)
        if len(chunks[rank]) < weights.size // cp_size:
            heappush(ranks, (load + int(weights[chunk]), rank))
    return np.array(chunks, dtype=np.int64)


def _swap_until_even(chunks: Ints, weights: Ints) -> Ints:
    """Let the busiest rank swap a chunk with another while the busier of the two gets less."""
    chunks = chunks.copy()
    for _ in range(weights.size):
        held = weights[chunks]
        load = held.sum(axis=1)
        top = int(load.argmax())
        moved = held[top][:, None, None] - held  # [n of the busiest, rank, n of the rank]
        after = np.maximum(load[top] - moved, load[:, None] + moved)
        mine, rank, theirs = map(int, np.unravel_index(int(after.argmin()), after.shape))
        if after[mine, rank, theirs] >= load[top]:
            break
        chunks[top, mine], chunks[rank, theirs] = chunks[rank, theirs], chunks[top, mine]
    return chunks
