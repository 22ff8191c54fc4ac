"""The ring: K/V pass from rank to rank in steps, and dK/dV return behind them.

``overlap`` and ``order_after`` tell the compiler which transfers run beside which kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from ring_core import RingProgram
from ring_core.base.arguments import not_none
from ring_core.programs.ring import Stage
from ring_core.viz.text import imbalance_line, step_lines
from ring_jax.collectives import order_after, overlap
from ring_jax.rank_view import Launches, step_table
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
from ring_jax.strategies.steps import (
    QueryGrads,
    Returned,
    StepRunner,
    Strategy,
    merge,
    own_message,
    to_bhtd,
)


@dataclass(frozen=True)
class Run:
    """Consecutive stages that differ in nothing but their work items, run as one loop.

    Stages in which ranks help others differ also in who sends queries to whom. The pairs of ranks
    of a transfer are part of a program, so these transfers are written out for every stage; all
    else that the stages do is one function, which the program calls for each.

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

    @property
    def has_helpers(self) -> bool:
        """True if ranks help others in each of the stages."""
        return self.stages[0].offloads

    def after(self, n: int) -> Stage | None:
        """Return the stage after the ``n``-th one; ``None`` at the end of the pass."""
        return self.stages[n + 1] if n + 1 < len(self.stages) else self.next_stage


_SHORTEST_LOOP = 4  # stages: a loop of fewer is no smaller; a function pays with half as many


def _runs(program: RingProgram, stages: tuple[Stage, ...]) -> list[Run]:
    """Cut a pass into loops of equal stages, and single stages.

    Outside of loops are the first stage, which begins the accumulators, and the last one, which
    ends them; and stages with another hop than their neighbours, or with items that a kernel
    computes in another way, or without helpers beside stages with some.
    """
    arriving = [None, *(stage.grad_hop for stage in stages[:-1])]

    def kind(n: int) -> object:
        """Return a key that is equal for neighbouring stages which one loop can run."""
        if n in (0, len(stages) - 1):
            return n
        part = step_table(program, stages[n].step)
        # A loop's body is traced once: hops are part of it, and so is the way in which a kernel
        # computes items. The items themselves are operands, a row of a table an iteration.
        # Queries leave for helpers a stage before, and results of theirs arrive a stage later.
        helped = stages[n].offloads or (stages[n - 1].offloads, stages[n + 1].offloads)
        return stages[n].kv_hop, arriving[n], part.has_rectangles, helped

    loops = [list(group) for _, group in groupby(range(len(stages)), kind)]
    numbers = chain.from_iterable(
        [run] if (1 + stages[run[0]].offloads) * len(run) >= _SHORTEST_LOOP else [[n] for n in run]
        for run in loops
    )
    # Queries for helpers are sent a stage ahead, so a run also knows the stage behind it.
    following = [*stages[1:], None]
    return [
        Run(tuple(stages[n] for n in run), arriving[run[0]], following[run[-1]]) for run in numbers
    ]


class RunLaunches(NamedTuple):
    """The launches of a run's stages: of each rank's own queries, and of those of its peers."""

    own: Launches
    peer: Launches | None

    @classmethod
    def of(cls, program: RingProgram, run: Run) -> RunLaunches:
        """Make the launches of a run."""
        parts = [step_table(program, stage.step) for stage in run.stages]
        peer = Launches.of(*parts, for_peer=True) if run.has_helpers else None
        return cls(Launches.of(*parts), peer)


def _launches(program: RingProgram) -> list[Launches]:
    """Return the launches of both passes."""
    runs = chain(_runs(program, program.forward), _runs(program, program.backward))
    return [x for run in runs for x in RunLaunches.of(program, run) if x is not None]


class StageInputs(NamedTuple):
    """Operands of one stage of a run, beside what the stage before it leaves.

    Attributes:
        work: This rank's items; ``None`` if no rank has any.
        peer_work: Its items of the queries of the rank that it helps.
        queries: Queries of the rank that it helps in the next stage, in flight.
        returned: What its own helper computed in the stage before, in flight.
    """

    work: ItemTable | None
    peer_work: ItemTable | None = None
    queries: QueryPayload | None = None
    returned: Returned[Any] | None = None


