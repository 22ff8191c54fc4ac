"""Assign chunks of the sequence to ranks so that a mask's work is spread evenly."""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush
from typing import cast

import numpy as np

from ring_core.base.arguments import Ints, check_choice, check_kind, check_size, numbers_as_python
from ring_core.base.errors import UnsupportedError
from ring_core.layouts.layout import LAYOUTS, ChunkLayout, Layout, LayoutName, LayoutSpec
from ring_core.masks.mask import Mask, check_documents
from ring_core.plan.geometry import BandGeometry

#: Names of all layouts; ``chunks`` is one made for a mask.
ALL_LAYOUTS = (*LAYOUTS, "chunks")

EVEN = 1.02  # busiest rank over the mean that is even enough: more chunks would cost launches
_CHUNKS_PER_RANK = (1, 2, 4, 8, 16)
_MOST_CHUNKS = 1024  # over all ranks, if more than 2 a rank: plans look at every pair of them


@numbers_as_python
def balanced_layout(
    mask: Mask, *, seq_len: int, cp_size: int, kv_seq_len: int | None = None
) -> ChunkLayout:
    """Make a layout under which a mask gives every rank equally much work.

    It is for masks that no named layout balances, packed documents above all. The sequence is cut
    into equal chunks, and these are assigned to the ranks, those whose queries see most first. The
    same arguments give the same layout, on every rank. Each chunk that a rank holds is a launch or
    more, so of 1, 2, 4, 8 and 16 chunks a rank the fewest are taken with which the busiest rank has
    at most 1.02 times the mean, or else those that are most even. Numbers that do not divide both
    lengths are left out, and so are 4 and more a rank that make over 1024 chunks. Chunks are
    multiples of 128 tokens, which kernels work in, where a length is a multiple of 128 times the
    number of chunks.

    >>> from ring_core import Mask, balanced_layout
    >>> documents = Mask(causal=True, cu_seqlens=(0, 6, 8))  # one long, one short
    >>> balanced_layout(documents, seq_len=8, cp_size=2).chunks
    ((0, 1, 2, 5), (3, 4, 6, 7))

    Args:
        mask: The rule that says which query sees which key; any but a predicate.
        seq_len: Number of queries, over all ranks.
        cp_size: Number of ranks.
        kv_seq_len: Number of keys, over all ranks, if it is another.

    Returns:
        A layout for ``layout=``, for sequences of this length on this number of ranks.

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
            "mask: balanced_layout counts what causal, window, chunk_size and cu_seqlens show, and "
            "cannot count a predicate; balance for the mask without it, or give a "
            "ring_core.ChunkLayout your own chunks"
        )
    return _balance(mask, seq_len, cp_size, keys)


def layout_for(
    name: str, mask: Mask, *, seq_len: int, cp_size: int, kv_seq_len: int | None = None
) -> LayoutSpec:
    """Return the layout of a name, where ``chunks`` is one balanced for the mask.

    Raises:
        ValueError: No such name, or chunks cannot be balanced; see :func:`balanced_layout`.
        UnsupportedError: ``chunks`` for a mask with a predicate.
    """
    check_choice("layout", name, ALL_LAYOUTS)
    if name == "chunks":
        return balanced_layout(mask, seq_len=seq_len, cp_size=cp_size, kv_seq_len=kv_seq_len)
    return cast("LayoutName", name)


@lru_cache(maxsize=128)
def _balance(mask: Mask, seq_len: int, cp_size: int, keys: int) -> ChunkLayout:
    """Make the layout of :func:`balanced_layout`, which has checked the types."""
    for length in (seq_len, keys):
        Layout("contiguous", length, cp_size)  # refuses what cannot be divided
    check_documents(mask, seq_len, keys)
    counts = [
        n
        for n in _CHUNKS_PER_RANK
        if seq_len % (cp_size * n) == keys % (cp_size * n) == 0
        and (n <= 2 or cp_size * n <= _MOST_CHUNKS)
    ]
    # Count the visible pairs of the smallest chunks' queries; larger chunks are sums of these.
    # Each chunk as a rank of its own, against all keys: one call counts them all.
    queries = Layout("contiguous", seq_len, cp_size * counts[-1])
    geometry = BandGeometry(mask, queries, Layout("contiguous", keys, 1), keys - seq_len)
    pairs = geometry.count(np.arange(queries.cp_size), 0)
    balanced: list[tuple[float, ChunkLayout]] = []
    for count in counts:
        weights = pairs.reshape(cp_size * count, -1).sum(axis=1)
        chunks = _swap_until_even(_assign(weights, cp_size), weights)
        load = weights[chunks].sum(axis=1)
        balance = float(load.max() / load.mean())
        # Sort the ranks by their first chunk, as in ``contiguous`` and ``zigzag``.
        by_first_chunk = tuple(sorted(tuple(sorted(of_rank)) for of_rank in chunks.tolist()))
        balanced.append((balance, ChunkLayout(by_first_chunk)))
        # More chunks would be more launches, for nothing.
        if balance <= EVEN:
            break
    return min(balanced, key=lambda balance_and_layout: balance_and_layout[0])[1]


def _assign(weights: Ints, cp_size: int) -> Ints:
    """Assign chunks to ranks: the heaviest first, each to the least loaded rank that takes more.

    Args:
        weights: Visible pairs of each chunk's queries, ``[chunks]``.
        cp_size: Number of ranks, each of which takes equally many chunks.

    Returns:
        Chunk numbers, int64 ``[cp_size, chunks / cp_size]``.
    """
    chunks: list[list[int]] = [[] for _ in range(cp_size)]
    ranks = [(0, rank) for rank in range(cp_size)]
    for chunk in np.argsort(-weights, kind="stable").tolist():
        load, rank = heappop(ranks)
        chunks[rank].append(chunk)
        # Equal numbers of tokens on every rank: one that is full leaves the heap.
        if len(chunks[rank]) < weights.size // cp_size:
            heappush(ranks, (load + int(weights[chunk]), rank))
    return np.array(chunks, dtype=np.int64)


def _swap_until_even(chunks: Ints, weights: Ints) -> Ints:
    """Return the chunks of all ranks after the busiest one has swapped some with others.

    It swaps as long as the larger load of the two ranks is then lower, at most once a chunk. The
    argument is not changed.

    Args:
        chunks: Chunk numbers ``[cp_size, n]``.
        weights: Visible pairs of each chunk's queries.
    """
    chunks = chunks.copy()
    for _ in range(weights.size):
        pairs = weights[chunks]
        load = pairs.sum(axis=1)
        top = int(load.argmax())
        # Evaluate all swaps at once: of each chunk of the busiest rank with each of every rank.
        moved = pairs[top][:, None, None] - pairs  # [n of the busiest, rank, n of the rank]
        after = np.maximum(load[top] - moved, load[:, None] + moved)
        n, rank, m = map(int, np.unravel_index(int(after.argmin()), after.shape))
        # No swap helps the busiest rank, and it alone sets the time of a pass.
        if after[n, rank, m] >= load[top]:
            break
        chunks[top, n], chunks[rank, m] = chunks[rank, m], chunks[top, n]
    return chunks
