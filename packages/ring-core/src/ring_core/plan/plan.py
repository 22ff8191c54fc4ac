"""The plan: for every rank and step, which slice of Q meets which slice of K/V under which band."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from ring_core.base.arguments import check_choice, check_index, check_record, check_size
from ring_core.base.errors import UnsupportedError
from ring_core.base.strategy import PLANNED, PlannedStrategy, takes_layout
from ring_core.base.tiles import TILE
from ring_core.layouts.layout import ChunkLayout, Layout, LayoutSpec, Run, check_layout
from ring_core.masks.band import UNBOUNDED
from ring_core.masks.mask import Mask, check_documents
from ring_core.plan.geometry import BandGeometry, RectangleTable
from ring_core.plan.items import WorkItem
from ring_core.plan.tile_mask import BlockGeometry
from ring_core.programs.ring import (
    Help,
    Stage,
    Step,
    active_steps,
    backward_program,
    forward_program,
    step_rows,
)

Ints = npt.NDArray[np.int64]

TABLE_COLUMNS = (
    "q_rank", "kv_rank", "out_rank", "q_start", "q_stop", "k_start", "k_stop", "lo", "hi", "doc_start", "doc_stop",
)  # fmt: skip
TABLE_UNBOUNDED = 2**31 - 1


@dataclass(frozen=True)
class ItemCounts:
    """What a kernel must be able to do to run every item of a plan, as numbers of items.

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


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything a ring needs to know before it starts. Make one with :func:`make_plan`.

    ``items(rank, step)`` is the view of a process that knows its rank; ``table(step)`` the view of
    one program that all ranks run. Both show the same work.
    """

    mask: Mask
    seq_len: int
    cp_size: int
    strategy: PlannedStrategy
    kv_seq_len: int
    q_layout: Layout
    k_layout: Layout
    geometry: BandGeometry | BlockGeometry = field(repr=False)
    steps: tuple[Step, ...]
    _work: Ints = field(repr=False)
    _items: dict[int, tuple[tuple[WorkItem, ...], ...]] = field(repr=False, default_factory=dict)
    _helped: dict[tuple[int, int], tuple[WorkItem, ...]] = field(repr=False, default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Live steps, the rank's own block included."""
        return len(self.steps)

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

    @cached_property
    def forward(self) -> tuple[Stage, ...]:
        """The step program of the forward pass."""
        return forward_program(self.steps)

    @cached_property
    def backward(self) -> tuple[Stage, ...]:
        """The step program of the backward pass."""
        return backward_program(self.steps)

    def positions(self, rank: int) -> Ints:
        """Global index of each query a rank holds, ``[T_local]``."""
        return self.q_layout.positions(rank)

    def q_positions(self, rank: int) -> Ints:
        """Where a rank's queries stand among the keys: ``positions(rank) + q_offset``."""
        return self.q_layout.positions(rank) + self.q_offset

    def k_positions(self, rank: int) -> Ints:
        """Global index of each key a rank holds."""
        return self.k_layout.positions(rank)

    def items(self, rank: int, step: int) -> tuple[WorkItem, ...]:
        """What a rank computes in a step (an index into ``steps``)."""
        check_index("rank", rank, self.cp_size)
        check_index("step", step, self.num_steps)
        if rank not in self._items:
            self._items[rank] = self._rank_items(rank)
        return self._items[rank][step]

    def helped(self, rank: int, step: int) -> tuple[WorkItem, ...]:
        """What another rank computes in a step for this rank's queries."""
        check_index("rank", rank, self.cp_size)
        check_index("step", step, self.num_steps)
        helps, shift = self.steps[step].helps, self.steps[step].shift
        if helps == "none":
            return ()
        if (rank, step) not in self._helped:
            helper = np.array([(rank + shift) % self.cp_size])
            _, rows = step_rows(helps, self.geometry, helper, np.array([rank]))
            assert rows is not None
            self._helped[rank, step] = self._work_items(rows, 0, rank, int(helper[0]))
        return self._helped[rank, step]

    @cached_property
    def k_runs(self) -> list[tuple[Run, int]]:
        """All runs of keys by position, with their ranks: equal pieces of the sequence."""
        layout = self.k_layout
        starts = layout.run_positions(np.arange(self.cp_size)).tolist()
        runs = [
            (Run(local, layout.run_length, start, layout.stride), rank)
            for rank, row in enumerate(starts)
            for local, start in zip(layout.run_starts, row, strict=True)
        ]
        return sorted(runs, key=lambda each: each[0].global_start)

    def table(self, step: int) -> npt.NDArray[np.int32]:
        """Items of all ranks, ``int32[cp_size, R, len(TABLE_COLUMNS)]``, padded with empty rows.

        Unbounded sides hold ``-TABLE_UNBOUNDED`` and ``TABLE_UNBOUNDED``, so that ``lo <= i - j <=
        hi`` needs no case; ``doc_start:doc_stop`` are the cells of ``boundaries`` the row spans
        (0:0 if the band alone decides). Ranks and slices of empty rows are zero.
        """
        check_index("step", step, self.num_steps)
        ranks = np.arange(self.cp_size)
        behind = (ranks - self.steps[step].shift) % self.cp_size
        own, helped = step_rows(self.steps[step].helps, self.geometry, ranks, behind)
        parts = [_columns(own, ranks, behind)]
        parts += [_columns(helped, behind, ranks)] if helped is not None else []
        table = np.concatenate(parts, axis=1)
        live = table[..., 4] > table[..., 3]
        order = np.argsort(~live, axis=1, kind="stable")[..., None]
        width = max(1, int(live.sum(axis=1).max()))
        return np.take_along_axis(np.where(live[..., None], table, 0), order, axis=1)[:, :width]

    def work(self) -> Ints:
        """Visible (query, key) pairs each rank computes in each step, ``[num_steps, cp_size]``."""
        return self._work.copy()

    @property
    def imbalance(self) -> float:
        """Visible pairs of the busiest rank over the mean; 1.0 is even."""
        totals = self._work.sum(axis=0)
        return float(totals.max() / totals.mean()) if totals.any() else 1.0

    @property
    def lockstep_imbalance(self) -> float:
        """What a ring in lockstep waits for: the slowest rank of every step, over the mean rank."""
        mean = self._work.sum(axis=0).mean()
        return float(self._work.max(axis=1).sum() / mean) if mean else 1.0

    @cached_property
    def traits(self) -> ItemCounts:
        """Which kinds of items the plan has, over all ranks and steps."""
        counts = np.zeros(4, dtype=np.int64)
        for step in range(self.num_steps):
            table = self.table(step).reshape(-1, len(TABLE_COLUMNS)).astype(np.int64)
            q_start, q_stop, k_start, k_stop, lo, hi, _, doc_stop = table[:, 3:].T
            live, square = q_stop > q_start, q_stop - q_start == k_stop - k_start
            no_hi = hi == TABLE_UNBOUNDED
            full, causal = no_hi & (lo == -TABLE_UNBOUNDED), no_hi & square & (lo == 0)
            counts += [
                x.sum() for x in (live & full, live & causal, live & ~full & ~causal, doc_stop > 0)
            ]
        return ItemCounts(*counts.tolist())

    @cached_property
    def digest(self) -> bytes:
        """8 bytes that differ between plans that differ: what ranks compare."""
        parts = [
            str(
                (
                    self.seq_len,
                    self.kv_seq_len,
                    self.cp_size,
                    self.q_layout.name,
                    self.strategy,
                    self.mask.band,
                )
            ).encode()
        ]
        if isinstance(self.q_layout.name, ChunkLayout):
            parts.append(self.q_layout.name.table.tobytes())
        if self.boundaries is not None:
            parts.append(self.boundaries.tobytes())
        if self.blocks is not None:
            parts.append(self.blocks.digest())
        return hashlib.blake2b(b"|".join(parts), digest_size=8).digest()

    def _rank_items(self, rank: int) -> tuple[tuple[WorkItem, ...], ...]:
        """The items of one rank in every step, from one pass over all steps that help alike."""
        items: list[tuple[WorkItem, ...]] = [()] * self.num_steps
        for helps in get_args(Help):
            steps = [n for n, step in enumerate(self.steps) if step.helps == helps]
            if not steps:
                continue
            behind = (rank - np.array([self.steps[n].shift for n in steps])) % self.cp_size
            own, helped = step_rows(helps, self.geometry, np.full_like(behind, rank), behind)
            for at, n in enumerate(steps):
                items[n] = self._work_items(own, at, rank, int(behind[at]))
                if helped is not None:
                    items[n] += self._work_items(helped, at, int(behind[at]), rank)
        return tuple(items)

    def _work_items(
        self, rows: RectangleTable, at: int, q_rank: int, kv_rank: int
    ) -> tuple[WorkItem, ...]:
        columns = (*rows.rect, rows.doc_start, rows.doc_stop)
        table = zip(*(x[at].tolist() for x in columns), strict=True)
        return tuple(self._work_item(q_rank, kv_rank, row) for row in table if row[1] > row[0])

    def _work_item(self, q_rank: int, kv_rank: int, row: Sequence[int]) -> WorkItem:
        q_start, q_stop, k_start, k_stop, lo, hi, doc_start, doc_stop = row
        extra: dict[str, Any] = {}
        if doc_stop > doc_start:
            assert self.boundaries is not None
            cuts = self.boundaries[doc_start : doc_stop + 1]
            q_first = self.q_positions(q_rank)[q_start:q_stop]
            extra["cu_q"] = np.searchsorted(q_first, cuts)
            extra["cu_k"] = np.searchsorted(self.k_positions(kv_rank)[k_start:k_stop], cuts)
        if self.blocks is not None:
            q_tiles = slice(q_start // TILE, -(-q_stop // TILE))
            k_tiles = slice(k_start // TILE, -(-k_stop // TILE))
            extra["tiles"] = self.blocks.kinds[q_rank, kv_rank, q_tiles, k_tiles]
        bounds = (None if lo == -UNBOUNDED else lo, None if hi == UNBOUNDED else hi)
        return WorkItem(q_rank, kv_rank, q_rank, q_start, q_stop, k_start, k_stop, *bounds, **extra)


def make_plan(
    mask: Mask,
    *,
    seq_len: int,
    cp_size: int,
    layout: LayoutSpec = "contiguous",
    strategy: PlannedStrategy = "ring",
    kv_seq_len: int | None = None,
) -> Plan:
    """Plan a ring: decide for every rank and step what it computes.

    Args:
        mask: Which query sees which key.
        seq_len: Queries, over all ranks.
        cp_size: Ranks.
        layout: ``contiguous``, ``zigzag``, ``striped`` or a :class:`ChunkLayout`.
        strategy: ``ring``, or ``balanced``, where ranks that would be idle compute for others: of
            contiguous shards alone. A ``gather`` is made of a ring's plan (``gather_program``).
        kv_seq_len: Keys, over all ranks, where they are not as many as queries; every rule then
            uses ``q_pos = i + kv_seq_len - seq_len`` and ``k_pos = j``.

    Returns:
        The plan; equal arguments return the same object, from a bounded cache.

    Raises:
        ValueError: Unknown layout or strategy, or chunks for other than ``cp_size`` ranks; a length
            the layout cannot divide; ``cu_seqlens`` that do not end at ``seq_len`` or come with
            other keys than queries; a predicate over more than ``2 ** 34`` pairs, or one that does
            not return booleans.
        UnsupportedError: ``balanced`` over another layout.
    """
    check_record("mask", mask, Mask)
    check_layout(layout)
    check_choice("strategy", strategy, PLANNED)
    if not takes_layout(strategy, layout):
        raise UnsupportedError(
            f"strategy 'balanced' folds a ring over contiguous shards, and the layout is {layout!r}. "
            f"Instead: use layout='contiguous', or strategy='ring'"
        )
    seq_len, cp_size = check_size("seq_len", seq_len), check_size("cp_size", cp_size)
    keys = None if kv_seq_len is None else check_size("kv_seq_len", kv_seq_len)
    return _make_plan(mask, seq_len, cp_size, layout, strategy, keys)


@lru_cache(maxsize=128)
def _make_plan(
    mask: Mask,
    seq_len: int,
    cp_size: int,
    layout: LayoutSpec,
    strategy: PlannedStrategy,
    kv_seq_len: int | None,
) -> Plan:
    keys = seq_len if kv_seq_len is None else kv_seq_len
    q_layout, k_layout = Layout(layout, seq_len, cp_size), Layout(layout, keys, cp_size)
    check_documents(mask, seq_len, keys)
    kind = BandGeometry if mask.predicate is None else BlockGeometry
    geometry = kind(mask, q_layout, k_layout, keys - seq_len)
    steps, work = active_steps(strategy, geometry, cp_size, q_layout.num_runs)
    return Plan(mask, seq_len, cp_size, strategy, keys, q_layout, k_layout, geometry, steps, work)


def _columns(rows: RectangleTable, q_rank: Ints, kv_rank: Ints) -> npt.NDArray[np.int32]:
    rect = rows.rect
    wide = np.zeros_like(rect.lo)
    bounds = np.clip(np.stack([rect.lo, rect.hi], axis=-1), -TABLE_UNBOUNDED, TABLE_UNBOUNDED)
    ranks = [x[:, None] + wide for x in (q_rank, kv_rank, q_rank)]
    columns = [*ranks, *rect[:4], bounds[..., 0], bounds[..., 1], rows.doc_start, rows.doc_stop]
    return np.stack(columns, axis=-1).astype(np.int32)
