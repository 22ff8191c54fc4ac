"""The loop round the ring: K/V pass from rank to rank in steps, and dK/dV return behind them.

What overlaps is said by ties.
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
    Grads,
    Inputs,
    KVPayload,
    Pass,
    Static,
    nbytes,
)
from ring_jax.strategies.steps import QueryGrads, StepRunner, Strategy, merge, own_message, to_bhtd


def _forward(static: Static, x: Inputs) -> tuple[AttentionState, KVPayload | None]:
    """Attention of this device's queries over all keys, sinks not yet included.

    Returns:
        The wide result, and the K/V that arrived last (``None`` if nothing travelled).
    """
    loop, stages = StepRunner.of(static, x), static.program.forward
    q, own = to_bhtd(x.q), own_message(x)
    held, into = own, loop.nothing_seen(q, x.v.shape[3])
    helping, home = loop.ship(stages[0], q), None
    for stage, following in zip(stages, [*stages[1:], None], strict=True):
        arriving, next_helping = loop.hop(held, stage.kv_hop), loop.ship(following, q)
        fresh, last = stage is stages[0], following is None and home is None and helping is None
        part = step_table(static.program, stage.step)
        into = loop.attend(part, q, held, into, fresh=fresh, last=last)
        if home is not None:
            into, home = merge(into, home), None
        home = home if helping is None else loop.home(part, loop.help(part, helping, own))
        if following is not None:
            into, arriving, next_helping = overlap(into, arriving, next_helping)
            arriving = order_after(arriving, into)
        held, helping = arriving, next_helping
    into = into if home is None else merge(into, home)
    return into, held if len(stages) > 1 else None


def _backward(static: Static, x: Inputs, upstream: BackwardInputs, last: KVPayload | None) -> Grads:
    """Gradients of this device's shards, wide, heads first; starts from the K/V that came last."""
    loop, stages = StepRunner.of(static, x), static.program.backward
    q, own = to_bhtd(x.q), own_message(x)
    held = own if last is None else last
    rows = QueryGrads(loop.zeros(q.shape), loop.no_bias_grad(x.bias))
    at_home = loop.zeros(own.kv.shape)  # dK/dV of the own keys
    in_flight: Array | None = None  # dK/dV on their way to the ranks ahead
    helping, returning = loop.ship(stages[0], q, upstream), None
    for stage, following in zip(stages, [*stages[1:], None], strict=True):
        part = step_table(static.program, stage.step)
        is_own = part.shift == 0
        arriving, next_helping = loop.hop(held, stage.kv_hop), loop.ship(following, q, upstream)
        own = own_message(x, after=rows.dq) if is_own and last is not None else own
        keys, dkv = (own, at_home) if is_own else (held, loop.zeros(own.kv.shape))
        fresh = not is_own or not any(stage.helps for stage in stages)  # else there is some at home
        rows, dkv = loop.differentiate(part, q, keys, upstream, rows, dkv, fresh=fresh)
        if returning is not None:
            rows, returning = loop.add(rows, *returning), None
        if helping is not None:
            theirs, at_home = loop.help_backward(part, helping, own, at_home)
            returning = part, loop.home(part, theirs)
        if following is not None or in_flight is not None:
            rows, dkv, arriving, next_helping, in_flight = overlap(
                rows, dkv, arriving, next_helping, in_flight
            )
            arriving = order_after(arriving, (rows, dkv))
        dkv = dkv if in_flight is None else dkv + in_flight
        if is_own:
            at_home = dkv
        else:
            in_flight = loop.hop(dkv, stage.grad_hop)
        held, helping = arriving, next_helping
    rows = rows if returning is None else loop.add(rows, *returning)
    return Grads(rows.dq, at_home, rows.dbias)


def _sent(static: Static, x: Inputs, which: Pass) -> int:
    """Count the bytes of keys and their gradients, and of what helpers get and return."""
    program, size, wide = static.program, static.plan.cp_size, np.dtype(static.wide).itemsize
    total = 0
    for stage in program.forward if which == "forward" else program.backward:
        if stage.kv_hop is not None:
            total += size * nbytes(x.k, x.v, x.k_ids)
        if stage.grad_hop is not None and which == "backward":
            total += size * (x.k.size + x.v.size) * wide
        if stage.helps:
            total += _sent_to_help(static, x, which, stage, wide)
    return total


def _sent_to_help(static: Static, x: Inputs, which: Pass, stage: Stage, wide: int) -> int:
    """Count the bytes of queries to helpers, and of results back."""
    helpers = len(step_table(static.program, stage.step).helpers)
    rows = x.q.size // x.q.shape[3]
    bias = 0 if x.bias is None else x.bias.size // x.bias.shape[3] * x.k.shape[1]
    there = nbytes(x.q, x.q_ids, x.bias_shift) + (
        0 if x.bias is None else bias * x.bias.dtype.itemsize
    )
    if which == "forward":
        return helpers * (there + rows * (x.v.shape[3] + 1) * wide)
    there += rows * (x.v.shape[3] * x.q.dtype.itemsize + 2 * wide)
    return helpers * (there + (x.q.size + (bias if static.bias_grad else 0)) * wide)


RING = Strategy(
    _forward,
    _backward,
    refusals=lambda _: [],
    key_lengths=lambda program: (program.plan.k_layout.local_len,),
    sent=_sent,
)
