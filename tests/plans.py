"""Hypothesis strategies for plans and ring programs, and dense masks of their items."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
from cases import RINGS, diagonals, prefix
from hypothesis import strategies as st

from ring_core import (
    ChunkLayout,
    Layout,
    LayoutSpec,
    Mask,
    Plan,
    RingProgram,
    WorkItem,
    divisor_of,
    make_plan,
    ring_program,
)
from ring_core.base.config import RingStrategy


def plan_of(
    mask: Mask,
    seq_len: int,
    cp_size: int,
    layout: LayoutSpec = "contiguous",
    keys: int | None = None,
) -> Plan:
    """Return the plan of a mask and sizes, in the order in which tests name them."""
    return make_plan(mask, seq_len=seq_len, cp_size=cp_size, layout=layout, kv_seq_len=keys)


@st.composite
def chunk_layouts(draw: st.DrawFn, cp_size: int) -> ChunkLayout:
    """Draw a chunk layout."""
    chunks_per_rank = draw(st.integers(1, 5))
    order = draw(st.permutations(range(cp_size * chunks_per_rank)))
    chunks = (order[rank::cp_size] for rank in range(cp_size))
    return ChunkLayout(tuple(tuple(sorted(numbers)) for numbers in chunks))


@st.composite
def programs(draw: st.DrawFn) -> RingProgram:
    """Draw a ring program: any mask rules, sizes, padding and numbers of keys."""
    cp_size = draw(st.integers(1, 9))
    strategy: RingStrategy = "ring"
    layout = draw(st.sampled_from(list(RINGS)) | chunk_layouts(cp_size))
    if not isinstance(layout, ChunkLayout):
        layout, strategy = RINGS[layout]
    unit = divisor_of(layout, cp_size)
    lengths = st.integers(1, 9).map(lambda n: unit * n) | st.integers(1, 9 * unit)
    seq_len = draw(lengths)
    side = st.none() | st.integers(0, seq_len + 2)
    cuts = draw(st.none() | st.lists(st.integers(0, seq_len), max_size=8))
    kv_seq_len = draw(lengths) if cuts is None and draw(st.booleans()) else None
    mask = Mask(
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(side, side)),
        chunk_size=draw(st.none() | st.integers(1, seq_len + 2)),
        cu_seqlens=None if cuts is None else (0, *sorted(cuts), seq_len),
        predicate=draw(st.none() | st.sampled_from([diagonals, prefix])),
    )
    padded = (
        Layout.padded(layout, n, cp_size).padded_len + unit * draw(st.sampled_from([0, 0, 1]))
        for n in (seq_len, seq_len if kv_seq_len is None else kv_seq_len)
    )
    plan = make_plan(
        mask, seq_len=seq_len, cp_size=cp_size, layout=layout, kv_seq_len=kv_seq_len,
        pad_to=(next(padded), next(padded)),
    )  # fmt: skip
    return ring_program(plan, strategy)


def plans() -> st.SearchStrategy[Plan]:
    """Draw a plan."""
    return programs().map(lambda program: program.plan)


def all_items(program: RingProgram) -> Iterator[tuple[int, int, WorkItem]]:
    """Yield the items of all ranks and steps, with the rank and the step."""
    for rank, step in product(range(program.plan.cp_size), range(program.num_steps)):
        yield from ((rank, step, item) for item in program.items(rank, step))


def place(plan: Plan, item: WorkItem) -> Any:
    """Return the index of an item's cells in an array of all queries and all keys."""
    queries = plan.positions(item.q_rank)[item.q_slice]
    return np.ix_(queries, plan.k_positions(item.kv_rank)[item.k_slice])


def through(
    window: tuple[int | None, int | None], rows: int, columns: int
) -> npt.NDArray[np.bool_]:
    """Return the dense mask of a flash-attn window, which is aligned bottom right."""
    distance = np.arange(columns) - (np.arange(rows)[:, None] + columns - rows)
    left, right = window
    cells = np.ones((rows, columns), dtype=bool)
    cells &= distance <= right if right is not None else True
    cells &= -distance <= left if left is not None else True
    return cells


def shown(plan: Plan, item: WorkItem) -> npt.NDArray[np.bool_]:
    """Return the dense mask of an item, from its own fields."""
    rows, columns = item.q_stop - item.q_start, item.k_stop - item.k_start
    distance = np.arange(rows)[:, None] - np.arange(columns)
    cells = np.ones((rows, columns), dtype=bool)
    cells &= True if item.lo is None else distance >= item.lo
    cells &= True if item.hi is None else distance <= item.hi
    if item.cu_q is not None and item.cu_k is not None:
        q_doc = np.searchsorted(item.cu_q, np.arange(rows), side="right")
        k_doc = np.searchsorted(item.cu_k, np.arange(columns), side="right")
        cells &= q_doc[:, None] == k_doc
    if item.tiles is not None:
        positions = plan.q_positions(item.q_rank)[item.q_slice]
        cells &= plan.mask.dense(positions, plan.k_positions(item.kv_rank)[item.k_slice])
    return cells
