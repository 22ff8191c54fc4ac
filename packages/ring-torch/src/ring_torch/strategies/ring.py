"""K/V go round a ring of ranks: a kernel for each work item of a step, its result merged.

Ranks that would be idle may compute for busy ones: queries travel to them, and the results back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ring_core import StrategyName, WorkItem
from ring_torch.buffers import BufferSpec
from ring_torch.call import Call, Saved, Shapes, Strategy, zero_row_grads
from ring_torch.comm.handshake import agree
from ring_torch.comm.ranks import DONE, Transfer
from ring_torch.kernels.api import merge_into
from ring_torch.payload import keys_of, packing_of
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
from ring_torch.strategies.balanced import RemoteQueries, helped_rows, rows_tensors


@dataclass(frozen=True)
class Ring(Strategy):
    """A ring whose plan says who computes what: each rank for itself, or for others too.

    What a forward saves is the packed K/V that arrived last, if any travelled.
    """

    name: StrategyName

    def forward(self, call: Call, inputs: Inputs) -> tuple[AttentionState, Saved]:
        """The state in the accumulators' dtype, and the packed K/V that arrived last, if any did.

        K/V move in two slots: while a kernel reads one, it is sent on and the next arrives in the
        other.
        """
        program, ring = call.program, call.ring
        agree(ring, call.number, call.seed, call.forward_signature, call.device)
        rows, keys = call.rows(inputs), keys_of(inputs)
        own = columns = call.columns(ring.rank, keys)
        into = empty_state(rows.q, inputs.v.shape[3])
        packing = packing_of(keys)
        slots: list[Tensor] = []
        if program.num_steps > 1:
            slots = [packing.pack(keys, call.device), packing.buffer(call.device)]
        remote = RemoteQueries(
            call,
            program.forward,
            take=lambda part: rows_tensors(rows.take(part)),
            like=into.take,
            add=lambda part, tensors: merge_into(into.take(part), *tensors),
        )

        def attend_remote(item: WorkItem, tensors: list[Tensor]) -> AttentionState:
            theirs = helped_rows(call, item, rows, tensors)
            result = empty_state(theirs.q, inputs.v.shape[3])
            if theirs.q.shape[0] > 0:
                call.kernel.attend_into(theirs, own.take(item.k_slice), item, call.params, result)
            return result

        for stage in program.forward:
            transfer = DONE
            if stage.kv_hop is not None:
                kv, spare = slots
                transfer = ring.start(
                    [(kv, ring.ahead(stage.kv_hop))], [(spare, ring.behind(stage.kv_hop))]
                )
            _attend(call, rows, columns, own, stage.step, into)
            remote.finish()
            if stage.helps:
                remote.help(stage.step, attend_remote)
            transfer.wait()
            if stage.kv_hop is not None:
                slots.reverse()
                columns = call.columns(
                    ring.behind(program.steps[stage.step + 1].shift), packing.views(slots[0])
                )
        remote.finish()
        return into, tuple(slots[:1])

    def backward(self, call: Call, inputs: Inputs, upstream: BackwardInputs, saved: Saved) -> Grads:
        """The gradients in the accumulators' dtype.

        The stages of the forward in reverse, from the K/V that arrived last. dK/dV travel with the
        K/V they belong to, one stage late: while a stage computes its own, those of the ranks
        before are still arriving. The own block, run last, hides the last hop.
        """
        program, ring = call.program, call.ring
        agree(ring, call.number, call.seed, call.backward_signature, call.device)
        rows, keys = call.rows(inputs), keys_of(inputs)
        own = columns = call.columns(ring.rank, keys)
        packing, kv = packing_of(keys), saved[0] if program.num_steps > 1 else None
        if kv is not None:
            columns = call.columns(ring.behind(program.steps[-1].shift), packing.views(kv))
        row_grads = zero_row_grads(call, rows)
        key_grads = RotatingKeyGrads(call, packing_of(keys[:2], call.acc_dtype))
        remote, differentiate_remote = _remote_backward(
            call, rows, own, upstream, row_grads, key_grads
        )
        for stage in program.backward:
            transfer, arriving = DONE, kv
            if stage.kv_hop is not None:
                assert kv is not None
                arriving = packing.buffer(call.device)
                transfer = ring.start(
                    [(kv, ring.ahead(stage.kv_hop))], [(arriving, ring.behind(stage.kv_hop))]
                )
            _differentiate(call, rows, columns, own, upstream, stage.step, row_grads, key_grads)
            remote.finish()
            if stage.helps:
                remote.help(stage.step, differentiate_remote)
            key_grads.hop(stage.grad_hop, home=program.steps[stage.step].shift == 0)
            transfer.wait()
            kv = arriving
            if stage.kv_hop is not None:
                assert kv is not None
                columns = call.columns(
                    ring.behind(program.steps[stage.step - 1].shift), packing.views(kv)
                )
        remote.finish()
        home = key_grads.grads(home=True)
        return Grads(row_grads.dq, home.dk, home.dv, row_grads.dbias)

    def saved_shapes(self, call: Call, inputs: Inputs, *, plan_known: bool) -> Shapes:
        """A message of K/V, also where this plan moves none: another may."""
        del plan_known
        return [packing_of(keys_of(inputs)).as_bytes] if call.ring.size > 1 else []


def _attend(
    call: Call, rows: QueryBlock, columns: KeyBlock, own: KeyBlock, step: int, into: AttentionState
) -> None:
    """Run a step's items for this rank's own queries."""
    for item in call.program.items(call.ring.rank, step):
        if item.q_rank == call.ring.rank and rows.q.shape[0] > 0:
            keys = (own if item.kv_rank == call.ring.rank else columns).take(item.k_slice)
            place = into.take(item.q_slice)
            call.kernel.attend_into(rows.take(item.q_slice), keys, item, call.params, place)


class RotatingKeyGrads:
    """dK/dV: those of this rank's own keys, and those of the keys it holds for now.

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

    def hop(self, hop: int | None, *, home: bool) -> None:
        """Add what arrived to what was computed, and send the sum on."""
        self._transfer.wait()
        total, arrived = self._sums.pop(home, None), self._arriving
        self._arriving, self._transfer = None, DONE
        if total is None:
            total = arrived
        elif arrived is not None:
            acc_dtype = self._call.acc_dtype
            total.view(acc_dtype).add_(arrived.view(acc_dtype))
        if home and total is not None:
            self._sums[home] = total
        if hop is None:
            return
        sent = self._packing.buffer(self._call.device).zero_() if total is None else total
        ring = self._call.ring
        self._arriving = self._packing.buffer(self._call.device)
        self._transfer = ring.start([(sent, ring.ahead(hop))], [(self._arriving, ring.behind(hop))])


