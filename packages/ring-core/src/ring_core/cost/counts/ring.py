"""Bytes of rings: K/V go round, and dK/dV behind them; idle ranks may compute for busy ones."""

from __future__ import annotations

from functools import partial

import numpy as np

from ring_core.base.config import RingStrategy, StrategyConfig
from ring_core.cost.counts.api import BytesByRanks, Count, CountedCall
from ring_core.cost.model import FLOAT32_BYTES, Model, rows_and_keys
from ring_core.programs.ring import ring_program


def _sent(call: CountedCall, strategy: RingStrategy) -> BytesByRanks:
    """Return the bytes that each rank sends to each rank in a ring, its helpers included."""
    plan, model = call.plan, call.model
    program, (_, shard) = ring_program(plan, strategy), rows_and_keys(plan, model)
    sent = np.zeros((plan.cp_size, plan.cp_size), np.int64)
    query, result = _row_bytes(model)
    for n, forward in enumerate((True, False) if call.backward else (True,)):
        for rank in range(plan.cp_size):
            moved = program.moved(rank, forward=forward)
            for hops, itemsize in (
                (moved.kv_hop, model.bytes_per_element), (moved.grad_hop, FLOAT32_BYTES),
            ):  # fmt: skip
                for hop in hops:
                    # Ranks without work in a step pass K/V on all the same.
                    sent[rank, (rank + hop) % plan.cp_size] += shard * itemsize
            for rows, size in ((moved.queries, query[n]), (moved.results, result[n])):
                for peer, count in rows.items():
                    sent[rank, peer] += count * size
    return sent


def _row_bytes(model: Model) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the bytes of a token's queries for a helper, and of its results, in both passes.

    A kernel that takes ``delta`` gets that as well.
    """
    d, dv, e = model.head_dim, model.value_dim, model.bytes_per_element
    rows = model.batch * model.num_q_heads
    # Forward q, and out and lse; backward q, dout, out and lse, and dQ.
    query = rows * d * e, rows * ((d + 2 * dv) * e + FLOAT32_BYTES)
    return query, (rows * (dv + 1) * FLOAT32_BYTES, rows * d * FLOAT32_BYTES)


def _held(call: CountedCall) -> int:
    """Return the bytes of two slots of K/V, dQ and three times dK/dV."""
    e, (rows, keys) = call.model.bytes_per_element, rows_and_keys(call.plan, call.model)
    return keys * (2 * e + 3 * FLOAT32_BYTES) + rows * call.model.head_dim * FLOAT32_BYTES


RING = Count(
    "ring", partial(_sent, strategy="ring"), held=_held,
    compared={"ring": StrategyConfig("ring")},
)  # fmt: skip
# The same count over another program, in whose stages ranks help others.
BALANCED = Count("balanced", partial(_sent, strategy="balanced"))
