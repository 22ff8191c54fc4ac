"""Runs of documents: what each rank holds of a recurrence, and which states cross between ranks.

A recurrent layer carries a state from token to token, ``S_t = A_t S_{t-1} + B_t``. A run is a
longest piece of consecutive tokens of one document on one rank; over it the layer is one affine map
of the state, ``S -> A S + B``. Maps compose, and composition is associative (Blelloch, "Prefix Sums
and Their Applications", 1990), so that a rank computes its runs' maps alone, gathers those of other
ranks, and folds what precedes each of its runs in the order of the sequence. A document's first run
starts from the initial state, so its map is a constant: what it leaves.

Which runs there are, and in whose slots their maps travel, is the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ring_core.base.arguments import Ints, check_index
from ring_core.layouts.layout import Layout
from ring_core.layouts.run_table import counts_up, runs_of
from ring_core.masks import mask as masks

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class DocumentRuns:
    """The runs of all ranks in the order of the sequence, as arrays ``[runs]``.

    :func:`runs_of_documents` makes them. Two runs of one document that follow one another are on
    different ranks, or not side by side on theirs. Padding is in no run.

    Attributes:
        rank: Rank that holds the run.
        local: Local index of its first token.
        start: Position of its first token.
        length: Number of its tokens; at least 1.
        document: Number of its document, counted with empty ones.
        documents: Number of documents, empty ones included; 1 without ``cu_seqlens``.
        cp_size: Number of ranks.
    """

    rank: Ints
    local: Ints
    start: Ints
    length: Ints
    document: Ints
    documents: int
    cp_size: int

    @cached_property
    def follows(self) -> Bools:
        """True for each run that another run of its document precedes: its entry state arrives."""
        return np.append(False, self.document[1:] == self.document[:-1])

    @cached_property
    def continues(self) -> Bools:
        """True for each run whose document goes on in another run: its exit state travels."""
        return np.append(self.document[:-1] == self.document[1:], False)

    def of_rank(self, rank: int) -> Ints:
        """Return the numbers of a rank's runs, ascending, which is their local order, too.

        Raises:
            ValueError: There is no such rank.
        """
        check_index("rank", rank, self.cp_size)
        return np.flatnonzero(self.rank == rank)

    def slots(self, travels: Bools) -> tuple[Ints, int]:
        """Return the slot of each run that travels, and the number of slots that a rank has.

        All ranks send equally many slots in an exchange: as many as the one with most such runs.

        Args:
            travels: True for each run that travels.

        Returns:
            The slot of each run among those of its rank, -1 where it does not travel; and the most
            of a rank.
        """
        slot = np.full(len(self.rank), -1)
        counts = np.bincount(self.rank[travels], minlength=self.cp_size)
        by_rank = np.argsort(self.rank[travels], kind="stable")
        slot[np.flatnonzero(travels)[by_rank]] = counts_up(counts)
        return slot, int(counts.max())

    def before(self, rank: int) -> Ints:
        """Return the runs whose exit states lead to a rank's entry states, in sequence order.

        These are the runs that precede one of the rank's runs in its document. Others are skipped:
        what they hold, NaN too, does not touch the rank's states.
        """
        return np.flatnonzero(_precedes(self.document, self.rank == rank))

    def behind(self, rank: int) -> Ints:
        """Return the runs that follow one of a rank's runs in its document, last first.

        Gradients come from them as states come from those of :meth:`before`.
        """
        precedes = _precedes(self.document[::-1], self.rank[::-1] == rank)
        return np.flatnonzero(precedes[::-1])[::-1]


def runs_of_documents(layout: Layout, cu_seqlens: tuple[int, ...] | None = None) -> DocumentRuns:
    """Return the runs of a sequence in a layout.

    Args:
        layout: The layout; padding behind its tokens is left out.
        cu_seqlens: Offsets of documents, ``(0, ..., T)``; empty ones are counted, and have no run.
            ``None`` is one document.

    Raises:
        ValueError: ``cu_seqlens`` are malformed, or end elsewhere.

    >>> from ring_core import Layout
    >>> from ring_core.recurrence import runs_of_documents
    >>> runs = runs_of_documents(Layout("zigzag", seq_len=8, cp_size=2), (0, 3, 3, 8))
    >>> runs.rank, runs.start, runs.length
    (array([0, 1, 1, 0]), array([0, 2, 3, 6]), array([2, 1, 3, 2]))
    >>> runs.document, runs.slots(runs.continues)
    (array([0, 0, 2, 2]), (array([ 0, -1,  0, -1]), 1))
    """
    offsets = np.array([0, layout.seq_len])
    if cu_seqlens is not None:
        masks.check_documents(masks.Mask(cu_seqlens=cu_seqlens), layout.seq_len, layout.seq_len)
        offsets = np.asarray(cu_seqlens, dtype=np.int64)
    held = runs_of(layout)
    if held.stride > 1:  # no two neighbours on one rank: each token is a piece
        pieces = held.positions()
        local, rank = (
            held.local.repeat(held.length) + counts_up(held.length),
            held.rank.repeat(held.length),
        )
    else:
        pieces, local, rank = held.start, held.local, held.rank
    order = np.argsort(pieces)
    pieces, local, rank = pieces[order], local[order], rank[order]
    # Cut where chunks and documents begin; then join what lies side by side on a rank.
    start = np.unique(np.concatenate([pieces, offsets[:-1]]))
    start = start[start < layout.seq_len]
    piece = np.searchsorted(pieces, start, side="right") - 1
    local, rank = local[piece] + start - pieces[piece], rank[piece]
    document = np.searchsorted(offsets, start, side="right") - 1
    joins = (
        (document[1:] == document[:-1]) & (rank[1:] == rank[:-1])
        & (np.diff(local) == np.diff(start))
    )  # fmt: skip
    first = np.append(True, ~joins)
    start = start[first]
    length = np.diff(np.append(start, layout.seq_len))
    return DocumentRuns(
        rank[first], local[first], start, length, document[first], len(offsets) - 1, layout.cp_size
    )


def _precedes(document: Ints, is_own: Bools) -> Bools:
    """Return True for each run that one of the rank's own follows, later, in its document."""
    # Runs of a document lie side by side, so its last own run bounds those before it.
    last = np.full(document.max() + 1, -1)
    np.maximum.at(last, document[is_own], np.flatnonzero(is_own))
    precedes: Bools = np.arange(len(document)) < last[document]
    return precedes
