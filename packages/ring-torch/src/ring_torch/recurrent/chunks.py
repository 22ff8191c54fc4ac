"""Chunks of this rank's runs: the tokens that a recurrent layer computes together.

A run is cut into chunks, the last of which is filled up with rows that change no state. No chunk
has tokens of two runs, so none has tokens of two documents. All chunks of a rank are computed as
one batch; only their states follow one another.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ring_core import Layout
from ring_core.recurrence import DocumentRuns, runs_of_documents
from ring_torch.capture import capture_safe_cache


class Span(NamedTuple):
    """The chunks of one of this rank's runs.

    Attributes:
        run: Number of the run among those of all ranks.
        document: Number of its document.
        chunks: Numbers of its chunks.
    """

    run: int
    document: int
    chunks: range


class Chunks(NamedTuple):
    """The chunks of a rank, and which rows they hold.

    Attributes:
        runs: Runs of all ranks.
        spans: This rank's runs, in their order.
        size: Number of tokens of a chunk, ``C``.
        rows: Local row of each token of a chunk, int64 ``[n * C]``; 0 in rows that are filled.
        is_filled: True in rows that hold no token, ``[n * C]``; ``None`` if there are none.
        places: For each token of this rank its place in ``rows``, int64 ``[tokens]``.
    """

    runs: DocumentRuns
    spans: tuple[Span, ...]
    size: int
    rows: Tensor
    is_filled: Tensor | None
    places: Tensor

    def split(self, x: Tensor, fill: float) -> Tensor:
        """Return rows ``[B, T_local, ...]`` in chunks, ``[n, B, C, ...]``; padding is left out."""
        if self.is_filled is None:
            # All chunks are full, and lie in the order of the rows.
            rows = x.narrow(1, 0, len(self.rows))
        else:
            rows = x.index_select(1, self.rows)
            shape = (1, -1, *(1,) * (x.ndim - 2))
            # Not multiplied by 0: the row that stands in for none may hold NaN.
            rows = rows.masked_fill(self.is_filled.view(shape), fill)
        chunks: Tensor = rows.unflatten(1, (len(self.rows) // self.size, self.size))
        return chunks.transpose(0, 1)

    def join(self, chunks: Tensor, rows: int) -> Tensor:
        """Return chunks ``[n, B, C, ...]`` as this rank's rows, zeros in its padding."""
        tokens = chunks.transpose(0, 1).flatten(1, 2)
        if self.is_filled is not None:
            tokens = tokens.index_select(1, self.places)
        return with_padding(tokens, rows - tokens.shape[1])


def with_padding(x: Tensor, rows: int) -> Tensor:
    """Return rows ``[B, tokens, ...]`` with so many rows of zeros behind them."""
    return functional.pad(x, (*(0, 0) * (x.ndim - 2), 0, rows)) if rows else x


@capture_safe_cache(maxsize=64)
def chunks_of(
    layout: Layout, cu_seqlens: tuple[int, ...] | None, rank: int, most: int, device: torch.device
) -> Chunks:
    """Return the chunks of a rank.

    Args:
        layout: The layout, with its padding.
        cu_seqlens: Offsets of documents; ``None`` for one.
        rank: The rank.
        most: Most tokens of a chunk, a power of 2.
        device: Device of the rows' indices.

    Raises:
        ValueError: ``cu_seqlens`` are malformed, or end elsewhere.
    """
    runs = runs_of_documents(layout, cu_seqlens)
    own = runs.of_rank(rank)
    length = runs.length[own]
    # Chunks of short documents are short, so that few of their rows are filled.
    mean = int(length.mean()) if len(own) else 1
    size = min(most, 1 << max(mean - 1, 0).bit_length())
    counts = -(-length // size)
    steps = np.arange(counts.sum() * size)
    # The place of each run's first token: the runs before it fill up their last chunks.
    first = (np.cumsum(counts) - counts) * size
    run = np.repeat(np.arange(len(own)), counts * size)
    inside = steps - first[run]
    is_token = inside < length[run]
    rows = np.where(is_token, runs.local[own][run] + inside, 0)
    ends = np.append(0, np.cumsum(counts)).tolist()
    spans = tuple(
        Span(n, document, range(*chunks))
        for n, document, chunks in zip(
            own.tolist(), runs.document[own].tolist(), pairwise(ends), strict=True
        )
    )
    return Chunks(
        runs, spans, size, torch.as_tensor(rows, device=device),
        None if is_token.all() else torch.as_tensor(~is_token, device=device),
        torch.as_tensor(np.flatnonzero(is_token), device=device),
    )  # fmt: skip
