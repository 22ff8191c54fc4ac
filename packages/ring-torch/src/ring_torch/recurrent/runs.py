"""The runs of a rank, computed by torch's operations; a library's kernels take their place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ring_torch.recurrent import maps
from ring_torch.recurrent.chunks import Chunks
from ring_torch.recurrent.kernels import Kernel, Parts

#: State before each of a rank's runs, ``[B, *S]``; ``None`` for zeros.
Starts = Sequence[Tensor | None]


class Runs(Protocol):
    """A rank's runs in one pass, by their numbers among the rank's own, 0 first."""

    def maps_of(self, runs: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return the transition of each of some runs and what it leaves of zeros, ``[B, ...]``."""

    def leave(self, run: int, start: Tensor | None) -> Tensor:
        """Return the state behind a run of which that before it is known."""

    def outputs(self, starts: Starts) -> Tensor:
        """Return the outputs of this rank's rows, zeros in padding, in the dtype of values."""

    def entry_grads(self, starts: Starts, out_grad: Tensor, runs: Sequence[int]) -> list[Tensor]:
        """Return the gradients of runs' entry states from the runs' own outputs."""

    def input_grads(self, exits: Starts) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return the gradients of all entry states, and of the inputs.

        It follows :meth:`entry_grads`.

        Args:
            exits: Gradients of the states behind the runs.
        """


class EagerRuns:
    """Runs in chunks, by a :class:`~ring_torch.recurrent.kernels.Kernel`.

    Args:
        kernel: The kernel.
        chunks: The chunks of the runs.
        inputs: The kernel's inputs, ``[B, T_local, ...]``.
        dtype: Dtype of states, in which all is computed.
    """

    def __init__(
        self, kernel: Kernel, chunks: Chunks, inputs: Sequence[Tensor], dtype: torch.dtype
    ) -> None:
        self.kernel, self.chunks, self.inputs, self.dtype = kernel, chunks, inputs, dtype
        self.known: set[int] = set()  # runs whose chunks have their states

    @cached_property
    def parts(self) -> Parts:
        """The kernel's results of all chunks."""
        return self.kernel.parts(*self._split(*self.inputs))

    @cached_property
    def before(self) -> Tensor:
        """The state before each chunk, which :meth:`leave` writes."""
        return torch.empty_like(self.parts.state)

    def maps_of(self, runs: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return the maps of runs, composed of those of their chunks."""
        return [
            maps.run_map(
                (self.parts.transition, self.parts.state), self.chunks.spans[run].chunks,
                is_matrix=self.kernel.is_matrix,
            )
            for run in runs
        ]  # fmt: skip

    def leave(self, run: int, start: Tensor | None) -> Tensor:
        """Return the state behind a run, and keep those before its chunks."""
        self.known.add(run)
        return maps.states_before(
            (self.parts.transition, self.parts.state), self.chunks.spans[run].chunks, start,
            self.before, is_matrix=self.kernel.is_matrix,
        )  # fmt: skip

    def outputs(self, starts: Starts) -> Tensor:
        """Return the outputs of all chunks, each from its own state."""
        for run, start in enumerate(starts):
            if run not in self.known:
                self.leave(run, start)
        return self._read(self.parts.readout, self.parts.own, self.before)

    def entry_grads(self, starts: Starts, out_grad: Tensor, runs: Sequence[int]) -> list[Tensor]:
        """Return the gradients from the runs' own outputs; what was not kept is computed again."""
        results, self.pull = torch.func.vjp(
            lambda *inputs: tuple(self.kernel.parts(*self._split(*inputs))), *self.inputs
        )[:2]
        self.parts = Parts(*results)
        for run, start in enumerate(starts):
            self.leave(run, start)
        _, pull_read = torch.func.vjp(self._read, self.parts.readout, self.parts.own, self.before)[
            :2
        ]
        self.readout_grad, self.own_grad, self.grads = pull_read(out_grad)
        return [self._grad_before(run, None, None) for run in runs]

    def input_grads(self, exits: Starts) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return all gradients, through the states of all chunks."""
        behind = torch.empty_like(self.before)
        entries = [self._grad_before(run, grad, behind) for run, grad in enumerate(exits)]
        transition_grad = maps.transition_grad(
            behind, self.before, self.parts.transition, is_matrix=self.kernel.is_matrix
        )
        grads: tuple[Tensor, ...] = self.pull(
            (transition_grad, behind, self.readout_grad, self.own_grad)
        )
        return entries, grads

    def _grad_before(self, run: int, grad: Tensor | None, out: Tensor | None) -> Tensor:
        """Return the gradient of a run's entry state, of that behind it."""
        return maps.grads_behind(
            self.parts.transition, self.grads, self.chunks.spans[run].chunks, grad, out,
            is_matrix=self.kernel.is_matrix,
        )  # fmt: skip

    def _split(self, *inputs: Tensor) -> list[Tensor]:
        """Return the inputs in chunks, those that tokens share whole, in the dtype of states."""
        return [
            (x if fill is None else self.chunks.split(x, fill)).to(self.dtype)
            for x, fill in zip(inputs, self.kernel.fills, strict=True)
        ]

    def _read(self, readout: Tensor, own: Tensor, before: Tensor) -> Tensor:
        """Return the outputs of this rank's rows, in the dtype of values."""
        out = self.kernel.read(readout, own, before)
        rows = self.chunks.join(out, self.inputs[0].shape[1])
        return rows.to(self.inputs[self.kernel.values].dtype)
