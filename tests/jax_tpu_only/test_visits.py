"""Kinds of blocks and the lists of them: the computed ones are those with a visible pair."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from cases import RINGS, Case, masks

from ring_core import RingProgram
from ring_core.base.arguments import EMPTY, FULL, PARTIAL, TILE
from ring_core.programs.ring import TABLE_COLUMNS
from ring_jax.kernels.xla import XlaKernel
from ring_jax.rank_view import Launches, RankView, step_table
from ring_jax.records import CallSpec, Inputs, KVPayload, QueryPayload
from ring_jax_tpu import block_index as index, block_sizes
from ring_jax_tpu.block_sizes import Blocks

CP, LENGTH = 4, 4 * 6 * TILE
NOTHING = Inputs(*[None] * len(Inputs._fields))  # type: ignore[arg-type]  # none is read


def shown(
    program: RingProgram, rank: int, step: int, *, helped: bool
) -> tuple[npt.NDArray[np.bool_], int]:
    """Return the pairs that a rank computes for its own queries, or lent ones, and their items."""
    plan, items = program.plan, 0
    visible = np.zeros((plan.q_layout.local_len, plan.k_layout.local_len), dtype=bool)
    for row in program.table(step)[rank].tolist():
        item = dict(zip(TABLE_COLUMNS, row, strict=True))
        rows, columns = (slice(item[f"{x}_start"], item[f"{x}_stop"]) for x in "qk")
        if rows.start == rows.stop or (item["q_rank"] != rank) != helped:
            continue
        q_pos, k_pos = plan.q_positions(item["q_rank"]), plan.k_positions(item["kv_rank"])
        dense = plan.mask.dense(q_pos[rows], k_pos[columns])
        distance = np.subtract.outer(*map(np.arange, dense.shape))
        visible[rows, columns] |= dense & (distance >= item["lo"]) & (distance <= item["hi"])
        items += 1
    return visible, items


def computed(program: RingProgram, rank: int, step: int, blocks: Blocks, *, helped: bool) -> Any:
    """Return the block kinds that a rank's kernel gets."""
    call = CallSpec(program, None, 1.0, None, 0.0, (XlaKernel(),), None, "float32", 8)  # type: ignore[arg-type]  # its strategy is not read
    side = RankView(call, NOTHING, jnp.int32(rank))
    launches = Launches.of(step_table(program, step), for_peer=helped)
    if launches.table is None:
        return None
    work = jax.tree.map(lambda x: x[0], side.work_of(launches))
    q, kv = (
        jnp.zeros((1, 1, layout.local_len, 1))
        for layout in (program.plan.q_layout, program.plan.k_layout)
    )
    rows = side.rows(launches, work.q_rank, QueryPayload(q, None, None, None))
    columns = side.columns(launches, side.key_positions(work.kv_rank), KVPayload(kv, None))
    return np.asarray(index.block_kinds(rows, columns, work, blocks))[0]


#: Combinations that run per change: two rings for each mask, alternating.
PER_CHANGE = [
    f"{name}-{ring}"
    for n, name in enumerate(masks(LENGTH, CP))
    for ring in (("contiguous", "striped"), ("zigzag", "balanced"))[n % 2]
]


@pytest.mark.nightly(unless=PER_CHANGE)
@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("name", masks(LENGTH, CP))
def test_live_blocks(name: str, ring: str) -> None:
    layout, strategy = RINGS[ring]
    case = Case("", masks(LENGTH, CP)[name], layout, CP, LENGTH, strategy=strategy)
    local, size = LENGTH // CP, 2 * TILE
    blocks = Blocks(size, TILE, local, local)
    for step, rank, helped in product(range(case.program.num_steps), range(CP), (False, True)):
        kinds = computed(case.program, rank, step, blocks, helped=helped)
        if kinds is not None:
            visible, items = shown(case.program, rank, step, helped=helped)
            tiles = visible.reshape(local // size, size, local // TILE, TILE)
            np.testing.assert_array_equal(kinds != EMPTY, tiles.any(axis=(1, 3)))
            full = tiles.all(axis=(1, 3))
            assert full[kinds == FULL].all()
            assert items > 1 or (kinds[full] == FULL).all()  # no item may see all that several do


@pytest.mark.parametrize("shape", [(1, 5, 4), (2, 7, 3), (3, 4, 2), (1, 2, 6)])
@pytest.mark.parametrize("whole", [False, True])
def test_lists_have_all_blocks_in_order(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch, *, whole: bool
) -> None:
    """A piece has whole rows or columns; one without visible blocks writes a block of its own."""
    kinds = np.random.default_rng(3).integers(0, FULL + 1, shape).astype(np.int32)
    kinds[:, shape[1] // 2] = EMPTY
    if not whole:
        monkeypatch.setattr(block_sizes, "MAX_WORDS", shape[0] * max(shape[1:]))
    for walk, outer in (
        (index.q_major(jnp.asarray(kinds)), 0),
        (index.k_major(jnp.asarray(kinds)), 1),
    ):
        assert (walk.pieces == 1) == whole
        blocks_by_batch: list[list[list[int]]] = [[] for _ in range(shape[0])]
        for n in range(walk.pieces):
            entries, steps = walk.whole() if whole else walk.piece(jnp.int32(n))
            assert entries.size <= block_sizes.MAX_WORDS
            for row, blocks in zip(np.asarray(entries), blocks_by_batch, strict=True):
                visits = [index.unpack(word) for word in row[: int(steps)]]
                assert sum(x.is_first for x in visits) == sum(x.is_last for x in visits)
                live = [[int(x.q_block), int(x.k_block)] for x in visits if x.kind > EMPTY]
                assert {int(x[outer]) // walk.height for x in visits} == {n}
                assert live or (visits[0].is_first and visits[0].is_last)
                blocks.extend(live)
        for batch, each in enumerate(blocks_by_batch):
            expected = np.argwhere(kinds[batch] > EMPTY).tolist()
            assert each == sorted(expected, key=lambda block: block[outer])


def test_numbers_that_are_not_finite() -> None:
    """Partial blocks with nonfinite inputs become NONFINITE, in the batch rows that have them."""
    blocks = Blocks(128, 128, 384, 256)
    kinds = jnp.asarray([[[FULL, EMPTY], [PARTIAL, PARTIAL], [PARTIAL, FULL]]], jnp.int32)
    rows, columns = np.zeros((2, 300), bool), np.zeros((2, 256), bool)
    rows[0, [0, 299]] = columns[1, 255] = True
    first = [[FULL, EMPTY], [PARTIAL, PARTIAL], [index.NONFINITE, FULL]]
    second = [[FULL, EMPTY], [PARTIAL, index.NONFINITE], [PARTIAL, FULL]]
    both = [[FULL, EMPTY], [PARTIAL, index.NONFINITE], [index.NONFINITE, FULL]]
    for many, expected in ((1, [both]), (2, [first, second])):
        repeated = jnp.repeat(kinds, many, axis=0)
        results = index.with_nonfinite(repeated, jnp.asarray(rows), jnp.asarray(columns), blocks)
        np.testing.assert_array_equal(results, expected)
