"""Trainers of TRL that sample completions, to which a ring is one process that samples once.

The first rank of a ring generates with the model as it was before ``hf.parallelize``, and tells the
others. Rewards, advantages and metrics are gathered from the first ranks alone. What TRL's code
reads of its Accelerator, and the two functions that its modules import from accelerate, is replaced
while these methods of one Trainer run.
"""

from __future__ import annotations

import copy
import io
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.serialization import default_restore_location

from ring_core import UnsupportedError
from ring_torch.comm.ranks import Ranks
from ring_torch.hf.models.hooks import replace_attribute
from ring_torch.hf.models.releases import lacks
from ring_torch.hf.trainer import TrainerHooks
from ring_torch.hf.verification import Target, unhooked

#: Modules and names of the classes that sample, which a Trainer's class may derive from.
_SAMPLERS = (
    ("trl.trainer.grpo_trainer", "GRPOTrainer"), ("trl.trainer.rloo_trainer", "RLOOTrainer"),
)  # fmt: skip

#: Methods that gather results of all processes.
_GATHERING = ("_generate_and_score_completions", "_compute_loss")

#: Beginnings of the names of functions of torch.distributed that wait for all ranks of a group.
_COLLECTIVES = (
    "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "monitored_barrier",
    "reduce", "scatter",
)  # fmt: skip


def is_sampler(trainer: object) -> bool:
    """Return True for a Trainer of TRL that samples completions of its own model."""
    return any((cls.__module__, cls.__name__) in _SAMPLERS for cls in type(trainer).__mro__)


def check_rollouts(trainer: Any, rings: int, cp_size: int) -> None:
    """Refuse settings of a Trainer that samples, which a ring would not do once.

    Raises:
        ValueError: The completions of a prompt do not fill batches of all rings.
        UnsupportedError: A setting samples, or runs tools, on each rank by itself.
    """
    args = trainer.args
    settings = {
        "use_vllm": args.use_vllm, "tools or environment_factory": any(
            getattr(trainer, name, None) for name in ("tools", "environment_factory", "environment_factories", "environments")
        ),
        "use_transformers_continuous_batching": args.use_transformers_continuous_batching,
        "FSDP": trainer.is_fsdp_enabled,
    }  # fmt: skip
    if conflicts := [name for name, is_set in settings.items() if is_set]:
        raise UnsupportedError(
            f"{type(trainer).__name__} is set to {' and '.join(conflicts)}, which samples on each rank by "
            f"itself, and not once for a ring: leave it out (GRPO takes a rollout_func)"
        )
    if not all(hasattr(trainer, name) for name in (*_GATHERING, "_generate_single_turn", "_logs")):
        raise UnsupportedError(lacks(type(trainer).__name__, " or ".join(_GATHERING)))
    sizes = {"generation_batch_size": (_sampled_at_once(args, rings), args.num_generations)}
    if args.eval_strategy != "no":
        each = args.num_generations_eval or args.num_generations
        sizes["per_device_eval_batch_size"] = (args.per_device_eval_batch_size * rings, each)
    for name, (size, generations) in sizes.items():
        if size % generations:
            raise ValueError(
                f"{name}: {rings} rings of {cp_size} ranks take {size} completions at once, which have to be "
                f"a multiple of the {generations} of a prompt: change it, or num_generations"
            )


class RingAccelerator:
    """An Accelerator to which each ring is one process.

    Args:
        hooks: Hooks of the Trainer; its Accelerator answers all else.
    """

    def __init__(self, hooks: TrainerHooks) -> None:
        self._hooks, self._accelerator = hooks, hooks.accelerator
        self.num_processes, self.process_index = len(hooks.firsts), hooks.ring_index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensors: Any) -> Any:
        """Return the tensors of all rings, behind each other."""
        if isinstance(tensors, Tensor) and tensors.ndim == 0:  # each process gives one number
            tensors = tensors[None]
        return self._hooks.gather_rings(tensors)

    def gather_object(self, values: list[Any]) -> list[Any]:
        """Return the lists of all rings as one."""
        from accelerate.utils import gather_object

        is_first = self._hooks.hooks.all_ranks.ranks.rank == 0
        joined: list[Any] = gather_object(values if is_first else [])
        return joined

    def reduce(self, tensor: Tensor, reduction: str = "sum", scale: float = 1.0) -> Tensor:
        """Return the sum, or the mean, of a tensor over the rings."""
        each = self.gather(tensor[None])
        total: Tensor = each.sum(0) if reduction == "sum" else each.mean(0)
        return total * scale


