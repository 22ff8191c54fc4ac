"""The plan: for every pair of ranks, which slice of Q meets which slice of K/V under which band."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ring_core.base.arguments import TILE, Ints, check_index, check_kind, check_size, not_none
from ring_core.layouts.layout import ChunkLayout, Layout, LayoutSpec, Run, check_layout
from ring_core.masks.band import UNBOUNDED, Rectangles, trim
from ring_core.masks.mask import Mask, Window, check_documents
from ring_core.plan.geometry import BandGeometry, RectangleTable
from ring_core.plan.tile_mask import BlockGeometry, Geometry


@dataclass(frozen=True, eq=False)
class WorkItem:
    """One kernel launch: a rectangle of a rank's queries and a rank's keys, and what it shows.

    Row ``i`` and column ``j`` count from the corner ``(q_start, k_start)`` of the local indices.
    The item shows the cells with ``lo <= i - j <= hi`` (``None``: unbounded) that lie in the same
    document, if it spans several, and that the predicate admits, if there is one.

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
        """The query rows."""
        return slice(self.q_start, self.q_stop)

    @cached_property
    def k_slice(self) -> slice:
        """The key columns."""
        return slice(self.k_start, self.k_stop)

    @cached_property
    def is_full(self) -> bool:
        """Whether every cell of the rectangle is shown."""
        return self.lo is None and self.hi is None and self.cu_q is None and self.tiles is None

    @cached_property
    def window(self) -> Window:
        """The band as flash-attention's window: ``(left, right)``, aligned bottom right.

        Row ``i`` shows columns ``i + d - left`` to ``i + d + right`` with ``d = columns - rows``;
        ``None`` is unbounded. Trimming makes both sides non-negative.
        """
        d = (self.k_stop - self.k_start) - (self.q_stop - self.q_start)
        return None if self.hi is None else self.hi + d, None if self.lo is None else -self.lo - d

    @cached_property
    def documents_window(self) -> Window | None:
        """For several documents: the window that shows each its part, if one does for all.

        Aligned bottom right in every document, as in varlen flash attention: a document whose keys
        end ``d`` columns after its queries needs another window than one that ends elsewhere.
        """
        assert self.cu_q is not None and self.cu_k is not None
        if self.lo is None and self.hi is None:
            return None, None
        both = (np.diff(self.cu_q) > 0) & (np.diff(self.cu_k) > 0)
        ends = (self.cu_k[1:] - self.cu_q[1:])[both]
        if ends.size and (ends != ends[0]).any():
            return None
        d = int(ends[0]) if ends.size else 0
        window = None if self.hi is None else self.hi + d, None if self.lo is None else -self.lo - d
        return window if all(side is None or side >= 0 for side in window) else None

    @cached_property
    def seen(self) -> tuple[Ints, Ints]:
        """From which column, and up to which, each row sees: of its rectangle, not for tiles.

        Neither falls from row to row; a row is fully masked where the second is not the larger one.
        """
        assert self.tiles is None
        row, columns = np.arange(self.q_stop - self.q_start), self.k_stop - self.k_start
        left = np.zeros_like(row) if self.hi is None else row - self.hi
        right = np.full_like(row, columns) if self.lo is None else row - self.lo + 1
        if self.cu_q is not None and self.cu_k is not None:
            sizes = np.diff(self.cu_q)
            left = np.maximum(left, np.repeat(self.cu_k[:-1], sizes))
            right = np.minimum(right, np.repeat(self.cu_k[1:], sizes))
        return np.maximum(left, 0), np.minimum(right, columns)

    def each_document(self) -> Iterator[WorkItem]:
        """Its documents as items of their own, whose rectangles count from this one's corner."""
        assert self.cu_q is not None and self.cu_k is not None
        sides = (pairwise(cu.tolist()) for cu in (self.cu_q, self.cu_k))
        for q, k in zip(*sides, strict=True):
            one = self._part((0, 0), *q, *k)
            if one is not None:
                yield one

    def rows(self, start: int, stop: int) -> WorkItem | None:
        """The part between two local query rows, trimmed; ``None`` if nothing is there.

        Not for tiles, which cannot be cut anywhere.
        """
        assert self.tiles is None
        first, last = max(start, self.q_start) - self.q_start, min(stop, self.q_stop) - self.q_start
        corner = self.q_start, self.k_start
        if first >= last:
            return None
        if self.cu_q is None or self.cu_k is None:
            return self._part(corner, first, last, 0, self.k_stop - self.k_start)
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
        """The band inside a rectangle of this one's rows and columns; its corner goes there."""
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
        """The item in at most ``pieces`` pieces of rows, each over the columns that it sees.

        Those of documents and of a predicate keep all columns. A square causal item stays whole:
        its pieces would be neither full nor causal, and a kernel may know only these. Pieces of a
        predicate's item begin at tiles.
        """
        rows = self.q_stop - self.q_start
        if self.lo == 0 and self.hi is None and rows == self.k_stop - self.k_start:
            return (self,)
        size = -(-rows // pieces)
        if self.tiles is not None:
            size = -(-size // TILE) * TILE
        return tuple(
            self._rows(start, min(start + size, rows)) for start in range(0, rows, max(size, 1))
        )

    def _rows(self, start: int, stop: int) -> WorkItem:
        cu_q, tiles = self.cu_q, self.tiles
        if cu_q is None and tiles is None:
            corner = (self.q_start, self.k_start)
            part = self._part(corner, start, stop, 0, self.k_stop - self.k_start)
            assert part is not None and part.q_stop - part.q_start == stop - start
            return part
        return replace(
            self,
            q_start=self.q_start + start,
            q_stop=self.q_start + stop,
            lo=None if self.lo is None else self.lo - start,
            hi=None if self.hi is None else self.hi - start,
            cu_q=None if cu_q is None else np.clip(cu_q, start, stop) - start,
            tiles=None if tiles is None else tiles[start // TILE : -(-stop // TILE)],
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """What meets what, whoever computes it and whenever. Make one with :func:`make_plan`.

    A strategy orders it in time: :func:`ring_core.ring_program`, :func:`ring_core.gather_program`.
    """

    mask: Mask
    seq_len: int
    cp_size: int
    kv_seq_len: int
    q_layout: Layout
    k_layout: Layout
    geometry: Geometry = field(repr=False)
    _items: dict[tuple[int, int], tuple[WorkItem, ...]] = field(repr=False, default_factory=dict)

    @property
    def q_offset(self) -> int:
        """Query ``i`` stands at position ``i + q_offset`` of the keys: ``T_kv - T_q``."""
        return self.kv_seq_len - self.seq_len

    @property
    def boundaries(self) -> Ints | None:
        """Ascending positions of document and chunk borders, if there are any."""
        return self.geometry.boundaries

    @property
    def blocks(self) -> BlockGeometry | None:
        """The block table of a predicate mask."""
        return self.geometry if isinstance(self.geometry, BlockGeometry) else None

    def positions(self, rank: int) -> Ints:
        """Global index of each query a rank holds, ``[T_local]``."""
        return self.q_layout.positions(rank)

    def q_positions(self, rank: int) -> Ints:
        """Where a rank's queries stand among the keys: ``positions(rank) + q_offset``."""
        return self.q_layout.positions(rank) + self.q_offset

    def k_positions(self, rank: int) -> Ints:
        """Global index of each key a rank holds."""
        return self.k_layout.positions(rank)

    def items(self, q_rank: int, kv_rank: int) -> tuple[WorkItem, ...]:
        """What a rank's queries see of a rank's keys."""
        check_index("q_rank", q_rank, self.cp_size)
        check_index("kv_rank", kv_rank, self.cp_size)
        pair = q_rank, kv_rank
        if pair not in self._items:
            rows = self.geometry.rows(np.array([q_rank]), np.array([kv_rank]))
            self._items[pair] = self.work_items(rows, 0, q_rank, kv_rank)
        return self._items[pair]

    @cached_property
    def k_runs(self) -> list[tuple[Run, int]]:
        """All runs of keys by position, with their ranks: equal pieces of the sequence."""
        layout = self.k_layout
        runs = [
            (Run(local, layout.run_length, start, layout.stride), rank)
            for rank, row in enumerate(layout.run_positions(np.arange(self.cp_size)).tolist())
            for local, start in zip(layout.run_starts, row, strict=True)
        ]
        return sorted(runs, key=lambda each: each[0].global_start)

    @cached_property
    def digest(self) -> bytes:
        """8 bytes that differ between plans that differ: what ranks compare."""
        sizes = self.seq_len, self.kv_seq_len, self.cp_size
        parts = [str((*sizes, self.q_layout.name, self.mask.band)).encode()]
        if isinstance(self.q_layout.name, ChunkLayout):
            parts.append(self.q_layout.name.table.tobytes())
        if self.boundaries is not None:
            parts.append(self.boundaries.tobytes())
        if self.blocks is not None:
            parts.append(self.blocks.digest())
        return hashlib.blake2b(b"|".join(parts), digest_size=8).digest()

    def work_items(
        self, rows: RectangleTable, at: int, q_rank: int, kv_rank: int
    ) -> tuple[WorkItem, ...]:
        """The rectangles of a pair of ranks, ``rows[at]``, as work items."""
        table = zip(*(x[at].tolist() for x in (*rows.rect, *rows[1:])), strict=True)
        return tuple(self._work_item(q_rank, kv_rank, row) for row in table if row[1] > row[0])

    def _work_item(self, q_rank: int, kv_rank: int, row: Sequence[int]) -> WorkItem:
        q_start, q_stop, k_start, k_stop, lo, hi, doc_start, doc_stop = row
        options: dict[str, Any] = {}
        if doc_stop > doc_start:
            cuts = not_none(self.boundaries)[doc_start : doc_stop + 1]
            options["cu_q"] = np.searchsorted(self.q_positions(q_rank)[q_start:q_stop], cuts)
            options["cu_k"] = np.searchsorted(self.k_positions(kv_rank)[k_start:k_stop], cuts)
        if self.blocks is not None:
            q_tiles, k_tiles = (
                slice(start // TILE, -(-stop // TILE))
                for start, stop in ((q_start, q_stop), (k_start, k_stop))
            )
            options["tiles"] = self.blocks.kinds[q_rank, kv_rank, q_tiles, k_tiles]
        return WorkItem(
            q_rank, kv_rank, q_rank, q_start, q_stop, k_start, k_stop,
            None if lo == -UNBOUNDED else lo, None if hi == UNBOUNDED else hi, **options,
        )  # fmt: skip


def make_plan(
    mask: Mask,
    *,
    seq_len: int,
    cp_size: int,
    layout: LayoutSpec = "contiguous",
    kv_seq_len: int | None = None,
) -> Plan:
    """Plan a call: decide for every pair of ranks what the one's queries see of the other's keys.

    Args:
        mask: Which query sees which key.
        seq_len: Queries, over all ranks.
        cp_size: Ranks.
        layout: ``contiguous``, ``zigzag``, ``striped`` or a :class:`ChunkLayout`.
        kv_seq_len: Keys, over all ranks, where they are not as many as queries; every rule then
            uses ``q_pos = i + kv_seq_len - seq_len`` and ``k_pos = j``.

    Returns:
        The plan; equal arguments return the same object, from a bounded cache.

    Raises:
        ValueError: Unknown layout, or chunks for other than ``cp_size`` ranks; a length
            the layout cannot divide; ``cu_seqlens`` that do not end at ``seq_len`` or come with
            other keys than queries; a predicate over more than ``2 ** 34`` pairs, or one that does
            not return booleans.
    """
    check_kind("mask", mask, Mask)
    check_layout(layout)
    seq_len, cp_size = check_size("seq_len", seq_len), check_size("cp_size", cp_size)
    keys = None if kv_seq_len is None else check_size("kv_seq_len", kv_seq_len)
    return _make_plan(mask, seq_len, cp_size, layout, keys)


@lru_cache(maxsize=128)
def _make_plan(
    mask: Mask,
    seq_len: int,
    cp_size: int,
    layout: LayoutSpec,
    kv_seq_len: int | None,
) -> Plan:
    keys = seq_len if kv_seq_len is None else kv_seq_len
    q_layout, k_layout = Layout(layout, seq_len, cp_size), Layout(layout, keys, cp_size)
    check_documents(mask, seq_len, keys)
    kind = BandGeometry if mask.predicate is None else BlockGeometry
    geometry = kind(mask, q_layout, k_layout, keys - seq_len)
    return Plan(mask, seq_len, cp_size, keys, q_layout, k_layout, geometry)
