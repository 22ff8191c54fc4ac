"""A work item of a plan: a rectangle of queries and keys, and the part of the mask inside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ring_core.base.arguments import TILE, Ints, not_none
from ring_core.masks.band import UNBOUNDED, Rectangles, trim
from ring_core.masks.mask import Window


@dataclass(frozen=True, eq=False)
class WorkItem:
    """A kernel launch: a rectangle of a rank's queries and a rank's keys, and its part of the mask.

    Row ``i`` and column ``j`` count from the corner ``(q_start, k_start)`` of the local indices.
    The item shows the cells with ``lo <= i - j <= hi`` (``None``: unbounded) that lie in the same
    document, if it spans several, and that the predicate admits, if there is one.

    >>> from ring_core import Mask, make_plan
    >>> plan = make_plan(Mask(causal=True, window=(2, 0)), seq_len=8, cp_size=2)
    >>> (item,) = plan.items(q_rank=1, kv_rank=0)  # queries 4 and 5 see keys 2 and 3
    >>> item.q_slice, item.k_slice, item.lo, item.hi
    (slice(0, 2, None), slice(2, 4, None), None, 0)

    Attributes:
        q_rank: The rank whose queries these are.
        kv_rank: The rank whose keys and values these are.
        out_rank: The rank the result belongs to.
        q_start, q_stop: Local query rows.
        k_start, k_stop: Local key columns.
        lo, hi: The band.
        cu_q, cu_k: Documents (or chunks) inside the rectangle, ``[documents + 1]`` each, counted
            from its corner; document ``n`` is rows ``cu_q[n]:cu_q[n + 1]`` and columns
            ``cu_k[n]:cu_k[n + 1]``. ``None`` where the rectangle lies inside a single one.
        tiles: For a predicate, the kind (empty 0, partial 1, full 2) of each 128 x 128 tile of the
            rectangle; then the band is unbounded and partial tiles need the mask's whole rule.
    """

    q_rank: int
    kv_rank: int
    out_rank: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lo: int | None
    hi: int | None
    cu_q: Ints | None = field(default=None, repr=False)
    cu_k: Ints | None = field(default=None, repr=False)
    tiles: npt.NDArray[np.uint8] | None = field(default=None, repr=False)

    @cached_property
    def q_slice(self) -> slice:
        """Local query rows as a slice."""
        return slice(self.q_start, self.q_stop)

    @cached_property
    def k_slice(self) -> slice:
        """Local key columns as a slice."""
        return slice(self.k_start, self.k_stop)

    @cached_property
    def is_full(self) -> bool:
        """True if every query of the rectangle sees every key of it.

        Items with documents or ``tiles`` are never full, even if all of their tiles are.
        """
        return self.lo is None and self.hi is None and self.cu_q is None and self.tiles is None

    @property
    def is_causal(self) -> bool:
        """True if the rectangle is a square that shows ``i >= j``, which kernels call causal."""
        return self._has_causal_band and self.cu_q is None

    @property
    def _has_causal_band(self) -> bool:
        """True if the band of a square is ``i >= j``; documents may hide more."""
        is_square = self.q_stop - self.q_start == self.k_stop - self.k_start
        return is_square and self.lo == 0 and self.hi is None and self.tiles is None

    @cached_property
    def window(self) -> Window:
        """Band as flash-attention's window ``(left, right)``, aligned at the bottom right corner.

        Row ``i`` shows columns ``i + d - left`` to ``i + d + right`` with ``d = columns - rows``;
        ``None`` is unbounded. Trimming makes both sides non-negative.
        """
        d = (self.k_stop - self.k_start) - (self.q_stop - self.q_start)
        return self._window_with(d)

    def _window_with(self, d: int) -> Window:
        """Return the band as a window aligned at a corner ``d`` columns right of its row."""
        return None if self.hi is None else self.hi + d, None if self.lo is None else -self.lo - d

    @cached_property
    def documents_window(self) -> Window | None:
        """Band as the one window that varlen flash attention takes for several documents.

        There the window is aligned at the bottom right corner of every document. So a document
        whose keys end ``d`` columns after its queries needs another window than one that ends
        elsewhere; the result is ``None`` where no window fits all documents of the item.
        """
        assert self.cu_q is not None and self.cu_k is not None
        both = (np.diff(self.cu_q) > 0) & (np.diff(self.cu_k) > 0)
        ends = (self.cu_k[1:] - self.cu_q[1:])[both]
        if (self.lo, self.hi) != (None, None) and ends.size and (ends != ends[0]).any():
            return None
        window = self._window_with(int(ends[0]) if ends.size else 0)
        return window if all(side is None or side >= 0 for side in window) else None

    @cached_property
    def seen(self) -> tuple[Ints, Ints]:
        """Columns ``[first, stop)`` that each row sees, counted from the item's corner, ``[rows]``.

        Both ascend from row to row; a row with ``stop <= first`` is fully masked. Not for items
        with ``tiles``.
        """
        assert self.tiles is None
        row, columns = np.arange(self.q_stop - self.q_start), self.k_stop - self.k_start
        first = np.zeros_like(row) if self.hi is None else row - self.hi
        stop = np.full_like(row, columns) if self.lo is None else row - self.lo + 1
        if self.cu_q is not None and self.cu_k is not None:
            sizes = np.diff(self.cu_q)
            first = np.maximum(first, np.repeat(self.cu_k[:-1], sizes))
            stop = np.minimum(stop, np.repeat(self.cu_k[1:], sizes))
        return np.maximum(first, 0), np.minimum(stop, columns)

    def each_document(self) -> Iterator[WorkItem]:
        """Yield an item for each document, trimmed, which counts from this item's corner.

        Documents in which no query sees a key are left out.
        """
        sides = (pairwise(not_none(cu).tolist()) for cu in (self.cu_q, self.cu_k))
        documents = (self._part((0, 0), *q, *k) for q, k in zip(*sides, strict=True))
        yield from (document for document in documents if document is not None)

    def rows(self, start: int, stop: int) -> WorkItem | None:
        """Return the part of the item between two local query rows; ``None`` if empty.

        It is trimmed, unless the rows lie in several documents: then it has all the rows, and all
        columns of these documents. Not for items with ``tiles``, which cannot be cut inside a tile.
        """
        assert self.tiles is None
        first, last = max(start, self.q_start) - self.q_start, min(stop, self.q_stop) - self.q_start
        corner = self.q_start, self.k_start
        if first >= last:
            return None
        if self.cu_q is None or self.cu_k is None:
            return self._part(corner, first, last, 0, self.k_stop - self.k_start)
        # Keep only the documents that these rows touch. If one is left, the band alone decides.
        documents = slice(
            int(np.searchsorted(self.cu_q, first, side="right")) - 1,
            int(np.searchsorted(self.cu_q, last, side="left")) + 1,
        )
        cu_q, cu_k = self.cu_q[documents], self.cu_k[documents]
        part = self._part(corner, first, last, int(cu_k[0]), int(cu_k[-1]), trimmed=cu_q.size == 2)
        if part is None or cu_q.size == 2:
            return part
        return replace(part, cu_q=np.clip(cu_q, first, last) - first, cu_k=cu_k - cu_k[0])

    def _part(
        self, corner: tuple[int, int], q_start: int, q_stop: int, k_start: int, k_stop: int,
        *, trimmed: bool = True,
    ) -> WorkItem | None:  # fmt: skip
        """Return the item of a part of the rectangle, without documents; ``None`` if it is empty.

        Args:
            corner: Local row and column at which this item's own corner shall lie.
            q_start, q_stop, k_start, k_stop: The part, counted from this item's corner.
            trimmed: Cut fully masked rows and columns off.
        """
        shift = q_start - k_start
        lo = -UNBOUNDED if self.lo is None else self.lo - shift
        hi = UNBOUNDED if self.hi is None else self.hi - shift
        rect = Rectangles(*(np.array(side) for side in (q_start, q_stop, k_start, k_stop, lo, hi)))
        q0, q1, k0, k1, lo, hi = (int(side) for side in (trim(rect) if trimmed else rect))
        if q0 >= q1:
            return None
        q, k = corner
        return WorkItem(
            self.q_rank, self.kv_rank, self.out_rank, q + q0, q + q1, k + k0, k + k1,
            None if lo == -UNBOUNDED else lo, None if hi == UNBOUNDED else hi,
        )  # fmt: skip

    def cut(self, pieces: int) -> tuple[WorkItem, ...]:
        """Cut the item into at most ``pieces`` pieces of equal rows, each over the columns it sees.

        So a piece can be computed while the next one is still on its way. Pieces of items with
        documents or tiles keep all columns, and those with tiles begin at tiles. A causal square,
        of documents too, stays whole: its pieces would be neither full nor causal, and a kernel may
        know only these.
        """
        if self._has_causal_band:
            return (self,)
        rows = self.q_stop - self.q_start
        size = -(-rows // pieces)
        if self.tiles is not None:
            size = -(-size // TILE) * TILE
        return tuple(
            self._piece(start, min(start + size, rows)) for start in range(0, rows, max(size, 1))
        )

    def _piece(self, start: int, stop: int) -> WorkItem:
        """Return the part of the rows ``start:stop``, counted from the corner; see ``cut``."""
        cu_q, tiles = self.cu_q, self.tiles
        if cu_q is None and tiles is None:
            columns = self.k_stop - self.k_start
            part = self._part((self.q_start, self.k_start), start, stop, 0, columns)
            assert part is not None and part.q_stop - part.q_start == stop - start
            return part
        return replace(
            self, q_start=self.q_start + start, q_stop=self.q_start + stop,
            lo=None if self.lo is None else self.lo - start,
            hi=None if self.hi is None else self.hi - start,
            cu_q=None if cu_q is None else np.clip(cu_q, start, stop) - start,
            tiles=None if tiles is None else tiles[start // TILE : -(-stop // TILE)],
        )  # fmt: skip
