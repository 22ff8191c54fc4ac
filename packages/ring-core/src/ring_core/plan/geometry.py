"""Compute what one rank's queries see of another rank's keys, for many pairs of ranks at once.

Between two runs of tokens the mask is a band over a rectangle (:mod:`ring_core.masks.band`); chunk
and document borders clip the rectangle first. All functions take arrays of ranks and work on all
pairs together, so that a plan for a thousand ranks costs a thousand numpy calls, not a million.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ring_core.base.arguments import Ints, not_none
from ring_core.layouts.layout import Layout
from ring_core.masks import band
from ring_core.masks.band import UNBOUNDED, Rectangles
from ring_core.masks.mask import Mask

_CELLS_AT_ONCE = 1 << 15  # arrays that stay in cache
_MOST_KEPT = 1 << 12  # pairs of runs whose rectangles a plan keeps: 256 KiB


class RectangleTable(NamedTuple):
    """Rectangles ``[..., n]`` of each pair of ranks; the empty ones are all zeros.

    A *cell* lies between two neighbouring ``boundaries`` (of documents and chunks); tokens see only
    their own cell. ``doc_start:doc_stop`` are the cells that a rectangle spans; both are zero where
    it lies inside a single one, so that the band alone is the rule.
    """

    rect: Rectangles
    doc_start: Ints
    doc_stop: Ints


@dataclass(frozen=True, eq=False)
class LaidOutMask:
    """A mask over the queries of one layout and the keys of another.

    Attributes:
        q_offset: Query ``i`` stands at position ``i + q_offset``: ``T_kv - T_q``.
    """

    mask: Mask
    q_layout: Layout
    k_layout: Layout
    q_offset: int

    @cached_property
    def boundaries(self) -> Ints | None:
        """Ascending borders of chunks and documents; see :meth:`ring_core.Mask.boundaries`."""
        return self.mask.boundaries(min(0, self.q_offset), self.k_layout.seq_len)


class BandGeometry(LaidOutMask):
    """Rectangles and counts of any mask without a predicate, worked out from bands.

    :class:`ring_core.plan.tile_mask.BlockGeometry` has the same methods for predicates.
    """

    def rectangles(
        self, q_rank: npt.ArrayLike, kv_rank: npt.ArrayLike, half: int | None = None
    ) -> RectangleTable:
        """Return the rectangles that pairs of ranks compute: one a pair of runs, or one for all.

        It is one where a single band over their bounding box shows the same.

        Args:
            q_rank, kv_rank: Ranks whose queries and whose keys meet; they broadcast to ``[...]``.
            half: 0 or 1 asks for the first or second half of each rectangle's query rows, cut so
                that both show about equally many pairs; ``None`` for all rows.
        """
        if half is not None or self._all is None:
            return self._worked_out(q_rank, kv_rank, half)[0]
        pairs = np.asarray(q_rank), np.asarray(kv_rank)
        parts = [x[pairs] for x in (*self._all[0].rect, *self._all[0][1:])]
        return RectangleTable(Rectangles(*parts[:6]), parts[6], parts[7])

    @cached_property
    def _all(self) -> tuple[RectangleTable, Ints] | None:
        """Rectangles and counts of all pairs of ranks, ``[q_rank, kv_rank]``; ``None`` of many.

        A numpy call for one step costs hardly less than one for all steps of a few ranks.
        """
        q, k = self.q_layout, self.k_layout
        if q.cp_size * q.num_runs * k.cp_size * k.num_runs > _MOST_KEPT:
            return None
        return self._worked_out(np.arange(q.cp_size)[:, None], np.arange(k.cp_size), None)

    def _worked_out(
        self, q_rank: npt.ArrayLike, kv_rank: npt.ArrayLike, half: int | None
    ) -> tuple[RectangleTable, Ints]:
        """Return the rectangles of pairs of ranks, and with documents how much each pair shows."""
        # A rectangle for each pair of runs. Trimming has dropped those without a visible pair,
        # unless documents hide what the band shows.
        table = self._pieces(q_rank, kv_rank, half)
        shown = table.doc_start  # without documents `count` has a closed form
        if self.boundaries is not None:
            shown = self._count(q_rank, kv_rank, table)
            table = _live_only(table, shown)
        if table.doc_start.shape[-1] > 1:
            table = self._coalesced(q_rank, kv_rank, table)
        return table, shown.sum(axis=-1)

    def rectangles_between(
        self, q_rank: npt.ArrayLike, k_start: int, k_stop: int
    ) -> RectangleTable:
        """Return a rectangle for each run of a rank's queries against keys at ``k_start:k_stop``.

        The keys must lie in natural order on one rank (``k_layout.cp_size == 1``), so that columns
        are positions.
        """
        assert self.k_layout.cp_size == 1
        q_local, k_local, q_pos, k_pos = self._runs(q_rank, 0)
        rect = self._rect_of_runs(q_local, k_local, q_pos, k_pos)
        # Only the columns that were asked for; rows keep their run.
        rect = band.clip(rect, rect.q_start, rect.q_stop, k_start, k_stop)
        table = self._in_cells(rect, q_pos - q_local, k_pos - k_local)
        if self.boundaries is None:
            return table
        return _live_only(table, self._count(q_rank, 0, table))

    def count(self, q_rank: npt.ArrayLike, kv_rank: npt.ArrayLike, half: int | None = None) -> Ints:
        """Count the visible (query, key) pairs in the :meth:`rectangles` of each pair of ranks."""
        if self.boundaries is None and half is None:  # the closed form needs no trimming
            return _count(self._rect_of_runs(*self._runs(q_rank, kv_rank))).sum(axis=-1)
        if half is None and self._all is not None:
            pairs: Ints = self._all[1][np.asarray(q_rank), np.asarray(kv_rank)]
            return pairs
        return self._count(q_rank, kv_rank, self._pieces(q_rank, kv_rank, half)).sum(axis=-1)

    def _runs(self, q_rank: npt.ArrayLike, kv_rank: npt.ArrayLike) -> tuple[Ints, Ints, Ints, Ints]:
        """Return where each pair of runs starts: ``(q_local, k_local, q_pos, k_pos)``.

        Local indices ``[n]`` are equal on all ranks, positions are ``[..., n]``; ``n`` counts the
        runs of a rank's queries times those of its keys.
        """
        q_rank, kv_rank = np.broadcast_arrays(q_rank, kv_rank)
        q_pos = self.q_layout.run_positions(q_rank) + self.q_offset
        k_pos = self.k_layout.run_positions(kv_rank)
        q_pos, k_pos = np.broadcast_arrays(q_pos[..., :, None], k_pos[..., None, :])
        flat = (*q_pos.shape[:-2], -1)
        q_local, k_local = np.meshgrid(
            self.q_layout.run_starts, self.k_layout.run_starts, indexing="ij"
        )
        return q_local.reshape(-1), k_local.reshape(-1), q_pos.reshape(flat), k_pos.reshape(flat)

    def _pieces(
        self, q_rank: npt.ArrayLike, kv_rank: npt.ArrayLike, half: int | None
    ) -> RectangleTable:
        """Return a trimmed rectangle for every pair of runs, or half of its rows."""
        q_local, k_local, q_pos, k_pos = self._runs(q_rank, kv_rank)
        rect = band.trim(self._rect_of_runs(q_local, k_local, q_pos, k_pos))
        table = self._in_cells(rect, q_pos - q_local, k_pos - k_local)
        return table if half is None else self._half(q_rank, kv_rank, table, half)

    def _rect_of_runs(self, q_local: Ints, k_local: Ints, q_pos: Ints, k_pos: Ints) -> Rectangles:
        """Return the rectangle of the tokens of each pair of runs, and the mask's band in it."""
        lo, hi = band.local_band(q_pos, k_pos, self.q_layout.stride, self.mask.band)
        # Padding is at the end of each run, and belongs to no rectangle.
        q_stop = q_local + self.q_layout.tokens_from(q_pos - self.q_offset)
        k_stop = k_local + self.k_layout.tokens_from(k_pos)
        return Rectangles(*np.broadcast_arrays(q_local, q_stop, k_local, k_stop, lo, hi))

    def _in_cells(self, rect: Rectangles, q_zero: Ints, k_zero: Ints) -> RectangleTable:
        """Clip rectangles to the cells that both their queries and their keys touch.

        ``q_zero`` and ``k_zero`` are the positions that local index 0 would have in each run: a
        token's position is ``zero + stride * local index``.
        """
        if self.boundaries is None:
            return RectangleTable(rect, np.zeros_like(rect.lo), np.zeros_like(rect.lo))
        cells = self.boundaries
        # In a striped layout a cell's tokens lie on every rank: nothing can be cut off, and the
        # kernel compares documents.
        if self.q_layout.stride > 1:
            stop = np.where(rect.live, cells.size - 1, 0)
            return RectangleTable(rect, np.zeros_like(stop), stop)
        # Clipping to the shared cells lets the band trim more, after which fewer cells are shared.
        for _ in range(2):
            # Documents before the first shared one have queries or keys here, not both.
            first, last = self._shared_cells(rect, q_zero, k_zero)
            inside = rect.live & (first <= last)
            first, last = np.where(inside, first, 0), np.where(inside, last, 0)
            start, stop = cells[first], np.where(inside, cells[last + 1], cells[first])
            rect = band.clip(rect, start - q_zero, stop - q_zero, start - k_zero, stop - k_zero)
        first, last = self._shared_cells(rect, q_zero, k_zero)
        # Inside one document the band alone decides, which more kernels can do.
        several = rect.live & (last > first)
        return RectangleTable(rect, np.where(several, first, 0), np.where(several, last + 1, 0))

    def _shared_cells(self, rect: Rectangles, q_zero: Ints, k_zero: Ints) -> tuple[Ints, Ints]:
        """Return the first and the last cell with both a query and a key of each rectangle."""
        q_first, q_last = self._cell(rect.q_start + q_zero), self._cell(rect.q_stop + q_zero - 1)
        k_first, k_last = self._cell(rect.k_start + k_zero), self._cell(rect.k_stop + k_zero - 1)
        return np.maximum(q_first, k_first), np.minimum(q_last, k_last)

    def _cell(self, position: Ints) -> Ints:
        """Return the cell that each position lies in."""
        boundaries = not_none(self.boundaries)
        cell = np.searchsorted(boundaries, position, side="right") - 1
        return np.clip(cell, 0, boundaries.size - 2)

    def _count(self, q_rank: npt.ArrayLike, kv_rank: npt.ArrayLike, table: RectangleTable) -> Ints:
        """Count the visible pairs of each rectangle, ``[..., n]``."""
        shown = _count(table.rect)
        if not table.doc_stop.any():
            return shown
        q_local, k_local, q_pos, k_pos = self._runs(q_rank, kv_rank)
        q_zero, k_zero = q_pos - q_local, k_pos - k_local
        # Some rectangles span several cells, and show pairs within one cell only.
        if self.q_layout.stride > 1:
            return np.where(table.doc_stop > 0, self._count_by_cell(table, q_zero, k_zero), shown)
        first, last = table.doc_start, np.maximum(table.doc_stop - 1, 0)
        # Cells between the first and the last lie whole inside the rectangle: a prefix sum counts
        # them. The first and the last may be cut by it, and are clipped and counted each.
        # A document's pairs do not depend on where its tokens lie, so they are counted once for all
        # ranks.
        whole = self._pairs_before[last] - self._pairs_before[np.minimum(first + 1, last)]
        ends = self._count_cell(table.rect, first, q_zero, k_zero) + np.where(
            last > first, self._count_cell(table.rect, last, q_zero, k_zero), 0
        )
        return np.where(table.doc_stop > 0, whole + ends, shown)

    def _count_cell(self, rect: Rectangles, cell: Ints, q_zero: Ints, k_zero: Ints) -> Ints:
        """Count the visible pairs of each rectangle inside one cell, ``cell`` for each."""
        boundaries, stride = not_none(self.boundaries), self.q_layout.stride
        start, stop = boundaries[cell], boundaries[cell + 1]
        # Local index n of a run stands at position zero + stride * n: round up to the next one.
        q_start, q_stop = -((q_zero - start) // stride), -((q_zero - stop) // stride)
        k_start, k_stop = -((k_zero - start) // stride), -((k_zero - stop) // stride)
        return _count(band.clip(rect, q_start, q_stop, k_start, k_stop))

    def _count_by_cell(self, table: RectangleTable, q_zero: Ints, k_zero: Ints) -> Ints:
        """Count visible pairs cell by cell, for striped layouts, which cut cells on each rank."""
        cells = not_none(self.boundaries).size - 1
        flat = Rectangles(*(x.reshape(-1, 1) for x in table.rect))
        q_flat, k_flat = q_zero.reshape(-1, 1), k_zero.reshape(-1, 1)
        total = np.zeros(flat.lo.shape[0], dtype=np.int64)
        # All cells of so many rectangles that the arrays [rectangles, cells] stay in the CPU's
        # cache.
        for begin in range(0, total.size, max(1, _CELLS_AT_ONCE // cells)):
            part = slice(begin, begin + max(1, _CELLS_AT_ONCE // cells))
            rect = Rectangles(*(x[part] for x in flat))
            total[part] = self._count_cell(rect, np.arange(cells), q_flat[part], k_flat[part]).sum(
                axis=1
            )
        return total.reshape(table.doc_stop.shape)

    @cached_property
    def _pairs_before(self) -> Ints:
        """Prefix sum over whole cells: visible pairs of all cells before each boundary."""
        length = np.diff(not_none(self.boundaries))
        lo, hi = band.local_band(0, 0, 1, self.mask.band)
        return np.concatenate([[0], np.cumsum(band.count(length, length, lo, hi))])

    def _half(
        self, q_rank: npt.ArrayLike, kv_rank: npt.ArrayLike, table: RectangleTable, half: int
    ) -> RectangleTable:
        """Cut each rectangle at the row that halves its visible pairs; return one side of it."""
        # Bisection: rows up to ``above`` hold half of the pairs or more, rows up to ``below`` less.
        below, above = table.rect.q_start, table.rect.q_stop
        # Counted in pairs, not rows: under a causal mask the later rows have more to do.
        total = self._count(q_rank, kv_rank, table)
        for _ in range(int((above - below).max()).bit_length()):
            middle = (below + above) // 2
            first = self._cut(q_rank, kv_rank, table, table.rect.q_start, middle)
            enough = 2 * self._count(q_rank, kv_rank, first) >= total
            below, above = np.where(enough, below, middle), np.where(enough, middle, above)
        bounds = (table.rect.q_start, above) if half == 0 else (above, table.rect.q_stop)
        return self._cut(q_rank, kv_rank, table, *bounds)

    def _cut(
        self,
        q_rank: npt.ArrayLike,
        kv_rank: npt.ArrayLike,
        table: RectangleTable,
        start: Ints,
        stop: Ints,
    ) -> RectangleTable:
        """Clip rectangles to the query rows ``start:stop``."""
        rect = band.clip(table.rect, start, stop, table.rect.k_start, table.rect.k_stop)
        q_local, k_local, q_pos, k_pos = self._runs(q_rank, kv_rank)
        return self._in_cells(rect, q_pos - q_local, k_pos - k_local)

    def _coalesced(
        self, q_rank: npt.ArrayLike, kv_rank: npt.ArrayLike, table: RectangleTable
    ) -> RectangleTable:
        """Replace the rectangles of a pair by their bounding box where one band shows the same.

        Fewer rectangles are fewer launches: the step of a causal zigzag in which a rank meets its
        own keys is one causal block, and adjacent full rectangles are one.
        """
        rect, live = table.rect, table.rect.live
        largest = np.iinfo(np.int64).max
        # Empty rectangles are zeros, which would pull the corner of the box to 0.
        q0 = np.where(live, rect.q_start, largest).min(axis=-1, keepdims=True)
        k0 = np.where(live, rect.k_start, largest).min(axis=-1, keepdims=True)
        q1, k1 = rect.q_stop.max(axis=-1, keepdims=True), rect.k_stop.max(axis=-1, keepdims=True)
        # The band of the box: the tightest of all pieces on each side, counted from the box's
        # corner. A side that binds in no piece is open.
        moved = (rect.k_start - k0) - (rect.q_start - q0)
        binds = live & (rect.lo > -UNBOUNDED), live & (rect.hi < UNBOUNDED)
        lo = np.where(binds[0], rect.lo - moved, -UNBOUNDED).max(axis=-1, keepdims=True)
        hi = np.where(binds[1], rect.hi - moved, UNBOUNDED).min(axis=-1, keepdims=True)
        box = band.trim(Rectangles(q0, q1, k0, k1, lo, hi))
        q_local, k_local, _, _ = self._runs(q_rank, kv_rank)
        # The box may stand for the pieces only if it shows in each run the same as that run's piece
        # does.
        runs = (
            q_local,
            q_local + self.q_layout.run_length,
            k_local,
            k_local + self.k_layout.run_length,
        )
        same = np.all([a == b for a, b in zip(band.clip(box, *runs), rect, strict=True)], axis=0)
        box_shows_the_same = (same & ~(table.doc_stop > 0)).all(axis=-1, keepdims=True)
        # One rectangle needs no box.
        use_box = (live.sum(axis=-1, keepdims=True) > 1) & box_shows_the_same
        first = np.arange(live.shape[-1]) == 0
        out = Rectangles(
            *(np.where(use_box, np.where(first, b, 0), a) for a, b in zip(rect, box, strict=True))
        )
        # Live rectangles first; columns no pair uses are dropped.
        order = np.argsort(~out.live, axis=-1, kind="stable")
        width = max(1, int(out.live.sum(axis=-1).max(initial=0)))
        parts = [np.take_along_axis(x, order, axis=-1)[..., :width] for x in (*out, *table[1:])]
        return RectangleTable(Rectangles(*parts[:6]), parts[6], parts[7])


def rows_before(layout: Layout, rank: int, start: int, stop: int, position: Ints) -> Ints:
    """Count the rows ``start:stop`` of a rank, all of one run, before each position."""
    run, row = divmod(start, layout.run_length)
    first = layout.run_positions(rank)[run] + row * layout.stride
    before: Ints = np.clip(-((first - position) // layout.stride), 0, stop - start)
    return before


def _live_only(table: RectangleTable, shown: Ints) -> RectangleTable:
    """Replace rectangles that show no pair by zeros: their band misses all cells."""
    # The band crosses the rectangle, and no document does: nobody has to launch, or send, for it.
    parts = [np.where(shown > 0, x, 0) for x in (*table.rect, *table[1:])]
    return RectangleTable(Rectangles(*parts[:6]), parts[6], parts[7])


def _count(rect: Rectangles) -> Ints:
    """Count the (query, key) pairs inside the band of each rectangle."""
    return band.count(rect.q_stop - rect.q_start, rect.k_stop - rect.k_start, rect.lo, rect.hi)
