"""A ring over contiguous shards whose idle ranks compute for busy ones.

Beside the keys, queries travel: to a helper, which computes over its own keys for them, and its
results travel back to be merged. They move in pieces of rows, one ahead of the piece that is being
computed, so that a helper holds two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from torch import Tensor

from ring_core import HELP_PIECES, RingProgram, Stage, WorkItem
from ring_torch.buffers import packing_of
from ring_torch.call import Call, Saved, Shapes, Strategy, StrategySpec, zero_row_grads
from ring_torch.comm.handshake import agree
from ring_torch.comm.ranks import DONE, Ranks, Transfer
from ring_torch.kernels.api import merge_into
from ring_torch.records import (
    AttentionState,
    BackwardInputs,
    Grads,
    Inputs,
    KeyGrads,
    QueryBlock,
    QueryGrads,
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


class HelpPiece(NamedTuple):
    """A piece of what ranks compute for each other in a step, resolved for a rank.

    Attributes:
        helper: The rank that computes for this one.
        helped: Rows of this rank's queries for which it does.
        launches: What this rank computes for others, over its own keys.
    """

    helper: int
    helped: tuple[slice, ...]
    launches: tuple[Launch, ...]


class BalancedStep(NamedTuple):
    """A step of a ring, and what ranks compute for each other after their own launches."""

    own: RingStep
    pieces: tuple[HelpPiece, ...]


def balanced_steps(
    program: RingProgram, rank: int, stages: tuple[Stage, ...]
) -> tuple[BalancedStep, ...]:
    """Resolve the stages of a pass for a rank."""

    def pieces(stage: Stage) -> tuple[HelpPiece, ...]:
        if not stage.helps:
            return ()
        helper = (rank + program.steps[stage.step].shift) % program.plan.cp_size
        helped = [item.cut(HELP_PIECES) for item in program.remote_items(rank, stage.step)]
        others = [
            item.cut(HELP_PIECES) for item in program.items(rank, stage.step) if item.q_rank != rank
        ]
        return tuple(
            HelpPiece(
                helper,
                tuple(cut[n].q_slice for cut in helped if n < len(cut)),
                tuple(Launch.of(cut[n]) for cut in others if n < len(cut)),
            )
            for n in range(HELP_PIECES)
        )

    steps = ring_steps(program, rank, stages)
    return tuple(BalancedStep(*x) for x in zip(steps, map(pieces, stages), strict=True))


@dataclass(frozen=True)
class Balanced(Strategy):
    """A ring with helpers. What a forward saves are the packed keys that arrived last, if any."""

    forward_steps: tuple[BalancedStep, ...]
    backward_steps: tuple[BalancedStep, ...]
    name: str = "balanced"

    @classmethod
    def of(cls, program: RingProgram, rank: int) -> Self:
        """Resolve a program for a rank."""
        return cls(
            balanced_steps(program, rank, program.forward),
            balanced_steps(program, rank, program.backward),
        )

    def forward(self, call: Call, inputs: Inputs) -> tuple[AttentionState, Saved]:
        """The state in the accumulators' dtype, and the packed keys that arrived last, if any."""
        agree(call.ranks, call.number, call.seed, call.forward_signature, call.device)
        rows, keys = call.rows(inputs), inputs.key_tensors()
        own = call.columns(call.ranks.rank, keys)
        into = empty_state(rows.q, inputs.v.shape[3])
        saved: Saved = ()
        if len(self.forward_steps) > 1:
            packing = packing_of(keys)
            held, spare = packing.pack(keys, call.device), packing.buffer(call.device)
        remote = RemoteQueries(
            call.ranks, self.forward_steps,
            take=lambda part: rows_tensors(rows.take(part)),
            like=into.take,
            add=lambda part, tensors: merge_into(into.take(part), *tensors),
        )  # fmt: skip

        def attend(launch: Launch, tensors: list[Tensor]) -> AttentionState:
            theirs = helped_rows(call, launch.item, rows, tensors)
            result = empty_state(theirs.q, inputs.v.shape[3])
            if theirs.q.shape[0] > 0:
                keys = own.take(launch.columns)
                call.kernel.attend_into(theirs, keys, launch.item, call.params, result)
            return result

        for step, pieces in self.forward_steps:
            # Kernels read the keys in ``held`` while they are sent on; what ``spare`` held went on
            # in the step before.
            transfer = DONE
            if step.keys_to is not None and step.keys_from is not None:
                transfer = call.ranks.start([(held, step.keys_to)], [(spare, step.keys_from)])
            columns = own
            if not step.is_own:
                columns = call.columns(step.keys_of, packing.views(held))
            attend_step(call, step.launches, rows, columns, into)
            remote.finish()
            remote.help(pieces, attend)
            transfer.wait()
            if step.keys_to is not None:
                held, spare = spare, held
                saved = (held,)
        remote.finish()
        return into, saved

    def backward(self, call: Call, inputs: Inputs, upstream: BackwardInputs, saved: Saved) -> Grads:
        """The gradients in the accumulators' dtype; as in a ring, with queries that travel."""
        agree(call.ranks, call.number, call.seed, call.backward_signature, call.device)
        rows, keys = call.rows(inputs), inputs.key_tensors()
        own = call.columns(call.ranks.rank, keys)
        packing = packing_of(keys)
        row_grads = zero_row_grads(call, rows)
        key_grads = RotatingKeyGrads(call, packing_of(keys[:2], call.acc_dtype))

        def differentiate(launch: Launch, tensors: list[Tensor]) -> list[Tensor]:
            theirs = helped_rows(call, launch.item, rows, tensors)
            grads = zero_row_grads(call, theirs)
            if theirs.q.shape[0] > 0:
                dout, out, lse, *delta = tensors[len(rows_tensors(rows)) :]
                given = BackwardInputs(dout, out, lse, delta[0] if delta else None)
                into: KeyGrads = key_grads.grads(home=True).take(launch.columns)
                call.kernel.grads_into(
                    theirs, own.take(launch.columns), given, launch.item, call.params, grads, into
                )
            return _row_grad_tensors(grads)

        def add(part: slice, tensors: list[Tensor]) -> None:
            for total, x in zip(_row_grad_tensors(row_grads.take(part)), tensors, strict=True):
                total.add_(x)

        remote = RemoteQueries(
            call.ranks, self.backward_steps,
            take=lambda part: [
                *rows_tensors(rows.take(part)),
                *(x for x in upstream.take(part) if x is not None),
            ],
            like=lambda part: _row_grad_tensors(row_grads.take(part)),
            add=add,
        )  # fmt: skip
        held = next(iter(saved), None)
        for step, pieces in self.backward_steps:
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
            remote.finish()
            remote.help(pieces, differentiate)
            # The sum of the ranks before has to be here now; with this rank's part it goes on.
            key_grads.hop(step)
            transfer.wait()
            held = arriving
        remote.finish()
        home = key_grads.grads(home=True)
        return Grads(row_grads.dq, home.dk, home.dv, row_grads.dbias)

    def traffic(self, call: Call, inputs: Inputs, *, forward: bool, saved: bool) -> Traffic:
        """As in a ring, and rows of queries to helpers, whose results come back."""
        del saved  # the backward sends the keys round again
        steps = self.forward_steps if forward else self.backward_steps
        ring = ring_traffic(call, inputs, [step.own for step in steps], forward=forward)
        pieces = [piece for step in steps for piece in step.pieces]
        helped = sum(rows.stop - rows.start for piece in pieces for rows in piece.helped)
        others = sum(x.rows.stop - x.rows.start for piece in pieces for x in piece.launches)
        query = _query_bytes(call, inputs, forward=forward)
        result = _result_bytes(call, inputs, forward=forward)
        return Traffic(
            ring.sent + query * helped + result * others,
            ring.received + query * others + result * helped,
        )

    def saved_shapes(self, call: Call, inputs: Inputs, *, plan_known: bool) -> Shapes:
        """A message of K/V, also where this plan moves none: another may."""
        del plan_known
        return [packing_of(inputs.key_tensors()).as_bytes] if call.ranks.size > 1 else []


