"""Strategy ``balanced``: a ring over contiguous shards whose idle ranks compute for busy ones.

Beside K/V, queries travel: a busy rank sends rows of Q to an idle one, its helper, which attends
with them to its own K/V and sends ``(out, lse)`` back to be merged; in the backward dQ comes back.
Rows move in pieces. The next piece is in flight while one is computed, so a helper holds two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from torch import Tensor

from ring_core import RingProgram, WorkItem
from ring_core.programs.ring import Stage, offload_pieces
from ring_torch.buffers import Shapes, packing_of
from ring_torch.call import Call, Saved, Strategy, StrategySpec, zero_row_grads
from ring_torch.comm.handshake import agree
from ring_torch.comm.ranks import DONE, Ranks, Transfer
from ring_torch.kernels.api import merge_into
from ring_torch.records import (
    AttentionState,
    BackwardInputs,
    Grads,
    Inputs,
    QueryBlock,
    empty_state,
)
from ring_torch.strategies.ring import (
    Launch,
    RingStep,
    RotatingKeyGrads,
    attend_step,
    differentiate_step,
    ring_steps,
    ring_traffic,
)
from ring_torch.transports.api import Traffic


class OffloadPiece(NamedTuple):
    """A piece of the work that ranks do for each other in a step, as one rank sees it.

    Attributes:
        helper: The rank that computes for this rank, if any rows are sent there.
        sent_rows: Slices of this rank's query rows that are sent there.
        launches: Launches of this rank for other ranks' query rows, over its own K/V.
    """

    helper: int
    sent_rows: tuple[slice, ...]
    launches: tuple[Launch, ...]


class BalancedStep(NamedTuple):
    """A step of a ring, and the pieces that ranks compute for each other after their own launches.

    All ranks have the same number of pieces in a step; those of some are empty.
    """

    own: RingStep
    pieces: tuple[OffloadPiece, ...]


def balanced_steps(
    program: RingProgram, rank: int, stages: tuple[Stage, ...]
) -> tuple[BalancedStep, ...]:
    """Return the steps of a pass for a rank, each with its pieces of offloaded work."""
    count = offload_pieces(program.plan.q_layout.local_len)

    def pieces(stage: Stage) -> tuple[OffloadPiece, ...]:
        """Return the pieces of a stage: its work items for other ranks, cut in slices of rows.

        Owner and helper cut the same items in the same order, so the owner's n-th piece is what
        the helper receives n-th.
        """
        if not stage.offloads:
            return ()
        helper = (rank + program.steps[stage.step].shift) % program.plan.cp_size
        offloaded = [item.cut(count) for item in program.remote_items(rank, stage.step)]
        for_others = [
            item.cut(count) for item in program.items(rank, stage.step) if item.q_rank != rank
        ]
        return tuple(
            OffloadPiece(
                helper,
                tuple(cut[n].q_slice for cut in offloaded if n < len(cut)),
                tuple(Launch.of(cut[n]) for cut in for_others if n < len(cut)),
            )
            for n in range(count)
        )

    steps = ring_steps(program, rank, stages)
    return tuple(BalancedStep(*x) for x in zip(steps, map(pieces, stages), strict=True))


@dataclass(frozen=True)
class Balanced(Strategy):
    """Strategy ``balanced``: a ring in which idle ranks compute for the queries of busy ones.

    The forward saves the packed K/V that arrived last, if any travelled.
    """

    forward_steps: tuple[BalancedStep, ...]
    backward_steps: tuple[BalancedStep, ...]
    name: str = "balanced"

    @classmethod
    def of(cls, program: RingProgram, rank: int) -> Self:
        """Make the steps of both passes for a rank."""
        return cls(
            balanced_steps(program, rank, program.forward),
            balanced_steps(program, rank, program.backward),
        )

    def forward(self, call: Call, inputs: Inputs) -> tuple[AttentionState, Saved]:
        """Return ``(out, lse)`` in the accumulators' dtype and the packed K/V that arrived last."""
        agree(
            call.ranks, call.number, call.params.dropout_seed, call.forward_signature, call.device
        )
        rows, keys = call.rows(inputs), inputs.key_tensors()
        own = call.columns(call.ranks.rank, keys)
        into = empty_state(rows.q, inputs.v.shape[3])
        saved: Saved = ()
        if len(self.forward_steps) > 1:
            packing = packing_of(keys)
            held, spare = packing.pack(keys, call.device), packing.buffer(call.device)
        remote = RemoteQueries(
            call.ranks, self.forward_steps,
            take=lambda tokens: rows_tensors(rows.take(tokens)),
            like=into.take,
            add=lambda tokens, tensors: merge_into(into.take(tokens), *tensors),
        )  # fmt: skip

        def attend(launch: Launch, tensors: list[Tensor]) -> AttentionState:
            """Attend to own K/V with another rank's rows; the result is merged there, not here."""
            peer_rows = remote_rows(call, launch.item, rows, tensors)
            result = empty_state(peer_rows.q, inputs.v.shape[3])
            if peer_rows.q.shape[0] > 0:
                keys = own.take(launch.columns)
                call.kernel.attend_into(peer_rows, keys, launch.item, call.params, result)
            return result

        for step, pieces in self.forward_steps:
            # Send the held K/V on, and receive the next into the spare buffer, whose K/V were sent
            # in the step before. In flight beside it: the first piece of remote queries, and
            # results of the step before on their way home.
            transfer = DONE
            if step.keys_hop is not None:
                transfer = call.ranks.rotate(held, spare, step.keys_hop, beside=True)
            columns = own
            if not step.is_own:
                columns = call.columns(step.keys_of, packing.views(held))
            # Kernels read `held` while it is being sent: both only read.
            attend_step(call, step.launches, rows, columns, into)
            # Merge what helpers computed for this rank before, then compute for others.
            remote.compute_pieces(pieces, attend)
            # The next step reads the K/V that arrived; `held` has been sent and may be overwritten.
            transfer.wait()
            if step.keys_hop is not None:
                held, spare = spare, held
                saved = (held,)
        # Results of the last step's helpers may still be on their way.
        remote.finish()
        return into, saved

    def backward(self, call: Call, inputs: Inputs, upstream: BackwardInputs, saved: Saved) -> Grads:
        """Return the gradients in the accumulators' dtype.

        It is the backward of :class:`ring_torch.strategies.ring.Ring`, in which helpers also get
        dout, out, lse and delta of the rows they compute for, and send dQ back. Their part of dK/dV
        is of their own K/V and stays.
        """
        agree(
            call.ranks, call.number, call.params.dropout_seed, call.backward_signature, call.device
        )
        rows, keys = call.rows(inputs), inputs.key_tensors()
        own = call.columns(call.ranks.rank, keys)
        packing = packing_of(keys)
        row_grads = zero_row_grads(call, rows)
        key_grads = RotatingKeyGrads(call, packing_of(keys[:2], call.acc_dtype))
        own_grads = key_grads.grads(own=True)

        def differentiate(launch: Launch, tensors: list[Tensor]) -> list[Tensor]:
            """Compute dQ and, if any, dbias for another rank's rows; dK/dV go to own sums."""
            peer_rows = remote_rows(call, launch.item, rows, tensors)
            grads = zero_row_grads(call, peer_rows)
            if peer_rows.q.shape[0] > 0:
                dout, out, lse, *delta = tensors[len(rows_tensors(rows)) :]
                peer_upstream = BackwardInputs(dout, out, lse, delta[0] if delta else None)
                into = own_grads.take(launch.columns)
                call.kernel.grads_into(
                    peer_rows, own.take(launch.columns), peer_upstream, launch.item, call.params, grads, into,
                )  # fmt: skip
            return [x for x in grads if x is not None]

        def add(tokens: slice, tensors: list[Tensor]) -> None:
            """Add the gradients that a helper sent home for a slice of this rank's rows."""
            totals = [x for x in row_grads.take(tokens) if x is not None]
            for total, x in zip(totals, tensors, strict=True):
                total.add_(x)

        remote = RemoteQueries(
            call.ranks, self.backward_steps,
            take=lambda tokens: [
                *rows_tensors(rows.take(tokens)),
                *[x for x in upstream.take(tokens) if x is not None],
            ],
            like=lambda tokens: [x for x in row_grads.take(tokens) if x is not None],
            add=add,
        )  # fmt: skip
        held = next(iter(saved), None)
        for step, pieces in self.backward_steps:
            transfer, arriving = DONE, held
            if held is not None and step.keys_hop is not None:
                # Send the held K/V on and receive the next into a new buffer: `held` may be the
                # tensor that autograd saved, which must not be overwritten.
                arriving = packing.buffer(call.device)
                transfer = call.ranks.rotate(held, arriving, step.keys_hop, beside=True)
            columns = own
            if not step.is_own:
                assert held is not None
                columns = call.columns(step.keys_of, packing.views(held))
            # Kernels read `held` while it is being sent; the ranks before still add to its dK/dV.
            if step.launches:
                into = own_grads if step.is_own else key_grads.grads(own=False)
                differentiate_step(call, step.launches, rows, columns, upstream, row_grads, into)
            # Add the dQ that helpers computed for this rank before, then compute for others.
            remote.compute_pieces(pieces, differentiate)
            # The sum of the ranks before is needed now: this rank's part is added, and it goes on.
            key_grads.hop(step)
            # The next step reads the K/V that arrived, or `held` again if none were to come.
            if transfer is not DONE:
                transfer.wait()
            held = arriving
        # dQ of the last step's helpers may still be on its way.
        remote.finish()
        return Grads(row_grads.dq, own_grads.dk, own_grads.dv, row_grads.dbias)

    def traffic(self, call: Call, inputs: Inputs, *, forward: bool, saved: bool) -> Traffic:
        """Count the bytes of the ring's K/V, of query rows for helpers, and of their results."""
        del saved  # the backward sends the keys round again
        steps = self.forward_steps if forward else self.backward_steps
        ring = ring_traffic(call, inputs, [step.own for step in steps], forward=forward)
        pieces = [piece for step in steps for piece in step.pieces]
        rows_sent = sum(rows.stop - rows.start for piece in pieces for rows in piece.sent_rows)
        rows_received = sum(x.rows.stop - x.rows.start for piece in pieces for x in piece.launches)
        query = _query_bytes(call, inputs, forward=forward)
        result = _result_bytes(call, inputs, forward=forward)
        return Traffic(
            ring.sent + query * rows_sent + result * rows_received,
            ring.received + query * rows_received + result * rows_sent,
        )

    def saved_shapes(self, call: Call, inputs: Inputs, *, plan_known: bool) -> Shapes:
        """Return the shape of one packed K/V message, also if this plan moves none.

        A compiled forward always saves one, as another plan of the same graph may.
        """
        del plan_known
        return [packing_of(inputs.key_tensors()).as_bytes] if call.ranks.size > 1 else []


