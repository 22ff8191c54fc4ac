"""Keys and values go round a ring of ranks: kernels run for each step, and their results merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from torch import Tensor

from ring_core import RingProgram, Stage, WorkItem
from ring_torch.buffers import BufferSpec, packing_of
from ring_torch.call import Call, Saved, Shapes, Strategy, StrategySpec, zero_row_grads
from ring_torch.comm.handshake import agree
from ring_torch.comm.ranks import DONE, Transfer
from ring_torch.records import (
    AttentionState,
    BackwardInputs,
    Grads,
    Inputs,
    KeyBlock,
    KeyGrads,
    QueryBlock,
    QueryGrads,
    empty_state,
)
from ring_torch.transports.api import Traffic


class Launch(NamedTuple):
    """A kernel launch: a work item, and what it takes of local queries and keys."""

    item: WorkItem
    rows: slice
    columns: slice

    @classmethod
    def of(cls, item: WorkItem) -> Self:
        """The launch of an item."""
        return cls(item, item.q_slice, item.k_slice)


class RingStep(NamedTuple):
    """What a rank does in one step of a pass, resolved.

    Attributes:
        launches: For its own queries, over the keys that it holds.
        keys_of: The rank whose keys these are.
        is_own: They are its own, which lie where they were given.
        keys_to: While the launches run, the keys go on to this rank; ``None`` if no step needs
            them.
        keys_from: And those of the next step arrive from this one.
        grads_to: Backward: after the launches the gradients of the keys go on to this rank, summed
            up with what arrived; ``None`` if they are home.
        grads_from: And those of the next step's keys arrive from this one.
    """

    launches: tuple[Launch, ...]
    keys_of: int
    is_own: bool
    keys_to: int | None
    keys_from: int | None
    grads_to: int | None
    grads_from: int | None


def ring_steps(program: RingProgram, rank: int, stages: tuple[Stage, ...]) -> tuple[RingStep, ...]:
    """Resolve the stages of a pass for a rank."""
    size = program.plan.cp_size

    def away(hop: int | None, direction: int) -> int | None:
        return None if hop is None else (rank + direction * hop) % size

    return tuple(
        RingStep(
            tuple(
                Launch.of(item) for item in program.items(rank, stage.step) if item.q_rank == rank
            ),
            (rank - program.steps[stage.step].shift) % size,
            program.steps[stage.step].shift == 0,
            away(stage.kv_hop, 1), away(stage.kv_hop, -1),
            away(stage.grad_hop, 1), away(stage.grad_hop, -1),
        )
        for stage in stages
    )  # fmt: skip


@dataclass(frozen=True)
class Ring(Strategy):
    """A ring in which each rank computes for itself.

    What a forward saves are the packed keys and values that arrived last, if any travelled.
    """

    forward_steps: tuple[RingStep, ...]
    backward_steps: tuple[RingStep, ...]
    name: str = "ring"

    @classmethod
    def of(cls, program: RingProgram, rank: int) -> Self:
        """Resolve a program for a rank."""
        return cls(
            ring_steps(program, rank, program.forward), ring_steps(program, rank, program.backward)
        )

    def forward(self, call: Call, inputs: Inputs) -> tuple[AttentionState, Saved]:
        """The state in the accumulators' dtype, and the packed keys that arrived last, if any."""
        agree(call.ranks, call.number, call.seed, call.forward_signature, call.device)
        rows, keys = call.rows(inputs), inputs.key_tensors()
        own = call.columns(call.ranks.rank, keys)
        into = empty_state(rows.q, inputs.v.shape[3])
        saved: Saved = ()
        if len(self.forward_steps) > 1:
            # Two buffers: kernels read the keys in one, which are sent on meanwhile, and the next
            # arrive in the other, whose keys went on in the step before.
            packing = packing_of(keys)
            held, spare = packing.pack(keys, call.device), packing.buffer(call.device)
        for step in self.forward_steps:
            transfer = DONE
            if step.keys_to is not None and step.keys_from is not None:
                transfer = call.ranks.start([(held, step.keys_to)], [(spare, step.keys_from)])
            columns = own
            if not step.is_own:
                columns = call.columns(step.keys_of, packing.views(held))
            attend_step(call, step.launches, rows, columns, into)
            transfer.wait()
            if step.keys_to is not None:
                held, spare = spare, held
                saved = (held,)
        return into, saved

    def backward(self, call: Call, inputs: Inputs, upstream: BackwardInputs, saved: Saved) -> Grads:
        """The gradients in the accumulators' dtype.

        The forward's steps in reverse, from the keys that arrived last. The gradients of keys
        travel with them, a step late: while a step computes its part, the sum of the ranks before
        still arrives. A rank's own keys come last, and hide the last hop of their gradients home.
        """
        agree(call.ranks, call.number, call.seed, call.backward_signature, call.device)
        rows, keys = call.rows(inputs), inputs.key_tensors()
        own = call.columns(call.ranks.rank, keys)
        packing = packing_of(keys)
        row_grads = zero_row_grads(call, rows)
        key_grads = RotatingKeyGrads(call, packing_of(keys[:2], call.acc_dtype))
        held = next(iter(saved), None)
        for step in self.backward_steps:
            transfer, arriving = DONE, held
            if held is not None and step.keys_to is not None and step.keys_from is not None:
                # Kernels read ``held`` while it is sent on; the next keys get their own buffer.
                arriving = packing.buffer(call.device)
                transfer = call.ranks.start([(held, step.keys_to)], [(arriving, step.keys_from)])
            columns = own
            if not step.is_own:
                assert held is not None
                columns = call.columns(step.keys_of, packing.views(held))
            if step.launches:
                differentiate_step(call, step, rows, columns, upstream, row_grads, key_grads)
            # The sum of the ranks before has to be here now; with this rank's part it goes on.
            key_grads.hop(step)
            transfer.wait()
            held = arriving
        home = key_grads.grads(home=True)
        return Grads(row_grads.dq, home.dk, home.dv, row_grads.dbias)

    def traffic(self, call: Call, inputs: Inputs, *, forward: bool, saved: bool) -> Traffic:
        """Keys that go on, and in the backward gradients."""
        del saved  # the backward sends the keys round again
        steps = self.forward_steps if forward else self.backward_steps
        return ring_traffic(call, inputs, steps, forward=forward)

    def saved_shapes(self, call: Call, inputs: Inputs, *, plan_known: bool) -> Shapes:
        """A message of K/V, also where this plan moves none: another may."""
        del plan_known
        return [packing_of(inputs.key_tensors()).as_bytes] if call.ranks.size > 1 else []


