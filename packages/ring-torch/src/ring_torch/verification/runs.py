"""Run one batch on a model, split over the ring or whole on every rank; compare gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ring_core import UnsupportedError
from ring_torch.comm.exchange import collective
from ring_torch.comm.groups import default_device
from ring_torch.comm.ranks import Ranks
from ring_torch.gradients.guards import local_shard
from ring_torch.verification.trace import Recorder, Tokens, Trace


@dataclass(frozen=True)
class ModelRun:
    """Results of one forward and backward.

    Attributes:
        trace: Inputs and outputs of every module in the forward.
        loss: The model's own loss; ``None`` where it returns none.
        gradients: Gradients by the parameter's name; of a split run, summed over the ranks.
    """

    trace: Trace
    loss: float | None
    gradients: dict[str, Tensor]


class Runner(ABC):
    """Runs one batch on a model, split and whole.

    Args:
        model: Module that is called with the batch.
        ranks: Ranks of the ring.
        sequences: Sequences of the batch.
        batch: Shape ``[B, T]`` of the whole batch.
        factor: Factor of the gradients of a split run, by which their sum over ranks is divided.
    """

    def __init__(
        self, model: nn.Module, ranks: Ranks, sequences: list[Tokens], batch: tuple[int, int], factor: int
    ) -> None:  # fmt: skip
        self.model, self.ranks, self.sequences, self.factor = model, ranks, sequences, factor
        self.shape, self.rows = batch, batch[0]
        self.recorder = Recorder(model, sequences, self.rows)
        self.parameters = {name: x for name, x in model.named_parameters() if x.requires_grad}
        members = {*dist.get_process_group_ranks(ranks.group)} if ranks.group else {0}
        # Parameters whose gradients `fully_shard` reduces over ranks of this ring.
        self.fsdp_names = {
            name
            for name, x in self.parameters.items()
            if isinstance(x, DTensor) and len(members & {*x.device_mesh.mesh.flatten().tolist()}) > 1
        }  # fmt: skip

    @property
    def name(self) -> str:
        """Name of the model's class, for messages."""
        return class_name(self.model)

    @abstractmethod
    def compute(self, attention: str | None) -> tuple[Tensor | None, Tensor]:
        """Run a forward; return the model's own loss, if any, and the scalar to differentiate.

        Args:
            attention: Attention of a whole run; ``None`` for a split one.
        """

    @abstractmethod
    def unhooked(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes whole sequences, as it did before."""

    def run(self, attention: str | None = None, *, perturbs: bool = False) -> ModelRun:
        """Run forward and backward, and leave no gradients behind.

        Args:
            attention: Attention for a whole run inside :meth:`unhooked`; ``None`` for a split one.
            perturbs: Change modules' outputs by a unit in the last place, at random.

        Raises:
            UnsupportedError: A rank has too little memory. It is raised on all ranks of the ring,
                but with FSDP on that rank alone.
        """
        kind = "split" if attention is None else "whole"
        run: ModelRun | None = None
        try:
            run = self._run(attention, perturbs=perturbs)
        except (RuntimeError, MemoryError) as error:
            is_memory_error = isinstance(error, torch.OutOfMemoryError | MemoryError)
            if not is_memory_error and "allocate memory" not in str(error):
                raise
        # The next run needs the memory, and must not add to these.
        self.model.zero_grad(set_to_none=True)
        is_full = torch.tensor(float(run is None), device=default_device(self.ranks))
        # Tell the other ranks if this one ran out of memory. With FSDP they are waiting in one of
        # its own collectives instead, and would never meet this one.
        if not self.fsdp_names:
            self._all_reduce(is_full, dist.ReduceOp.MAX)
        if run is None or is_full:
            length = "x".join(str(n) for n in self.shape)
            raise UnsupportedError(
                f"verify: a {kind} run of {length} tokens does not fit into the memory of "
                f"{'this' if run is None else 'another'} rank, as every rank runs the whole batch: "
                f"give a shorter batch, or one row of it"
            ) from None
        return run

    def _run(self, attention: str | None, *, perturbs: bool) -> ModelRun:
        """Run forward and backward once, and return their results."""
        # The backward is outside of it: checkpointed modules run a second time there.
        with self.recorder.recording(perturbs=perturbs) as trace:
            loss, total = self.compute(attention)
        if total.requires_grad:
            total.backward()
        gradients = {name: x.grad for name, x in self.parameters.items() if x.grad is not None}
        if attention is None:
            gradients = self._summed(gradients)
        return ModelRun(trace, None if loss is None else float(loss.detach()), gradients)

    def _summed(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum the gradients of a split run over the ranks, and divide by the factor in its loss.

        FSDP has reduced its own already.
        """
        summed = {}
        for name, weight in self.parameters.items():
            gradient = gradients.get(name)
            if name in self.fsdp_names or self.ranks.size == 1:
                if gradient is not None:
                    summed[name] = gradient
                continue
            # A rank without a gradient takes part with zeros: all ranks must call the collective.
            local = local_shard(torch.zeros_like(weight) if gradient is None else gradient)
            total = local.to(torch.promote_types(local.dtype, torch.float32))
            self._all_reduce(total)
            summed[name] = total.div_(self.factor).to(local.dtype)
        return summed

    def gradient_distances(self, run: ModelRun | None, whole: ModelRun) -> Tensor:
        """Return the norm of ``run - whole`` of each parameter's gradient.

        The result is float64 ``[parameters]``, one zero if there are none. A gradient that a run
        has not counts as zeros.

        Args:
            run: A run; ``None`` for zeros, which gives the norms of the whole run's gradients.
            whole: A whole run.
        """
        squares = [torch.zeros((), dtype=torch.float64, device=default_device(self.ranks))]
        for name, weight in self.parameters.items():
            gradients = [x.gradients.get(name) for x in (run, whole) if x is not None]
            # A parameter that a run has not used has a gradient of 0.
            a, b = (0 if x is None else local_shard(x).double() for x in ([None, *gradients])[-2:])
            square = torch.as_tensor(a - b, device=weight.device).square().sum()
            squares.append(square.to(squares[0]))
        total = torch.stack(squares[1:] or squares)
        self._all_reduce(total)  # under FSDP each rank has the squares of its own shards only
        return total.sqrt().nan_to_num(nan=torch.inf)

    def gather(self, numbers: list[float]) -> list[list[float]]:
        """Return the numbers of every rank of the ring, by rank."""
        local = torch.tensor(numbers, dtype=torch.float64, device=default_device(self.ranks))
        if self.ranks.size == 1:
            return [local.tolist()]
        by_rank = [torch.empty_like(local) for _ in range(self.ranks.size)]
        collective(
            self.ranks, "verify",
            lambda: dist.all_gather(by_rank, local, group=self.ranks.group, async_op=True),
        )  # fmt: skip
        return [x.tolist() for x in by_rank]

    def _all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce a tensor over the ranks of the ring, in place."""
        if self.ranks.size > 1:
            collective(
                self.ranks, "verify",
                lambda: dist.all_reduce(x, op, group=self.ranks.group, async_op=True),
            )  # fmt: skip


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class, without the prefix that ``fully_shard`` gives it."""
    return type(module).__name__.removeprefix("FSDP")
