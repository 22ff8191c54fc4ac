"""Runs of one batch on a model: split over the ring, and whole on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ring_core import UnsupportedError, divisor_of
from ring_torch.comm.ranks import collective
from ring_torch.gradients import default_device, local_shard
from ring_torch.hf.models.batch import tokens_of
from ring_torch.hf.models.check import is_of_transformers, unwrapped
from ring_torch.hf.models.classes import has_eager_attention
from ring_torch.hf.models.code import parameters_of
from ring_torch.hf.models.hooks import ModelHooks
from ring_torch.hf.verification.state import SavedFields
from ring_torch.hf.verification.trace import Recorder, Tokens, Trace

#: Names of a sequence's ids, embeddings and padding mask in a batch: first those of a model with
#: one sequence, or of an encoder; then those of a decoder.
_SEQUENCES = (
    ("input_ids", "inputs_embeds", "attention_mask"),
    ("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask"),
)


@dataclass(frozen=True)
class Target:
    """Parallelized model, as ``verify`` takes it.

    Attributes:
        model: Module whose ``__call__`` takes whole batches.
        hooks: Hooks that split its batches.
        undo: Functions that undo each change ``hf.parallelize`` has made. Called from the last to
            the first they leave the model as it was. Empty once the handle was removed.
    """

    model: nn.Module
    hooks: ModelHooks
    undo: list[Callable[[], object]]


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


class Runner:
    """Runs one batch on a model, split and whole.

    Args:
        target: The parallelized model.
        batch: The whole batch, the same on all ranks.
    """

    def __init__(self, target: Target, batch: Mapping[str, Any]) -> None:
        self.target, self.model, self.hooks = target, target.model, target.hooks
        self.inner: Any = unwrapped(target.model)
        self.ranks = target.hooks.sharding.ranks
        self.rows = len(tokens_of(batch))
        self.sequences = [*_sequences(target.hooks, batch)]
        self.recorder = Recorder(target.model, self.sequences, self.rows)
        takes_cache = "use_cache" in parameters_of(type(self.inner))
        self.batch = ({"use_cache": False} if takes_cache else {}) | dict(batch)
        self.parameters = {
            name: x for name, x in target.model.named_parameters() if x.requires_grad
        }
        ranks = {*dist.get_process_group_ranks(self.ranks.group)} if self.ranks.group else {0}
        # Parameters whose gradients `fully_shard` reduces over ranks of this ring.
        self.fsdp_names = {
            name
            for name, x in self.parameters.items()
            if isinstance(x, DTensor) and len(ranks & {*x.device_mesh.mesh.flatten().tolist()}) > 1
        }

    @property
    def has_sdpa(self) -> bool:
        """True if every part of the model can compute its attention with torch's SDPA."""
        models = [x for x in self.inner.modules() if is_of_transformers(x)]
        return not has_eager_attention(self.inner) and all(
            getattr(x, "_supports_sdpa", False) for x in models
        )

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Undo within the block the changes that ``hf.parallelize`` has made to the model."""
        fields = SavedFields(self.model)
        try:
            for undo in reversed(self.target.undo):
                undo()
            yield
        finally:
            fields.restore()

    def run(self, attention: str | None = None, *, perturbs: bool = False) -> ModelRun:
        """Run forward and backward, and leave no gradients behind.

        Args:
            attention: Attention of transformers, for a whole run inside :meth:`unhooked`; ``None``
                for a split one.
            perturbs: Change modules' outputs by a unit in the last place, at random.

        Raises:
            UnsupportedError: A rank has too little memory. It is raised on all ranks of the ring,
                but with FSDP on that rank alone.
        """
        if attention is not None and not has_eager_attention(self.inner):
            self.inner.set_attn_implementation(attention)
        kind = "split" if attention is None else "whole"
        run: ModelRun | None = None
        try:
            run = self._run(perturbs=perturbs, is_split=attention is None)
        except (RuntimeError, MemoryError) as error:
            # torch's error for a full GPU, Python's for a full host, and torch's for that.
            if not isinstance(error, torch.OutOfMemoryError | MemoryError) and (
                "allocate memory" not in str(error)
            ):
                raise
        self.model.zero_grad(set_to_none=True)
        is_full = torch.tensor(float(run is None), device=default_device(self.ranks))
        # Tell the other ranks if this one ran out of memory. With FSDP they are waiting in one of
        # its own collectives instead, and would never meet this one.
        if not self.fsdp_names:
            self._all_reduce(is_full, dist.ReduceOp.MAX)
        if run is None or is_full:
            length = "x".join(str(n) for n in tokens_of(self.batch).shape[:2])
            raise UnsupportedError(
                f"verify: a {kind} run of {length} tokens does not fit into the memory of "
                f"{'this' if run is None else 'another'} rank, as every rank runs the whole batch: "
                f"give a shorter batch, or one row of it"
            ) from None
        return run

    def _run(self, *, perturbs: bool, is_split: bool) -> ModelRun:
        """Run forward and backward once, and return their results."""
        with self.recorder.recording(perturbs=perturbs) as trace:
            output = self.model(**self.batch)
        loss = output.get("loss")
        total = loss if isinstance(loss, Tensor) else self._stand_in_loss(output)
        if total.requires_grad:
            total.backward()
        gradients = {name: x.grad for name, x in self.parameters.items() if x.grad is not None}
        if is_split:
            gradients = self._summed(gradients)
        return ModelRun(trace, None if total is not loss else float(total.detach()), gradients)

    def _stand_in_loss(self, output: Mapping[str, Any]) -> Tensor:
        """Return a loss for a model that has none: a fixed random weighting of per-token outputs.

        Outputs are ``[B, T, ...]`` or, on a ring, ``[B, T_local, ...]``; padding has weight 0.
        """
        tokens = self.sequences[-1]
        total = torch.zeros((), device=tokens.positions.device)
        for x in output.values():
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
                continue
            is_whole = x.shape[1] == tokens.length
            if len(x) != self.rows or not (is_whole or x.shape[1] == tokens.local_length):
                continue
            generator = torch.Generator().manual_seed(x.ndim)
            weights = torch.randn(self.rows, tokens.length, *x.shape[2:], generator=generator)
            weights = weights.to(x.device, x.dtype) * tokens.real.reshape(
                *tokens.real.shape, *[1] * (x.ndim - 2)
            )
            if is_whole:
                total = total + (x * weights).sum()
            else:
                local = x[:, tokens.local_positions] * weights[:, tokens.positions]
                total = total + local.sum() * self.hooks.factor
        return total

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
            summed[name] = total.div_(self.hooks.factor).to(local.dtype)
        return summed

    def gradient_distances(self, run: ModelRun | None, whole: ModelRun) -> Tensor:
        """Return the norm of ``run - whole`` of each parameter's gradient, float64 ``[P]``.

        Args:
            run: A run; ``None`` for zeros, which gives the norms of the whole run's gradients.
            whole: A whole run.
        """
        squares = [torch.zeros((), dtype=torch.float64, device=default_device(self.ranks))]
        for name, weight in self.parameters.items():
            gradients = [x.gradients.get(name) for x in (run, whole) if x is not None]
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
        with collective(self.ranks, "verify"):
            dist.all_gather(by_rank, local, group=self.ranks.group)
        return [x.tolist() for x in by_rank]

    def _all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce a tensor over the ranks of the ring, in place."""
        if self.ranks.size > 1:
            with collective(self.ranks, "verify"):
                dist.all_reduce(x, op, group=self.ranks.group)


def _sequences(hooks: ModelHooks, batch: Mapping[str, Any]) -> Iterator[Tokens]:
    """Yield the sequences of a batch: one, or an encoder's and a decoder's."""
    sharding = hooks.sharding
    for names in _SEQUENCES:
        ids, embeds, mask = (batch.get(name) for name in names)
        tokens = ids if ids is not None else embeds
        if tokens is None and names is _SEQUENCES[-1] and hooks.is_pair:
            tokens = batch.get("labels")  # the model makes the decoder's tokens from them
        if tokens is None:
            continue
        length, device = tokens.shape[1], tokens.device
        padded = length + -length % divisor_of(sharding.layout, sharding.ranks.size)
        positions = sharding.positions(padded, device=device)
        local_positions = (positions < length).nonzero().flatten()
        real = torch.ones(tokens.shape[:2], dtype=torch.bool, device=device)
        if mask is not None:
            real &= mask != 0
        yield Tokens(length, len(positions), positions[local_positions], local_positions, real)