#: A piece that arrives at a helper: the transfer, and the tensors that it fills for each launch.
_Arriving = tuple[Transfer, list[tuple[Launch, list[Tensor]]]]


class RemoteQueries:
    """Exchange of query rows and results between busy ranks and their helpers in one pass.

    All ranks go through the pieces of all steps in one order, so that sends meet their receives.

    Args:
        ranks: The ranks that hold one sequence.
        steps: The steps of the pass.
        take: Returns the tensors that a helper needs for a slice of this rank's rows. Shards have
            equal shapes on all ranks, so it also gives the shapes of what other ranks send.
        like: Returns tensors with the shapes and dtypes of the results for a slice of rows.
        add: Merges or adds results that came home for a slice of rows.
    """

    def __init__(
        self,
        ranks: Ranks,
        steps: Sequence[BalancedStep],
        *,
        take: Callable[[slice], list[Tensor]],
        like: Callable[[slice], Sequence[Tensor]],
        add: Callable[[slice, list[Tensor]], None],
    ) -> None:
        self._ranks, self._take, self._like, self._add = ranks, take, like, add
        self._to_send = iter([piece for step in steps for piece in step.pieces])
        self._returning: list[tuple[Transfer, list[tuple[slice, list[Tensor]]]]] = []
        self._arriving = self._send_next()

    def compute_pieces(
        self,
        pieces: Sequence[OffloadPiece],
        compute: Callable[[Launch, list[Tensor]], Sequence[Tensor]],
    ) -> None:
        """Take in earlier results; compute for other ranks, and start sending the results home.

        ``compute`` gets a launch and the tensors that arrived for it, and returns its results.
        """
        if self._returning:
            self.finish()
        for piece in pieces:
            transfer, arriving = self._arriving
            # This piece of other ranks' rows is here, and this rank's own has left.
            transfer.wait()
            # The next piece travels, into tensors of its own, while this one is computed; the
            # peers start the same exchange when they come to this point.
            self._arriving = self._send_next()
            results = [(launch.item.out_rank, compute(launch, x)) for launch, x in arriving]
            # Before more results are sent home take in those of the piece before: at most one
            # piece of results is in flight, and what was sent of it may be freed.
            if self._returning:
                self.finish()
            self._return_results(piece, results)

    def finish(self) -> None:
        """Wait for the results that helpers sent home, and add them to this rank's."""
        for transfer, expected in self._returning:
            transfer.wait()
            for rows, tensors in expected:
                self._add(rows, tensors)
        self._returning.clear()

    def _send_next(self) -> _Arriving:
        """Start sending this rank's next piece to its helper, and receiving the next to compute.

        Return the transfer and what it fills; after the last piece both are empty.
        """
        piece = next(self._to_send, None)
        if piece is None:
            return DONE, []
        sends = [
            (x.contiguous(), piece.helper) for rows in piece.sent_rows for x in self._take(rows)
        ]
        arriving = [
            (launch, [x.new_empty(x.shape) for x in self._take(launch.rows)])
            for launch in piece.launches
        ]
        receives = [(x, launch.item.q_rank) for launch, tensors in arriving for x in tensors]
        return self._ranks.start(sends, receives), arriving

    def _return_results(
        self, piece: OffloadPiece, results: Sequence[tuple[int, Sequence[Tensor]]]
    ) -> None:
        """Start sending computed results to their owners, and receiving those of this rank's rows.

        The transfer keeps what is sent alive; :meth:`finish` takes in what arrives.
        """
        expected = [
            (rows, [x.new_empty(x.shape) for x in self._like(rows)]) for rows in piece.sent_rows
        ]
        transfer = self._ranks.start(
            [(x, owner) for owner, tensors in results for x in tensors],
            [(x, piece.helper) for _, tensors in expected for x in tensors],
        )
        self._returning.append((transfer, expected))


