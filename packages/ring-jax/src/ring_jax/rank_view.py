"""A rank's side of the plan: which work it does of a part, and what belongs to its tokens.

A part is a step of the ring, or all other ranks' keys at once.

The rank is a traced number, so everything that differs between ranks is looked up in small arrays:
the program's tables, and where each run of the layout begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ring_core import TABLE_COLUMNS, TABLE_UNBOUNDED, Layout, RingProgram
from ring_jax.records import (
    Array,
    Inputs,
    Item,
    ItemTable,
    KeyBlock,
    KVPayload,
    Queries,
    QueryBlock,
    Rectangle,
    Static,
)
from ring_jax.search import searchsorted

Table = npt.NDArray[np.int32]


class StepTable(NamedTuple):
    """What ranks compute of some keys: ``int32 [P, R, C]`` for their own queries and for others'.

    The keys are those of the rank ``shift`` behind, or, if ``gathered``, of all ranks, one rank's
    behind the other's. ``helped`` has no rows where nobody helps; ``helpers`` are the ranks that
    do. ``items`` are all of ``own``, if ranks show each other a band of one rectangle at most;
    ``None`` if there is more to it.
    """

    shift: int
    gathered: bool
    own: Table
    helped: Table
    helpers: tuple[int, ...]
    has_documents: bool
    items: tuple[Item, ...] | None


@lru_cache(maxsize=1024)
def step_table(program: RingProgram, step: int) -> StepTable:
    """A step: the program's table, split by whose queries the rows are."""
    plan, table = program.plan, program.table(step)
    column = {name: table[..., n] for n, name in enumerate(TABLE_COLUMNS)}
    live = column["q_stop"] > column["q_start"]
    is_own = column["q_rank"] == np.arange(plan.cp_size)[:, None]
    own, helped = _picked(table, live & is_own), live & ~is_own
    return StepTable(
        program.steps[step].shift,
        gathered=False,
        own=own,
        helped=_picked(table, helped),
        helpers=tuple(np.flatnonzero(helped.any(axis=1)).tolist()),
        has_documents=bool((live & (column["doc_stop"] > column["doc_start"])).any()),
        items=_items(own) if plan.blocks is None else None,
    )


@lru_cache(maxsize=256)
def remote_table(program: RingProgram) -> StepTable | None:
    """All steps but that of the own keys, at once; ``None`` if there are none."""
    parts = [step_table(program, n) for n, step in enumerate(program.steps) if step.shift != 0]
    if not parts:
        return None
    table = np.concatenate([part.own for part in parts], axis=1)
    at = {name: n for n, name in enumerate(TABLE_COLUMNS)}
    live = table[..., at["q_stop"]] > table[..., at["q_start"]]
    before = np.where(live, table[..., at["kv_rank"]] * program.plan.k_layout.local_len, 0)
    table[..., [at["k_start"], at["k_stop"]]] += before[..., None]
    own, has_documents = _joined(_picked(table, live)), any(part.has_documents for part in parts)
    return StepTable(0, True, own, own[:, :0], (), has_documents, _items(own))


def _picked(table: Table, wanted: npt.NDArray[np.bool_]) -> Table:
    """The wanted rows of each rank first, as many as the busiest rank has."""
    order = np.argsort(~wanted, axis=1, kind="stable")[..., None]
    width = int(wanted.sum(axis=1).max(initial=0))
    return np.take_along_axis(np.where(wanted[..., None], table, 0), order, axis=1)[:, :width]


def _joined(table: Table) -> Table:
    """The same rows, those in one that show touching keys whole to the same queries."""
    column = {name: table[..., n] for n, name in enumerate(TABLE_COLUMNS)}
    keys = [column[name] for name in ("k_start", "q_stop", "q_start")]
    order = np.lexsort((*keys, ~_is_plain(table)), axis=1)
    table = np.take_along_axis(table, order[..., None], axis=1)
    column = {name: table[..., n] for n, name in enumerate(TABLE_COLUMNS)}
    is_plain, stop = _is_plain(table), column["k_stop"]
    is_taken = np.zeros_like(is_plain)  # a row that the one before it takes in
    touches = column["k_start"][:, 1:] == stop[:, :-1]
    is_taken[:, 1:] = is_plain[:, 1:] & is_plain[:, :-1] & touches
    for name in ("q_start", "q_stop"):
        is_taken[:, 1:] &= column[name][:, 1:] == column[name][:, :-1]
    first = np.maximum.accumulate(np.where(is_taken, 0, np.arange(table.shape[1])), axis=1)
    np.maximum.at(stop, (np.arange(len(table))[:, None], first), stop)
    return _picked(table, ~is_taken & (column["q_stop"] > column["q_start"]))


