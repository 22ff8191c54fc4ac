"""Gathered keys: attend over the own keys while all K/V are gathered, then over all other ranks'.

There are two kernel launches in place of one a rank, so results are merged once, and kernels get
as much work as there is. It costs memory for the keys of all ranks, kept for the backward if they
are few, and there for the sums of their gradients. ``overlap`` and ``order_after`` tell the
compiler which transfers run beside which kernels.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ring_core import Request, RingProgram
from ring_core.choose.gathering import MAX_SAVED_BYTES, memory_refusals
from ring_core.viz.text import figure, imbalance_line
from ring_jax.collectives import order_after, overlap
from ring_jax.rank_view import Launches, remote_table, step_table
from ring_jax.records import (
    Array,
    AttentionState,
    BackwardInputs,
    CallSpec,
    Devices,
    Direction,
    Grads,
    Inputs,
    KVPayload,
    nbytes,
)
from ring_jax.strategies.steps import QueryGrads, StepRunner, Strategy, own_message, to_bhtd

_KV_TOKEN_DIM, _ID_TOKEN_DIM = 2, 1


def _gather_forward(call: CallSpec, x: Inputs) -> tuple[AttentionState, KVPayload | None]:
    """Compute attention of this device's queries over all keys, before sinks.

    Returns:
        The wide result, and the K/V of all ranks (``None`` if no query sees another rank's keys,
        and where the backward gathers them again).
    """
    runner = StepRunner.of(call, x)
    remote_part, own_part = _parts(call.program)
    q, own = to_bhtd(x.q), own_message(x)
    # The K/V of all ranks are in flight ...
    gathering = None if remote_part is None else _gather_all(runner, own)
    into = runner.empty_state(q, x.v.shape[3])
    # ... while the kernel computes with the own ones.
    is_final = remote_part is None
    into = runner.attend(
        own_part, runner.work_of(own_part)[0], q, own, into, overwrite=True, is_final=is_final
    )
    if remote_part is None or gathering is None:
        return into, None
    # The gathered keys have arrived, and are used no earlier than that kernel ends.
    into, gathered = overlap(into, gathering)
    into = runner.attend(
        remote_part, runner.work_of(remote_part)[0], q, order_after(gathered, into), into,
        overwrite=False, is_final=True,
    )  # fmt: skip
    # Kept as they arrived, not tied to the own block's kernel: gathered again under a policy of
    # jax.checkpoint, they need no kernel.
    return into, gathering if _is_kept(call, x) else None


def _gather_backward(
    call: CallSpec, x: Inputs, upstream: BackwardInputs, gathered: KVPayload | None
) -> Grads:
    """Compute the gradients of this device's shards, wide, heads first.

    ``gathered`` are the K/V of all ranks, if they were kept since the forward. Other ranks' keys
    come first, so that the sums of their gradients travel beside the own block.
    """
    runner = StepRunner.of(call, x)
    remote_part, own_part = _parts(call.program)
    q, own = to_bhtd(x.q), own_message(x)
    # Not kept since the forward: gathered again, with no kernel to hide it, as all work that could
    # run meanwhile is needed to hide the sums on their way back.
    if remote_part is not None and gathered is None:
        gathered = _gather_all(runner, own)
    query_grads = QueryGrads(runner.zeros(q.shape), runner.empty_bias_grad(x.bias))
    own_dkv = runner.zeros(own.kv.shape)
    arriving: Array | None = None
    if remote_part is not None and gathered is not None:
        # A sum for every rank's keys, not only the own ones: this rank's part of all dK/dV.
        dkv = runner.zeros(gathered.kv.shape)
        query_grads, dkv = runner.differentiate(
            remote_part, runner.work_of(remote_part)[0], q, gathered, upstream, query_grads, dkv,
            overwrite=True,
        )  # fmt: skip
        # In flight: every rank's dK/dV for the keys of all ranks; each gets the sum for its own ...
        arriving = runner.ranks.scatter(dkv, _KV_TOKEN_DIM)
        own = own_message(x, after=query_grads.dq)
    # ... while the kernel computes the own block, in an accumulator of its own.
    query_grads, own_dkv = runner.differentiate(
        own_part, runner.work_of(own_part)[0], q, own, upstream, query_grads, own_dkv,
        overwrite=True,
    )  # fmt: skip
    # The other ranks' sums for the own keys have arrived beside the own block's kernel.
    if arriving is not None:
        query_grads, own_dkv, received = overlap(query_grads, own_dkv, arriving)
        own_dkv = own_dkv + received
    return Grads(query_grads.dq, own_dkv, query_grads.dbias)


def _is_kept(call: CallSpec, x: Inputs) -> bool:
    """Return True if the backward gets the gathered K/V of the forward."""
    return call.plan.cp_size * nbytes(x.k, x.v, x.k_ids) <= MAX_SAVED_BYTES


def _gather_all(runner: StepRunner, own: KVPayload) -> KVPayload:
    """Gather the K/V and segment ids of all ranks, in the order of the ranks."""
    ids = None if own.ids is None else runner.ranks.gather(own.ids, _ID_TOKEN_DIM)
    return KVPayload(runner.ranks.gather(own.kv, _KV_TOKEN_DIM), ids)


def _parts(program: RingProgram) -> tuple[Launches | None, Launches]:
    """Return the launch over all gathered keys, and that over a rank's own ones.

    The first is ``None`` where no query sees another rank's keys.
    """
    remote = remote_table(program)
    # The first step is that of the own keys, also where no query sees any of them.
    return None if remote is None else Launches.of(remote), Launches.of(step_table(program, 0))


def _refusals(program: RingProgram, _request: Request) -> list[str]:
    """Return why gathered keys cannot serve a program: predicates, documents out of order."""
    if program.plan.blocks is not None:
        return ["a predicate mask is planned in tiles of each rank's own keys"]
    remote_part, layout = remote_table(program), program.plan.k_layout.name
    if remote_part is None or not remote_part.has_documents or layout == "contiguous":
        return []
    return [
        (
            f"packed documents and chunks have to lie in natural order, and in layout {layout!r} "
            f"they do not (in 'contiguous' they do)"
        )
    ]


def _key_lengths(program: RingProgram) -> tuple[int, ...]:
    """Return a rank's number of keys, and that of all ranks if any query sees another rank's."""
    own, gathers = program.plan.k_layout.local_len, any(step.shift for step in program.steps)
    return (own, own * program.plan.cp_size) if gathers else (own,)


def _gather_sent(call: CallSpec, x: Inputs, direction: Direction) -> int:
    """Return the bytes that leave all ranks together in one pass over gathered keys."""
    if remote_table(call.program) is None:
        return 0
    # By pair of ranks: each sends its K/V to every other one, and its part of the dK/dV of every
    # other one's keys. The own pieces stay.
    grads = (x.k.size + x.v.size) * np.dtype(call.wide).itemsize
    message = nbytes(x.k, x.v, x.k_ids)
    if direction == "forward":
        per_pair = message
    else:
        per_pair = grads if _is_kept(call, x) else grads + message
    return call.plan.cp_size * (call.plan.cp_size - 1) * per_pair


def _figures(call: CallSpec) -> list[str]:
    """Return how even the work is, and what is gathered for which launches."""
    remote_part, _ = _parts(call.program)
    fetches, launches = "none, as no query sees keys of another device", "1 over own keys"
    if remote_part is not None:
        shards = call.plan.cp_size - 1
        plural = "s" if shards > 1 else ""
        fetches = f"{shards} shard{plural} of K/V by each device, in one all-gather"
        launches += ", 1 over all others"
    return [
        imbalance_line(call.program), figure("fetches", fetches),
        figure("launches", f"{launches}, in the forward"),
    ]  # fmt: skip


#: Platforms on which ``auto`` does not gather, and why.
_RING_ON = {
    "cpu": "devices of a CPU share its cores and its memory, and a ring was faster there",
    "tpu": "on TPUs XLA runs an all-gather beside no kernel, and each hop of a ring beside one",
}

#: ``auto`` does not gather more than this many times the shards of K/V that go round a ring. On
#: four H200s, with a window of which the ring passes two shards on, gathering all three took 0.89
#: of the ring's time forward and 0.94 with the backward.
MOST_FETCHED = 1.5


def _automatic_refusals(
    program: RingProgram, request: Request, devices: Devices
) -> tuple[str, ...]:
    """Return why ``auto`` does not gather: it does where that was faster and memory allows it."""
    plan, shards = program.plan, program.plan.cp_size - 1
    # The first reason stands for what follows from it.
    if shards == 0:
        return ("on one device nothing travels",)
    if devices.platform != "gpu":
        return (_RING_ON.get(devices.platform, f"it was not measured on {devices.platform}"),)
    if not devices.in_one_process:
        return ("between processes, which may be on other hosts, each hop of a ring is hidden",)
    if shards == 1:
        return ("on two devices it launches what a ring does, and takes more memory",)
    hops = sum(stage.kv_hop is not None for stage in program.forward)
    if shards > MOST_FETCHED * hops:
        return (f"it fetches {shards} shards of K/V, and {hops} go round the ring",)
    return memory_refusals(
        plan, request, itemsize=jnp.dtype(request.dtype).itemsize,
        buffer_len=plan.k_layout.padded_len,
    )  # fmt: skip


GATHER = Strategy(
    "gather",
    _gather_forward,
    _gather_backward,
    _refusals,
    _key_lengths,
    launches=lambda program: [part for part in _parts(program) if part is not None] * 2,
    sent=_gather_sent,
    figures=_figures,
    automatic_refusals=_automatic_refusals,
)
