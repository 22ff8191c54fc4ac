"""A plan in the order of a ring: what to move, compute and send home in each step, on each rank.

Executors differ (streams, barriers, a loop over ranks in one process); the order does not, and it
is decided here. Forward, K/V of the next stage travel while a stage computes::

    step 0 (own block) | step 1 | ... | step n      K/V arrive from ever further behind

Backward, the stages run in reverse from the K/V that arrived last, so that the own block comes last
and hides the last hop of dK/dV home::

    step n | ... | step 1 | step 0                  dK/dV travel with K/V, one stage late
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from ring_core.base.arguments import Ints, check_choice, check_index, check_kind, not_none
from ring_core.base.config import RING_STRATEGIES, RingStrategy, takes_layout
from ring_core.base.errors import UnsupportedError
from ring_core.plan.geometry import RectangleTable
from ring_core.plan.plan import Plan, WorkItem
from ring_core.plan.tile_mask import Geometry

HELP_PIECES = 4


@dataclass(frozen=True)
class Stage:
    """One stage: start the transfers named here, compute a step, then collect the transfers.

    Attributes:
        step: Compute the work items of this step.
        kv_hop: Before computing, start moving K/V to the rank this far ahead, for the next stage;
            ``None`` moves nothing.
        grad_hop: Backward: after computing, add the step's dK/dV to those that arrived and start
            moving them to the rank this far ahead.
        helps: Ranks compute for others in this step, after their own items. What belongs to the
            helped queries travels ``steps[step].shift`` ahead in ``HELP_PIECES`` pieces of rows
            (``WorkItem.cut``), each while the piece before is computed, the first one during the
            stage before; the results go back piece by piece.
    """

    step: int
    kv_hop: int | None = None
    grad_hop: int | None = None
    helps: bool = False


Help = Literal["none", "mirror", "half"]
_PAIRS_AT_ONCE = 1 << 15


@dataclass(frozen=True)
class Step:
    """A live step: rank ``r`` works with the K/V of rank ``r - shift``.

    ``helps`` says what ranks do beside that for the queries of rank ``r - shift``, which travel to
    them by the same shift and meet their own K/V: nothing; ``mirror``, all of the pair that the
    plain ring would run at distance ``cp_size - shift``; or ``half`` of it, at the distance that
    is its own mirror.
    """

    shift: int
    helps: Help = "none"


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


def _table_of(rows: RectangleTable, q_rank: Ints, kv_rank: Ints) -> Table:
    """Rectangles of pairs of ranks as rows of a table, ``[pair, R, len(TABLE_COLUMNS)]``."""
    rect = rows.rect
    bounds = np.clip(np.stack([rect.lo, rect.hi], axis=-1), -TABLE_UNBOUNDED, TABLE_UNBOUNDED)
    ranks = [np.broadcast_to(x[:, None], rect.lo.shape) for x in (q_rank, kv_rank, q_rank)]
    columns = [*ranks, *rect[:4], bounds[..., 0], bounds[..., 1], *rows[1:]]
    return np.stack(columns, axis=-1).astype(np.int32)


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
        parts = [_table_of(own, ranks, behind)]
        parts += [_table_of(remote, behind, ranks)] if remote is not None else []
        table = np.concatenate(parts, axis=1)
        # Live rows of each rank first, as many as the busiest rank has: one at least.
        live = table[..., 4] > table[..., 3]
        order = np.argsort(~live, axis=1, kind="stable")[..., None]
        width = max(1, int(live.sum(axis=1).max()))
        return np.take_along_axis(np.where(live[..., None], table, 0), order, axis=1)[:, :width]

    @cached_property
    def item_counts(self) -> ItemCounts:
        """Which kinds of items there are, over all ranks and steps."""
        counts = np.zeros(4, dtype=np.int64)
        for step in range(self.num_steps):
            rows = self.table(step).reshape(-1, len(TABLE_COLUMNS)).astype(np.int64)
            q_start, q_stop, k_start, k_stop, lo, hi, _, doc_stop = rows[:, 3:].T
            live, same_len = q_stop > q_start, q_stop - q_start == k_stop - k_start
            no_hi = hi == TABLE_UNBOUNDED
            full, causal = no_hi & (lo == -TABLE_UNBOUNDED), no_hi & same_len & (lo == 0)
            counts += [
                x.sum() for x in (live & full, live & causal, live & ~full & ~causal, doc_stop > 0)
            ]
        return ItemCounts(*counts.tolist())

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


def active_steps(
    strategy: RingStrategy, geometry: Geometry, cp_size: int, num_runs: int
) -> tuple[tuple[Step, ...], Ints]:
    """The steps some rank needs, and the visible pairs ``[step, rank]`` each rank computes in them.

    ``num_runs`` are those of a rank. Step 0, the rank's own block, is always there.
    """
    found = _STEPS[strategy](geometry, cp_size, num_runs)
    live = sorted(
        ((step, row) for step, row in found if step.shift == 0 or row.any()),
        key=lambda each: each[0].shift,
    )
    return tuple(step for step, _ in live), np.stack([row for _, row in live])


def step_rows(
    helps: Help, geometry: Geometry, ranks: Ints, behind: Ints
) -> tuple[RectangleTable, RectangleTable | None]:
    """What ``ranks`` compute in steps that help alike: for their own queries, and for others'.

    ``behind`` are the ranks their K/V, or the queries they help, come from.
    """
    if helps == "half":
        return geometry.rows(ranks, behind, half=0), geometry.rows(behind, ranks, half=1)
    return geometry.rows(ranks, behind), geometry.rows(behind, ranks) if helps == "mirror" else None


def _ring_steps(geometry: Geometry, cp_size: int, num_runs: int) -> Iterator[tuple[Step, Ints]]:
    ranks = np.arange(cp_size)
    for shifts in _chunks(ranks, cp_size * num_runs**2):
        behind = (ranks - shifts[:, None]) % cp_size
        yield from zip(map(Step, shifts.tolist()), geometry.count(ranks, behind), strict=True)


def _balanced_steps(
    geometry: Geometry, cp_size: int, _num_runs: int
) -> Iterator[tuple[Step, Ints]]:
    """Fold the far half of the ring onto the near half wherever that shortens the slowest rank."""
    ranks = np.arange(cp_size)
    yield Step(0), geometry.count(ranks, ranks)
    for shifts in _chunks(np.arange(1, cp_size // 2 + 1), cp_size):
        behind = (ranks - shifts[:, None]) % cp_size
        own, others = geometry.count(ranks, behind), geometry.count(behind, ranks)
        for n, shift in enumerate(shifts.tolist()):
            if 2 * shift == cp_size:
                both = geometry.count(ranks, behind[n], half=0) + geometry.count(
                    behind[n], ranks, half=1
                )
                helps = both.max() < own[n].max()
                yield Step(shift, "half" if helps else "none"), both if helps else own[n]
            elif (own[n] + others[n]).max() < own[n].max() + others[n].max():
                yield Step(shift, "mirror"), own[n] + others[n]
            else:
                yield Step(shift), own[n]
                yield Step(cp_size - shift), np.roll(others[n], -shift)


#: All steps of each strategy, with the pairs that each rank computes in them.
_STEPS: Mapping[RingStrategy, Callable[[Geometry, int, int], Iterator[tuple[Step, Ints]]]] = (
    MappingProxyType({"ring": _ring_steps, "balanced": _balanced_steps})
)


def _chunks(shifts: Ints, pairs: int) -> Iterator[Ints]:
    """Shifts of so many pairs a few at a time, so that the arrays over all stay in cache."""
    size = max(1, _PAIRS_AT_ONCE // pairs)
    for start in range(0, shifts.size, size):
        yield shifts[start : start + size]
