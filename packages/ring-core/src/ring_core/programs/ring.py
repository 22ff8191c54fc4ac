"""A plan in the order of a ring: what to move, compute and send home in each step, on each rank.

In a step with shift ``s`` rank ``r`` works with the K/V of rank ``r - s``. Steps in which no rank
has anything to compute are left out, but not the first, of the own block; the others are the *live*
steps. In the ``balanced`` strategy some steps are *offloaded*: a rank sends queries to a rank with
less to do, which computes for them with its own K/V and sends the results back.

Executors differ (streams, barriers, a loop over ranks in one process); the order does not, and it
is decided here. Forward, K/V of the next stage travel while a stage computes::

    step 0 (own block) | step 1 | ... | step n      K/V arrive from ever further behind

Backward, the stages run in reverse from the K/V that arrived last, so that the own block comes last
and hides the last hop of dK/dV home::

    step n | ... | step 1 | step 0                  dK/dV travel with K/V, one stage late
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from ring_core.base.arguments import Ints, check_choice, check_index, check_kind, not_none
from ring_core.base.config import RING_STRATEGIES, RingStrategy
from ring_core.base.errors import UnsupportedError
from ring_core.masks.band import UNBOUNDED
from ring_core.plan.geometry import RectangleTable
from ring_core.plan.item import WorkItem
from ring_core.plan.plan import Plan
from ring_core.programs.steps import Offload, Step, active_steps, chunks, ring_of, step_rectangles

_MOST_PIECES = 4  # in which offloaded queries travel
_PIECE_ROWS = 256  # least query rows of a shard for each of them: smaller launches are mostly cost


@dataclass(frozen=True)
class Stage:
    """A stage of a pass: start the transfers named here, compute a step, then wait for them.

    Attributes:
        step: Index into ``RingProgram.steps`` of the step to compute.
        kv_hop: Before computing, start moving K/V to the rank this far ahead, for the next stage;
            ``None`` moves nothing.
        grad_hop: Backward: after computing, add the step's dK/dV to those that arrived and start
            moving them to the rank this far ahead.
        offloads: In this step ranks also compute for the queries of others, after their own items.
            Those queries travel to the rank ``steps[step].shift`` ahead in
            :func:`offload_pieces` pieces of rows (``WorkItem.cut``): the first during the stage
            before, each other one while the piece before it is computed. The results go back piece
            by piece.
    """

    step: int
    kv_hop: int | None = None
    grad_hop: int | None = None
    offloads: bool = False


def offload_pieces(rows: int) -> int:
    """Return the number of pieces in which queries of shards of so many rows travel to helpers.

    >>> offload_pieces(64), offload_pieces(600), offload_pieces(4096)
    (1, 2, 4)
    """
    return min(max(rows // _PIECE_ROWS, 1), _MOST_PIECES)


StepRows = npt.NDArray[np.int32]

TABLE_COLUMNS = (
    "q_rank", "kv_rank", "out_rank", "q_start", "q_stop", "k_start", "k_stop", "lo", "hi", "doc_start", "doc_stop",
)  # fmt: skip
TABLE_UNBOUNDED = 2**31 - 1  # stands for a side of a band without a bound


@dataclass(frozen=True)
class ItemCounts:
    """Numbers of items of each kind in a program, which say what a kernel has to be able to do.

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


class Moved(NamedTuple):
    """Hops and rows that a rank of a ring sends in a pass.

    Attributes:
        kv_hop: Distance of each hop of a shard of K/V.
        grad_hop: Distance of each hop of a shard of dK/dV.
        queries: Rows of queries that it hands to each helper, by the helper.
        results: Rows of results that it sends home, by the rank that they are of.
    """

    kv_hop: tuple[int, ...]
    grad_hop: tuple[int, ...]
    queries: Mapping[int, int]
    results: Mapping[int, int]


