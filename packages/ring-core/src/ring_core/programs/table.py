"""Work items of all ranks as integer tables, for one program that every rank runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ring_core.plan.geometry import RectangleTable

Ints = npt.NDArray[np.int64]
Table = npt.NDArray[np.int32]

TABLE_COLUMNS = (
    "q_rank", "kv_rank", "out_rank", "q_start", "q_stop", "k_start", "k_stop", "lo", "hi", "doc_start", "doc_stop",
)  # fmt: skip
TABLE_UNBOUNDED = 2**31 - 1


@dataclass(frozen=True)
class ItemCounts:
    """What a kernel must be able to do to run every item of a program, as numbers of items.

    Attributes:
        full: Items that show their whole rectangle.
        causal: Square items that show ``i >= j``.
        banded: Items with any other band.
        several_documents: Items that span several documents or chunks.
    """

    full: int
    causal: int
    banded: int
    several_documents: int


def count_items(every: Iterable[Table]) -> ItemCounts:
    """Which kinds of items tables have."""
    counts = np.zeros(4, dtype=np.int64)
    for table in every:
        rows = table.reshape(-1, len(TABLE_COLUMNS)).astype(np.int64)
        q_start, q_stop, k_start, k_stop, lo, hi, _, doc_stop = rows[:, 3:].T
        live, same_len = q_stop > q_start, q_stop - q_start == k_stop - k_start
        no_hi = hi == TABLE_UNBOUNDED
        full, causal = no_hi & (lo == -TABLE_UNBOUNDED), no_hi & same_len & (lo == 0)
        counts += [
            x.sum() for x in (live & full, live & causal, live & ~full & ~causal, doc_stop > 0)
        ]
    return ItemCounts(*counts.tolist())


def table_of(rows: RectangleTable, q_rank: Ints, kv_rank: Ints) -> Table:
    """Rectangles of pairs of ranks as rows of a table, ``[pair, R, len(TABLE_COLUMNS)]``."""
    rect = rows.rect
    zero = np.zeros_like(rect.lo)
    bounds = np.clip(np.stack([rect.lo, rect.hi], axis=-1), -TABLE_UNBOUNDED, TABLE_UNBOUNDED)
    ranks = [x[:, None] + zero for x in (q_rank, kv_rank, q_rank)]
    columns = [*ranks, *rect[:4], bounds[..., 0], bounds[..., 1], rows.doc_start, rows.doc_stop]
    return np.stack(columns, axis=-1).astype(np.int32)


def live_first(table: Table) -> Table:
    """Live rows of each rank first, as many as the busiest rank has: one at least."""
    live = table[..., 4] > table[..., 3]
    order = np.argsort(~live, axis=1, kind="stable")[..., None]
    width = max(1, int(live.sum(axis=1).max()))
    return np.take_along_axis(np.where(live[..., None], table, 0), order, axis=1)[:, :width]
