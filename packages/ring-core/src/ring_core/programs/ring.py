"""A plan ordered in time for a ring: K/V go round, and each rank computes a step at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import get_args

import numpy as np
import numpy.typing as npt

from ring_core.base.arguments import Ints, check_choice, check_index, check_kind, not_none
from ring_core.base.errors import UnsupportedError
from ring_core.base.strategy import RING_STRATEGIES, RingStrategy, takes_layout
from ring_core.plan.geometry import RectangleTable
from ring_core.plan.items import WorkItem
from ring_core.plan.plan import Plan
from ring_core.programs.steps import (
    Help,
    Stage,
    Step,
    active_steps,
    step_rows,
)

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
    columns = [*ranks, *rect[:4], bounds[..., 0], bounds[..., 1], *rows[1:]]
    return np.stack(columns, axis=-1).astype(np.int32)


def live_first(table: Table) -> Table:
    """Live rows of each rank first, as many as the busiest rank has: one at least."""
    live = table[..., 4] > table[..., 3]
    order = np.argsort(~live, axis=1, kind="stable")[..., None]
    width = max(1, int(live.sum(axis=1).max()))
    return np.take_along_axis(np.where(live[..., None], table, 0), order, axis=1)[:, :width]


@dataclass(frozen=True, eq=False)
class RingProgram:
    """What every rank of a ring does in every step. Make one with :func:`ring_program`.

    ``items(rank, step)`` is the view of a process that knows its rank; ``table(step)`` the view of
    one program that all ranks run. Both show the same work.

    Attributes:
        plan: What meets what.
        strategy: ``ring`` or ``balanced``.
        steps: The steps that some rank has work in, its own block the first.
    """

    plan: Plan
    strategy: RingStrategy
    steps: tuple[Step, ...]
    _work: Ints = field(repr=False)
    _items: dict[int, tuple[tuple[WorkItem, ...], ...]] = field(repr=False, default_factory=dict)
    _remote: dict[tuple[int, int], tuple[WorkItem, ...]] = field(repr=False, default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Active steps, the rank's own block included."""
        return len(self.steps)

    @cached_property
    def forward(self) -> tuple[Stage, ...]:
        """The stages of the forward pass; the last one moves nothing."""
        hops = [*(b.shift - a.shift for a, b in pairwise(self.steps)), None]
        return tuple(
            Stage(step=n, kv_hop=hop, helps=step.helps != "none")
            for n, (step, hop) in enumerate(zip(self.steps, hops, strict=True))
        )

    @cached_property
    def backward(self) -> tuple[Stage, ...]:
        """The stages of the backward pass; the own block, run last, needs no K/V from afar."""
        hops = [None, *(a.shift - b.shift for a, b in pairwise(self.steps))]
        return tuple(
            Stage(
                n, hops[n] if n > 1 else None, grad_hop=hops[n], helps=self.steps[n].helps != "none"
            )
            for n in reversed(range(self.num_steps))
        )

    def items(self, rank: int, step: int) -> tuple[WorkItem, ...]:
        """What a rank computes in a step (an index into ``steps``)."""
        check_index("rank", rank, self.plan.cp_size)
        check_index("step", step, self.num_steps)
        if rank not in self._items:
            self._items[rank] = self._rank_items(rank)
        return self._items[rank][step]

    def remote_items(self, rank: int, step: int) -> tuple[WorkItem, ...]:
        """What another rank computes in a step for this rank's queries."""
        check_index("rank", rank, self.plan.cp_size)
        check_index("step", step, self.num_steps)
        helps, shift = self.steps[step].helps, self.steps[step].shift
        if helps == "none":
            return ()
        if (rank, step) not in self._remote:
            other = np.array([(rank + shift) % self.plan.cp_size])
            _, rows = step_rows(helps, self.plan.geometry, other, np.array([rank]))
            self._remote[rank, step] = self.plan.work_items(not_none(rows), 0, rank, int(other[0]))
        return self._remote[rank, step]

    def table(self, step: int) -> Table:
        """Items of all ranks, ``int32[cp_size, R, len(TABLE_COLUMNS)]``, padded with empty rows.

        Unbounded sides hold ``-TABLE_UNBOUNDED`` and ``TABLE_UNBOUNDED``, so that ``lo <= i - j <=
        hi`` needs no case; ``doc_start:doc_stop`` are the cells of ``boundaries`` the row spans
        (0:0 if the band alone decides). Ranks and slices of empty rows are zero.
        """
        check_index("step", step, self.num_steps)
        ranks = np.arange(self.plan.cp_size)
        behind = (ranks - self.steps[step].shift) % self.plan.cp_size
        own, remote = step_rows(self.steps[step].helps, self.plan.geometry, ranks, behind)
        parts = [table_of(own, ranks, behind)]
        parts += [table_of(remote, behind, ranks)] if remote is not None else []
        return live_first(np.concatenate(parts, axis=1))

    @cached_property
    def item_counts(self) -> ItemCounts:
        """Which kinds of items there are, over all ranks and steps."""
        return count_items(self.table(step) for step in range(self.num_steps))

    def work(self) -> Ints:
        """Visible (query, key) pairs each rank computes in each step, ``[num_steps, cp_size]``."""
        return self._work.copy()

    @property
    def imbalance(self) -> float:
        """Visible pairs of the busiest rank over the mean; 1.0 is even."""
        work = self._work.sum(axis=0)
        return float(work.max() / work.mean()) if work.any() else 1.0

    @property
    def lockstep_imbalance(self) -> float:
        """What a ring in lockstep waits for: the slowest rank of every step, over the mean rank."""
        per_rank = self._work.sum(axis=0).mean()
        return float(self._work.max(axis=1).sum() / per_rank) if per_rank else 1.0

    def _rank_items(self, rank: int) -> tuple[tuple[WorkItem, ...], ...]:
        """The items of one rank in every step, from one pass over all steps that help alike."""
        items: list[tuple[WorkItem, ...]] = [()] * self.num_steps
        plan = self.plan
        for helps in get_args(Help):
            steps = [n for n, step in enumerate(self.steps) if step.helps == helps]
            if not steps:
                continue
            behind = (rank - np.array([self.steps[n].shift for n in steps])) % plan.cp_size
            own, remote = step_rows(helps, plan.geometry, np.full_like(behind, rank), behind)
            for at, n in enumerate(steps):
                items[n] = plan.work_items(own, at, rank, int(behind[at]))
                if remote is not None:
                    items[n] += plan.work_items(remote, at, int(behind[at]), rank)
        return tuple(items)


def ring_program(plan: Plan, strategy: RingStrategy = "ring") -> RingProgram:
    """Order a plan in time for a ring: decide for every rank and step what it computes.

    Args:
        plan: What meets what.
        strategy: ``ring``, or ``balanced``, where ranks that would be idle compute for others: of
            contiguous shards alone.

    Returns:
        The program; equal arguments return the same object, from a bounded cache.

    Raises:
        ValueError: Unknown strategy.
        UnsupportedError: ``balanced`` over another layout.
    """
    check_kind("plan", plan, Plan)
    check_choice("strategy", strategy, RING_STRATEGIES)
    if not takes_layout(strategy, plan.q_layout.name):
        raise UnsupportedError(
            f"strategy 'balanced' folds a ring over contiguous shards, and the layout is "
            f"{plan.q_layout.name!r}. Instead: use layout='contiguous', or strategy='ring'"
        )
    return _ring_program(plan, strategy)


@lru_cache(maxsize=128)
def _ring_program(plan: Plan, strategy: RingStrategy) -> RingProgram:
    steps, work = active_steps(strategy, plan.geometry, plan.cp_size, plan.q_layout.num_runs)
    return RingProgram(plan, strategy, steps, work)
