"""Ring attention: K/V shards travel from rank to rank while each rank attends to those it holds.

In the forward partial results ``(out, lse)`` merge step by step. In the backward dK/dV travel
after their K/V, collecting each rank's part, until they are home.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ring_core import RingProgram, WorkItem
from ring_core.programs.grid import RankGrid
from ring_core.programs.ring import Stage
from ring_core.viz.text import step_lines
from ring_torch.accumulate import Accumulator, Joins, Rows, Work, joins_of
from ring_torch.buffers import BufferSpec, Shapes, aligned_bytes, packing_of
from ring_torch.call import Call, Saved, Strategy, StrategySpec, Traffic
from ring_torch.comm.ranks import DONE, Transfer
from ring_torch.records import (
    AttentionState,
    Backward,
    BackwardInputs,
    Grads,
    Inputs,
    KeyBlock,
    KeyGrads,
    QueryBlock,
)


class RingStep(NamedTuple):
    """A step of one pass for one rank: work over the held K/V, and its messages.

    Attributes:
        items: Work items of this rank's queries over the K/V that it holds in this step.
        keys_of: The rank to which these K/V belong.
        is_own: True if they are this rank's own, which are read from the call's inputs.
        keys_hop: How many ranks ahead the held K/V are sent while the launches run; the next step's
            arrive meanwhile from as many behind. ``None`` if no later step needs them.
        grads_hop: In the backward, how many ranks ahead the summed dK/dV of the held K/V are sent
            after the launches, while those of the next step's K/V arrive from as many behind.
            ``None`` if they are home.
    """

    items: tuple[WorkItem, ...]
    keys_of: int
    is_own: bool
    keys_hop: int | None
    grads_hop: int | None


def ring_steps(program: RingProgram, rank: int, stages: tuple[Stage, ...]) -> tuple[RingStep, ...]:
    """Return the steps of a pass for a rank: its work, and how far what it holds travels."""
    shifts = [program.steps[stage.step].shift for stage in stages]
    return tuple(
        RingStep(
            tuple(item for item in program.items(rank, stage.step) if item.q_rank == rank),
            (rank - shift) % program.plan.cp_size,
            shift == 0,
            stage.kv_hop,
            stage.grad_hop,
        )
        for stage, shift in zip(stages, shifts, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class Ring(Strategy):
    """Strategy ``ring``: each rank computes for its own queries, and K/V shards go round.

    The forward starts with the rank's own K/V, and saves the packed ones that arrived last, if any
    travelled. The backward starts from those, sends the others round again, and ends with its own.

    Attributes:
        forward_steps: The steps of the forward.
        backward_steps: The steps of the backward.
        work: The launches of each step of the forward.
        joins: How the results of all of them come together.
        backward_launches: The launches of each step of the backward.
    """

    name: str = "ring"
    forward_steps: tuple[RingStep, ...]
    backward_steps: tuple[RingStep, ...]
    work: tuple[Work, ...]
    joins: Joins
    backward_launches: tuple[Backward, ...]

    @classmethod
    def of(cls, call: Call, _inner: Call | None = None, _grid: RankGrid | None = None) -> Self:
        """Make the steps of both passes of a call for its rank."""
        passes = call.program.forward, call.program.backward
        return cls.of_steps(call, *(ring_steps(call.program, call.ranks.rank, x) for x in passes))

    @classmethod
    def of_steps(
        cls,
        call: Call,
        forward: tuple[RingStep, ...],
        backward: tuple[RingStep, ...],
        *,
        resumes: bool = False,
        **fields: Any,
    ) -> Self:
        """Make the launches of a call's steps; with ``resumes`` others merge results, too."""
        params = replace(call.params, needs_lse=True)  # partial results are merged by it
        length = call.plan.q_layout.local_len
        work = tuple(
            Work.of([call.kernel.forward(x, params) for x in step.items], length, call.keys.length)
            for step in forward
        )
        launches = [launch for some in work for launch in some.launches]
        joins = joins_of(launches, call.dtype, length, wide=call.has_sinks, resumes=resumes)
        return cls(
            forward_steps=forward,
            backward_steps=backward,
            work=work,
            joins=joins,
            # Launches run in reverse.
            backward_launches=tuple(
                call.kernel.backward(step.items[::-1], params, adds=True) for step in backward
            ),
            **fields,
        )

    def forward(self, call: Call, inputs: Inputs) -> tuple[AttentionState, Saved]:
        """Return ``(out, lse)``, and the packed K/V that arrived last.

        Nothing is saved on one rank, or where no step but the rank's own has work.
        """
        if call.ranks.size > 1:
            call.agree(call.ranks, call.forward_signature)
        key_tensors = inputs.k, inputs.v, inputs.k_ids
        rows, keys = call.rows(inputs), [x.detach() for x in key_tensors if x is not None]
        results = Accumulator(self.joins, rows.q, inputs.v.shape[3])
        saved: Saved = []
        if len(self.forward_steps) > 1:
            # Two buffers, whatever the number of ranks: `held` is read by kernels and by the send,
            # `spare` is where the next K/V arrive. The call's own K/V are copied into `held` once.
            packing = packing_of(keys)
            held, spare = packing.pair(call.device)
            held_keys, spare_keys = packing.views(held), packing.views(spare)
            for view, x in zip(held_keys, keys, strict=True):
                view.copy_(x)
        # Query rows for helpers, if there are any, leave now and travel while the first steps
        # compute.
        offload = self.offload_forward(call, inputs, keys, rows, results)
        next(offload)
        for step, work in zip(self.forward_steps, self.work, strict=True):
            # Send the held K/V on, and receive the next into the spare buffer. Its former K/V were
            # sent in the step before, and their kernels are queued ahead of this transfer, so it
            # may be overwritten. The peers do the same with their buffers.
            if step.keys_hop is not None:
                transfer = call.ranks.rotate(held, spare, step.keys_hop, beside=True)
            # Kernels read `held` while it is being sent: both only read.
            columns = call.columns(step.keys_of, keys if step.is_own else held_keys)
            # Launches on one stream run in order; each may be merged with what those before wrote.
            results.attend(work, rows, columns)
            # Run this step's part of the offloaded work: take in results that came home, compute
            # for peers. The next K/V may still arrive.
            next(offload)
            # The next step reads what arrived. That the send has completed frees `held`, too.
            if step.keys_hop is not None:
                transfer.wait()
                held, spare, held_keys, spare_keys = spare, held, spare_keys, held_keys
                saved = [held]
        # Wait for results that helpers still owe this rank, and merge them.
        next(offload, None)
        return results.finish(), saved

    def backward(self, call: Call, inputs: Inputs, upstream: BackwardInputs, saved: Saved) -> Grads:
        """Return the gradients in the accumulators' dtype.

        The steps are the forward's in reverse, beginning with the K/V that arrived last there. dK
        and dV travel the way of their K/V, one step late: while a step computes its part, the sum
        over the ranks before is still arriving. The rank's own K/V come last, and their launches
        hide the last hop of their gradients home.
        """
        call.agree(call.ranks, call.backward_signature)
        rows, keys = call.rows(inputs), inputs.key_tensors()
        own = call.columns(call.ranks.rank, keys)
        packing = packing_of(keys)
        row_sums = call.row_sums(rows, "add")
        # Sums of dK/dV travel in the accumulators' dtype: rounded at each rank they would lose
        # digits with the number of ranks.
        key_grads = RotatingKeyGrads(call, packing_of(keys[:2], call.acc_dtype))
        own_grads = None
        offload = self.offload_backward(call, own, upstream, rows, row_sums, key_grads)
        next(offload)
        # Nothing was saved where only the own block has work: then nothing travels here either.
        held = saved.pop(0) if saved else None
        if held is not None and (held.data_ptr() | held.storage_offset()) % 16:
            # A hook on saved tensors has put it where it cannot be viewed in any dtype.
            held = held.clone()
        for step, launch in zip(self.backward_steps, self.backward_launches, strict=True):
            transfer, arriving = DONE, held
            if held is not None and step.keys_hop is not None:
                # Send the held K/V on and receive the next into a new buffer. `held` may be the
                # tensor that autograd saved, which must not be overwritten: a backward may be run
                # twice. Each buffer goes back to the allocator after its step.
                arriving = packing.buffer(call.device)
                transfer = call.ranks.rotate(held, arriving, step.keys_hop, beside=True)
            columns = own
            if not step.is_own:
                assert held is not None
                columns = call.columns(step.keys_of, packing.views(held))
            # Kernels read `held` while it is being sent, and add to dK/dV buffers of this rank
            # alone, while the sum of the ranks before for these K/V still arrives elsewhere.
            if step.items:
                column_grads = key_grads.grads(own=step.is_own)
                if rows.q.shape[0] > 0:
                    launch.run(rows, [columns], upstream, row_sums, column_grads)
                own_grads = column_grads if step.is_own else own_grads
            # Run this step's part of the offloaded work; it may add to own dK/dV, too.
            next(offload)
            # That sum is needed now: this rank's part is added, and it follows the K/V.
            key_grads.hop(step)
            # The next step reads the K/V that arrived, or `held` again if none were to come.
            if transfer is not DONE:
                transfer.wait()
            held = arriving
        # Wait for gradients that helpers still owe this rank, and add them.
        next(offload, None)
        # The last hop brought the other ranks' sum home, and added it to the own part.
        if own_grads is None:
            own_grads = key_grads.grads(own=True)
        return Grads(row_sums.whole(), own_grads.dk, own_grads.dv, row_sums.dbias)

    def traffic(self, call: Call, inputs: Inputs, *, forward: bool, **_: bool) -> Traffic:
        """Count the bytes of K/V that are passed on and, in the backward, of dK/dV.

        The backward sends the keys round again, whatever the forward saves.
        """
        keys = inputs.key_tensors()
        kv = packing_of(keys).size
        grads = 0 if forward else packing_of(keys[:2], call.acc_dtype).size
        moved = call.program.moved(call.ranks.rank, forward=forward)
        size = kv * len(moved.kv_hop) + grads * len(moved.grad_hop)
        return Traffic(size, size)

    def figures(self, call: Call, inputs: Inputs) -> list[str]:
        """Return how even the work is, and how often K/V are passed on; one rank passes nothing."""
        moves = step_lines(call.program) if call.ranks.size > 1 else ()
        return [*super().figures(call, inputs), *moves]

    def saved_shapes(self, call: Call, inputs: Inputs, **_: bool) -> Shapes:
        """Return the shape of one packed K/V message, also if this plan moves none.

        A compiled forward always saves one, as another plan of the same graph may. On one rank it
        saves none.
        """
        size = sum(aligned_bytes(x.shape, x.dtype) for x in inputs.key_tensors())
        return [((size,), torch.uint8)] if call.ranks.size > 1 else []

    def offload_forward(
        self,
        _call: Call,
        _inputs: Inputs,
        _keys: Sequence[Tensor],
        _rows: QueryBlock,
        _results: Accumulator,
        /,
    ) -> Iterator[None]:
        """Return an iterator whose parts run work that ranks do for each other in a forward.

        There is a part before the first step, one after the launches of each, and the end; those of
        a plain ring are empty. Results for ``rows`` are merged into ``results``.
        """
        return repeat(None)

    def offload_backward(
        self,
        _call: Call,
        _own: KeyBlock,
        _upstream: BackwardInputs,
        _rows: QueryBlock,
        _row_sums: Rows,
        _key_grads: RotatingKeyGrads,
        /,
    ) -> Iterator[None]:
        """Return an iterator over a backward's offloaded work, as :meth:`offload_forward` does.

        Gradients of ``rows`` are added to ``row_sums``, those of own K/V to ``key_grads``.
        """
        return repeat(None)


