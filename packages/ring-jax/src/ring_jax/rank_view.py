"""A rank's side of the plan: its work items, and the positions of its tokens.

Work comes in parts: a part is a step of the ring, or, with gathered keys, all other ranks' keys at
once.

The rank is a traced number, so everything that differs between ranks is looked up in small arrays:
the program's tables, and the first position of each run of the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ring_core import Layout, RingProgram
from ring_core.programs.ring import TABLE_COLUMNS, TABLE_UNBOUNDED
from ring_jax.collectives import Ranks
from ring_jax.records import (
    Array,
    CallSpec,
    Inputs,
    Item,
    ItemTable,
    KeyBlock,
    KVPayload,
    QueryBlock,
    QueryPayload,
    Rectangle,
)
from ring_jax.search import searchsorted

Table = npt.NDArray[np.int32]


class StepTable(NamedTuple):
    """The work items of all ranks in one part, as tables ``int32 [P, R, C]``.

    ``P`` are the ranks, ``R`` the most items that one of them has, ``C`` the columns of
    ``TABLE_COLUMNS``.

    Attributes:
        shift: The keys are those of rank ``r - shift`` on rank ``r``; 0 are the rank's own.
        gathered: The keys are those of all ranks instead, in the order of the ranks.
        own: Items of each rank's own queries.
        peer: Items of the queries of rank ``r - shift``, which rank ``r`` computes over its own
            keys (strategy ``balanced``). It has no rows if no rank helps another.
        helpers: The ranks that have rows in ``peer``.
        has_documents: Some item spans several documents or chunks.
        items: The content of ``own`` if no rank has more than one item and none has several
            documents or a predicate; else ``None``.
    """

    shift: int
    gathered: bool
    own: Table
    peer: Table
    helpers: tuple[int, ...]
    has_documents: bool
    items: tuple[Item, ...] | None


@lru_cache(maxsize=1024)
def step_table(program: RingProgram, step: int) -> StepTable:
    """Return the items of a step of the program, split by whose queries they are."""
    plan, table = program.plan, program.table(step)
    column = {name: table[..., n] for n, name in enumerate(TABLE_COLUMNS)}
    live = column["q_stop"] > column["q_start"]
    is_own = column["q_rank"] == np.arange(plan.cp_size)[:, None]
    own, is_peer = _compact_rows(table, live & is_own), live & ~is_own
    return StepTable(
        program.steps[step].shift,
        gathered=False,
        own=own,
        peer=_compact_rows(table, is_peer),
        helpers=tuple(np.flatnonzero(is_peer.any(axis=1)).tolist()),
        has_documents=bool((live & (column["doc_stop"] > column["doc_start"])).any()),
        items=_single_items(own) if plan.blocks is None else None,
    )


@lru_cache(maxsize=256)
def remote_table(program: RingProgram) -> StepTable | None:
    """Join all steps but that of the own keys into one part over gathered keys.

    Returns:
        The part; ``None`` if no query sees another rank's keys.
    """
    parts = [step_table(program, n) for n, step in enumerate(program.steps) if step.shift != 0]
    if not parts:
        return None
    table = np.concatenate([part.own for part in parts], axis=1)
    column = {name: n for n, name in enumerate(TABLE_COLUMNS)}
    live = table[..., column["q_stop"]] > table[..., column["q_start"]]
    # Local key indices become indices into the keys of all ranks.
    offset = np.where(live, table[..., column["kv_rank"]] * program.plan.k_layout.local_len, 0)
    table[..., [column["k_start"], column["k_stop"]]] += offset[..., None]
    own = _join_adjacent(_compact_rows(table, live))
    has_documents = any(part.has_documents for part in parts)
    return StepTable(0, True, own, own[:, :0], (), has_documents, _single_items(own))


def _compact_rows(table: Table, wanted: npt.NDArray[np.bool_]) -> Table:
    """Move the wanted rows of each rank to the front, and cut off what no rank needs.

    Returns:
        ``[P, R, C]`` with the ``R`` of the busiest rank; unused rows are zeros.
    """
    order = np.argsort(~wanted, axis=1, kind="stable")[..., None]
    width = int(wanted.sum(axis=1).max(initial=0))
    return np.take_along_axis(np.where(wanted[..., None], table, 0), order, axis=1)[:, :width]


def _join_adjacent(table: Table) -> Table:
    """Join rows that show adjacent ranges of keys, fully, to the same queries."""
    column = {name: table[..., n] for n, name in enumerate(TABLE_COLUMNS)}
    keys = [column[name] for name in ("k_start", "q_stop", "q_start")]
    order = np.lexsort((*keys, ~_is_full(table)), axis=1)
    table = np.take_along_axis(table, order[..., None], axis=1)
    column = {name: table[..., n] for n, name in enumerate(TABLE_COLUMNS)}
    is_full, stop = _is_full(table), column["k_stop"]
    continues = np.zeros_like(is_full)  # a row that continues the row before it
    touches = column["k_start"][:, 1:] == stop[:, :-1]
    continues[:, 1:] = is_full[:, 1:] & is_full[:, :-1] & touches
    for name in ("q_start", "q_stop"):
        continues[:, 1:] &= column[name][:, 1:] == column[name][:, :-1]
    # The first row of each joined run takes the last one's end; the others are dropped.
    first = np.maximum.accumulate(np.where(continues, 0, np.arange(table.shape[1])), axis=1)
    np.maximum.at(stop, (np.arange(len(table))[:, None], first), stop)
    return _compact_rows(table, ~continues & (column["q_stop"] > column["q_start"]))


def _is_full(table: Table) -> npt.NDArray[np.bool_]:
    """Return which rows are fully visible: no band, one document; bool ``[P, R]``."""
    column = {name: table[..., n] for n, name in enumerate(TABLE_COLUMNS)}
    full = (column["lo"] == -TABLE_UNBOUNDED) & (column["hi"] == TABLE_UNBOUNDED)
    one_document = column["doc_stop"] <= column["doc_start"]
    return cast(
        "npt.NDArray[np.bool_]", full & one_document & (column["q_stop"] > column["q_start"])
    )


def _single_items(table: Table) -> tuple[Item, ...] | None:
    """Return the rows as items; ``None`` if a rank has two, or one spans several documents."""
    column = {name: table[..., n] for n, name in enumerate(TABLE_COLUMNS)}
    live, several = column["q_stop"] > column["q_start"], column["doc_stop"] > column["doc_start"]
    if table.shape[1] > 1 or several[live].any():
        return None
    columns = [TABLE_COLUMNS.index(name) for name in (*Rectangle._fields, "lo", "hi")]
    return tuple(Item(Rectangle(*row[:6]), *row[6:]) for row in table[live][:, columns].tolist())


@dataclass(frozen=True)
class RankView:
    """A rank's view of a call: its work items, and the operands of its kernels.

    Attributes:
        call: The call.
        inputs: This device's arrays.
        rank: This device's rank, a traced int32 scalar.
    """

    call: CallSpec
    inputs: Inputs
    rank: Array

    def rank_before(self, shift: int) -> Array:
        """Return the rank ``shift`` places before this one on the ring, or after if negative."""
        return (self.rank - shift) % self.call.plan.cp_size

    def key_positions(self, shift: int) -> Array:
        """Return the global index of each key of rank ``rank_before(shift)``, int32 ``[S]``."""
        return local_positions(self.call.plan.k_layout, self.rank_before(shift))

    def own_work(self, part: StepTable) -> ItemTable | None:
        """Return the items of this rank's own queries; ``None`` if no rank has any."""
        return self._work(part.own, 0, part.shift)

    def peer_work(self, part: StepTable) -> ItemTable | None:
        """Return the items of the queries of the rank it helps; ``None`` if no rank helps."""
        return self._work(part.peer, part.shift, 0)

    def _work(self, table: Table, q_shift: int, kv_shift: int) -> ItemTable | None:
        """Look up this rank's rows of a table, with the tiles of a predicate.

        Queries are those of ``rank_before(q_shift)``, keys those of ``rank_before(kv_shift)``.
        """
        if table.shape[1] == 0:
            return None
        kinds, size = None, self.call.plan.cp_size
        if self.call.plan.blocks is not None:
            q_rank, kv_rank = ((np.arange(size) - shift) % size for shift in (q_shift, kv_shift))
            kinds = jnp.asarray(self.call.plan.blocks.kinds[q_rank, kv_rank])[self.rank]
        return ItemTable(jnp.asarray(table)[self.rank], kinds)

    def rows(self, part: StepTable, shift: int, queries: QueryPayload) -> QueryBlock:
        """Return a kernel's operands for queries of ``rank_before(shift)``."""
        indices = local_positions(self.call.plan.q_layout, self.rank_before(shift))
        positions = indices + self.call.plan.q_offset
        return QueryBlock(
            queries.q, positions, indices, self._cells(part, positions), queries.ids, queries.bias,
            queries.bias_shift, self.inputs.slopes, self.inputs.seed, self.inputs.offsets,
        )  # fmt: skip

    def columns(self, part: StepTable, positions: Array, keys: KVPayload) -> KeyBlock:
        """Return a kernel's operands for keys at global ``positions``, int32 ``[S]``."""
        return KeyBlock(keys.kv, positions, self._cells(part, positions), keys.ids)

    def _cells(self, part: StepTable, positions: Array) -> Array | None:
        """Return the number of the document or chunk at each position, int32.

        ``None`` if no item of the part spans several, so that kernels need not compare them.
        """
        boundaries = self.call.plan.boundaries
        if boundaries is None or (self.call.plan.blocks is None and not part.has_documents):
            return None
        return searchsorted(jnp.asarray(boundaries.astype(np.int32)), positions, "right")


def local_positions(layout: Layout, rank: Array) -> Array:
    """Return the global index of each token of a rank, int32 ``[T_local]``."""
    starts = jnp.asarray(layout.run_positions(np.arange(layout.cp_size)).astype(np.int32))[rank]
    index = jnp.arange(layout.local_len, dtype=jnp.int32)
    positions = starts[0] + layout.stride * index
    for n, run_start in enumerate(layout.run_starts[1:], start=1):
        positions = jnp.where(
            index >= run_start, starts[n] + layout.stride * (index - run_start), positions
        )
    return positions


def is_padding(call: CallSpec) -> Array:
    """Return which of this device's queries are padding, bool ``[T_local]``."""
    layout = call.plan.q_layout
    rank = Ranks(call.axis_name, layout.cp_size).rank()
    return local_positions(layout, rank) >= layout.seq_len


def all_positions(layout: Layout) -> Array:
    """Return the global index of each token of every rank, int32 ``[P, T_local]``."""
    return jax.vmap(partial(local_positions, layout))(jnp.arange(layout.cp_size))