class ForwardState(NamedTuple):
    """The arrays of a forward between two stages.

    Attributes:
        held: The K/V that the next stage computes with.
        into: Attention over all keys so far, but those of which ``peer_result`` tells the owner.
        peer_queries: Queries of the rank that this one helps in the next stage.
        peer_result: Result of the rank that this one helped in the stage before.
    """

    held: KVPayload
    into: AttentionState
    peer_queries: QueryPayload | None
    peer_result: AttentionState | None


def _run_stages[S: (ForwardState, BackwardState)](
    runner: StepRunner,
    stages: tuple[Stage, ...],
    send: Callable[[Stage | None], QueryPayload | None],
    run_stage: Callable[[Run, RunLaunches, S, StageInputs], tuple[S, None]],
    state: S,
) -> S:
    """Run the stages of a pass, equal ones in a loop or as calls of one function.

    Args:
        runner: The operations of the pass.
        stages: The stages.
        send: Sends this rank's queries to its helper in a stage.
        run_stage: Runs a stage of a run; it is the body of a ``lax.scan``.
        state: The arrays before the first stage.
    """
    before = stages[0]  # with no results to send home
    for run in _runs(runner.call.program, stages):
        launches = RunLaunches.of(runner.call.program, run)
        body = partial(run_stage, run, launches)
        if len(run.stages) > 1 and not run.has_helpers:
            # Tables are looked up for all stages before the loop; an iteration gets its own rows.
            inputs = StageInputs(runner.view.work_of(launches.own))
            # An iteration is two stages. The K/V that arrive in the first are sent in the second,
            # and those that arrive there take the place of the first ones. In a loop of one stage
            # the place where K/V arrive would be the one that they are sent from, and they would
            # be copied.
            state, _ = lax.scan(body, state, inputs, unroll=2)
            before = run.stages[-1]
            continue
        work = runner.work_of(launches.own)
        peer_work = runner.work_of(launches.peer) if launches.peer else [None] * len(work)
        # Traced once for equal stages, and one function of the program.
        call_stage = jax.jit(body) if len(work) > 1 else body
        for n, stage in enumerate(run.stages):
            # In flight beside the stage: queries for helpers in the next one, and what helpers
            # computed in the one before, on its way home.
            returned = runner.return_to_owner(before, state.peer_result)
            inputs = StageInputs(work[n], peer_work[n], send(run.after(n)), returned)
            state, _ = call_stage(state, inputs)
            before = stage
    return state


