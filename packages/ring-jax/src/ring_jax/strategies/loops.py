"""The loops over the keys: round the ring, step by step, or gathered.

Round the ring K/V pass from rank to rank in steps, and dK/dV return behind them.

Gathered are all others' keys, while the own ones are computed with; then all of these at once. Two
parts in place of as many as there are ranks, so results are merged once, and kernels see as much as
they can. It costs memory for the keys of all ranks, kept for the backward, and there for the sums
of their gradients. What overlaps is said by ties in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ring_core import RingProgram
from ring_jax.collectives import order_after, overlap
from ring_jax.rank_view import StepTable, remote_table, step_table
from ring_jax.records import Array, AttentionState, BackwardInputs, Grads, Inputs, KVPayload, Static
from ring_jax.strategies.steps import QueryGrads, StepRunner, Strategy, merge, own_message, to_bhtd

_TOKENS, _ID_TOKENS = 2, 1  # which dimensions of a message


def _ring_forward(static: Static, x: Inputs) -> tuple[AttentionState, KVPayload | None]:
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


def _ring_backward(
    static: Static, x: Inputs, upstream: BackwardInputs, last: KVPayload | None
) -> Grads:
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


def _gather_forward(static: Static, x: Inputs) -> tuple[AttentionState, KVPayload | None]:
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


def _gather_backward(
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


def _gather_refusals(program: RingProgram) -> list[str]:
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


def _gather_key_lengths(program: RingProgram) -> tuple[int, ...]:
    """A rank's own, and those of all ranks together if others' are seen."""
    own, gathers = program.plan.k_layout.local_len, any(step.shift for step in program.steps)
    return (own, own * program.plan.cp_size) if gathers else (own,)


RING = Strategy(
    _ring_forward,
    _ring_backward,
    refusals=lambda _: [],
    key_lengths=lambda program: (program.plan.k_layout.local_len,),
)
GATHER = Strategy(_gather_forward, _gather_backward, _gather_refusals, _gather_key_lengths)
STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {"ring": RING, "balanced": RING, "gather": GATHER}
)