def _table_of(rectangles: RectangleTable, q_rank: Ints, kv_rank: Ints) -> StepRows:
    """Return rectangles of pairs of ranks as rows of a table, ``[pair, R, len(TABLE_COLUMNS)]``."""
    rect = rectangles.rect
    bounds = np.clip(np.stack([rect.lo, rect.hi], axis=-1), -TABLE_UNBOUNDED, TABLE_UNBOUNDED)
    ranks = [np.broadcast_to(x[:, None], rect.lo.shape) for x in (q_rank, kv_rank, q_rank)]
    columns = [*ranks, *rect[:4], bounds[..., 0], bounds[..., 1], *rectangles[1:]]
    return np.stack(columns, axis=-1).astype(np.int32)


def _counts(rectangles: RectangleTable) -> list[int]:
    """Return the numbers of :class:`ItemCounts` of some rectangles."""
    rect, live = rectangles.rect, rectangles.rect.live
    no_hi = live & (rect.hi == UNBOUNDED)
    # A square that shows i >= j is what kernels call causal; every other cut is a band.
    full = no_hi & (rect.lo == -UNBOUNDED)
    causal = no_hi & (rect.lo == 0) & (rect.q_stop - rect.q_start == rect.k_stop - rect.k_start)
    several = live & (rectangles.doc_stop > 0)
    all_live, *rest = (int(np.count_nonzero(x)) for x in (live, full, causal, several))
    return [*rest[:2], all_live - rest[0] - rest[1], rest[2]]