def _ring_forward(call: CallSpec, x: Inputs) -> tuple[AttentionState, KVPayload | None]:
    """Compute attention of this device's queries over all keys, before sinks.

    Returns:
        The wide result, and the K/V that arrived last (``None`` if nothing travelled).
    """
    runner, stages = StepRunner.of(call, x), call.program.forward
    q, own = to_bhtd(x.q), own_message(x)

    def run_stage(
        run: Run, launches: RunLaunches, state: ForwardState, inputs: StageInputs
    ) -> tuple[ForwardState, None]:
        """Run one stage of a run."""
        held, into, peer_queries, _ = state
        # The K/V we hold go to the next rank, and those of the rank before arrive beside them;
        # so do the queries for the next stage. Nothing is overwritten: both sets are live.
        arriving = runner.hop(held, run.kv_hop)
        # Meanwhile the kernel reads the K/V that are being sent.
        is_final = run.next_stage is None and inputs.returned is None and peer_queries is None
        into = runner.attend(
            launches.own, inputs.work, q, held, into, overwrite=run.stages[0] is stages[0],
            is_final=is_final,
        )  # fmt: skip
        # Our helper's results of the stage before have arrived beside that kernel.
        if inputs.returned is not None:
            into = merge(into, inputs.returned.results)
        # Help another rank; our results for it travel during the next stage's kernel.
        peer_result, next_peer_queries = None, inputs.queries
        if peer_queries is not None:
            peer = not_none(launches.peer), not_none(inputs.peer_work)
            peer_result = runner.attend_for_peer(*peer, peer_queries, own)
        # The received K/V become the current ones, no earlier than this stage's kernel ends.
        if run.next_stage is not None:
            into, arriving, next_peer_queries = overlap(into, arriving, next_peer_queries)
            arriving = order_after(arriving, into)
        return ForwardState(arriving, into, next_peer_queries, peer_result), None

    def send(stage: Stage | None) -> QueryPayload | None:
        return runner.send_to_helper(stage, q)

    # The own K/V are held first, whatever the first stage computes. Queries for its helpers leave
    # before it, with no kernel to hide them.
    state = ForwardState(own, runner.empty_state(q, x.v.shape[3]), send(stages[0]), None)
    state = _run_stages(runner, stages, send, run_stage, state)
    into = state.into
    # Helpers' results of the last stage have no kernel behind them to travel beside.
    if state.peer_result is not None:
        returned = not_none(runner.return_to_owner(stages[-1], state.peer_result))
        into = merge(into, returned.results)
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
        peer_result: Gradients of the queries of the rank that this one helped in the stage before.
    """

    held: KVPayload
    dkv: Array | None
    query_grads: QueryGrads
    own_dkv: Array | None
    peer_queries: QueryPayload | None
    peer_result: QueryGrads | None


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
        run: Run, launches: RunLaunches, state: BackwardState, inputs: StageInputs
    ) -> tuple[BackwardState, None]:
        """Run one stage of a run."""
        held, dkv_before, query_grads, own_dkv, peer_queries, _ = state
        is_own = launches.own.shifts == (0,)
        # In flight beside this stage's kernel: the K/V we hold, queries for helpers, and the sum
        # of dK/dV up to the stage before. The kernel adds to zeros, not to that sum.
        arriving = runner.hop(held, run.kv_hop)
        arriving_dkv = None if dkv_before is None else runner.hop(dkv_before, run.grad_hop)
        # The own K/V are packed again for the stage that needs them: kept from the beginning, they
        # would be a third set in memory beside those that are held and those that arrive.
        own = own_message(x, after=query_grads.dq) if is_own and last is not None else first
        keys, dkv = own if is_own else held, runner.zeros(own.kv.shape)
        # Other stages start from zeros. own_dkv has gradients already if this rank helped others.
        if is_own and own_dkv is not None:
            dkv = own_dkv
        query_grads, dkv = runner.differentiate(
            launches.own, inputs.work, q, keys, upstream, query_grads, dkv,
            overwrite=not is_own or not has_helpers,
        )  # fmt: skip
        # dQ that our helper computed in the stage before has arrived.
        if inputs.returned is not None:
            query_grads = runner.add_returned(query_grads, inputs.returned)
        # Help another rank; its dQ travels during the next stage's kernel, dK/dV stay here.
        peer_result, next_peer_queries = None, inputs.queries
        if peer_queries is not None:
            peer = not_none(launches.peer), not_none(inputs.peer_work), peer_queries
            before = runner.zeros(own.kv.shape) if own_dkv is None else own_dkv
            peer_result, own_dkv = runner.differentiate_for_peer(*peer, first, before)
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
        state = BackwardState(
            arriving, sums[0], query_grads, sums[1], next_peer_queries, peer_result
        )
        return state, None

    def send(stage: Stage | None) -> QueryPayload | None:
        return runner.send_to_helper(stage, q, upstream)

    query_grads = QueryGrads(runner.zeros(q.shape), runner.empty_bias_grad(x.bias))
    held = first if last is None else last
    state = BackwardState(held, None, query_grads, None, send(stages[0]), None)
    state = _run_stages(runner, stages, send, run_stage, state)
    query_grads = state.query_grads
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
