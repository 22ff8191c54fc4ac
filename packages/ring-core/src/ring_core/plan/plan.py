"""Plan a call: for every pair of ranks, which slice of Q meets which slice of K/V.

Inside such a rectangle a band ``lo <= i - j <= hi`` says which query sees which key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ring_core.base.arguments import (
    TILE,
    Ints,
    check_index,
    check_kind,
    check_size,
    not_none,
    numbers_as_python,
)
from ring_core.layouts.layout import ChunkLayout, Layout, LayoutSpec, Run, check_layout
from ring_core.masks.band import UNBOUNDED
from ring_core.masks.expression import TracedRule
from ring_core.masks.mask import Mask, check_documents, rule_of, snapshot
from ring_core.plan.geometry import BandGeometry, RectangleTable, rows_before
from ring_core.plan.item import WorkItem
from ring_core.plan.tile_mask import BlockGeometry, Geometry, spans_of


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

    @cached_property
    def rule(self) -> TracedRule:
        """The mask's rule, without documents, as an expression that devices evaluate."""
        if self.blocks is not None:
            return self.blocks.rule
        return rule_of(self.mask, *spans_of(self.seq_len, self.kv_seq_len))

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
            parts.append(self.blocks.digest)
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
            # A rectangle over several documents lies between two runs.
            q_cuts = cuts - self.q_offset
            options["cu_q"] = rows_before(self.q_layout, q_rank, q_start, q_stop, q_cuts)
            options["cu_k"] = rows_before(self.k_layout, kv_rank, k_start, k_stop, cuts)
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


@numbers_as_python
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
    return _make_plan(snapshot(mask), seq_len, cp_size, layout, keys, q_padded, k_padded)


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
