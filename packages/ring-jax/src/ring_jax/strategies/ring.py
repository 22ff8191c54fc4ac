"""The ring: K/V pass from rank to rank in steps, and dK/dV return behind them.

``overlap`` and ``order_after`` tell the compiler which transfers run beside which kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np

from ring_core import RingProgram
from ring_core.base.arguments import not_none
from ring_core.programs.ring import Stage
from ring_core.viz.text import imbalance_line, step_lines
from ring_jax.collectives import order_after, overlap
from ring_jax.rank_view import Launches, StepTable, step_table
from ring_jax.records import (
    Array,
    AttentionState,
    BackwardInputs,
    CallSpec,
    Direction,
    Grads,
    Inputs,
    ItemTable,
    KVPayload,
    QueryPayload,
    nbytes,
)
from ring_jax.strategies.steps import QueryGrads, StepRunner, Strategy, merge, own_message, to_bhtd


@dataclass(frozen=True)
class Run:
    """Consecutive stages that differ in nothing but their work items, run as one loop.

    Attributes:
        stages: The stages.
        grad_hop: Distance that the dK/dV sums of the stage before travel, beside each of them.
        next_stage: The stage after the last one; ``None`` at the end of the pass.
    """

    stages: tuple[Stage, ...]
    grad_hop: int | None
    next_stage: Stage | None

    @property
    def kv_hop(self) -> int | None:
        """Distance that K/V travel beside each stage."""
        return self.stages[0].kv_hop


_SHORTEST_LOOP = 4  # stages: a loop of fewer is no smaller than they are


def _runs(program: RingProgram, stages: tuple[Stage, ...]) -> list[Run]:
    """Cut a pass into loops of equal stages, and single stages.

    Outside of loops are the first stage, which begins the accumulators, and the last one, which
    ends them; stages with another hop than their neighbours, or with items that a kernel computes
    in another way; and where ranks help others, all of them.
    """
    has_helpers = any(stage.offloads for stage in stages)
    arriving = [None, *(stage.grad_hop for stage in stages[:-1])]

    def kind(n: int) -> object:
        """Return a key that is equal for neighbouring stages which one loop can run."""
        if n in (0, len(stages) - 1) or has_helpers:
            return n
        part = step_table(program, stages[n].step)
        # A loop's body is traced once: hops are part of it, and so is the way in which a kernel
        # computes items. The items themselves are operands, a row of a table an iteration.
        return stages[n].kv_hop, arriving[n], part.has_rectangles

    loops = [list(group) for _, group in groupby(range(len(stages)), kind)]
    numbers = chain.from_iterable(
        [loop] if len(loop) >= _SHORTEST_LOOP else [[n] for n in loop] for loop in loops
    )
    # Queries for helpers are sent a stage ahead, so a run also knows the stage behind it.
    following = [*stages[1:], None]
    return [
        Run(tuple(stages[n] for n in run), arriving[run[0]], following[run[-1]]) for run in numbers
    ]


def _launches_of(program: RingProgram, run: Run) -> Launches:
    """Return the launches of a run's stages."""
    return Launches.of(*(step_table(program, stage.step) for stage in run.stages))


def _launches(program: RingProgram) -> list[Launches]:
    """Return the launches of both passes, with those for other ranks' queries."""
    launches: list[Launches] = []
    for stages in (program.forward, program.backward):
        launches += [_launches_of(program, run) for run in _runs(program, stages)]
        parts = [step_table(program, stage.step) for stage in stages if stage.offloads]
        launches += [Launches.of(part, for_peer=True) for part in parts]
    return launches


class ForwardState(NamedTuple):
    """The arrays of a forward between two stages.

    Attributes:
        held: The K/V that the next stage computes with.
        into: Attention over all keys so far, but those whose results are in ``returned``.
        peer_queries: Queries of the rank that this one helps in the next stage.
        returned: Results of this rank's own helper in the stage before.
    """

    held: KVPayload
    into: AttentionState
    peer_queries: QueryPayload | None
    returned: AttentionState | None


