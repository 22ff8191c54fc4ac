"""The backward loop: the stages of the forward in reverse, with dK/dV on their way home."""

from __future__ import annotations

from torch import Tensor

from ring_core import WorkItem
from ring_torch.buffers import BufferSpec
from ring_torch.call import Call, header_device, zero_row_grads
from ring_torch.comm.handshake import agree
from ring_torch.comm.ranks import DONE, Transfer
from ring_torch.payload import keys_of, packing_of
from ring_torch.records import (
    BackwardInputs,
    Grads,
    Inputs,
    KeyBlock,
    KeyGrads,
    QueryBlock,
    QueryGrads,
)
from ring_torch.strategies.balanced import RemoteQueries, helped_rows, rows_tensors


def run_backward(
    call: Call, inputs: Inputs, upstream: BackwardInputs, last: Tensor | None
) -> Grads:
    """Gradients of this rank's shards.

    The stages start from the K/V that arrived last. dK/dV travel with the K/V they belong to, one
    stage late: while a stage computes its own, those of the ranks before are still arriving. The
    own block, run last, hides the last hop.

    Args:
        call: The call.
        inputs: Its tensors.
        upstream: The gradient of this rank's rows, with the global ``out`` and ``lse``.
        last: The packed K/V that the forward received last.
    """
    plan, ring = call.plan, call.ring
    agree(ring, call.number, call.seed, call.backward_signature, header_device(call))
    rows, keys = call.rows(inputs), keys_of(inputs)
    own = columns = call.columns(ring.rank, keys)
    packing, held = packing_of(keys), last
    if held is not None:
        columns = call.columns(ring.behind(plan.steps[-1].shift), packing.views(held))
    row_grads = zero_row_grads(call, rows)
    moving = RotatingKeyGrads(call, packing_of(keys[:2], call.acc_dtype))

    def help_with(item: WorkItem, tensors: list[Tensor]) -> list[Tensor]:
        theirs = helped_rows(call, item, rows, tensors)
        grads = zero_row_grads(call, theirs)
        sent = tensors[len(rows_tensors(rows)) :]
        delta = sent[3] if len(sent) > 3 else None
        _help(
            call, item, theirs, own, BackwardInputs(sent[0], sent[1], sent[2], delta), grads, moving
        )
        return _row_grad_tensors(grads)

    def add(part: slice, tensors: list[Tensor]) -> None:
        for total, x in zip(_row_grad_tensors(row_grads.take(part)), tensors, strict=True):
            total.add_(x)

    errands = RemoteQueries(
        call,
        plan.backward,
        take=lambda part: [
            *rows_tensors(rows.take(part)),
            *(x for x in upstream.take(part) if x is not None),
        ],
        like=lambda part: _row_grad_tensors(row_grads.take(part)),
        add=add,
    )
    for stage in plan.backward:
        transfer, arriving = DONE, held
        if stage.kv_hop is not None:
            assert held is not None
            arriving = packing.buffer(call.device)
            transfer = ring.start(
                [(held, ring.ahead(stage.kv_hop))], [(arriving, ring.behind(stage.kv_hop))]
            )
        _differentiate(call, rows, columns, own, upstream, stage.step, row_grads, moving)
        errands.collect()
        if stage.helps:
            errands.help(stage.step, help_with)
        moving.hop(stage.grad_hop, home=plan.steps[stage.step].shift == 0)
        transfer.wait()
        held = arriving
        if stage.kv_hop is not None:
            assert held is not None
            columns = call.columns(
                ring.behind(plan.steps[stage.step - 1].shift), packing.views(held)
            )
    errands.collect()
    home = moving.grads(home=True)
    return Grads(row_grads.dq, home.dk, home.dv, row_grads.dbias)


class RotatingKeyGrads:
    """dK/dV: those of this rank's own keys, and those of the keys it holds for now.

    At most three buffers live: one computing, one arriving, one leaving.
    """

    def __init__(self, call: Call, packing: BufferSpec) -> None:
        self._call = call
        self._packing = packing
        self._home: Tensor | None = None
        self._computing: Tensor | None = None
        self._arriving: Tensor | None = None
        self._transfer: Transfer = DONE

    def grads(self, *, home: bool) -> KeyGrads:
        """Accumulators of the own keys, or of the held ones; zero when first asked for."""
        buffer = self._home if home else self._computing
        if buffer is None:
            buffer = self._packing.buffer(self._call.device).zero_()
            if home:
                self._home = buffer
            else:
                self._computing = buffer
        dk, dv = self._packing.views(buffer)
        return KeyGrads(dk, dv)

    def hop(self, hop: int | None, *, home: bool) -> None:
        """Add what arrived to what was computed, and start moving the sum on."""
        self._transfer.wait()
        computed, arrived = self._home if home else self._computing, self._arriving
        if computed is None or arrived is None:
            total = computed if arrived is None else arrived
        else:
            acc_dtype = self._call.acc_dtype
            computed.view(acc_dtype).add_(arrived.view(acc_dtype))
            total = computed
        self._computing, self._arriving, self._transfer = None, None, DONE
        if home:
            self._home = total
        if hop is None:
            return
        leaving = self._packing.buffer(self._call.device).zero_() if total is None else total
        ring = self._call.ring
        self._arriving = self._packing.buffer(self._call.device)
        self._transfer = ring.start(
            [(leaving, ring.ahead(hop))], [(self._arriving, ring.behind(hop))]
        )


def _differentiate(
    call: Call, rows: QueryBlock, columns: KeyBlock, own: KeyBlock, upstream: BackwardInputs, step: int,
    row_grads: QueryGrads,
    moving: RotatingKeyGrads,
) -> None:  # fmt: skip
    """Run a step's items for this rank's own queries."""
    for item in call.plan.items(call.ring.rank, step):
        if item.q_rank == call.ring.rank and rows.q.shape[0] > 0:
            is_own = item.kv_rank == call.ring.rank
            keys = own if is_own else columns
            part = rows.take(item.q_slice), keys.take(item.k_slice), upstream.take(item.q_slice)
            column_grads = moving.grads(home=is_own).take(item.k_slice)
            call.kernel.backward(
                *part, item, call.params, row_grads.take(item.q_slice), column_grads
            )


def _help(
    call: Call,
    item: WorkItem,
    rows: QueryBlock,
    own: KeyBlock,
    upstream: BackwardInputs,
    row_grads: QueryGrads,
    moving: RotatingKeyGrads,
) -> None:
    """Run an item for another rank's queries, over this rank's own keys."""
    if rows.q.shape[0] > 0:
        column_grads = moving.grads(home=True).take(item.k_slice)
        call.kernel.backward(
            rows, own.take(item.k_slice), upstream, item, call.params, row_grads, column_grads
        )


def _row_grad_tensors(grads: QueryGrads) -> list[Tensor]:
    return [x for x in grads if x is not None]
