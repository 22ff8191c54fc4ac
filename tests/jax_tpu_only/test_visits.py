"""The computed blocks are exactly those with a visible pair."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from cases import RINGS, Case, masks

from ring_core import RingProgram
from ring_core.base.arguments import EMPTY, FULL, TILE
from ring_core.programs.ring import TABLE_COLUMNS
from ring_jax.kernels.xla import XlaKernel
from ring_jax.rank_view import Launches, RankView, step_table
from ring_jax.records import CallSpec, Inputs, KVPayload, QueryPayload
from ring_jax_tpu.block_index import block_kinds
from ring_jax_tpu.block_sizes import Blocks

CP, LENGTH = 4, 4 * 6 * TILE
NOTHING = Inputs(*[None] * len(Inputs._fields))  # type: ignore[arg-type]  # none is read


def shown(program: RingProgram, rank: int, step: int, *, helped: bool) -> npt.NDArray[np.bool_]:
    """Return the pairs that a rank computes in a step for its own queries, or for lent ones."""
    visible = np.zeros(
        (program.plan.q_layout.local_len, program.plan.k_layout.local_len), dtype=bool
    )
    for row in program.table(step)[rank].tolist():
        item = dict(zip(TABLE_COLUMNS, row, strict=True))
        if item["q_stop"] == item["q_start"] or (item["q_rank"] != rank) != helped:
            continue
        rows = slice(item["q_start"], item["q_stop"])
        columns = slice(item["k_start"], item["k_stop"])
        dense = program.plan.mask.dense(
            program.plan.q_positions(item["q_rank"]), program.plan.k_positions(item["kv_rank"])
        )
        distance = np.subtract.outer(
            np.arange(item["q_stop"] - item["q_start"]), np.arange(item["k_stop"] - item["k_start"])
        )
        inside = (distance >= item["lo"]) & (distance <= item["hi"])
        visible[rows, columns] |= dense[rows, columns] & inside
    return visible


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
    return np.asarray(block_kinds(rows, columns, work, blocks))[0]


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
    program = case.program
    local = LENGTH // CP
    size = 2 * TILE
    blocks = Blocks(size, TILE, local, local)
    for step in range(program.num_steps):
        for rank in range(CP):
            for helped in (False, True):
                kinds = computed(program, rank, step, blocks, helped=helped)
                if kinds is None:
                    continue
                visible = shown(program, rank, step, helped=helped)
                tiles = visible.reshape(local // size, size, local // TILE, TILE)
                np.testing.assert_array_equal(kinds != EMPTY, tiles.any(axis=(1, 3)))
                assert tiles.all(axis=(1, 3))[kinds == FULL].all()
