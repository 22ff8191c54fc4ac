"""Movements of rows between ranks, for layers that look at neighbours or want other tokens.

A shift, a halo and a relayout are one thing: ``out[target] = x[source]`` for rows of all ranks, and
a fill where there is no source. Sources are the runs of a layout. Targets are runs as well, named
by the positions of the tokens that they want: a shift's lie ``n`` earlier, a halo's begin ``left``
earlier and are longer, a relayout's are those of another layout. Two runs are evenly spaced, so
they meet in evenly spaced rows: a plan has a few slices for each pair of runs, and one more for
each border of documents, however many tokens there are.

The return of a movement swaps sources and targets. It is the movement's adjoint, and so its
backward: a row that was copied to several places gets the sum of what returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ring_core.base.arguments import Ints, check_index
from ring_core.layouts.layout import Layout
from ring_core.layouts.run_table import (
    RowCopy,
    RunTable,
    overlap_of,
    ranges_of,
    runs_of,
    starts_of,
)
from ring_core.masks import mask as masks
from ring_core.row_checks import check_halo, check_steps


class Exchange(NamedTuple):
    """The part of a single rank in a movement.

    It copies rows that stay; packs those that leave, in the order of the ranks that get them; and
    unpacks what arrives, in the order of the ranks that sent it.

    Attributes:
        local: Copies from the operand to the result.
        pack: Copies from the operand to the buffer of rows that leave.
        unpack: Copies from the buffer of rows that arrive to the result.
        sent: ``(rank, rows)`` for each rank that rows leave for, ascending.
        received: ``(rank, rows)`` for each rank that rows arrive from, ascending.
    """

    local: RowCopy
    pack: RowCopy
    unpack: RowCopy
    sent: tuple[tuple[int, int], ...]
    received: tuple[tuple[int, int], ...]

    def reversed(self) -> Exchange:
        """Return this rank's part in the return of the movement."""
        return Exchange(
            self.local.reversed(), self.unpack.reversed(), self.pack.reversed(),
            self.received, self.sent,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Movement:
    """The rows of all ranks before and after a movement, and where each row comes from.

    :func:`shift`, :func:`halo`, :func:`relayout` and :func:`pack_documents` make one.

    Attributes:
        source: Runs that the ranks hold.
        target: Runs that the ranks want.
        source_rows: Number of rows that each rank holds, if it holds any.
        target_rows: Number of rows that each rank wants, if it wants any.
        allowed: Ranges of positions that move; ``None`` for all.
        repeats: True if a source row may be copied to several places.
    """

    source: RunTable
    target: RunTable
    source_rows: int
    target_rows: int
    allowed: RunTable | None = None
    repeats: bool = False

    def rows_of(self, rank: int) -> tuple[int, int]:
        """Return how many rows a rank holds, and how many it wants."""
        holds, wants = ((runs.rank == rank).any() for runs in (self.source, self.target))
        return self.source_rows * int(holds), self.target_rows * int(wants)

    def exchange(self, rank: int) -> Exchange:
        """Return one rank's part.

        >>> from ring_core import Layout
        >>> from ring_core.movement import shift
        >>> part = shift(Layout("contiguous", seq_len=8, cp_size=2), 1).exchange(1)
        >>> part.received, list(part.unpack.slices())
        (((0, 1),), [(slice(0, 1, 1), slice(0, 1, 1))])
        >>> list(part.local.slices())
        [(slice(0, 3, 1), slice(1, 4, 1))]
        """
        # Sender and receiver find the same slices, and order them alike: by peer, then by target.
        held = overlap_of(self._allowed(self.source.of_rank(rank)), self.target)
        peers = self.target.rank[held.b]
        pack, sent = _by_peer(held.copies, peers, peers != rank)
        wanted = overlap_of(self._allowed(self.target.of_rank(rank)), self.source)
        landing, peers = wanted.copies.reversed(), self.source.rank[wanted.b]
        unpack, received = _by_peer(landing, peers, peers != rank)
        # Rows that stay are copied from operand to result, and are in no buffer.
        local, _ = _by_peer(landing, peers, peers == rank)
        # In a buffer the slices' rows follow one another without gaps.
        pack = pack._replace(target=starts_of(pack.length), target_step=1)
        unpack = unpack._replace(source=starts_of(unpack.length), source_step=1)
        return Exchange(local, pack, unpack, sent, received)

    def traffic(self, rank: int) -> tuple[int, int]:
        """Count the rows that leave a rank and those that arrive at it, position by position.

        No intersection of runs takes part: :meth:`exchange` has to agree.

        >>> from ring_core import Layout
        >>> shift(Layout("zigzag", seq_len=16, cp_size=2), 1).traffic(0)
        (1, 1)
        """
        source_is_own, target_is_own = self.source.rank == rank, self.target.rank == rank

        def count(source: RunTable, target: RunTable) -> int:
            wanted = target.positions()
            if self.allowed is not None:
                wanted = wanted[np.isin(wanted, self.allowed.positions())]
            return int(np.isin(wanted, source.positions()).sum())

        return (
            count(self.source.take(source_is_own), self.target.take(~target_is_own)),
            count(self.source.take(~source_is_own), self.target.take(target_is_own)),
        )

    def _allowed(self, runs: RunTable) -> RunTable:
        """Return the parts of runs whose positions may move."""
        if self.allowed is None:
            return runs
        parts = overlap_of(runs, self.allowed)
        local, length = parts.copies.source, parts.copies.length
        return RunTable(runs.rank[parts.a], local, length, parts.start, runs.stride)


def shift(layout: Layout, n: int, cu_seqlens: tuple[int, ...] | None = None) -> Movement:
    """Return the movement ``out[t] = x[t - n]`` over positions, inside of documents.

    Args:
        layout: The layout of both.
        n: How far tokens move, of either sign.
        cu_seqlens: Offsets of the documents, which tokens do not leave.

    Raises:
        ValueError: ``n`` is no integer, or ``cu_seqlens`` are malformed or end elsewhere.
    """
    check_steps(n)
    source = runs_of(layout)
    allowed = None
    offsets = offsets_of_documents(layout, cu_seqlens)
    # No token leaves the sequence for its padding.
    if offsets is None and layout.pad_to is not None:
        offsets = np.array([0, layout.seq_len])
    if offsets is not None:
        # Positions whose shifted position is in the same document.
        start = np.maximum(offsets[:-1], offsets[:-1] - n)
        # Where a document is shorter than the shift its range is empty.
        allowed = ranges_of(start, np.minimum(offsets[1:], offsets[1:] - n))
    # A rank wants, for position t, what stands at t - n: its runs, n positions back.
    target = source._replace(start=source.start - n)
    return Movement(source, target, layout.local_len, layout.local_len, allowed)


def halo(layout: Layout, left: int, right: int) -> Movement:
    """Return the movement that gives each run the ``left`` rows before and ``right`` rows behind.

    Args:
        layout: A layout whose runs are of consecutive tokens.
        left: Number of rows before a run.
        right: Number of rows behind it.

    Raises:
        ValueError: A side is no integer >= 0.
        UnsupportedError: The layout has no runs of consecutive tokens.
    """
    check_halo(left, right, layout.name, layout.cp_size)
    source = runs_of(layout)
    width = layout.run_length + left + right
    rows = layout.num_runs * width
    # Widened runs lie behind each other in the result: rows of neighbours stand in several of them.
    local = np.tile(np.arange(0, rows, width, dtype=np.int64), layout.cp_size)
    target = source._replace(
        local=local, length=np.full_like(local, width), start=source.start - left
    )
    tokens = _tokens_of(layout)
    return Movement(source, target, layout.local_len, rows, tokens, repeats=left + right > 0)


def halo_ids(
    layout: Layout, left: int, right: int, rank: int, cu_seqlens: tuple[int, ...] | None = None
) -> tuple[Ints, Ints]:
    """Return the position and the document of each row of a halo, ``[runs, left + L + right]``.

    Both are -1 outside of the sequence. Without ``cu_seqlens`` it is document 0.

    Raises:
        ValueError: ``cu_seqlens`` are malformed or end elsewhere.
    """
    check_index("rank", rank, layout.cp_size)
    steps = np.arange(-left, layout.run_length + right, dtype=np.int64)
    positions = layout.run_positions(rank).reshape(-1, 1) + steps
    inside = (positions >= 0) & (positions < layout.seq_len)
    offsets = offsets_of_documents(layout, cu_seqlens)
    documents = np.zeros_like(positions)
    if offsets is not None:
        documents = np.searchsorted(offsets, positions, side="right") - 1
    return np.where(inside, positions, -1), np.where(inside, documents, -1)


def relayout(
    source: Layout, target: Layout, source_ranks: tuple[int, ...] | None = None,
    target_ranks: tuple[int, ...] | None = None,
) -> Movement:  # fmt: skip
    """Return the movement from one layout of a sequence to another.

    Args:
        source: The layout that the rows have.
        target: The layout that they get.
        source_ranks: For each rank of the source, its number among the ranks that exchange rows;
            ``None`` if both are counted alike.
        target_ranks: For each rank of the target, likewise.

    Raises:
        ValueError: They have unlike lengths.

    >>> from ring_core import Layout
    >>> from ring_core.movement import relayout
    >>> whole, half = Layout("contiguous", 8, 4), Layout("contiguous", 8, 2)
    >>> [relayout(whole, half, (0, 1, 2, 3), (1, 3)).exchange(rank).sent for rank in range(4)]
    [((1, 2),), (), ((3, 2),), ()]
    """
    if source.seq_len != target.seq_len:
        raise ValueError(
            f"both layouts must be of one sequence, got {source.seq_len} and {target.seq_len} tokens"
        )
    held, wanted = runs_of(source), runs_of(target)
    if source_ranks is not None:
        # Runs keep their positions; only who holds them is renamed.
        held = held._replace(rank=np.asarray(source_ranks, dtype=np.int64)[held.rank])
    if target_ranks is not None:
        wanted = wanted._replace(rank=np.asarray(target_ranks, dtype=np.int64)[wanted.rank])
    return Movement(held, wanted, source.local_len, target.local_len, _tokens_of(source))


def pack_documents(layout: Layout, offsets: tuple[int, ...]) -> Movement:
    """Return the movement of documents, each of which all ranks share, to the layout of their pack.

    Args:
        layout: The layout of each document, and of the pack: all documents as one sequence.
        offsets: Offsets of the documents' pieces among a rank's rows, ``(0, ..., T_local)``.
    """
    chunks = layout.num_runs
    starts, lengths = np.asarray(offsets[:-1], dtype=np.int64), np.diff(offsets) // chunks
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    # Number of each of a rank's chunks among a document's, [P, 1, chunks].
    numbers = layout.run_positions(np.arange(layout.cp_size)) // layout.run_length
    local = starts[:, None] + lengths[:, None] * np.arange(chunks)
    start = layout.cp_size * starts[:, None] + lengths[:, None] * numbers[:, None]
    shape = start.shape  # [P, documents, chunks]
    rank = np.arange(layout.cp_size, dtype=np.int64)[:, None, None]
    rank, local, length, start = (
        np.broadcast_to(x, shape).reshape(-1) for x in (rank, local, lengths[:, None], start)
    )
    source = RunTable(rank, local, length, start, 1)
    return Movement(source, runs_of(layout), layout.local_len, layout.local_len)


def offsets_of_documents(layout: Layout, cu_seqlens: tuple[int, ...] | None) -> Ints | None:
    """Return the offsets of documents that are not empty; ``None`` without ``cu_seqlens``.

    Raises:
        ValueError: They are malformed, or do not end with the sequence.
    """
    if cu_seqlens is None:
        return None
    mask = masks.Mask(cu_seqlens=cu_seqlens)
    masks.check_documents(mask, layout.seq_len, layout.seq_len)
    return mask.document_offsets


def _by_peer(
    copies: RowCopy, peers: Ints, selected: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> tuple[RowCopy, tuple[tuple[int, int], ...]]:
    """Return some of the copies by peer and then by target, and the rows of each peer."""
    order = np.flatnonzero(selected)
    # Stable on both ends: the n-th row of a message is the same row for sender and receiver.
    order = order[np.lexsort((copies.target[order], peers[order]))]
    source, target, length = (x[order] for x in copies[:3])
    ranks, first = np.unique(peers[order], return_index=True)
    rows = np.add.reduceat(length, first) if len(first) else first
    counts = tuple(zip(ranks.tolist(), rows.tolist(), strict=True))
    return RowCopy(source, target, length, *copies[3:]), counts


def _tokens_of(layout: Layout) -> RunTable | None:
    """Return the positions of tokens, if there is padding behind them; else ``None``."""
    is_padded = layout.pad_to is not None
    return ranges_of(np.array([0]), np.array([layout.seq_len])) if is_padded else None