def _ring_forward(call: CallSpec, x: Inputs) -> tuple[AttentionState, KVPayload | None]:
    """Compute attention of this device's queries over all keys, before sinks.

    Returns:
        The wide result, and the K/V that arrived last (``None`` if nothing travelled).
    """
    runner, stages = StepRunner.of(call, x), call.program.forward
    q, own = to_bhtd(x.q), own_message(x)

    def run_stage(
        run: Run, launches: Launches, work: ItemTable | None, state: ForwardState
    ) -> ForwardState:
        """Run one stage of a run; ``work`` are this rank's items, ``None`` if no rank has any."""
        held, into, peer_queries, returned = state
        # The K/V we hold go to the next rank, and those of the rank before arrive beside them;
        # so do the queries for the next stage. Nothing is overwritten: both sets are live.
        arriving = runner.hop(held, run.kv_hop)
        next_peer_queries = runner.send_to_helper(run.next_stage, q)
        # Meanwhile the kernel reads the K/V that are being sent.
        is_final = run.next_stage is None and returned is None and peer_queries is None
        into = runner.attend(
            launches, work, q, held, into, overwrite=run.stages[0] is stages[0], is_final=is_final
        )
        # Our helper's results of the stage before have arrived beside that kernel.
        if returned is not None:
            into, returned = merge(into, returned), None
        # Help another rank; our results for it travel during the next stage's kernel.
        if peer_queries is not None:
            part = step_table(call.program, run.stages[0].step)
            peer_result = runner.attend_for_peer(part, peer_queries, own)
            returned = runner.return_to_owner(part, peer_result)
        # The received K/V become the current ones, no earlier than this stage's kernel ends.
        if run.next_stage is not None:
            into, arriving, next_peer_queries = overlap(into, arriving, next_peer_queries)
            arriving = order_after(arriving, into)
        return ForwardState(arriving, into, next_peer_queries, returned)

    into = runner.empty_state(q, x.v.shape[3])
    # The own K/V are held first, whatever the first stage computes. Queries for its helpers leave
    # before it, with no kernel to hide them.
    state = ForwardState(own, into, runner.send_to_helper(stages[0], q), None)
    for run in _runs(call.program, stages):
        launches = _launches_of(call.program, run)
        state = runner.for_each(launches, partial(run_stage, run, launches), state)
    # Helpers' results of the last stage have no kernel behind them to travel beside.
    into = state.into if state.returned is None else merge(state.into, state.returned)
    return into, state.held if len(stages) > 1 else None


class BackwardState(NamedTuple):
    """The arrays of a backward between two stages.

    Attributes:
        held: The K/V that the next stage computes with.
        dkv: Sum of dK/dV of the K/V of the stage before, to follow them round the ring; ``None``
            before the first stage, and after the last one, where the sum is the rank's own.
        query_grads: Gradients of this rank's queries so far.
        own_dkv: dK/dV of this rank's own K/V; ``None`` as long as nothing was added to them.
        peer_queries: Queries of the rank that this one helps in the next stage.
        returned: The part in which this rank was helped before, and what its helper computed.
    """

    held: KVPayload
    dkv: Array | None
    query_grads: QueryGrads
    own_dkv: Array | None
    peer_queries: QueryPayload | None
    returned: tuple[StepTable, QueryGrads] | None


