"""A rank's side of the plan: which work it does in a step, and what belongs to its tokens.

The rank is a traced number, so everything that differs between ranks is looked up in small arrays:
the plan's tables, and where each run of the layout begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ring_core import TABLE_COLUMNS, TABLE_UNBOUNDED, Layout, Plan
from ring_jax._types import (
    Array,
    Columns,
    Inputs,
    Message,
    Queries,
    Rectangle,
    Rows,
    Static,
    Work,
)

Table = npt.NDArray[np.int32]


class StepTables(NamedTuple):
    """What ranks compute in a step: ``int32 [P, R, C]`` for their own queries and for others'.

    ``helped`` has no rows where nobody helps; ``helpers`` are the ranks that do. ``rectangles`` are
    all of ``own``, if ranks show each other all or nothing of one rectangle.
    """

    own: Table
    helped: Table
    helpers: tuple[int, ...]
    has_documents: bool
    rectangles: tuple[Rectangle, ...]


@lru_cache(maxsize=1024)
def step_tables(plan: Plan, step: int) -> StepTables:
    """Split the plan's table by whose queries the rows are."""
    table = plan.table(step)
    column = {name: table[..., n] for n, name in enumerate(TABLE_COLUMNS)}
    live = column["q_stop"] > column["q_start"]
    is_own = column["q_rank"] == np.arange(plan.cp_size)[:, None]
    helped = live & ~is_own
    helpers = tuple(np.flatnonzero(helped.any(axis=1)).tolist())
    has_documents = bool((live & (column["doc_stop"] > column["doc_start"])).any())
    own = _pick(table, live & is_own)
    rectangles = _rectangles(own) if plan.blocks is None else ()
    return StepTables(own, _pick(table, helped), helpers, has_documents, rectangles)


def _pick(table: Table, wanted: npt.NDArray[np.bool_]) -> Table:
    """The wanted rows of each rank first, as many as the busiest rank has."""
    order = np.argsort(~wanted, axis=1, kind="stable")[..., None]
    width = int(wanted.sum(axis=1).max(initial=0))
    return np.take_along_axis(np.where(wanted[..., None], table, 0), order, axis=1)[:, :width]


def _rectangles(table: Table) -> tuple[Rectangle, ...]:
    """The rows, if each rank has at most one and none has a band or several documents."""
    column = {name: table[..., n] for n, name in enumerate(TABLE_COLUMNS)}
    live = column["q_stop"] > column["q_start"]
    is_plain = (column["lo"] == -TABLE_UNBOUNDED) & (column["hi"] == TABLE_UNBOUNDED)
    is_plain &= column["doc_stop"] <= column["doc_start"]
    if table.shape[1] != 1 or not is_plain[live].all():
        return ()
    wanted = [TABLE_COLUMNS.index(name) for name in Rectangle._fields]
    return tuple(Rectangle(*row) for row in table[live][:, wanted].tolist())


@dataclass(frozen=True)
class Side:
    """One rank's view of a call."""

    static: Static
    inputs: Inputs
    rank: Array

    @property
    def plan(self) -> Plan:
        """The call's plan."""
        return self.static.plan

    def behind(self, shift: int) -> Array:
        """The rank this far behind."""
        return (self.rank - shift) % self.plan.cp_size

    def ahead(self, shift: int) -> Array:
        """The rank this far ahead."""
        return (self.rank + shift) % self.plan.cp_size

    def key_positions(self, rank: Array) -> Array:
        """Global index of each key of a rank, int32 ``[S]``."""
        return local_positions(self.plan.k_layout, rank)

    def own_work(self, step: int) -> Work | None:
        """What this rank does for its own queries; ``None`` if no rank does anything."""
        shift = self.plan.steps[step].shift
        ranks = np.arange(self.plan.cp_size)
        return self._work(step_tables(self.plan, step).own, ranks, ranks - shift)

    def helped_work(self, step: int) -> Work | None:
        """What this rank does for the queries of the rank it helps."""
        shift = self.plan.steps[step].shift
        ranks = np.arange(self.plan.cp_size)
        return self._work(step_tables(self.plan, step).helped, ranks - shift, ranks)

    def _work(
        self, table: Table, q_rank: npt.NDArray[np.int64], kv_rank: npt.NDArray[np.int64]
    ) -> Work | None:
        if table.shape[1] == 0:
            return None
        kinds = None
        if self.plan.blocks is not None:
            size = self.plan.cp_size
            kinds = jnp.asarray(self.plan.blocks.kinds[q_rank % size, kv_rank % size])[self.rank]
        return Work(jnp.asarray(table)[self.rank], kinds)

    def rows(self, step: int, rank: Array, queries: Queries) -> Rows:
        """Queries of a rank, with what every rank knows of them."""
        indices = local_positions(self.plan.q_layout, rank)
        positions = indices + self.plan.q_offset
        q, ids, bias = queries
        return Rows(
            q, positions, indices, self._cells(step, positions), ids, bias, self.inputs.slopes,
            self.inputs.seed, self.inputs.offsets,
        )  # fmt: skip

    def columns(self, step: int, rank: Array, keys: Message) -> Columns:
        """Keys of a rank, with what every rank knows of them."""
        positions = self.key_positions(rank)
        return Columns(keys.kv, positions, self._cells(step, positions), keys.ids)

    def _cells(self, step: int, positions: Array) -> Array | None:
        """Which document or chunk each position lies in, if some item spans several."""
        boundaries = self.plan.boundaries
        spans = self.plan.blocks is not None or step_tables(self.plan, step).has_documents
        if boundaries is None or not spans:
            return None
        borders = jnp.asarray(boundaries.astype(np.int32))
        return jnp.searchsorted(borders, positions, side="right").astype(jnp.int32)


def local_positions(layout: Layout, rank: Array) -> Array:
    """Global index of each token of a rank, int32 ``[T_local]``."""
    runs = layout.run_positions(np.arange(layout.cp_size)).astype(np.int32)
    starts = jnp.asarray(runs)[rank]
    index = jnp.arange(layout.local_len, dtype=jnp.int32)
    positions = starts[0] + layout.stride * index
    for n, begin in enumerate(layout.run_starts[1:], start=1):
        here = starts[n] + layout.stride * (index - begin)
        positions = jnp.where(index >= begin, here, positions)
    return positions