#: What arrives at a helper, and where: the tensors of the rows of each launch.
_Arriving = tuple[Transfer, list[tuple[Launch, list[Tensor]]]]


class RemoteQueries:
    """Ships what a call's rows need to their helpers, helps others, and brings results home.

    Args:
        ring: The ranks.
        steps: The pass.
        take: Cuts the tensors a helper needs out of this rank's own, for a slice of rows; as shapes
            are equal on all ranks, it also tells what a shipment from another rank looks like.
        like: Tensors of the shapes and dtypes of the results of a slice of rows.
        add: Adds results that came home in their place.
    """

    def __init__(
        self,
        ring: Ranks,
        steps: Sequence[BalancedStep],
        *,
        take: Callable[[slice], list[Tensor]],
        like: Callable[[slice], Sequence[Tensor]],
        add: Callable[[slice, list[Tensor]], None],
    ) -> None:
        self._ring, self._take, self._like, self._add = ring, take, like, add
        self._to_send = iter([piece for step in steps for piece in step.pieces])
        self._returning: list[tuple[Transfer, list[tuple[slice, list[Tensor]]]]] = []
        self._arriving = self._send_next()

    def help(
        self,
        pieces: Sequence[HelpPiece],
        compute: Callable[[Launch, list[Tensor]], Sequence[Tensor]],
    ) -> None:
        """Compute for others in a step, piece by piece; ``compute`` is given what arrived."""
        for piece in pieces:
            transfer, arriving = self._arriving
            transfer.wait()
            self._arriving = self._send_next()  # the next piece travels while this one is computed
            results = [(launch.item.out_rank, compute(launch, x)) for launch, x in arriving]
            self.finish()
            self._return_results(piece, results)

    def finish(self) -> None:
        """Wait for results sent home, and add each in its place."""
        for transfer, expected in self._returning:
            transfer.wait()
            for rows, tensors in expected:
                self._add(rows, tensors)
        self._returning.clear()

    def _send_next(self) -> _Arriving:
        """Start sending the next piece that others compute, and receiving the next one to do."""
        piece = next(self._to_send, None)
        if piece is None:
            return DONE, []
        sends = [(x.contiguous(), piece.helper) for rows in piece.helped for x in self._take(rows)]
        arriving = [
            (launch, [x.new_empty(x.shape) for x in self._take(launch.rows)])
            for launch in piece.launches
        ]
        receives = [(x, launch.item.q_rank) for launch, tensors in arriving for x in tensors]
        return self._ring.start(sends, receives), arriving

    def _return_results(
        self, piece: HelpPiece, results: Sequence[tuple[int, Sequence[Tensor]]]
    ) -> None:
        """Start sending results to the ranks they belong to, and receiving this rank's own."""
        expected = [
            (rows, [x.new_empty(x.shape) for x in self._like(rows)]) for rows in piece.helped
        ]
        transfer = self._ring.start(
            [(x, owner) for owner, tensors in results for x in tensors],
            [(x, piece.helper) for _, tensors in expected for x in tensors],
        )
        self._returning.append((transfer, expected))