def rows_tensors(rows: QueryBlock) -> list[Tensor]:
    """Return the tensors of some rows that a helper needs for a forward: q, and what q comes with.

    The order is q, segment ids, bias, bias shift; absent ones are left out, alike on all ranks.
    """
    return [x for x in (rows.q, rows.segments, rows.bias, rows.bias_shift) if x is not None]


def remote_rows(call: Call, item: WorkItem, local: QueryBlock, tensors: list[Tensor]) -> QueryBlock:
    """Return another rank's rows as a block, from tensors in the order of :func:`rows_tensors`.

    Positions come from the plan, which every rank has, and slopes from ``local``, this rank's rows:
    both are never sent.
    """
    q, *remaining = tensors
    segments = None if local.segments is None else remaining.pop(0)
    bias = None if local.bias is None else remaining.pop(0)
    shift = None if local.bias_shift is None else remaining.pop(0)
    index, position, _ = [
        None if x is None else x[item.q_slice] for x in call.positions(item.q_rank)
    ]
    return QueryBlock(q, index, position, segments, bias, local.slopes, bias_shift=shift)


def _query_bytes(call: Call, inputs: Inputs, *, forward: bool) -> int:
    """Return the bytes that are sent to a helper for one token's queries."""
    batch, _, heads, _ = inputs.q.shape
    tensors = [x[:, :1] for x in (inputs.q, inputs.q_ids) if x is not None]
    size = sum(x.nbytes for x in tensors)
    if inputs.bias is not None:
        size += inputs.bias[:, :, :1].nbytes
        if call.params.shifts_bias:
            shared = inputs.bias.shape[0] if inputs.k_ids is None else batch
            size += shared * inputs.bias.shape[1] * call.acc_dtype.itemsize
    if not forward:
        numbers = 2 if call.kernel.needs_delta else 1  # lse, delta
        size += batch * heads * 2 * inputs.v.shape[3] * inputs.q.itemsize  # dout, out
        size += batch * heads * numbers * call.acc_dtype.itemsize
    return size


def _result_bytes(call: Call, inputs: Inputs, *, forward: bool) -> int:
    """Return the bytes of results that a helper sends home for one token."""
    batch, _, heads, dim = inputs.q.shape
    if forward:
        return batch * heads * (inputs.v.shape[3] + 1) * call.acc_dtype.itemsize
    bias = 0
    if inputs.bias is not None and call.params.bias_grad:
        bias = inputs.bias[:, :, :1].numel()
    return (batch * heads * dim + bias) * call.acc_dtype.itemsize


BALANCED = StrategySpec(
    "balanced", lambda resolution: Balanced.of(resolution.program, resolution.rank)
)
