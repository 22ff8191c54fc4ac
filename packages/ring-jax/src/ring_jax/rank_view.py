"""A rank's side of the plan: its work items, and the operands of its kernels.

Work comes in parts: a part is a step of the ring, or, with gathered keys, all other ranks' keys at
once. Parts that differ in nothing but their items are launched in a loop.

The rank is a traced number, so everything that differs between ranks is looked up in small arrays,
the program's tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, cast

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ring_core import Plan, RingProgram
from ring_core.programs.ring import TABLE_COLUMNS, TABLE_UNBOUNDED
from ring_jax.collectives import Ranks
from ring_jax.positions import constant_bytes, local_positions, searchsorted
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
)

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
        has_single_items: No rank has more than one item of ``own``, and none has several documents
            or a predicate.
    """

    shift: int
    gathered: bool
    own: Table
    peer: Table
    helpers: tuple[int, ...]
    has_documents: bool
    has_single_items: bool

    @property
    def has_rectangles(self) -> bool:
        """True if it has single items, all of which are fully visible."""
        empty = self.own[..., TABLE_COLUMNS.index("q_stop")] == 0
        return self.has_single_items and bool((_is_full(self.own) | empty).all())


class RankTable(NamedTuple):
    """A table ``[P, ..., C]`` of rows of each of ``P`` ranks, compressed.

    A program is one for all ranks, so it holds the work items of all of them. Most are alike: under
    a causal mask a rank that comes after another sees one rectangle of its keys, a rank that comes
    before it another one, whatever their distance. So equal rows are stored once, and neighbouring
    ranks that have the same one as a range of ranks.

    Attributes:
        rows: The distinct rows, int32 ``[U, C]``.
        starts: First rank of each range of ranks with the same row, ascending, int32 ``[..., G]``;
            ``P`` where there are fewer than ``G`` ranges. ``None`` if each rank is a range.
        numbers: Number of the row of each range, int32 ``[..., G]``.
    """

    rows: Table
    starts: Table | None
    numbers: Table

    @classmethod
    def of(cls, table: Table) -> RankTable:
        """Compress a table ``[P, ..., C]``."""
        ranks, width = len(table), table.shape[-1]
        rows = np.ascontiguousarray(table.reshape(-1, width))
        # Rows are compared as strings of bytes, which is faster than column by column.
        packed = rows.view(np.dtype((np.void, rows.dtype.itemsize * width)))[:, 0]
        _, first, numbers = np.unique(packed, return_index=True, return_inverse=True)
        rows = rows[first]
        # Ranks become the last dimension, so that equal neighbours form ranges.
        by_rank = np.moveaxis(numbers.reshape(table.shape[:-1]), 0, -1)  # [..., P]
        begins = np.ones(by_rank.shape, dtype=bool)
        begins[..., 1:] = by_rank[..., 1:] != by_rank[..., :-1]
        ranges = int(begins.sum(axis=-1).max(initial=1))
        if 2 * ranges >= ranks:  # a first rank and a number for each range take no less
            return cls(rows, None, by_rank.astype(np.int32))
        # Stable, so the ranks at which a range begins come first, in ascending order.
        order = np.argsort(~begins, axis=-1, kind="stable")[..., :ranges]
        starts = np.where(np.take_along_axis(begins, order, axis=-1), order, ranks)
        return cls(
            rows, starts.astype(np.int32), np.take_along_axis(by_rank, order, -1).astype(np.int32)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the constants that a program holds for it, without scalars."""
        if self._has_one_rank:
            return self.rows[self.numbers].nbytes
        return sum(x.nbytes for x in self if x is not None)

    @property
    def _has_one_rank(self) -> bool:
        """True if it is of one rank: its rows are looked up here, and not in the program."""
        return self.starts is None and self.numbers.shape[-1] == 1

    def rows_of(self, rank: Array) -> tuple[Array, Array]:
        """Return a rank's rows, int32 ``[..., C]``, and their numbers, int32 ``[...]``."""
        if self._has_one_rank:
            numbers = self.numbers[..., 0]
            return jnp.asarray(self.rows[numbers]), jnp.asarray(numbers)
        numbers_of_rank = jnp.asarray(self.numbers)
        if self.starts is None:
            numbers_of_rank = numbers_of_rank[..., rank]
        else:
            # The range that the rank lies in is the last one that begins at it or before.
            last = (jnp.asarray(self.starts) <= rank).sum(axis=-1, keepdims=True) - 1
            numbers_of_rank = jnp.take_along_axis(numbers_of_rank, last, axis=-1)[..., 0]
        return jnp.asarray(self.rows)[numbers_of_rank], numbers_of_rank


class Constants(NamedTuple):
    """Bytes of constants of a program, by what they are.

    A launch, or a step of a loop, has some numbers more, which are not counted.
    """

    items: int = 0  # tables of work items
    kinds: int = 0  # kinds of a predicate's tiles
    boundaries: int = 0  # offsets of documents or chunks
    positions: int = 0  # first position of each run of all ranks, where it is looked up


@dataclass(frozen=True)
class Launches:
    """The work items of all ranks in one launch, or in a loop of launches, each for a part.

    Attributes:
        shifts: For each launch the distance of the ranks that meet, see :class:`StepTable`.
        gathered: The keys are those of all ranks.
        for_peer: The items are those of other ranks' queries, over each rank's own keys.
        has_documents: Some item spans several documents or chunks.
        items: The distinct items, as in :class:`LaunchSpec`; ``None`` with ``for_peer`` too.
        table: All items, ``[P, launches, R, len(Item._fields)]``; ``None`` if no rank has any.
    """

    shifts: tuple[int, ...]
    gathered: bool
    for_peer: bool
    has_documents: bool
    items: tuple[Item[int], ...] | None
    table: RankTable | None

    @classmethod
    def of(cls, *parts: StepTable, for_peer: bool = False) -> Launches:
        """Make one launch of one part, or a loop of launches of several parts."""
        tables = [(part.peer if for_peer else part.own)[..., _ITEM_COLUMNS] for part in parts]
        # Parts with fewer rows than the longest get zeros, which are no items.
        rows = max(x.shape[1] for x in tables)
        padded = [np.pad(x, ((0, 0), (0, rows - x.shape[1]), (0, 0))) for x in tables]
        table = np.stack(padded, axis=1)
        compressed = RankTable.of(table) if table.size else None
        items = None
        if compressed and not for_peer and all(part.has_single_items for part in parts):
            items = tuple(Item(*row) for row in compressed.rows.tolist())
        return cls(
            tuple(part.shift for part in parts), parts[0].gathered, for_peer,
            any(part.has_documents for part in parts), items, compressed,
        )  # fmt: skip

    def kinds(self, plan: Plan) -> npt.NDArray[np.uint8] | None:
        """Return the kinds of a predicate's tiles, ``[P, launches, tiles of T, tiles of S]``.

        They are those of the pairs of ranks that meet alone. ``None`` without a predicate.
        """
        if plan.blocks is None:
            return None
        ranks = np.arange(plan.cp_size)[:, None]
        q_ranks, kv_ranks = ranks, (ranks - np.array(self.shifts)) % plan.cp_size
        if self.for_peer:
            q_ranks, kv_ranks = kv_ranks, q_ranks
        return cast("npt.NDArray[np.uint8]", plan.blocks.kinds[q_ranks, kv_ranks])

    def boundaries(self, plan: Plan) -> Table | None:
        """Return the offsets of documents or chunks that kernels compare tokens by, int32.

        ``None`` if the mask has none. Without a predicate also if no item spans several, so that
        kernels need not compare them.
        """
        if plan.boundaries is None or (plan.blocks is None and not self.has_documents):
            return None
        return plan.boundaries.astype(np.int32)

    def constants(self, plan: Plan) -> Constants:
        """Return the bytes of the constants that a program holds for these launches."""
        if self.table is None:
            return Constants()
        kinds, boundaries = self.kinds(plan), self.boundaries(plan)
        return Constants(
            self.table.nbytes, 0 if kinds is None else kinds.nbytes,
            0 if boundaries is None else 2 * boundaries.nbytes,  # for queries and for keys
            constant_bytes(plan.q_layout) + constant_bytes(plan.k_layout),
        )  # fmt: skip


_ITEM_COLUMNS = [TABLE_COLUMNS.index(name) for name in Item._fields]


@lru_cache(maxsize=1024)
def step_table(program: RingProgram, step: int) -> StepTable:
    """Return the items of a step of the program, split by whose queries they are."""
    plan, table = program.plan, program.table(step)
    column = {name: table[..., n] for n, name in enumerate(TABLE_COLUMNS)}
    # Rows beyond a rank's own number of items have no queries. Rows of other ranks' queries are
    # those with which this rank helps.
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
        has_single_items=plan.blocks is None and _are_single(own),
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
    # No rank helps another where keys are gathered, so the items of own queries are all.
    table = np.concatenate([part.own for part in parts], axis=1)
    column = {name: n for n, name in enumerate(TABLE_COLUMNS)}
    live = table[..., column["q_stop"]] > table[..., column["q_start"]]
    # Local key indices become indices into the keys of all ranks.
    offset = np.where(live, table[..., column["kv_rank"]] * program.plan.k_layout.local_len, 0)
    table[..., [column["k_start"], column["k_stop"]]] += offset[..., None]
    own = _join_adjacent(_compact_rows(table, live))
    has_documents = any(part.has_documents for part in parts)
    return StepTable(0, True, own, own[:, :0], (), has_documents, _are_single(own))


def _compact_rows(table: Table, wanted: npt.NDArray[np.bool_]) -> Table:
    """Move the wanted rows of each rank to the front, and cut off what no rank needs.

    Returns:
        ``[P, R, C]`` with the ``R`` of the busiest rank; unused rows are zeros.
    """
    # Stable, so that a rank's items stay in the order of the plan.
    order = np.argsort(~wanted, axis=1, kind="stable")[..., None]
    width = int(wanted.sum(axis=1).max(initial=0))
    return np.take_along_axis(np.where(wanted[..., None], table, 0), order, axis=1)[:, :width]


def _join_adjacent(table: Table) -> Table:
    """Join rows that show adjacent ranges of keys, fully, to the same queries."""
    column = {name: table[..., n] for n, name in enumerate(TABLE_COLUMNS)}
    keys = [column[name] for name in ("k_start", "q_stop", "q_start")]
    # Full rows first, those of the same queries one behind the other, in the order of their keys.
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


def _are_single(table: Table) -> bool:
    """Return False if a rank has two items, or one that spans several documents."""
    column = {name: table[..., n] for n, name in enumerate(TABLE_COLUMNS)}
    live, several = column["q_stop"] > column["q_start"], column["doc_stop"] > column["doc_start"]
    return table.shape[1] <= 1 and not several[live].any()


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

    def work_of(self, launches: Launches) -> ItemTable:
        """Return this rank's items of each launch, with the ranks whose queries and keys they are.

        On some rank some launch has an item: others have no table.
        """
        assert launches.table is not None
        items, numbers = launches.table.rows_of(self.rank)  # [launches, R, C], [launches, R]
        size, shifts = self.call.plan.cp_size, np.array(launches.shifts, np.int32)
        # The keys that rank r meets over a shift are those of rank r - shift; where it helps, these
        # are the queries, and the keys its own.
        ranks = jnp.broadcast_to(self.rank, shifts.shape), (self.rank - shifts) % size
        q_rank, kv_rank = ranks[::-1] if launches.for_peer else ranks
        # Chosen on the host for every rank and launch, so that a device takes its row.
        kinds = launches.kinds(self.call.plan)
        return ItemTable(
            items, None if kinds is None else jnp.asarray(kinds)[self.rank], q_rank, kv_rank,
            None if launches.items is None else numbers[:, 0],
        )  # fmt: skip

    def rank_before(self, shift: int) -> Array:
        """Return the rank ``shift`` places before this one on the ring, or after if negative."""
        return (self.rank - shift) % self.call.plan.cp_size

    def key_positions(self, rank: Array) -> Array:
        """Return the global index of each key of a rank, int32 ``[S]``."""
        return local_positions(self.call.plan.k_layout, rank)

    def rows(self, launches: Launches, rank: Array, queries: QueryPayload) -> QueryBlock:
        """Return a kernel's operands for the queries of a rank."""
        indices = local_positions(self.call.plan.q_layout, rank)
        positions = indices + self.call.plan.q_offset
        return QueryBlock(
            queries.q, positions, indices, self._cells(launches, positions), queries.ids, queries.bias,
            queries.bias_shift, self.inputs.slopes, self.inputs.seed, self.inputs.numbers,
        )  # fmt: skip

    def columns(self, launches: Launches, positions: Array, keys: KVPayload) -> KeyBlock:
        """Return a kernel's operands for keys at global ``positions``, int32 ``[S]``."""
        return KeyBlock(keys.kv, positions, self._cells(launches, positions), keys.ids)

    def _cells(self, launches: Launches, positions: Array) -> Array | None:
        """Return the number of the document or chunk at each position, int32, if it is needed."""
        boundaries = launches.boundaries(self.call.plan)
        if boundaries is None:
            return None
        return cast("Array", searchsorted(jnp.asarray(boundaries), positions, "right"))


def ranks_of(call: CallSpec) -> Ranks:
    """Return the devices that share the sequence of a call."""
    return Ranks(call.axis_name, call.plan.cp_size, call.stride)


def is_padding(call: CallSpec) -> Array:
    """Return which of this device's queries are padding, bool ``[T_local]``."""
    layout = call.plan.q_layout
    return local_positions(layout, ranks_of(call).rank()) >= layout.seq_len
