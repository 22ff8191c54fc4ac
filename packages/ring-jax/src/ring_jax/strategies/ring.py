"""The ring: K/V pass from rank to rank in steps, and dK/dV return behind them.

``overlap`` and ``order_after`` tell the compiler which transfers run beside which kernels.
"""

from __future__ import annotations

import numpy as np

from ring_core.programs.ring import Stage
from ring_jax.collectives import order_after, overlap
from ring_jax.rank_view import step_table
from ring_jax.records import (
    Array,
    AttentionState,
    BackwardInputs,
    CallSpec,
    Direction,
    Grads,
    Inputs,
    KVPayload,
    nbytes,
)
from ring_jax.strategies.steps import QueryGrads, StepRunner, Strategy, merge, own_message, to_bhtd


def _ring_forward(call: CallSpec, x: Inputs) -> tuple[AttentionState, KVPayload | None]:
    """Compute attention of this device's queries over all keys, before sinks.

    Returns:
        The wide result, and the K/V that arrived last (``None`` if nothing travelled).
    """
    runner, stages = StepRunner.of(call, x), call.program.forward
    q, own = to_bhtd(x.q), own_message(x)
    held, into = own, runner.empty_state(q, x.v.shape[3])
    # Queries of the rank that this one helps in the current stage, and results of its own helper.
    peer_queries, returned = runner.send_to_helper(stages[0], q), None
    for stage, next_stage in zip(stages, [*stages[1:], None], strict=True):
        # The K/V we hold go to the next rank, and those of the rank before arrive beside them;
        # so do the queries for the next stage. Nothing is overwritten: both sets are live.
        arriving = runner.hop(held, stage.kv_hop)
        next_peer_queries = runner.send_to_helper(next_stage, q)
        # Meanwhile the kernel reads the K/V that are being sent.
        part = step_table(call.program, stage.step)
        is_final = next_stage is None and returned is None and peer_queries is None
        overwrite = stage is stages[0]
        into = runner.attend(part, q, held, into, overwrite=overwrite, is_final=is_final)
        # Our helper's results of the stage before have arrived beside that kernel.
        if returned is not None:
            into, returned = merge(into, returned), None
        # Help another rank; our results for it travel during the next stage's kernel.
        if peer_queries is not None:
            peer_result = runner.attend_for_peer(part, peer_queries, own)
            returned = runner.return_to_owner(part, peer_result)
        # The received K/V become the current ones, no earlier than this stage's kernel ends.
        if next_stage is not None:
            into, arriving, next_peer_queries = overlap(into, arriving, next_peer_queries)
            arriving = order_after(arriving, into)
        held, peer_queries = arriving, next_peer_queries
    into = into if returned is None else merge(into, returned)
    return into, held if len(stages) > 1 else None


def _ring_backward(
    call: CallSpec, x: Inputs, upstream: BackwardInputs, last: KVPayload | None
) -> Grads:
    """Compute the gradients of this device's shards, wide, heads first.

    The stages run in reverse, from ``last``, the K/V that arrived last in the forward.
    """
    runner, stages = StepRunner.of(call, x), call.program.backward
    q, own = to_bhtd(x.q), own_message(x)
    held = own if last is None else last
    query_grads = QueryGrads(runner.zeros(q.shape), runner.empty_bias_grad(x.bias))
    own_dkv = runner.zeros(own.kv.shape)
    in_flight: Array | None = None  # dK/dV of the K/V one stage ago, following them round the ring
    peer_queries, returned = runner.send_to_helper(stages[0], q, upstream), None
    for stage, next_stage in zip(stages, [*stages[1:], None], strict=True):
        part = step_table(call.program, stage.step)
        is_own = part.shift == 0
        # In flight beside this stage's kernel: the K/V we hold, queries for helpers, and the sum
        # of dK/dV up to the stage before. The kernel adds to zeros, not to that sum.
        arriving = runner.hop(held, stage.kv_hop)
        next_peer_queries = runner.send_to_helper(next_stage, q, upstream)
        own = own_message(x, after=query_grads.dq) if is_own and last is not None else own
        keys, dkv = (own, own_dkv) if is_own else (held, runner.zeros(own.kv.shape))
        # Other stages start from zeros. own_dkv has gradients already if this rank helped others.
        overwrite = not is_own or not any(stage.offloads for stage in stages)
        query_grads, dkv = runner.differentiate(
            part, q, keys, upstream, query_grads, dkv, overwrite=overwrite
        )
        # dQ that our helper computed in the stage before has arrived.
        if returned is not None:
            query_grads, returned = runner.add_returned(query_grads, *returned), None
        # Help another rank; its dQ travels during the next stage's kernel, dK/dV stay here.
        if peer_queries is not None:
            peer_grads, own_dkv = runner.differentiate_for_peer(part, peer_queries, own, own_dkv)
            returned = part, runner.return_to_owner(part, peer_grads)
        # What arrived may be read from here on, no earlier than this stage's kernel ends.
        if next_stage is not None or in_flight is not None:
            query_grads, dkv, arriving, next_peer_queries, in_flight = overlap(
                query_grads, dkv, arriving, next_peer_queries, in_flight
            )
            arriving = order_after(arriving, (query_grads, dkv))
        # The sum that arrived is of the same keys as this stage's dK/dV. Send it on, or keep it
        # where it is home: in the stage of this rank's own keys.
        dkv = dkv if in_flight is None else dkv + in_flight
        if is_own:
            own_dkv = dkv
        else:
            in_flight = runner.hop(dkv, stage.grad_hop)
        held, peer_queries = arriving, next_peer_queries
    query_grads = query_grads if returned is None else runner.add_returned(query_grads, *returned)
    return Grads(query_grads.dq, own_dkv, query_grads.dbias)


def _ring_sent(call: CallSpec, x: Inputs, direction: Direction) -> int:
    """Return the bytes that leave all ranks together in one pass of a ring."""
    program, size, wide = call.program, call.plan.cp_size, np.dtype(call.wide).itemsize
    total = 0
    for stage in program.forward if direction == "forward" else program.backward:
        if stage.kv_hop is not None:
            total += size * nbytes(x.k, x.v, x.k_ids)
        if stage.grad_hop is not None and direction == "backward":
            total += size * (x.k.size + x.v.size) * wide
        if stage.offloads:
            total += _helper_bytes(call, x, direction, stage, wide)
    return total


def _helper_bytes(call: CallSpec, x: Inputs, direction: Direction, stage: Stage, wide: int) -> int:
    """Return the bytes of queries to helpers and of results back, in one stage."""
    helpers = len(step_table(call.program, stage.step).helpers)
    rows = x.q.size // x.q.shape[3]
    bias = 0 if x.bias is None else x.bias.size // x.bias.shape[3] * x.k.shape[1]
    sent = nbytes(x.q, x.q_ids, x.bias_shift) + (
        0 if x.bias is None else bias * x.bias.dtype.itemsize
    )
    if direction == "forward":
        return helpers * (sent + rows * (x.v.shape[3] + 1) * wide)
    sent += rows * (x.v.shape[3] * x.q.dtype.itemsize + 2 * wide)
    return helpers * (sent + (x.q.size + (bias if call.bias_grad else 0)) * wide)


RING = Strategy(
    _ring_forward,
    _ring_backward,
    refusals=lambda _: [],
    key_lengths=lambda program: (program.plan.k_layout.local_len,),
    sent=_ring_sent,
)
