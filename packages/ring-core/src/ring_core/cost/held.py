"""Bytes that a rank holds beyond the caller's tensors in a call of each strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ring_core.base.config import StrategyConfig
from ring_core.cost.model import FLOAT32_BYTES, Model, rows_and_keys
from ring_core.plan.plan import Plan, make_plan
from ring_core.programs.gather import longest_gather
from ring_core.programs.grid import RankGrid, rank_grid
from ring_core.programs.heads import head_plan


def bytes_held(
    plan: Plan, model: Model, config: StrategyConfig, hosts: Sequence[str] | None = None
) -> int:
    """Return the bytes that a rank holds beyond the caller's tensors, in forward + backward.

    They are K/V, heads and sums of gradients that a strategy cannot do without; buffers of kernels
    and transports come on top, so it compares strategies and forecasts no peak. A ring holds two
    slots of K/V, dQ and three times dK/dV; a gather the longest buffer of keys and the rank's own,
    with their gradients; a trade of heads q, k, v and out of all its tokens, and their gradients.
    Sums are float32.

    Args:
        plan: The plan.
        model: Heads, dims, batch, bytes an element.
        config: ``ring``, ``gather``, ``ulysses`` or ``hybrid``.
        hosts: The host of each rank, for ``hybrid`` without ``ulysses_size``; ``None`` if all are
            on one.
    """
    rows, keys = rows_and_keys(plan, model)
    e = model.bytes_per_element
    match config.name:
        case "ring":
            dq = rows * model.head_dim * FLOAT32_BYTES
            return keys * (2 * e + 3 * FLOAT32_BYTES) + dq
        case "gather":
            width = keys // plan.k_layout.local_len
            return (longest_gather(plan).length * width + keys) * (e + FLOAT32_BYTES)
        case "ulysses":
            grid = RankGrid(plan.cp_size, plan.cp_size)
        case _:
            grid = rank_grid(
                plan.cp_size, model.num_q_heads, plan.q_layout.name, outer=config.outer,
                ulysses_size=config.ulysses_size, hosts=hosts,
            )  # fmt: skip
    heads = head_plan(model.num_q_heads, model.num_kv_heads, grid.ulysses_size)
    inner = replace(model, num_q_heads=heads.q.shape[1], num_kv_heads=heads.kv.shape[1])
    rows, keys = (grid.ulysses_size * n for n in rows_and_keys(plan, inner))
    traded = 2 * e * (rows * (model.head_dim + model.value_dim) + keys)
    if grid.outer_size == 1:
        return traded
    outer_plan = make_plan(
        plan.mask, seq_len=plan.seq_len, cp_size=grid.outer_size,
        layout=grid.outer_layout(plan.q_layout.name), kv_seq_len=plan.kv_seq_len,
        pad_to=(plan.q_layout.padded_len, plan.k_layout.padded_len),
    )  # fmt: skip
    return traded + bytes_held(outer_plan, inner, StrategyConfig(config.outer))