def _remote_backward(
    call: Call, rows: QueryBlock, own: KeyBlock, upstream: BackwardInputs, row_grads: QueryGrads,
    key_grads: RotatingKeyGrads,
) -> tuple[RemoteQueries, Callable[[WorkItem, list[Tensor]], list[Tensor]]]:  # fmt: skip
    """This rank's queries that others differentiate, and how it does others'."""

    def differentiate_remote(item: WorkItem, tensors: list[Tensor]) -> list[Tensor]:
        theirs = helped_rows(call, item, rows, tensors)
        grads = zero_row_grads(call, theirs)
        if theirs.q.shape[0] > 0:
            dout, out, lse, *delta = tensors[len(rows_tensors(rows)) :]
            given = BackwardInputs(dout, out, lse, delta[0] if delta else None)
            column_grads = key_grads.grads(home=True).take(item.k_slice)
            call.kernel.grads_into(
                theirs, own.take(item.k_slice), given, item, call.params, grads, column_grads
            )
        return _row_grad_tensors(grads)

    def add(part: slice, tensors: list[Tensor]) -> None:
        for total, x in zip(_row_grad_tensors(row_grads.take(part)), tensors, strict=True):
            total.add_(x)

    return RemoteQueries(
        call,
        call.program.backward,
        take=lambda part: [
            *rows_tensors(rows.take(part)),
            *(x for x in upstream.take(part) if x is not None),
        ],
        like=lambda part: _row_grad_tensors(row_grads.take(part)),
        add=add,
    ), differentiate_remote


def _differentiate(
    call: Call, rows: QueryBlock, columns: KeyBlock, own: KeyBlock, upstream: BackwardInputs, step: int,
    row_grads: QueryGrads,
    key_grads: RotatingKeyGrads,
) -> None:  # fmt: skip
    for item in call.program.items(call.ring.rank, step):
        if item.q_rank == call.ring.rank and rows.q.shape[0] > 0:
            is_own = item.kv_rank == call.ring.rank
            keys, column_grads = own if is_own else columns, key_grads.grads(home=is_own)
            part = rows.take(item.q_slice), keys.take(item.k_slice), upstream.take(item.q_slice)
            into = row_grads.take(item.q_slice), column_grads.take(item.k_slice)
            call.kernel.grads_into(*part, item, call.params, *into)


def _row_grad_tensors(grads: QueryGrads) -> list[Tensor]:
    return [x for x in grads if x is not None]