class Rollouts:
    """Methods that replace those of a Trainer which samples.

    Args:
        hooks: Hooks of the Trainer.
        target: Its parallelized model.
    """

    def __init__(self, hooks: TrainerHooks, target: Target) -> None:
        self.trainer, self.target = hooks.trainer, target
        self.ranks = hooks.hooks.all_ranks.ranks
        self.accelerator = RingAccelerator(hooks)
        self._samples = False  # True on the first rank while the others wait

    def install(self) -> Iterator[Callable[[], object]]:
        """Set the methods on the instance; yield a function that undoes each replacement."""
        from accelerate.utils import set_seed

        trainer, args = self.trainer, self.trainer.args
        for name in _GATHERING:
            yield replace_attribute(trainer, name, self._counting_rings(getattr(trainer, name)))
        for name in ("_generate_single_turn", "rollout_func"):
            if (function := getattr(trainer, name, None)) is not None:
                yield replace_attribute(trainer, name, self._on_first_rank(function))
        # The sampler repeats prompts to fill a batch, which it takes to be of all ranks.
        batch = _sampled_at_once(args, self.accelerator.num_processes)
        yield replace_attribute(args, "generation_batch_size", batch)
        logs = {  # of a step's samples, of which each keeps as many as there are
            name: deque(x, maxlen=batch) if isinstance(x, deque) else copy.copy(x)
            for name, x in trainer._logs.items()  # noqa: SLF001 - TRL has no other name for it
        }
        yield replace_attribute(trainer, "_logs", logs)
        # The Trainer seeded each rank alone. A ring draws one stream, as a process in its place.
        set_seed(args.seed + self.accelerator.process_index)

    def _counting_rings(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that runs with each ring as one process."""
        # A class between the Trainer's and TRL's may have code in a module of its own.
        modules = {sys.modules[cls.__module__] for cls in type(self.trainer).__mro__[:-1]}
        names = [
            (module, name)
            for module in modules for name in ("gather", "gather_object")
            if getattr(vars(module).get(name), "__module__", "").startswith("accelerate.")
        ]  # fmt: skip

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as undo:
                undo.callback(replace_attribute(self.trainer, "accelerator", self.accelerator))
                for module, name in names:
                    undo.callback(replace_attribute(module, name, getattr(self.accelerator, name)))
                return method(*args, **kwargs)

        return call

    def _send(self, message: Any) -> Any:
        """Send a message of the ring's first rank to the others, or return what is received."""
        if self.ranks.size == 1:
            return message
        written = io.BytesIO()
        torch.save(message, written)
        texts = [written.getvalue()]
        dist.broadcast_object_list(texts, group=self.ranks.group, group_src=0)
        if self.ranks.rank == 0:
            return message
        device = self.accelerator.device

        def mine(storage: Any, location: str) -> Any:  # tensors of its GPU come to this rank's
            is_host = "cpu" in (location, device.type)
            return default_restore_location(storage, "cpu" if is_host else str(device))

        # It is of this job's own process, as all that is broadcast by pickles.
        return torch.load(io.BytesIO(texts[0]), mine, weights_only=False)

    def _on_first_rank(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs on the first rank of a ring, by the model that is not split.

        The others get its result, and the states of random generators: all ranks of a ring go on
        with the same numbers. If it raises there, it raises on all of them; so does a call that
        waits for the other ranks.
        """

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._samples:  # a `rollout_func` calls the Trainer's own method
                return function(*args, **kwargs)
            error: Exception | None = None
            message: Any = None
            if self.ranks.rank == 0:
                self._samples = True
                try:
                    with unhooked(self.target), _refusing_collectives(function, self.ranks):
                        message = function(*args, **kwargs), _random_states(), None
                    self._send(message)
                except dist.DistError:
                    raise
                except Exception as raised:  # noqa: BLE001 - the other ranks wait: tell them
                    # (A result that cannot be sent raises before anything is.)
                    error, message = raised, (None, None, f"{type(raised).__name__}: {raised}")
                    self._send(message)
                finally:
                    self._samples = False
            else:
                message = self._send(message)
            if error is not None:
                raise error
            result, states, reason = message
            if reason is not None:
                raise RuntimeError(f"the first rank of this ring failed to generate: {reason}")
            _set_random_states(states)
            return result

        return call


def sampled_by_gkd(hooks: TrainerHooks, target: Target) -> Iterator[Callable[[], object]]:
    """Have the first rank of each ring generate for GKD; yield a function that undoes it."""
    function = getattr(hooks.trainer, "generate_on_policy_outputs", None)
    if function is None:
        return
    generate = Rollouts(hooks, target)._on_first_rank(function)  # noqa: SLF001 - of this module
    yield replace_attribute(hooks.trainer, "generate_on_policy_outputs", generate)


def _sampled_at_once(args: Any, rings: int) -> int:
    """Return how many completions are sampled at once, with each ring as one process."""
    # (An earlier Trainer with these arguments may have changed `generation_batch_size`.)
    size: int = args.per_device_train_batch_size * rings * args.steps_per_generation
    return size


@contextmanager
def _refusing_collectives(function: Callable[..., Any], ranks: Ranks) -> Iterator[None]:
    """Refuse calls that wait for ranks of a ring which wait for ``function``.

    All collectives of torch.distributed ask :func:`_rank_not_in_group` of its module first, however
    they were imported.
    """
    is_outside = distributed_c10d._rank_not_in_group  # noqa: SLF001 - replaced below
    waiting = {*dist.get_process_group_ranks(ranks.group)[1:]} if ranks.size > 1 else set[int]()

    def checked(group: Any) -> Any:
        name = sys._getframe(1).f_code.co_name  # noqa: SLF001 - of the function that asks
        if is_outside(group) or not name.startswith(_COLLECTIVES):
            return is_outside(group)
        if not waiting.isdisjoint(dist.get_process_group_ranks(group)):
            raise ValueError(
                f"{getattr(function, '__name__', 'rollout_func')} runs on the first rank of each ring alone, and "
                f"{name} waits for others of the ring: give it a process group of first ranks, or "
                f"gather in a reward function"
            )
        return False

    undo = replace_attribute(distributed_c10d, "_rank_not_in_group", checked)
    try:
        yield
    finally:
        undo()


def _random_states() -> tuple[Any, ...]:
    """Return the states of the generators of Python, numpy and torch, of its GPU's if any."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    of_numpy = np.random.get_state()  # noqa: NPY002 - the generator that Trainers seed
    return random.getstate(), of_numpy, torch.get_rng_state(), cuda


def _set_random_states(states: tuple[Any, ...]) -> None:
    """Set the states of the generators of Python, numpy and torch."""
    of_python, of_numpy, cpu, cuda = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)  # noqa: NPY002
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
