"""The loop over gathered keys: the own ones first, while all others' arrive, and then all of these.

Two parts in place of as many as there are ranks, so results are merged once, and kernels see as
much as they can. It costs memory for the keys of all ranks, kept for the backward, and there for
the sums of their gradients. What overlaps is said by ties.
"""

from __future__ import annotations

import numpy as np

from ring_core import RingProgram
from ring_jax.collectives import order_after, overlap
from ring_jax.rank_view import StepTable, remote_table, step_table
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
from ring_jax.strategies.steps import QueryGrads, StepRunner, Strategy, own_message, to_bhtd

_TOKENS, _ID_TOKENS = 2, 1  # which dimensions of a message


def _forward(static: Static, x: Inputs) -> tuple[AttentionState, KVPayload | None]:
    """Attention of this device's queries over all keys, sinks not yet included.

    Returns:
        The wide result, and the keys of all ranks (``None`` if no other rank's are seen).
    """
    loop, others, mine = StepRunner.of(static, x), remote_table(static.program), _own_part(static)
    q, own = to_bhtd(x.q), own_message(x)
    every = None if others is None else _gathered(loop, own)
    into = loop.nothing_seen(q, x.v.shape[3])
    if mine is not None:
        into = loop.attend(mine, q, own, into, fresh=True, last=others is None)
    if others is None or every is None:
        return into, None
    into, arrived = overlap(into, every)
    into = loop.attend(others, q, order_after(arrived, into), into, fresh=mine is None, last=True)
    return into, arrived


def _backward(
    static: Static, x: Inputs, upstream: BackwardInputs, every: KVPayload | None
) -> Grads:
    """Gradients of this device's shards, wide, heads first.

    The others' keys come first: the sums of their gradients travel beside the own block.
    """
    loop, others, mine = StepRunner.of(static, x), remote_table(static.program), _own_part(static)
    q, own = to_bhtd(x.q), own_message(x)
    rows = QueryGrads(loop.zeros(q.shape), loop.no_bias_grad(x.bias))
    at_home = loop.zeros(own.kv.shape)
    arriving: Array | None = None
    if others is not None and every is not None:
        sums = loop.zeros(every.kv.shape)
        rows, sums = loop.differentiate(others, q, every, upstream, rows, sums, fresh=True)
        arriving = loop.ring.scatter(sums, _TOKENS)
        own = own_message(x, after=rows.dq)
    if mine is not None:
        rows, at_home = loop.differentiate(mine, q, own, upstream, rows, at_home, fresh=True)
    if arriving is not None:
        rows, at_home, came = overlap(rows, at_home, arriving)
        at_home = at_home + came
    return Grads(rows.dq, at_home, rows.dbias)


def _gathered(loop: StepRunner, own: KVPayload) -> KVPayload:
    ids = None if own.ids is None else loop.ring.gather(own.ids, _ID_TOKENS)
    return KVPayload(loop.ring.gather(own.kv, _TOKENS), ids)


def _own_part(static: Static) -> StepTable | None:
    """The step of the own keys, unless no rank sees any of its own."""
    found = (n for n, step in enumerate(static.program.steps) if step.shift == 0)
    return next((step_table(static.program, n) for n in found), None)


def _refusals(program: RingProgram) -> list[str]:
    if program.plan.blocks is not None:
        return ["a predicate mask is planned in tiles of each rank's own keys"]
    others, layout = remote_table(program), program.plan.k_layout.name
    if others is None or not others.has_documents or layout == "contiguous":
        return []
    return [
        (
            f"packed documents and chunks have to lie in natural order, and in layout {layout!r} "
            f"they do not (in 'contiguous' they do)"
        )
    ]


def _key_lengths(program: RingProgram) -> tuple[int, ...]:
    """A rank's own, and those of all ranks together if others' are seen."""
    own, gathers = program.plan.k_layout.local_len, any(step.shift for step in program.steps)
    return (own, own * program.plan.cp_size) if gathers else (own,)


def _sent(static: Static, x: Inputs, which: Pass) -> int:
    """Count the bytes of all keys to all others, or of their gradients back."""
    if remote_table(static.program) is None:
        return 0
    grads = (x.k.size + x.v.size) * np.dtype(static.wide).itemsize
    each = nbytes(x.k, x.v, x.k_ids) if which == "forward" else grads
    return static.plan.cp_size * (static.plan.cp_size - 1) * each


GATHER = Strategy(_forward, _backward, _refusals, _key_lengths, _sent)