def _is_plain(table: Table) -> npt.NDArray[np.bool_]:
    """Which rows show all of their rectangle."""
    column = {name: table[..., n] for n, name in enumerate(TABLE_COLUMNS)}
    full = (column["lo"] == -TABLE_UNBOUNDED) & (column["hi"] == TABLE_UNBOUNDED)
    one_document = column["doc_stop"] <= column["doc_start"]
    return cast(
        "npt.NDArray[np.bool_]", full & one_document & (column["q_stop"] > column["q_start"])
    )


def _items(table: Table) -> tuple[Item, ...] | None:
    """The rows, if each rank has at most one and none has several documents."""
    column = {name: table[..., n] for n, name in enumerate(TABLE_COLUMNS)}
    live, several = column["q_stop"] > column["q_start"], column["doc_stop"] > column["doc_start"]
    if table.shape[1] > 1 or several[live].any():
        return None
    wanted = [TABLE_COLUMNS.index(name) for name in (*Rectangle._fields, "lo", "hi")]
    return tuple(Item(Rectangle(*row[:6]), *row[6:]) for row in table[live][:, wanted].tolist())


@dataclass(frozen=True)
class RankView:
    """One rank's view of a call."""

    static: Static
    inputs: Inputs
    rank: Array

    def behind(self, shift: int) -> Array:
        """The rank this far behind; ahead where ``shift`` is negative."""
        return (self.rank - shift) % self.static.plan.cp_size

    def key_positions(self, shift: int) -> Array:
        """Global index of each key of the rank this far behind, int32 ``[S]``."""
        return local_positions(self.static.plan.k_layout, self.behind(shift))

    def own_work(self, part: StepTable) -> ItemTable | None:
        """What this rank does for its own queries; ``None`` if no rank does anything."""
        return self._work(part.own, 0, part.shift)

    def helped_work(self, part: StepTable) -> ItemTable | None:
        """What this rank does for the queries of the rank it helps."""
        return self._work(part.helped, part.shift, 0)

    def _work(self, table: Table, q_shift: int, kv_shift: int) -> ItemTable | None:
        """Rows for queries of the rank ``q_shift`` behind, keys of the one ``kv_shift`` behind."""
        if table.shape[1] == 0:
            return None
        kinds, size = None, self.static.plan.cp_size
        if self.static.plan.blocks is not None:
            q_rank, kv_rank = ((np.arange(size) - shift) % size for shift in (q_shift, kv_shift))
            kinds = jnp.asarray(self.static.plan.blocks.kinds[q_rank, kv_rank])[self.rank]
        return ItemTable(jnp.asarray(table)[self.rank], kinds)

    def rows(self, part: StepTable, shift: int, queries: Queries) -> QueryBlock:
        """Queries of the rank this far behind, with what every rank knows of them."""
        indices = local_positions(self.static.plan.q_layout, self.behind(shift))
        positions = indices + self.static.plan.q_offset
        return QueryBlock(
            queries.q, positions, indices, self._cells(part, positions), queries.ids, queries.bias,
            queries.bias_shift, self.inputs.slopes, self.inputs.seed, self.inputs.offsets,
        )  # fmt: skip

    def columns(self, part: StepTable, positions: Array, keys: KVPayload) -> KeyBlock:
        """Keys at some positions, with what every rank knows of them."""
        return KeyBlock(keys.kv, positions, self._cells(part, positions), keys.ids)

    def _cells(self, part: StepTable, positions: Array) -> Array | None:
        """Which document or chunk each position lies in, if some item spans several."""
        boundaries = self.static.plan.boundaries
        if boundaries is None or (self.static.plan.blocks is None and not part.has_documents):
            return None
        return searchsorted(jnp.asarray(boundaries.astype(np.int32)), positions, "right")


def local_positions(layout: Layout, rank: Array) -> Array:
    """Global index of each token of a rank, int32 ``[T_local]``."""
    starts = jnp.asarray(layout.run_positions(np.arange(layout.cp_size)).astype(np.int32))[rank]
    index = jnp.arange(layout.local_len, dtype=jnp.int32)
    positions = starts[0] + layout.stride * index
    for n, begin in enumerate(layout.run_starts[1:], start=1):
        positions = jnp.where(
            index >= begin, starts[n] + layout.stride * (index - begin), positions
        )
    return positions


def all_positions(layout: Layout) -> Array:
    """Those of all ranks, int32 ``[P, T_local]``."""
    return jax.vmap(partial(local_positions, layout))(jnp.arange(layout.cp_size))