def rows_tensors(rows: QueryBlock) -> list[Tensor]:
    """What a helper needs of some rows to run the forward."""
    return [x for x in (rows.q, rows.segments, rows.bias, rows.bias_shift) if x is not None]


def helped_rows(call: Call, item: WorkItem, like: QueryBlock, tensors: list[Tensor]) -> QueryBlock:
    """Rows that arrived as :func:`rows_tensors`, completed by what every rank knows."""
    q, *rest = tensors
    segments = None if like.segments is None else rest.pop(0)
    bias = None if like.bias is None else rest.pop(0)
    shift = None if like.bias_shift is None else rest.pop(0)
    index, position, _ = [
        None if x is None else x[item.q_slice] for x in call.positions(item.q_rank)
    ]
    return QueryBlock(q, index, position, segments, bias, like.slopes, bias_shift=shift)


def _row_grad_tensors(grads: QueryGrads) -> list[Tensor]:
    return [x for x in grads if x is not None]


def _query_bytes(call: Call, inputs: Inputs, *, forward: bool) -> int:
    """Count the bytes of one token's query rows, as a helper gets them."""
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
    """Count the bytes of one token's results, as a helper sends them home."""
    batch, _, heads, dim = inputs.q.shape
    if forward:
        return batch * heads * (inputs.v.shape[3] + 1) * call.acc_dtype.itemsize
    bias = 0
    if inputs.bias is not None and call.params.bias_grad:
        bias = inputs.bias[:, :, :1].numel()
    return (batch * heads * dim + bias) * call.acc_dtype.itemsize


BALANCED = StrategySpec("balanced", lambda given: Balanced.of(given.program, given.rank))