def ring_traffic(
    call: Call, inputs: Inputs, steps: Sequence[RingStep], *, forward: bool
) -> Traffic:
    """Count the bytes of keys, and of their gradients, that go from rank to rank in these steps."""
    keys = inputs.key_tensors()
    kv = packing_of(keys).size
    grads = 0 if forward else packing_of(keys[:2], call.acc_dtype).size
    return Traffic(
        sum(kv * (x.keys_to is not None) + grads * (x.grads_to is not None) for x in steps),
        sum(kv * (x.keys_from is not None) + grads * (x.grads_from is not None) for x in steps),
    )


def attend_step(
    call: Call,
    launches: tuple[Launch, ...],
    rows: QueryBlock,
    columns: KeyBlock,
    into: AttentionState,
) -> None:
    """Run launches of a forward, and merge what each gives."""
    if rows.q.shape[0] == 0:
        return
    for item, at, keys_at in launches:
        call.kernel.attend_into(
            rows.take(at), columns.take(keys_at), item, call.params, into.take(at)
        )


def differentiate_step(
    call: Call, step: RingStep, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs,
    row_grads: QueryGrads, key_grads: RotatingKeyGrads,
) -> None:  # fmt: skip
    """Run the launches of a backward's step, and add what each gives."""
    if rows.q.shape[0] == 0:
        return
    column_grads = key_grads.grads(home=step.is_own)
    for item, at, keys_at in step.launches:
        call.kernel.grads_into(
            rows.take(at), columns.take(keys_at), upstream.take(at), item, call.params,
            row_grads.take(at), column_grads.take(keys_at),
        )  # fmt: skip


class RotatingKeyGrads:
    """Gradients of keys: those of this rank's own, and those of the keys that it holds for now.

    At most three buffers live: one computing, one arriving, one leaving.
    """

    def __init__(self, call: Call, packing: BufferSpec) -> None:
        self._call, self._packing = call, packing
        self._sums: dict[bool, Tensor] = {}  # by whether they are of the own keys
        self._arriving: Tensor | None = None
        self._transfer: Transfer = DONE

    def grads(self, *, home: bool) -> KeyGrads:
        """Accumulators of the own keys, or of those it holds for now; zero when first asked for."""
        if home not in self._sums:
            self._sums[home] = self._packing.buffer(self._call.device).zero_()
        return KeyGrads(*self._packing.views(self._sums[home]))

    def hop(self, step: RingStep) -> None:
        """Add what arrived to what was computed in a step, and send the sum on.

        The sum that leaves is read until the next hop waits for it; nothing else writes it.
        """
        self._transfer.wait()
        home = step.is_own
        total, arrived = self._sums.pop(home, None), self._arriving
        self._arriving, self._transfer = None, DONE
        if total is None:
            total = arrived
        elif arrived is not None:
            acc_dtype = self._call.acc_dtype
            total.view(acc_dtype).add_(arrived.view(acc_dtype))
        if home and total is not None:
            self._sums[home] = total
        if step.grads_to is None or step.grads_from is None:
            return
        sent = self._packing.buffer(self._call.device).zero_() if total is None else total
        self._arriving = self._packing.buffer(self._call.device)
        self._transfer = self._call.ranks.start(
            [(sent, step.grads_to)], [(self._arriving, step.grads_from)]
        )


RING = StrategySpec(
    "ring", lambda given: Ring.of(given.program, given.rank), is_automatic=lambda _: True
)
