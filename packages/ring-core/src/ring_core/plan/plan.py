"""The plan: for every pair of ranks, which slice of Q meets which slice of K/V under which band."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ring_core.base.arguments import TILE, Ints, check_index, check_kind, check_size, not_none
from ring_core.layouts.layout import ChunkLayout, Layout, LayoutSpec, Run, check_layout
from ring_core.masks.band import UNBOUNDED
from ring_core.masks.mask import Mask, check_documents
from ring_core.plan.geometry import BandGeometry, RectangleTable
from ring_core.plan.items import WorkItem
from ring_core.plan.tile_mask import BlockGeometry, Geometry


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
        given = self.seq_len, self.kv_seq_len, self.cp_size, self.q_layout.name, self.mask.band
        parts = [str(given).encode()]
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
            q_tiles = slice(q_start // TILE, -(-q_stop // TILE))
            k_tiles = slice(k_start // TILE, -(-k_stop // TILE))
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
