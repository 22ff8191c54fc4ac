"""A movement as messages by distance, for one program that all ranks run alike, as in JAX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ring_core.base.arguments import Ints
from ring_core.layouts.run_table import RowCopy, starts_of
from ring_core.movement import Movement


class RowTable(NamedTuple):
    """Rows of all ranks' messages over one distance, as tables of slices for one traced program.

    Row ``i`` of rank ``r``'s message, if ``offset[r, s]`` is the last one that is at most ``i``, is
    row ``start[r, s] + step * (i - offset[r, s])``. A rank with fewer slices repeats its last one.

    Attributes:
        start: First row of each slice, int64 ``[P, S]``.
        offset: Where each slice begins in the message, likewise, ascending.
        rows: Number of rows of each rank's message, int64 ``[P]``.
        step: Distance of the rows.
    """

    start: Ints
    offset: Ints
    rows: Ints
    step: int


class Hop(NamedTuple):
    """Messages of a movement to the ranks ``distance`` ahead; of distance 0 rows that stay.

    Attributes:
        distance: How far the receivers are ahead, round the ring.
        pieces: ``(start, stop, receivers)``, ascending: rows of the message that the same ranks
            get. Messages are of unequal lengths, and a program sends pieces of one length.
        read: Rows of the operand that each rank sends.
        written: Rows of the result in which each rank puts what arrives.
    """

    distance: int
    pieces: tuple[tuple[int, int, tuple[int, ...]], ...]
    read: RowTable
    written: RowTable

    @property
    def rows(self) -> int:
        """Number of rows of the longest message."""
        return self.pieces[-1][1]


def hops(movement: Movement, cp_size: int) -> tuple[Hop, ...]:
    """Return a movement as messages of all ranks, by distance.

    >>> from ring_core import Layout
    >>> from ring_core.movement import shift
    >>> moves = hops(shift(Layout("contiguous", seq_len=8, cp_size=2), 1), 2)
    >>> [(hop.distance, hop.pieces) for hop in moves]
    [(0, ((0, 3, (0, 1)),)), (1, ((0, 1, (1,)),))]
    """
    sent: dict[int, dict[int, RowCopy]] = {}
    received: dict[int, dict[int, RowCopy]] = {}
    # Sender and receiver find the same slices in the same order, so neither has to be told what a
    # message holds.
    for rank in range(cp_size):
        part = movement.exchange(rank)
        for peer, copies in _messages(part.pack, part.pack.target, part.sent):
            sent.setdefault((peer - rank) % cp_size, {})[rank] = copies
        for peer, copies in _messages(part.unpack, part.unpack.source, part.received):
            received.setdefault((rank - peer) % cp_size, {})[rank] = copies
        # Distance 0: copied on the rank, no message.
        if len(part.local.length):
            sent.setdefault(0, {})[rank] = received.setdefault(0, {})[rank] = part.local
    return tuple(
        Hop(
            distance, _pieces({rank: x.rows for rank, x in received[distance].items()}),
            _targets_by_rank({rank: x.reversed() for rank, x in sent[distance].items()}, cp_size),
            _targets_by_rank(received[distance], cp_size),
        )
        for distance in sorted(received)
    )  # fmt: skip


def _messages(
    copies: RowCopy, offsets: Ints, counts: tuple[tuple[int, int], ...]
) -> Iterator[tuple[int, RowCopy]]:
    """Cut a rank's copies into those of the message of each peer.

    The messages lie one after the other in a buffer, of ``counts``: (peer, rows of its message).
    ``offsets`` are the places of the copies in that buffer.
    """
    start = 0
    for peer, rows in counts:
        # Copies are in the order of the buffer, so those of a message are neighbours.
        first, stop = np.searchsorted(offsets, (start, start + rows))
        source, target, length = (x[first:stop] for x in copies[:3])
        yield peer, RowCopy(source, target, length, *copies[3:])
        start += rows


def _pieces(rows: dict[int, int]) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Cut messages at the ends of the shorter ones, from the rows that each rank gets."""
    # All ranks run one program, so a message has one length for all that get it: the longest is cut
    # where shorter ones end.
    ends = sorted(set(rows.values()))
    return tuple(
        (start, stop, tuple(sorted(rank for rank, count in rows.items() if count >= stop)))
        for start, stop in zip([0, *ends], ends, strict=False)
    )


def _targets_by_rank(copies: dict[int, RowCopy], cp_size: int) -> RowTable:
    """Return the target rows of each rank's copies; ranks without any have no rows.

    For the rows that messages are read from, pass the copies reversed.
    """
    slices = max(len(x.length) for x in copies.values())
    start, offset = np.zeros((2, cp_size, slices), dtype=np.int64)
    rows, step = np.zeros(cp_size, dtype=np.int64), 1
    # A program looks its rank's row up, so all rows are as long as the longest.
    for rank, x in copies.items():
        missing = (0, slices - len(x.length))
        start[rank] = np.pad(x.target, missing, mode="edge")
        offset[rank] = np.pad(starts_of(x.length), missing, mode="edge")
        rows[rank], step = x.rows, x.target_step
    return RowTable(start, offset, rows, step)
