"""Bytes of a gather: a rank fetches the K/V that its queries see."""

from __future__ import annotations

from ring_core.base.config import StrategyConfig
from ring_core.cost.counts.api import BytesByRanks, Count, CountedCall
from ring_core.cost.model import FLOAT32_BYTES, rows_and_keys
from ring_core.programs.gather import gather_program, gather_refusals, longest_gather, moved_keys


def _sent(call: CountedCall) -> BytesByRanks:
    """Return the bytes that each rank sends to each rank in a gather of what its queries see."""
    plan, model = call.plan, call.model
    if reasons := gather_refusals(plan):
        raise ValueError(f"strategy 'gather' cannot run this plan: {'; '.join(reasons)}")
    width = model.batch * model.num_kv_heads * (model.head_dim + model.value_dim)
    keys = moved_keys(plan, like=gather_program(plan, 0, tile=call.tile))
    # dK/dV go home against the way of their keys, as float32 sums.
    grads = keys.T * width * FLOAT32_BYTES if call.backward else 0
    return keys * width * model.bytes_per_element * (1 + call.fetches_again) + grads


def _held(call: CountedCall) -> int:
    """Return the bytes of the longest buffer of keys and the rank's own, with their gradients."""
    plan, (_, keys) = call.plan, rows_and_keys(call.plan, call.model)
    # Ranks differ in what they fetch: memory has to do for the one that fetches most.
    longest = longest_gather(plan, tile=call.tile).length
    gathered = longest * keys // plan.k_layout.local_len
    return (gathered + keys) * (call.model.bytes_per_element + FLOAT32_BYTES)


GATHER = Count(
    "gather", _sent, gathers=lambda _config: True, held=_held,
    compared={"gather": StrategyConfig("gather")},
)  # fmt: skip