@dataclass(frozen=True, eq=False)
class RingProgram:
    """The work of every rank of a ring in every step. Make one with :func:`ring_program`.

    ``items(rank, step)`` is the view of a process that knows its rank; ``table(step)`` the view of
    one program that all ranks run. Both show the same work.

    Attributes:
        plan: The work items of every pair of ranks.
        strategy: ``ring`` or ``balanced``.
    """

    plan: Plan
    strategy: RingStrategy
    _items: dict[int, tuple[tuple[WorkItem, ...], ...]] = field(repr=False, default_factory=dict)
    _remote: dict[tuple[int, int], tuple[WorkItem, ...]] = field(repr=False, default_factory=dict)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Live steps by ascending shift.

        The first is each rank's own block, which is there even without work; in each other one some
        rank has work.
        """
        return self._live[0]

    @cached_property
    def _live(self) -> tuple[tuple[Step, ...], Ints]:
        """Live steps, and their visible pairs; not asked for where tokens are traded for heads."""
        plan = self.plan
        return active_steps(self.strategy, plan.geometry, plan.cp_size, plan.q_layout.num_runs)

    @property
    def num_steps(self) -> int:
        """Number of live steps, that of the rank's own block included."""
        return len(self.steps)

    @cached_property
    def forward(self) -> tuple[Stage, ...]:
        """Stages of the forward pass: the steps in order; the last one moves nothing."""
        # K/V jump over shifts in which no rank has work: a hop is the distance to the next live
        # one.
        hops = [*(b.shift - a.shift for a, b in pairwise(self.steps)), None]
        return tuple(
            Stage(step=n, kv_hop=hop, offloads=step.offload != "none")
            for n, (step, hop) in enumerate(zip(self.steps, hops, strict=True))
        )

    @cached_property
    def backward(self) -> tuple[Stage, ...]:
        """Stages of the backward pass: the steps in reverse, the rank's own block last."""
        # K/V go back the way they came, so hops are negative; dK/dV go with them, one stage later.
        # The own block needs no K/V of others: none are moved before it.
        hops = [None, *(a.shift - b.shift for a, b in pairwise(self.steps))]
        return tuple(
            Stage(n, hops[n] if n > 1 else None, hops[n], offloads=self.steps[n].offload != "none")
            for n in reversed(range(self.num_steps))
        )

    def items(self, rank: int, step: int) -> tuple[WorkItem, ...]:
        """Return what a rank computes in a step.

        Args:
            rank: The rank that computes.
            step: An index into ``steps``.

        Raises:
            ValueError: There is no such rank or step.
        """
        check_index("rank", rank, self.plan.cp_size)
        check_index("step", step, self.num_steps)
        if rank not in self._items:
            self._items[rank] = self._rank_items(rank)
        return self._items[rank][step]

    def remote_items(self, rank: int, step: int) -> tuple[WorkItem, ...]:
        """Return what another rank computes in a step for this rank's queries, if anything.

        Raises:
            ValueError: There is no such rank or step.
        """
        check_index("rank", rank, self.plan.cp_size)
        check_index("step", step, self.num_steps)
        offload, shift = self.steps[step].offload, self.steps[step].shift
        if offload == "none":
            return ()
        # Seen from the rank that is helped: its queries go `shift` ranks ahead, to the helper, and
        # meet the helper's own keys there.
        if (rank, step) not in self._remote:
            helper = np.array([(rank + shift) % self.plan.cp_size])
            _, rectangles = step_rectangles(offload, self.plan.geometry, helper, np.array([rank]))
            self._remote[rank, step] = self.plan.work_items(
                not_none(rectangles), 0, rank, int(helper[0])
            )
        return self._remote[rank, step]

    def moved(self, rank: int, *, forward: bool) -> Moved:
        """Return what a rank sends in a pass: bytes of every framework are counted by it."""
        queries, results = Counter[int](), Counter[int]()
        stages = self.forward if forward else self.backward
        for stage in stages:
            if stage.offloads:
                helper = (rank + self.steps[stage.step].shift) % self.plan.cp_size
                rows = sum(x.q_stop - x.q_start for x in self.remote_items(rank, stage.step))
                queries[helper] += rows
                for item in self.items(rank, stage.step):
                    results[item.q_rank] += item.q_stop - item.q_start
        results.pop(rank, None)
        return Moved(
            tuple(x.kv_hop for x in stages if x.kv_hop is not None),
            tuple(x.grad_hop for x in stages if x.grad_hop is not None),
            queries, results,
        )  # fmt: skip

    def table(self, step: int) -> StepRows:
        """Return the items of all ranks in a step, ``int32 [cp_size, R, len(TABLE_COLUMNS)]``.

        Row ``[r, n]`` is the ``n``-th item of rank ``r``; ranks with fewer than ``R`` items have
        rows of zeros. Unbounded sides hold ``-TABLE_UNBOUNDED`` and ``TABLE_UNBOUNDED``, so that
        ``lo <= i - j <= hi`` needs no case; ``doc_start:doc_stop`` are the documents or chunks
        between ``plan.boundaries`` that the row spans (0:0 if the band alone decides).
        """
        check_index("step", step, self.num_steps)
        ranks = np.arange(self.plan.cp_size)
        kv_ranks = (ranks - self.steps[step].shift) % self.plan.cp_size
        # Rank r meets the K/V of rank r - shift, which have moved that far ahead. Offloaded rows
        # have the same two ranks with their parts exchanged: the queries moved, the keys stayed.
        own, remote = step_rectangles(self.steps[step].offload, self.plan.geometry, ranks, kv_ranks)
        parts = [_table_of(own, ranks, kv_ranks)]
        # The result of such a row belongs to the rank whose queries they are, and travels back to
        # it.
        parts += [_table_of(remote, kv_ranks, ranks)] if remote is not None else []
        table = np.concatenate(parts, axis=1)
        # Live rows of each rank first, as many as the busiest rank has: one at least.
        live = table[..., 4] > table[..., 3]
        order = np.argsort(~live, axis=1, kind="stable")[..., None]
        width = max(1, int(live.sum(axis=1).max()))
        return np.take_along_axis(np.where(live[..., None], table, 0), order, axis=1)[:, :width]

    @cached_property
    def item_counts(self) -> ItemCounts:
        """Numbers of items of each kind, over all ranks and steps."""
        counts = np.zeros(4, dtype=np.int64)
        plan, ranks = self.plan, np.arange(self.plan.cp_size)
        for offload in get_args(Offload):
            of_kind = np.array(
                [x.shift for x in self.steps if x.offload == offload], dtype=np.int64
            )
            for shifts in chunks(of_kind, plan.cp_size * plan.q_layout.num_runs**2):
                kv_ranks = (ranks - shifts[:, None]) % plan.cp_size
                for table in step_rectangles(offload, plan.geometry, ranks, kv_ranks):
                    counts += 0 if table is None else _counts(table)
        return ItemCounts(*counts.tolist())

    def work(self) -> Ints:
        """Return the visible (query, key) pairs computed, int64 ``[num_steps, cp_size]``."""
        return self._live[1].copy()

    @property
    def imbalance(self) -> float:
        """Visible pairs of the busiest rank over the mean; 1.0 is even."""
        work = self._live[1].sum(axis=0)
        return float(work.max() / work.mean()) if work.any() else 1.0

    @property
    def imbalance_by_step(self) -> float:
        """Imbalance of a ring whose ranks wait for each other after every step.

        It is the visible pairs of the slowest rank of each step, summed over steps, over what a
        rank computes on average. 1.0 is even; :attr:`imbalance` compares the sums of whole passes.
        """
        work = self._live[1]
        per_rank = work.sum(axis=0).mean()
        return float(work.max(axis=1).sum() / per_rank) if per_rank else 1.0

    def _rank_items(self, rank: int) -> tuple[tuple[WorkItem, ...], ...]:
        """Return the items of one rank in every step.

        Steps of one kind of help are worked out together, as that takes one numpy call for all.
        """
        items: list[tuple[WorkItem, ...]] = [()] * self.num_steps
        plan = self.plan
        for offload in get_args(Offload):
            steps = [n for n, step in enumerate(self.steps) if step.offload == offload]
            if not steps:
                continue
            # All steps with this kind of offload at once. The K/V of a step are those of the rank
            # `shift` behind.
            kv_ranks = (rank - np.array([self.steps[n].shift for n in steps])) % plan.cp_size
            own, remote = step_rectangles(
                offload, plan.geometry, np.full_like(kv_ranks, rank), kv_ranks
            )
            for pair, n in enumerate(steps):
                items[n] = plan.work_items(own, pair, rank, int(kv_ranks[pair]))
                # Items for another rank come last: its queries travel in pieces, and all but the
                # first arrive while the piece before them is computed.
                if remote is not None:
                    items[n] += plan.work_items(remote, pair, int(kv_ranks[pair]), rank)
        return tuple(items)


