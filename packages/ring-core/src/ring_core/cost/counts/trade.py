"""Bytes of ranks that trade tokens for heads, and of the call between their groups."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ring_core.base.arguments import not_none
from ring_core.base.config import StrategyConfig
from ring_core.cost.counts.api import BytesByRanks, Count, CountedCall
from ring_core.cost.model import FLOAT32_BYTES, Model, rows_and_keys
from ring_core.plan.plan import Plan
from ring_core.programs.grid import RankGrid
from ring_core.programs.heads import HeadPlan, head_plan


class HeadExchange(NamedTuple):
    """Ranks that trade tokens for heads, and the call between their groups that follows.

    Attributes:
        grid: The groups of ranks.
        heads: The heads of each rank of a group.
        outer: The call over groups, each with the tokens of its ranks and the heads of a rank;
            ``None`` for one group.
        inner_model: The model of a rank's own call: the heads of a rank.
    """

    grid: RankGrid
    heads: HeadPlan
    outer: CountedCall | None
    inner_model: Model

    @classmethod
    def of(cls, call: CountedCall, grid: RankGrid) -> HeadExchange:
        """Return the trade of a call within the groups of a grid."""
        plan, model = call.plan, call.model
        heads = head_plan(model.num_q_heads, model.num_kv_heads, grid.ulysses_size)
        inner = replace(model, num_q_heads=heads.q.shape[1], num_kv_heads=heads.kv.shape[1])
        if grid.outer_size == 1:
            return cls(grid, heads, None, inner)
        outer = call._replace(
            plan=grid.outer_plan(plan), model=inner, config=StrategyConfig(call.config.outer), hosts=None
        )  # fmt: skip
        return cls(grid, heads, outer, inner)


def traded_bytes(call: CountedCall, grid: RankGrid, outer: Count | None = None) -> BytesByRanks:
    """Return the bytes that each rank sends to each rank in trades, and between groups.

    ``outer`` counts the call between groups; ``None`` if there is one group.
    """
    plan, trade = call.plan, HeadExchange.of(call, grid)
    moved = np.zeros((plan.cp_size, plan.cp_size), np.int64)
    for first in range(0, plan.cp_size, grid.ulysses_size):
        group = grid.inner_ranks(first)
        moved[np.ix_(group, group)] = _exchange_bytes(plan, call.model, trade.heads, call.backward)
    # A rank keeps its own tokens of its own heads.
    np.fill_diagonal(moved, 0)
    if trade.outer is None:
        return moved
    between_groups = not_none(outer).sent(trade.outer)
    # Ranks with the same place in their groups make one inner call, and each such set its own.
    for rank in grid.inner_ranks(0):
        peers = grid.outer_ranks(rank)
        moved[np.ix_(peers, peers)] += between_groups
    return moved


def traded_held(call: CountedCall, grid: RankGrid, outer: Count | None = None) -> int:
    """Return the bytes that a rank holds for its heads, and in the call between groups.

    ``outer`` is that of :func:`traded_bytes`.
    """
    trade, model = HeadExchange.of(call, grid), call.model
    rows, keys = rows_and_keys(call.plan, trade.inner_model)
    # Q, K, V and out by heads are there while the inner call runs, and in the backward their
    # gradients beside them.
    traded = rows * (model.head_dim + model.value_dim) + keys
    held = 2 * model.bytes_per_element * grid.ulysses_size * traded
    if trade.outer is None:
        return held
    return held + not_none(not_none(outer).held)(trade.outer)


def _exchange_bytes(plan: Plan, model: Model, heads: HeadPlan, backward: bool) -> int:
    """Return the bytes that a rank sends each other where they trade tokens for heads."""
    d, dv, e = model.head_dim, model.value_dim, model.bytes_per_element
    rows = model.batch * plan.q_layout.local_len * int(heads.q.shape[1])
    keys = model.batch * plan.k_layout.local_len * int(heads.kv.shape[1]) * (d + dv)
    # Gradients of a K/V head with copies are summed in float32 before they are rounded.
    grad = e if heads.copies == 1 else FLOAT32_BYTES
    forward = rows * (d * e + dv * e + FLOAT32_BYTES) + keys * e
    return forward + (rows * (d + dv) * e + keys * grad if backward else 0)
