"""Run one batch on a model, split over the ring or whole on every rank, and put everything back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ring_core import UnsupportedError
from ring_torch.comm.exchange import collective
from ring_torch.comm.groups import default_device
from ring_torch.comm.ranks import Ranks
from ring_torch.comm.together import failing_together
from ring_torch.gradients.guards import local_shard
from ring_torch.verification.trace import Recorder, Tokens, Trace

#: Dicts of a module whose entries are restored.
_DICTS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_buffers",
)  # fmt: skip


class ModelRun(NamedTuple):
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

    caller = "verify"  # name of the public function, for messages
    traces_split = True  # False if a split run needs no trace, whose hooks break compiled graphs

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        sequences: list[Tokens],
        batch: tuple[int, int],
        factor: int,
    ) -> None:
        self.model, self.ranks, self.sequences, self.factor = model, ranks, sequences, factor
        self.shape, self.rows = batch, batch[0]
        self.recorder = Recorder(model, sequences)
        self.parameters = {name: x for name, x in model.named_parameters() if x.requires_grad}
        members = {*dist.get_process_group_ranks(ranks.group)} if ranks.group else {0}
        # Parameters whose gradients `fully_shard` reduces over ranks of this ring.
        self.fsdp_names = {
            name
            for name, x in self.parameters.items()
            if isinstance(x, DTensor)
            and len(members & {*x.device_mesh.mesh.flatten().tolist()}) > 1
        }

    @property
    def name(self) -> str:
        """Name of the model's class, for messages."""
        return class_name(self.model)

    @abstractmethod
    def compute(self, attention: str | None) -> tuple[Tensor | None, Tensor]:
        """Run a forward; return the model's own loss, if any, and the scalar to differentiate.

        ``attention`` is that of a whole run; ``None`` for a split one.
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
            UnsupportedError: This rank has too little memory.
            RuntimeError: Another rank failed.
        """
        what = f"{self.caller}: a {'split' if attention is None else 'whole'} run"
        with failing_together(self.ranks, what):
            try:
                # The backward is outside of the trace: checkpoints run modules again there.
                is_traced = self.traces_split or attention is not None
                hooks = self.recorder.recording(perturbs=perturbs)
                with hooks if is_traced else nullcontext(Trace()) as trace:
                    loss, total = self.compute(attention)
                if total.requires_grad:
                    total.backward()
                gradients = {
                    name: x.grad for name, x in self.parameters.items() if x.grad is not None
                }
                gradients = self.reduced(gradients, is_split=attention is None)
                return ModelRun(trace, None if loss is None else float(loss.detach()), gradients)
            except (RuntimeError, MemoryError) as error:
                is_memory_error = isinstance(error, torch.OutOfMemoryError | MemoryError)
                if not is_memory_error and "allocate memory" not in str(error):
                    raise
                raise UnsupportedError(
                    f"{what} of {'x'.join(map(str, self.shape))} tokens does not fit into the memory of this "
                    f"rank, as every rank runs the whole batch: give a shorter batch, or one row of it"
                ) from None
            finally:
                # The next run needs the memory, and must not add to these.
                self.model.zero_grad(set_to_none=True)

    def reduced(self, gradients: dict[str, Tensor], *, is_split: bool) -> dict[str, Tensor]:
        """Return the gradients of a run as they are compared: of a split one summed over ranks."""
        return self._summed(gradients) if is_split else gradients

    def _summed(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum the gradients of a split run over the ranks, and divide by the factor in its loss."""
        summed = {}
        for name, weight in self.parameters.items():
            gradient = gradients.get(name)
            if name in self.fsdp_names or self.ranks.size == 1:  # FSDP has reduced its own
                if gradient is not None:
                    summed[name] = gradient
                continue
            # A rank without a gradient takes part with zeros: all ranks must call the collective.
            local = local_shard(torch.zeros_like(weight) if gradient is None else gradient)
            # gloo knows no gaps between rows.
            total = local.to(torch.promote_types(local.dtype, torch.float32)).contiguous()
            self._all_reduce(total)
            summed[name] = total.div_(self.factor).to(local.dtype)
        return summed

    def gradient_distances(self, run: ModelRun | None, whole: ModelRun) -> Tensor:
        """Return the norm of ``run - whole`` of each parameter's gradient.

        The result is float64 ``[parameters]``, one zero if there are none. A gradient that a run
        has not counts as zeros, and so do those of ``None``.
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
        shape, device = (self.ranks.size, len(numbers)), default_device(self.ranks)
        by_rank = torch.zeros(shape, dtype=torch.float64, device=device)
        by_rank[self.ranks.rank] = torch.tensor(numbers, dtype=torch.float64, device=device)
        self._all_reduce(by_rank)  # other ranks' rows are zeros here
        rows: list[list[float]] = by_rank.tolist()
        return rows

    def _all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce a tensor over the ranks of the ring, in place."""
        if self.ranks.size > 1:
            collective(
                self.ranks,
                "verify",
                lambda: dist.all_reduce(x, op, group=self.ranks.group, async_op=True),
            )


def weighted_sum(x: Tensor, dim: int, tokens: Tokens | None, *, is_split: bool) -> Tensor:
    """Return a sum of an output with random weights, the same in every run and on every rank.

    Args:
        x: The output.
        dim: Its dimension along which the tokens lie.
        tokens: The sequence; ``None`` for an output without one.
        is_split: True if ``x`` has this rank's part of it.
    """
    shape = [*x.shape]
    if tokens is not None:
        shape[dim] = tokens.length
    seeded = torch.Generator().manual_seed(len(shape))
    weights = torch.randn(shape, generator=seeded, device="cpu").to(x)
    if tokens is not None and dim == 1 and len(x) == len(tokens.real):  # padding weighs nothing
        weights *= tokens.real.reshape(*tokens.real.shape, *[1] * (x.ndim - 2))
    if tokens is not None and is_split:
        x = x.index_select(dim, tokens.local_positions)
        weights = weights.index_select(dim, tokens.positions)
    return (x * weights).sum()


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class, without the prefix that ``fully_shard`` gives it."""
    return type(module).__name__.removeprefix("FSDP")


class SavedFields:
    """Copy of the attributes, hooks and buffers of a model's modules, and of their configs.

    Tensors are kept by reference, not copied.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [*model.modules()]
        self._public = [(x, _public_fields(x)) for x in modules]
        configs = {id(x): x for module in modules for x in _configs_in(module)}
        self._configs = [(x, dict(vars(x))) for x in configs.values()]
        self._dicts = [(vars(x)[name], dict(vars(x)[name])) for x in modules for name in _DICTS]

    def restore(self) -> None:
        """Restore all fields. Hooks registered since then stay, after the restored ones."""
        for owner, before in self._public:
            for name in _public_fields(owner).keys() - before.keys():
                del vars(owner)[name]
            vars(owner).update(before)
        for config, before in self._configs:
            vars(config).clear()
            vars(config).update(before)
        for current, before in self._dicts:
            added = {key: x for key, x in current.items() if key not in before}
            current.clear()
            # Handles of hooks refer to these very dictionaries: their contents change, not they.
            current.update(before | added)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Run a block with dropout off and gradients enabled, then restore the model and torch's RNG.

    In the block parameters have no gradient and no hooks on its accumulation, and the CPU's RNG is
    seeded alike on all ranks. Restored are the parameters' gradients and hooks, and the modules'
    buffers, modes, hooks, attributes and configs, also when the block raises. Parameters are not
    copied: the block must not change them.
    """
    fields = SavedFields(model)
    buffers = [(x, x.clone()) for x in model.buffers()]
    weights = [*model.parameters()]
    gradients = [x.grad for x in weights]
    # Hooks may step an optimizer as soon as there is a gradient. Torch has no public name for them.
    hooks = [x._post_accumulate_grad_hooks or {} for x in weights]  # noqa: SLF001 - torch has no other list
    saved_hooks = [dict(x) for x in hooks]
    devices = {x.device for x in weights if x.device.type not in ("cpu", "meta")}
    device_type = next((x.type for x in devices), "cuda")
    try:
        with (
            torch.random.fork_rng([x.index for x in devices], device_type=device_type),
            torch.inference_mode(mode=False),
            torch.enable_grad(),
        ):
            # Ranks compare the dropout seeds that they draw, so they must draw alike.
            torch.default_generator.manual_seed(0)
            for weight, weight_hooks in zip(weights, hooks, strict=True):
                # Gradients of the user's step are set aside, not added to.
                weight.grad = None
                weight_hooks.clear()
            for module in model.modules():
                _switch_off_dropout(module)
            yield
    finally:
        fields.restore()
        with torch.no_grad():
            for buffer, before in buffers:
                # In place, as modules and compiled graphs hold the tensors.
                buffer.copy_(before)
        for weight, gradient, weight_hooks, saved in zip(
            weights, gradients, hooks, saved_hooks, strict=True
        ):
            weight.grad = gradient
            weight_hooks.update(saved)


def _switch_off_dropout(module: nn.Module) -> None:
    """Set a module to evaluation mode.

    Activation checkpointing works in training mode only. A module with it stays in training mode
    with dropout rates of zero, so that its checkpointed path is verified.
    """
    module.training = bool(getattr(module, "gradient_checkpointing", False))
    for name, rate in _public_fields(module).items() if module.training else ():
        if "drop" in name and isinstance(rate, float):
            setattr(module, name, 0.0)


def _public_fields(module: nn.Module) -> dict[str, Any]:
    """Return a module's own attributes whose names have no leading underscore."""
    return {name: x for name, x in vars(module).items() if not name.startswith("_")}


def _configs_in(module: nn.Module) -> Iterator[Any]:
    """Yield the config of a module, if it has one, and the configs nested in it."""
    config = getattr(module, "config", None)
    if hasattr(config, "to_dict"):
        yield config
        yield from (x for x in vars(config).values() if hasattr(x, "to_dict"))