def ring_program(plan: Plan, strategy: RingStrategy = "ring") -> RingProgram:
    """Order a plan in time for a ring: decide for every rank and step what it computes.

    >>> from ring_core import Mask, make_plan, ring_program
    >>> program = ring_program(make_plan(Mask(causal=True), seq_len=8, cp_size=2))
    >>> program.work()  # the first rank idles in the second step
    array([[10, 10],
           [ 0, 16]])
    >>> program.forward[0]  # K/V move one rank ahead while the first step is computed
    Stage(step=0, kv_hop=1, grad_hop=None, offloads=False)

    Args:
        plan: The plan of the call.
        strategy: ``ring``; or ``balanced``, for contiguous shards alone, where ranks that would be
            idle compute for others.

    Returns:
        The program; equal arguments return the same object, from a bounded cache.

    Raises:
        ValueError: Unknown strategy.
        UnsupportedError: ``balanced`` over another layout.
    """
    check_kind("plan", plan, Plan)
    check_choice("strategy", strategy, RING_STRATEGIES)
    ring, layout = ring_of(strategy), plan.q_layout.name
    if not ring.takes_layout(layout):
        layouts = " or ".join(f"layout={x!r}" for x in ring.layouts)
        raise UnsupportedError(
            f"strategy {strategy!r} needs {' or '.join(ring.layouts)} shards, and the layout is "
            f"{layout!r}. Instead: use {layouts}, or strategy='ring'"
        )
    return _ring_program(plan, strategy)


@lru_cache(maxsize=128)
def _ring_program(plan: Plan, strategy: RingStrategy) -> RingProgram:
    """Make the program of :func:`ring_program`, which has checked the arguments."""
    return RingProgram(plan, strategy)
