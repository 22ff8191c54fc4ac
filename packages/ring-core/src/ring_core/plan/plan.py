"""Plan a call: for every pair of ranks, which slice of Q meets which slice of K/V.

Inside such a rectangle a band ``lo <= i - j <= hi`` says which query sees which key.
"""

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
        is_square = self.q_stop - self.q_start == self.k_stop - self.k_start
        no_other_rule = self.hi is None and self.cu_q is None and self.tiles is None
        return is_square and self.lo == 0 and no_other_rule

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
        documents or tiles keep all columns, and those with tiles begin at tiles. A square causal
        item stays whole: its pieces would be neither full nor causal, and a kernel may know only
        these.
        """
        rows = self.q_stop - self.q_start
        if self.lo == 0 and self.hi is None and rows == self.k_stop - self.k_start:
            return (self,)
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


@dataclass(frozen=True, eq=False)
class Plan:
    """The work items of every pair of ranks, whoever computes them and whenever.

    Make one with :func:`make_plan`. A strategy orders it in time:
    :func:`ring_core.ring_program`, :func:`ring_core.gather_program`.

    Attributes:
        mask: The rule over global positions.
        seq_len, kv_seq_len: Queries and keys, over all ranks, without padding.
        cp_size: Number of ranks.
        q_layout, k_layout: Assignment of queries and of keys to ranks; both have one name.
        geometry: The rectangles of every pair of ranks.
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
        """Difference ``T_kv - T_q``: query ``i`` stands at position ``i + q_offset``."""
        return self.kv_seq_len - self.seq_len

    @property
    def boundaries(self) -> Ints | None:
        """Positions of the borders of documents and chunks, ascending; ``None`` without any."""
        return self.geometry.boundaries

    @property
    def blocks(self) -> BlockGeometry | None:
        """Tiles of a predicate mask; ``None`` for any other mask."""
        return self.geometry if isinstance(self.geometry, BlockGeometry) else None

    def positions(self, rank: int) -> Ints:
        """Return the global index of each query a rank holds, int64 ``[T_local]``."""
        return self.q_layout.positions(rank)

    def q_positions(self, rank: int) -> Ints:
        """Return the position of each query in the mask's rule: ``positions(rank) + q_offset``."""
        return self.q_layout.positions(rank) + self.q_offset

    def k_positions(self, rank: int) -> Ints:
        """Return the global index, and so the position, of each key a rank holds."""
        return self.k_layout.positions(rank)

    def items(self, q_rank: int, kv_rank: int) -> tuple[WorkItem, ...]:
        """Return the work items of one rank's queries and another's (or its own) keys.

        Empty if the queries see none of these keys. Rows and columns are local indices of the two
        ranks.

        >>> from ring_core import Mask, make_plan
        >>> plan = make_plan(Mask(causal=True), seq_len=8, cp_size=2)
        >>> plan.items(0, 1)  # the first rank's queries see no later keys
        ()
        >>> plan.items(1, 0)[0].is_full
        True

        Raises:
            ValueError: There is no such rank.
        """
        check_index("q_rank", q_rank, self.cp_size)
        check_index("kv_rank", kv_rank, self.cp_size)
        pair = q_rank, kv_rank
        if pair not in self._items:
            rectangles = self.geometry.rectangles(np.array([q_rank]), np.array([kv_rank]))
            self._items[pair] = self.work_items(rectangles, 0, q_rank, kv_rank)
        return self._items[pair]

    @cached_property
    def k_runs(self) -> list[tuple[Run, int]]:
        """Runs of keys of all ranks, each with its rank, in the order of their positions."""
        layout = self.k_layout
        runs = [
            (Run(local, layout.run_length, start, layout.stride), rank)
            for rank, row in enumerate(layout.run_positions(np.arange(self.cp_size)).tolist())
            for local, start in zip(layout.run_starts, row, strict=True)
        ]
        return sorted(runs, key=lambda run_and_rank: run_and_rank[0].global_start)

    @cached_property
    def digest(self) -> bytes:
        """Hash of 8 bytes by which ranks check that they made the same plan."""
        q, k = self.q_layout, self.k_layout
        sizes = self.seq_len, self.kv_seq_len, q.padded_len, k.padded_len, self.cp_size
        parts = [str((*sizes, q.name, self.mask.band)).encode()]
        if isinstance(q.name, ChunkLayout):
            parts.append(q.name.table.tobytes())
        if self.boundaries is not None:
            parts.append(self.boundaries.tobytes())
        if self.blocks is not None:
            parts.append(self.blocks.digest())
        return hashlib.blake2b(b"|".join(parts), digest_size=8).digest()

    def work_items(
        self, rectangles: RectangleTable, pair: int, q_rank: int, kv_rank: int
    ) -> tuple[WorkItem, ...]:
        """Return the rectangles of entry ``pair``, those of two ranks, as work items.

        Empty ones are left out.
        """
        columns = (*rectangles.rect, *rectangles[1:])
        table = zip(*(x[pair].tolist() for x in columns), strict=True)
        return tuple(self._work_item(q_rank, kv_rank, row) for row in table if row[1] > row[0])

    def _work_item(self, q_rank: int, kv_rank: int, row: Sequence[int]) -> WorkItem:
        """Return the work item of one rectangle, with its documents or tiles."""
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
    mask: Mask, *, seq_len: int, cp_size: int, layout: LayoutSpec = "contiguous",
    kv_seq_len: int | None = None, pad_to: int | tuple[int, int] | None = None,
) -> Plan:  # fmt: skip
    """Plan a call: decide for every pair of ranks what the one's queries see of the other's keys.

    >>> from ring_core import Mask, make_plan
    >>> plan = make_plan(Mask(causal=True), seq_len=8, cp_size=2, layout="zigzag")
    >>> [len(plan.items(q_rank=1, kv_rank=rank)) for rank in range(2)]
    [1, 1]

    Args:
        mask: The rule that says which query sees which key.
        seq_len: Number of queries, over all ranks.
        cp_size: Number of ranks.
        layout: ``contiguous``, ``zigzag``, ``striped`` or a :class:`ChunkLayout`.
        kv_seq_len: Number of keys, over all ranks, if it is another; every rule then
            uses ``q_pos = i + kv_seq_len - seq_len`` and ``k_pos = j``.
        pad_to: Number of tokens over all ranks with the padding behind them, or a pair (queries',
            keys'), for lengths that the layout cannot divide. Padding is in no work item: it sees
            nothing and is not seen.

    Returns:
        The plan; equal arguments return the same object, from a bounded cache.

    Raises:
        ValueError: Unknown layout, or chunks for other than ``cp_size`` ranks; a length the layout
            cannot divide; a ``pad_to`` that is no such length; ``cu_seqlens`` that do not end at
            ``seq_len`` or come with other keys than queries; a predicate over more than
            ``2 ** 34`` pairs, or not of booleans.
    """
    check_kind("mask", mask, Mask)
    check_layout(layout)
    seq_len, cp_size = check_size("seq_len", seq_len), check_size("cp_size", cp_size)
    keys = seq_len if kv_seq_len is None else check_size("kv_seq_len", kv_seq_len)
    padded = pad_to if isinstance(pad_to, tuple) else (pad_to, pad_to)
    if len(padded) != 2:
        raise ValueError(f"pad_to must be an integer or a pair (queries', keys'), got {pad_to!r}")
    q_padded, k_padded = (None if x is None else check_size("pad_to", x) for x in padded)
    return _make_plan(mask, seq_len, cp_size, layout, keys, q_padded, k_padded)


@lru_cache(maxsize=128)
def _make_plan(
    mask: Mask, seq_len: int, cp_size: int, layout: LayoutSpec, keys: int, q_padded: int | None,
    k_padded: int | None,
) -> Plan:  # fmt: skip
    """Make a plan; :func:`make_plan` has checked the types, so that arguments can be hashed."""
    q_layout = Layout(layout, seq_len, cp_size, q_padded)
    k_layout = Layout(layout, keys, cp_size, k_padded)
    check_documents(mask, seq_len, keys)
    kind = BandGeometry if mask.predicate is None else BlockGeometry
    geometry = kind(mask, q_layout, k_layout, keys - seq_len)
    return Plan(mask, seq_len, cp_size, keys, q_layout, k_layout, geometry)
