"""A call of a recurrent layer over the ranks of a group, forward and backward.

Forward, a rank makes the affine map of each of its runs (:mod:`ring_core.recurrence`). One
all-gather carries the maps of runs whose document goes on elsewhere, and each rank folds those that
precede its own runs: ``S -> A S + B``, in the order of the sequence. Then every run has its entry
state, and is computed as if it were alone.

The backward is the mirror. A rank makes the gradient ``W`` of each run's entry state from the run's
own outputs. One all-gather carries them, and each rank folds those behind its own runs, in the
reverse order: the gradient ``G`` behind a run becomes ``A^T G + W`` before it. Then every run has
the gradient of what it leaves, and the rest is local. Entry states and transitions are kept from
the forward, so nothing is gathered twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, reduce
from importlib import import_module
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ring_core import LayoutSpec, UnsupportedError, WrongResultError
from ring_core.base.arguments import Ints
from ring_core.checks import padded_layout
from ring_core.recurrence import DocumentRuns
from ring_torch.checking.watch import Watch, shared_findings
from ring_torch.comm.handshake import GuardedPass
from ring_torch.comm.ranks import run_collective
from ring_torch.comm.store import CallSignature
from ring_torch.derivatives import NEEDS_COMPILED_FORWARD, check_no_batch
from ring_torch.recurrent import maps
from ring_torch.recurrent.chunks import Chunks, chunks_of
from ring_torch.recurrent.fla import fla_runs
from ring_torch.recurrent.kernels import Kernel, LinearAttention
from ring_torch.recurrent.layer_call import LayerCall, Shapes
from ring_torch.recurrent.runs import EagerRuns, Runs
from ring_torch.recurrent.tripwire import Check, backward_faults, forward_faults
from ring_torch.sharding import agree_on_call


class Results(NamedTuple):
    """Results of a forward, and what its backward needs beside the inputs.

    Attributes:
        out: Outputs of this rank's tokens, ``[B, T_local, ...]``; zeros in padding.
        final: State behind each document, ``[documents, B, *S]``; no documents if not asked for.
        entries: Entry states of this rank's runs that follow another, ``[runs, B, *S]``.
        transitions: Transitions of the runs behind this rank's, last first, flat.
    """

    out: Tensor
    final: Tensor
    entries: Tensor
    transitions: Tensor


class RecurrentCall(LayerCall):
    """A call of a recurrent layer, with its two passes."""

    def forward(self, initial: Tensor | None, inputs: Sequence[Tensor]) -> Results:
        """Return the outputs of this rank's tokens, and the final states.

        Args:
            initial: State before each document, ``[documents, B, *S]``, in the dtype of states.
            inputs: The kernel's inputs, ``[B, T_local, ...]``.

        Raises:
            ValueError: ``T_local`` is no rank's part in this layout, or documents end elsewhere.
            RankMismatchError: Shapes, dtypes or arguments differ between ranks.
            WrongResultError: The tripwire checked this call and found a wrong result.
        """
        message = None
        with self._agreed("", inputs) as chunks:
            # The tripwire counts what is sent inside, if it checks this call.
            with self._watch(inputs) as watch:
                results = self._forward(chunks, initial, inputs)
            if watch is not None:
                check = Check.of(self, inputs)
                faults = forward_faults(
                    check, self._by_position(chunks.runs, results.entries), initial, results.out,
                    results.final, watch.sent,
                )  # fmt: skip
                message = self._shared(check, faults, "forward")
        if message is not None:
            raise WrongResultError(message)
        return results

    def _forward(self, chunks: Chunks, initial: Tensor | None, inputs: Sequence[Tensor]) -> Results:
        """Compute :meth:`forward` after the ranks have agreed."""
        runs, rank = chunks.runs, self.ranks.rank
        own, work = runs.of_rank(rank).tolist(), self._work(chunks, inputs)
        shapes = self.shapes(inputs)
        size = prod(shapes.transition)
        slot, slots, travels = self.slots(runs)
        sent = inputs[0].new_zeros(slots, size + prod(shapes.state), dtype=self.dtype)
        # Each run's map. A run that begins its document has its entry state, so that its map is a
        # constant, what it leaves; that of others begins with zeros.
        travelling = [(number, n) for number, n in enumerate(own) if travels[n]]
        follow = [number for number, n in travelling if runs.follows[n]]
        for number, parts in zip(follow, work.maps_of(follow), strict=True):
            sent[slot[own[number]]] = torch.cat([x.flatten() for x in parts])
        for number, n in travelling:
            if not runs.follows[n]:
                start = None if initial is None else initial[runs.document[n]]
                sent[slot[n], size:] = work.leave(number, start).flatten()
        gathered = self._gather(sent)
        entries, final = self._fold(runs, gathered, slot, shapes, initial)
        # Now every run has its entry state, and is computed as if it were alone.
        own_entries = [entries[n] for n in own if runs.follows[n]]
        out = work.outputs(self._starts(runs, initial, own_entries))
        later = [n for n in runs.behind(rank).tolist() if travels[n]]
        no_states = sent.new_empty(0, *shapes.state)
        return Results(
            out, no_states if final is None else final,
            torch.stack(own_entries) if own_entries else no_states,
            torch.stack([gathered[runs.rank[n], slot[n], :size] for n in later])
            if later else sent.new_empty(0, size),
        )  # fmt: skip

    def backward(
        self, initial: Tensor | None, inputs: Sequence[Tensor], entries: Tensor,
        transitions: Tensor, out_grad: Tensor, final_grad: Tensor,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:  # fmt: skip
        """Return the gradients of the initial states and of the inputs.

        Those of the initial states, and of inputs that all tokens share, are this rank's part.

        Args:
            initial: As of :meth:`forward`, as ``inputs``.
            inputs: The kernel's inputs.
            entries: Of the forward's results, as ``transitions``.
            transitions: Transitions of the runs behind this rank's.
            out_grad: Gradient of the outputs.
            final_grad: This rank's gradient of the final states; of no documents if there are none.

        Raises:
            RankMismatchError: Ranks run other backwards.
            WrongResultError: The tripwire checked this call and found a wrong gradient.
        """
        message = None
        with self._agreed(" backward", inputs) as chunks:
            with self._watch(inputs) as watch:
                initial_grad, grads, exits = self._backward(
                    chunks, initial, inputs, entries, transitions, out_grad, final_grad
                )
            if watch is not None:
                check = Check.of(self, inputs)
                faults = backward_faults(
                    check, self._by_position(chunks.runs, entries), exits, initial,
                    (out_grad, final_grad), initial_grad, grads, watch.sent,
                )  # fmt: skip
                message = self._shared(check, faults, "backward")
        if message is not None:
            raise WrongResultError(message)
        return initial_grad, grads

    def _backward(
        self, chunks: Chunks, initial: Tensor | None, inputs: Sequence[Tensor],
        entries: Tensor, transitions: Tensor, out_grad: Tensor, final_grad: Tensor,
    ) -> tuple[Tensor | None, tuple[Tensor, ...], dict[int, Tensor]]:  # fmt: skip
        """Compute :meth:`backward`, and the gradients of exit states, by the positions behind."""
        runs = chunks.runs
        own, work = runs.of_rank(self.ranks.rank).tolist(), self._work(chunks, inputs)
        shapes = self.shapes(inputs)
        follow = [number for number, n in enumerate(own) if runs.follows[n]]
        # The gradient of each entry state from the run's own outputs, for the runs before it.
        # Nothing is gathered to compute again what was not kept.
        starts = self._starts(runs, initial, list(entries))
        own_grads = work.entry_grads(starts, out_grad, follow)
        slot, slots = runs.slots(runs.follows)
        sent = final_grad.new_zeros(slots + len(final_grad), *shapes.state)
        for number, grad in zip(follow, own_grads, strict=True):
            sent[slot[own[number]]] = grad
        sent[slots:] = final_grad
        gathered = self._gather(sent)
        # The loss is the sum of the ranks' losses: a final state has every rank's gradient.
        final_grads = gathered[:, slots:].sum(0) if self.wants_final else None
        exits = self._fold_back(runs, gathered, slot, shapes, transitions, final_grads)
        by_position = {int(runs.start[n] + runs.length[n]): x for n, x in exits.items()}
        entry_grads, input_grads = work.input_grads([exits.get(n) for n in own])
        if initial is None:
            return None, input_grads, by_position
        initial_grad = torch.zeros_like(initial)
        if self.wants_final:
            # Through a document without tokens its state passes as it is: each rank's part.
            is_empty = np.bincount(runs.document, minlength=runs.documents) == 0
            for document in np.flatnonzero(is_empty).tolist():
                initial_grad[document] = final_grad[document]
        for n, grad in zip(own, entry_grads, strict=True):
            if not runs.follows[n]:
                initial_grad[runs.document[n]] = grad
        return initial_grad, input_grads, by_position

    def _fold(
        self,
        runs: DocumentRuns,
        gathered: Tensor,
        slot: Ints,
        shapes: Shapes,
        initial: Tensor | None,
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        """Fold the maps that precede this rank's runs; return entry states, and final states."""
        rank, size = self.ranks.rank, prod(shapes.transition)
        entries: dict[int, Tensor] = {}
        final: Tensor | None = None
        numbers = runs.before(rank)
        if self.wants_final:
            numbers = np.arange(len(runs.rank))
            shape = (runs.documents, *shapes.state)
            final = gathered.new_zeros(shape) if initial is None else initial.clone()
        state = gathered.new_empty(0)
        for n in numbers.tolist():
            row = gathered[runs.rank[n], slot[n]]
            left = row[size:].view(shapes.state)
            if runs.follows[n]:
                transition = row[:size].view(shapes.transition)
                # In the order of the sequence, so `state` is that behind the run before this one.
                state = maps.apply(transition, state, is_matrix=self.kernel.is_matrix) + left
            else:
                state = left
            if runs.continues[n]:
                if runs.rank[n + 1] == rank:
                    entries[n + 1] = state
            elif final is not None:
                final[runs.document[n]] = state
        return entries, final

    def _fold_back(
        self, runs: DocumentRuns, gathered: Tensor, slot: Ints, shapes: Shapes, transitions: Tensor,
        final_grads: Tensor | None,
    ) -> dict[int, Tensor]:  # fmt: skip
        """Fold the gradients behind this rank's runs; return that of each run's exit state."""
        rank, travels = self.ranks.rank, self.slots(runs)[2]
        exits: dict[int, Tensor] = {}
        if final_grads is not None:
            last = np.flatnonzero(~runs.continues)
            exits = {n: final_grads[runs.document[n]] for n in last.tolist()}
        kept = iter(transitions)
        for n in runs.behind(rank).tolist():
            grad = gathered[runs.rank[n], slot[n]]
            if travels[n]:
                transition = next(kept).view(shapes.transition)
                grad = grad + maps.apply_adjoint(
                    transition, exits[n], is_matrix=self.kernel.is_matrix
                )
            exits[n - 1] = grad
        return exits

    def _work(self, chunks: Chunks, inputs: Sequence[Tensor]) -> Runs:
        """Return this rank's runs, to be computed by the call's library."""
        if self.library == "fla" and isinstance(self.kernel, LinearAttention):
            return fla_runs(self.kernel, chunks, inputs)
        kind = EagerRuns
        if self.library == "triton":
            kind = import_module("ring_torch.recurrent.scan_kernel").ScanRuns
        return kind(self.kernel, chunks, inputs, self.dtype)

    def _starts(
        self, runs: DocumentRuns, initial: Tensor | None, entries: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return the state before each of this rank's runs."""
        kept = iter(entries)
        return [
            next(kept)
            if runs.follows[n]
            else None
            if initial is None
            else initial[runs.document[n]]
            for n in runs.of_rank(self.ranks.rank).tolist()
        ]

    def _by_position(self, runs: DocumentRuns, entries: Tensor) -> dict[int, Tensor]:
        """Return the entry states of this rank's runs that follow others, by their positions."""
        own = [n for n in runs.of_rank(self.ranks.rank).tolist() if runs.follows[n]]
        return dict(zip(runs.start[own].tolist(), entries, strict=False))

    def _gather(self, sent: Tensor) -> Tensor:
        """Return what all ranks send, ``[ranks, ...]``; nothing moves if that is nothing."""
        ranks = self.ranks
        if ranks.size == 1 or sent.numel() == 0:
            return sent.expand(ranks.size, *sent.shape)
        gathered = sent.new_empty(ranks.size, *sent.shape)
        run_collective(
            ranks,
            lambda: dist.all_gather_into_tensor(
                gathered.view(-1), sent.view(-1), group=ranks.group, async_op=True
            ),
        )
        return gathered

    def _shared(self, check: Check, faults: Sequence[str], pass_name: str) -> str | None:
        """Exchange findings with all ranks; return the error message, or ``None`` for no fault."""
        lines = shared_findings(self.ranks, faults, check.inputs[0].device)
        if lines is None:
            return None
        return (
            f"call {self.checked} of {self.kernel.name} ({pass_name}) is wrong. {lines}. Kernel "
            f"{self.library!r}, layout {str(self.layout)!r}, document {check.document}, "
            f"{self.ranks.size} ranks. Every rank of the group raises this. To find out more: the same "
            f"call with kernel='eager', and in cp.whole()"
        )

    def _watch(self, inputs: Sequence[Tensor]) -> AbstractContextManager[Watch | None]:
        """Return a counter of what is sent in a block, if the tripwire checks this call."""
        return Watch(inputs[0].device) if self.checked else nullcontext()

    @contextmanager
    def _agreed(self, order: str, inputs: Sequence[Tensor]) -> Iterator[Chunks]:
        """Run a block, in IEEE arithmetic, after all ranks have found their calls to be equal."""
        x, ranks = inputs[0], self.ranks
        shapes = tuple((tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in inputs)
        signature = _signature(
            self.kernel, order, shapes, self.layout, self.cu_seqlens, self.seq_len, self.dtype,
            (self.has_initial, self.wants_final, self.needs_grad), self.library, self.check_every,
        )  # fmt: skip
        agree_on_call(ranks, self.number, signature, x.device)
        # Refuse what no rank can do. All ranks refuse alike, as their arguments are equal.
        layout = padded_layout(self.seq_len, x.shape[1], self.layout, ranks.size)
        chunks = chunks_of(layout, self.cu_seqlens, ranks.rank, self.most_tokens, x.device)
        with GuardedPass(ranks, self.number, signature, x.device), ieee(x.device.type):
            yield chunks


def state_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of states: float32, or float64 if any of the tensors is."""
    return reduce(torch.promote_types, [x.dtype for x in tensors], torch.float32)


@contextmanager
def ieee(device_type: str) -> Iterator[None]:
    """Multiply matrices in IEEE float32 in a block, whatever autocast and torch's settings say.

    A state is a sum over all that precedes it, and would lose digits with each chunk.
    """
    backend = torch.backends.mkldnn if device_type == "cpu" else torch.backends.cuda
    precision = backend.matmul.fp32_precision
    backend.matmul.fp32_precision = "ieee"
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        backend.matmul.fp32_precision = precision


@lru_cache(maxsize=256)
def _signature(
    kernel: Kernel, order: str, shapes: tuple[tuple[tuple[int, ...], str], ...], layout: LayoutSpec,
    cu_seqlens: tuple[int, ...] | None, seq_len: int | None, dtype: torch.dtype,
    flags: tuple[bool, bool, bool], library: str, check_every: int,
) -> CallSignature:  # fmt: skip
    """Return the facts of a pass that must be equal on all ranks."""
    has_initial, wants_final, needs_grad = flags
    facts = {
        name: [list(shape), dtype]
        for name, (shape, dtype) in zip(kernel.inputs, shapes, strict=True)
    }
    return CallSignature.of(
        {
            **facts, "kernel": str(kernel), "library": library, "layout": str(layout), "cu_seqlens": cu_seqlens,
            "seq_len": seq_len, "states": str(dtype), "initial_state": has_initial, "output_final_state": wants_final,
            "needs_grad": needs_grad, "check": check_every,
        }, kernel.name + order,
    )  # fmt: skip


def second_derivative_of(name: str) -> UnsupportedError:
    """Return the error of a backward under ``create_graph=True``."""
    return UnsupportedError(
        f"{name} has no second derivative, and this backward runs under create_graph=True (as in "
        f"gradient penalties). Instead: pass create_graph=False, or compute what is differentiated "
        f"twice on whole sequences, token by token"
    )


_backward_alone = torch.compiler.disable(RecurrentCall.backward, reason=NEEDS_COMPILED_FORWARD)


class _RecurrentFunction(torch.autograd.Function):
    """Autograd function of a recurrent layer."""

    @staticmethod
    def forward(
        ctx: Any, call: RecurrentCall, initial: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        results = call.forward(initial, inputs)
        ctx.call = call
        if call.needs_grad:
            ctx.save_for_backward(initial, results.entries, results.transitions, *inputs)
        return results.out, results.final

    @staticmethod
    def backward(ctx: Any, out_grad: Tensor, final_grad: Tensor) -> tuple[Any, ...]:
        check_no_batch(out_grad, final_grad)
        if torch.is_grad_enabled():  # which autograd does under create_graph=True alone
            raise second_derivative_of(ctx.call.kernel.name)
        initial, entries, transitions, *inputs = ctx.saved_tensors
        initial_grad, grads = _backward_alone(
            ctx.call, initial, inputs, entries, transitions, out_grad, final_grad
        )
        needed = ctx.needs_input_grad[2:]
        return (
            None, initial_grad,
            *(grad if is_needed else None for grad, is_needed in zip(grads, needed, strict=True)),
        )  # fmt: skip


# Compiled graphs use `ring_torch.recurrent.in_graph`. After a graph break this runs, untraced.
run: Callable[..., tuple[Tensor, Tensor]] = torch.compiler.disable(
    _RecurrentFunction.apply, reason=NEEDS_COMPILED_FORWARD
)