def _ring_backward(
    call: CallSpec, x: Inputs, upstream: BackwardInputs, last: KVPayload | None
) -> Grads:
    """Compute the gradients of this device's shards, wide, heads first.

    The stages run in reverse, from ``last``, the K/V that arrived last in the forward.
    """
    runner, stages = StepRunner.of(call, x), call.program.backward
    q, first = to_bhtd(x.q), own_message(x)
    has_helpers = any(stage.offloads for stage in stages)

    def run_stage(
        run: Run, launches: Launches, work: ItemTable | None, state: BackwardState
    ) -> BackwardState:
        """Run one stage of a run; ``work`` are this rank's items, ``None`` if no rank has any."""
        held, dkv_before, query_grads, own_dkv, peer_queries, returned = state
        is_own = launches.shifts == (0,)
        # In flight beside this stage's kernel: the K/V we hold, queries for helpers, and the sum
        # of dK/dV up to the stage before. The kernel adds to zeros, not to that sum.
        arriving = runner.hop(held, run.kv_hop)
        arriving_dkv = None if dkv_before is None else runner.hop(dkv_before, run.grad_hop)
        next_peer_queries = runner.send_to_helper(run.next_stage, q, upstream)
        # The own K/V are packed again for the stage that needs them: kept from the beginning, they
        # would be a third set in memory beside those that are held and those that arrive.
        own = own_message(x, after=query_grads.dq) if is_own and last is not None else first
        keys, dkv = own if is_own else held, runner.zeros(own.kv.shape)
        # Other stages start from zeros. own_dkv has gradients already if this rank helped others.
        if is_own and own_dkv is not None:
            dkv = own_dkv
        query_grads, dkv = runner.differentiate(
            launches, work, q, keys, upstream, query_grads, dkv,
            overwrite=not is_own or not has_helpers,
        )  # fmt: skip
        # dQ that our helper computed in the stage before has arrived.
        if returned is not None:
            query_grads, returned = runner.add_returned(query_grads, *returned), None
        # Help another rank; its dQ travels during the next stage's kernel, dK/dV stay here.
        if peer_queries is not None:
            part = step_table(call.program, run.stages[0].step)
            before = runner.zeros(own.kv.shape) if own_dkv is None else own_dkv
            peer_grads, own_dkv = runner.differentiate_for_peer(part, peer_queries, first, before)
            returned = part, runner.return_to_owner(part, peer_grads)
        # What arrived may be read from here on, no earlier than this stage's kernel ends.
        if run.next_stage is not None or arriving_dkv is not None:
            query_grads, dkv, arriving, next_peer_queries, arriving_dkv = overlap(
                query_grads, dkv, arriving, next_peer_queries, arriving_dkv
            )
            arriving = order_after(arriving, (query_grads, dkv))
        # The sum that arrived is of the same keys as this stage's dK/dV. It is sent on in the next
        # stage, or kept where it is home: in the stage of this rank's own keys.
        dkv = dkv if arriving_dkv is None else dkv + arriving_dkv
        sums = (None, dkv) if is_own else (dkv, own_dkv)
        return BackwardState(arriving, sums[0], query_grads, sums[1], next_peer_queries, returned)

    query_grads = QueryGrads(runner.zeros(q.shape), runner.empty_bias_grad(x.bias))
    peer_queries = runner.send_to_helper(stages[0], q, upstream)
    held = first if last is None else last
    state = BackwardState(held, None, query_grads, None, peer_queries, None)
    for run in _runs(call.program, stages):
        launches = _launches_of(call.program, run)
        state = runner.for_each(launches, partial(run_stage, run, launches), state)
    query_grads = state.query_grads
    if state.returned is not None:
        query_grads = runner.add_returned(query_grads, *state.returned)
    return Grads(query_grads.dq, not_none(state.own_dkv), query_grads.dbias)


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
    # Messages leave for helpers alone, and return from them: out and lse, or dQ and dbias, both
    # wide. In a backward dO, lse and delta go along with the queries.
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


def _figures(call: CallSpec) -> list[str]:
    """Return how even the work is, and how often K/V are passed on; one device passes nothing."""
    passes_on = call.plan.cp_size > 1
    return [imbalance_line(call.program), *(step_lines(call.program) if passes_on else ())]


RING = Strategy(
    "ring",
    _ring_forward,
    _ring_backward,
    refusals=lambda *_: (),
    key_lengths=lambda program: (program.plan.k_layout.local_len,),
    launches=_launches,
    sent=_ring_sent,
    figures=_figures,
)
# The same loop over another program, in whose stages ranks help others.
BALANCED = RING._replace(name="balanced")
