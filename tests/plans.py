"""Hypothesis strategies for plans and ring programs, and dense masks of their items."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from cases import RINGS, diagonals, prefix
from hypothesis import strategies as st

from ring_core import (
    ChunkLayout,
    Layout,
    Mask,
    Plan,
    RingProgram,
    WorkItem,
    divisor_of,
    make_plan,
    ring_program,
)
from ring_core.base.config import RingStrategy


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


def shown(plan: Plan, item: WorkItem) -> npt.NDArray[np.bool_]:
    """Return the dense mask of an item, from its own fields."""
    rows, columns = item.q_stop - item.q_start, item.k_stop - item.k_start
    distance = np.arange(rows)[:, None] - np.arange(columns)
    cells = np.ones((rows, columns), dtype=bool)
    if item.lo is not None:
        cells &= distance >= item.lo
    if item.hi is not None:
        cells &= distance <= item.hi
    if item.cu_q is not None and item.cu_k is not None:
        q_doc, k_doc = np.zeros(rows, int), np.zeros(columns, int)
        for n in range(len(item.cu_q) - 1):
            q_doc[item.cu_q[n] : item.cu_q[n + 1]] = n
            k_doc[item.cu_k[n] : item.cu_k[n + 1]] = n
        cells &= q_doc[:, None] == k_doc
    if item.tiles is not None:
        positions = plan.q_positions(item.q_rank)[item.q_slice]
        cells &= plan.mask.dense(positions, plan.k_positions(item.kv_rank)[item.k_slice])
    return cells