class RotatingKeyGrads:
    """Accumulators of dK/dV on a rank: for its own K/V, and for the K/V that it holds for now.

    At most three buffers are alive: one that kernels add to, one that arrives, one that leaves.
    The rank's own is alive beside these as soon as something is added to it.
    """

    def __init__(self, call: Call, packing: BufferSpec) -> None:
        self._call, self._packing = call, packing
        self._sums: dict[bool, Tensor] = {}  # True: of the rank's own K/V; False: of the held ones
        self._arriving: Tensor | None = None
        self._transfer: Transfer = DONE

    def grads(self, *, own: bool) -> KeyGrads:
        """Return the accumulators of the rank's own K/V (``own``) or of the held ones.

        They are allocated, and filled with zeros, when first asked for.
        """
        if own not in self._sums:
            self._sums[own] = self._packing.buffer(self._call.device).zero_()
        return KeyGrads(*self._packing.views(self._sums[own]))

    def hop(self, step: RingStep) -> None:
        """Add the arrived dK/dV to those computed in a step, and start sending the sum on."""
        # Wait for the exchange that the hop before started: the sum of the ranks before for this
        # step's K/V has arrived, and what this rank sent then has left and is released.
        self._transfer.wait()
        total, arrived = self._sums.pop(step.is_own, None), self._arriving
        self._arriving, self._transfer = None, DONE
        # Without launches there is no part of this rank: the arrived sum goes on as it is.
        if total is None:
            total = arrived
        elif arrived is not None:
            acc_dtype = self._call.acc_dtype
            total.view(acc_dtype).add_(arrived.view(acc_dtype))
        if step.is_own and total is not None:
            self._sums[True] = total
        if step.grads_hop is None:
            return
        # `sent` belongs to the transfer until the next hop: nothing else holds it, so nothing
        # writes it. The next step's launches add to a new buffer, while the sum that its hop will
        # add arrives in `_arriving`. The peer expects a message in any case, so zeros if need be.
        sent = self._packing.buffer(self._call.device).zero_() if total is None else total
        self._arriving = self._packing.buffer(self._call.device)
        self._transfer = self._call.ranks.rotate(sent, self._arriving, step.grads_hop, beside=True)


RING = StrategySpec("ring", Ring.of, is_automatic=lambda _: True)
