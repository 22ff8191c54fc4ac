"""Methods that replace a Trainer's own, so that the ranks of a ring count as one device to it.

They are set on the instance of a Trainer that is built already, not on its class.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ring_core import UnsupportedError
from ring_torch.hf.models.hooks import ModelHooks, replace_attribute
from ring_torch.hf.models.releases import installed_release, lacks
from ring_torch.training.part import loss_part

#: Names of the methods replaced on the Accelerator, and on the Trainer.
_ACCELERATOR_METHODS = ("prepare_data_loader", "prepare_model", "gather_for_metrics")
_METHODS = (
    "evaluation_loop", "prediction_step", "get_total_train_batch_size", "floating_point_ops",
    "_track_num_input_tokens",
)  # fmt: skip


def trainer_class(x: object) -> Any:
    """Return the class ``transformers.Trainer`` if the object is an instance of it, else ``None``.

    It is found by name, as importing it takes long.
    """
    name = ("transformers.trainer", "Trainer")
    return next((cls for cls in type(x).__mro__ if (cls.__module__, cls.__name__) == name), None)


def check_trainer(trainer: Any, logits: str) -> None:
    """Refuse a Trainer whose settings split batches or reduce gradients in another way.

    Raises:
        ValueError: Its loss function reads logits of the whole sequence, and ``logits`` is
            ``"local"``.
        UnsupportedError: A setting conflicts, which the message names; or the installed release has
            no method of a name that is replaced.
    """
    args, accelerator = trainer.args, trainer.accelerator
    config = getattr(accelerator, "parallelism_config", None)
    parallel_dims = [
        name for name in ("tp_enabled", "cp_enabled", "sp_enabled") if getattr(config, name, False)
    ]
    settings = {
        "deepspeed": trainer.is_deepspeed_enabled,
        "several GPUs in one process (DataParallel)": args.n_gpu > 1,
        f"parallelism_config ({', '.join(parallel_dims)})": parallel_dims,
        "train_sampling_strategy='batch_rebalance'": (
            getattr(args, "train_sampling_strategy", "") == "batch_rebalance"
        ),
        "dispatch_batches=True": accelerator.dispatch_batches is True,
    }
    if conflicts := [name for name, is_set in settings.items() if is_set]:
        raise UnsupportedError(
            f"the Trainer is set to {' and '.join(conflicts)}, which splits batches or reduces gradients "
            f"in a way of its own; leave it out"
        )
    replaced = [
        *((accelerator, name) for name in _ACCELERATOR_METHODS),
        *((trainer, name) for name in (*_METHODS, "gather_function", "label_smoother")),
    ]
    for owner, method in replaced:
        if not hasattr(owner, method):
            raise UnsupportedError(lacks(type(owner).__name__, method))
    name = "compute_loss_func" if trainer.compute_loss_func is not None else _custom_loss(trainer)
    if name and logits == "local":
        raise ValueError(
            f"the Trainer's {name} reads logits of the whole sequence: give logits='gather' to "
            f"hf.parallelize"
        )


def _custom_loss(trainer: Any) -> str | None:
    """Return the name of a user's ``compute_loss`` that reads logits; ``None`` if there is none.

    Found from the names and string constants in its code.
    """
    method = trainer.compute_loss
    function = inspect.unwrap(getattr(method, "__func__", method))
    if function.__module__.partition(".")[0] in ("transformers", "trl"):
        return None  # TRL's losses are of the whole batch; its metrics read this rank's logits
    code = function.__code__
    is_reading = "logits" in {*code.co_names, *map(str, code.co_consts)}
    return f"compute_loss ({function.__qualname__})" if is_reading else None


class TrainerHooks:
    """Methods that replace those of a Trainer and of its Accelerator.

    The ranks of a ring work on one batch, so to the Trainer they are one device: they draw the same
    batches, report the same loss, and count once in tokens, samples and results.

    All ranks make theirs together, as they tell each other their rings. Nothing is changed before
    :meth:`install`.

    Args:
        trainer: The Trainer; its model is parallelized already.
        hooks: Hooks of its model.

    Raises:
        ValueError: The Trainer's ranks are not divided into rings of one size.
        UnsupportedError: The installed transformers counts labels in an unknown way, or in a way
            that the model's loss does not allow.
    """

    def __init__(self, trainer: Any, hooks: ModelHooks) -> None:
        self.trainer = trainer
        self.accelerator = trainer.accelerator
        self.hooks = hooks
        self.owner: Any = None  # the handle of parallelize, which sets it
        self.evaluated: Any = None  # the model, while it is prepared for evaluation only
        self.firsts, self.ring_index = _first_ranks(hooks)
        self.cp_size = hooks.sharding.ranks.size
        counts_all = trainer.args.average_tokens_across_devices
        # Since transformers 5.20 compute_loss divides the number of ranks by get_tp_size. Older
        # releases count the labels of each rank: the loss is divided by the count of all ranks, and
        # multiplied by the number of all ranks.
        is_asked = "get_tp_size" in trainer_class(trainer).compute_loss.__code__.co_names
        if not is_asked and tuple(map(int, installed_release().split(".")[:2])) >= (5, 20):
            raise UnsupportedError(lacks(trainer_class(trainer).__name__, "get_tp_size"))
        self.counts_once = counts_all and is_asked
        # The Trainer counts labels on each rank of a ring.
        self.counts_each = counts_all and not is_asked
        if self.counts_each and not hooks.divides_by_items(trainer.model):
            raise UnsupportedError(
                "the model's loss is no sum over labels: before transformers 5.20 a Trainer "
                "counts it on each rank of a ring; set average_tokens_across_devices=False"
            )

    def install(self) -> Iterator[Callable[[], object]]:
        """Set the methods on the instances; yield a function that undoes each replacement.

        ``undivided_share`` of the model's hooks is set if the Trainer counts labels on each rank.
        """
        if self.counts_each:
            yield replace_attribute(self.hooks, "undivided_share", 1 / self.cp_size)
        for name in _ACCELERATOR_METHODS:
            yield replace_attribute(self.accelerator, name, getattr(self, name))
        for name in (*_METHODS, "get_tp_size"):
            yield replace_attribute(self.trainer, name, getattr(self, name))
        yield replace_attribute(self.trainer, "gather_function", partial(
            self.gather_for_metrics, use_gather_object=self.trainer.args.eval_use_gather_object
        ))  # fmt: skip
        if (smoother := self.trainer.label_smoother) is not None:
            yield replace_attribute(
                self.trainer, "label_smoother", _LabelSmoother(smoother, self.hooks)
            )

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepare a data loader so that the ranks of a ring draw the same batches.

        It replaces the Accelerator's method, which gives each rank its own batches. Iterable
        datasets are read on every rank, not read on rank 0 and sent to the others.
        """
        from accelerate.data_loader import prepare_data_loader

        accelerator = self.accelerator
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return self._original(accelerator, "prepare_data_loader")(data_loader, device_placement)
        is_placed = accelerator.device_placement if device_placement is None else device_placement
        prepared = prepare_data_loader(
            data_loader,
            accelerator.device,
            num_processes=len(self.firsts),
            process_index=self.ring_index,
            split_batches=accelerator.split_batches,
            put_on_device=is_placed,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,
            even_batches=accelerator.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )
        accelerator._dataloaders.append(prepared)  # noqa: SLF001 - as Accelerator.prepare_data_loader does
        return prepared

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare a model as the Accelerator does, but separately for evaluation and for training.

        The Accelerator takes a model prepared for evaluation as prepared for training too. It would
        then train without DDP, and the weights of the ranks would drift apart.
        """
        if model is self.evaluated and not evaluation_mode:
            model._is_accelerate_prepared = False  # noqa: SLF001 - its only sign of that
            if (forward := vars(model).pop("_original_forward", None)) is not None:
                model.forward = forward
        prepared = self._original(self.accelerator, "prepare_model")(
            model, device_placement, evaluation_mode
        )
        self.evaluated = prepared if evaluation_mode else None
        return prepared

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather results of all ranks as the Accelerator does, but only once from each ring."""
        original = self._original(self.accelerator, "gather_for_metrics")
        if use_gather_object:
            is_first = self.hooks.sharding.ranks.rank == 0
            return original(input_data if is_first else [], use_gather_object=True)
        undo = replace_attribute(self.accelerator, "gather", self._gather)
        try:
            return original(input_data)
        finally:
            undo()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's evaluation, and count steps a second by rings, not by ranks."""
        output = self._original(self.trainer, "evaluation_loop")(*args, **kwargs)
        batch = self.trainer.args.eval_batch_size
        counted, steps = (
            math.ceil(output.num_samples / (batch * devices))
            for devices in (self.trainer.args.world_size, len(self.firsts))
        )
        metrics = _Metrics(output.metrics)
        metrics.steps_of_one_counted = steps / max(counted, 1)
        return output._replace(metrics=metrics)

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Run the Trainer's prediction step, with whole logits if predictions are wanted."""
        with self.hooks.with_whole_logits(not prediction_loss_only):
            return self._original(self.trainer, "prediction_step")(
                model, inputs, prediction_loss_only, ignore_keys=ignore_keys
            )

    def get_tp_size(self) -> int:
        """Return the number of ranks with the same batch, by which the Trainer divides its counts.

        If the Trainer averages each rank's loss by that rank's own count
        (``average_tokens_across_devices=False``), labels count once already, and it is the
        Trainer's own number.
        """
        tp_size: int = self._original(self.trainer, "get_tp_size")()
        return tp_size * (self.cp_size if self.counts_once else 1)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of samples of an optimizer step, each ring's counted once."""
        batch_size: int = self._original(self.trainer, "get_total_train_batch_size")(args)
        return batch_size if self.counts_once else batch_size // self.cp_size

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return this rank's share of a batch's floating point operations."""
        return int(self._original(self.trainer, "floating_point_ops")(inputs)) // self.cp_size

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Add a batch's tokens to the Trainer's count once for each ring, not for each rank."""
        state = self.trainer.state
        before = state.num_input_tokens_seen
        self._original(self.trainer, "_track_num_input_tokens")(inputs)
        state.num_input_tokens_seen = (
            before + (state.num_input_tokens_seen - before) // self.cp_size
        )

    def _gather(self, tensors: Any) -> Any:
        """Gather tensors of all ranks, and keep those of each ring's first rank."""
        from accelerate.utils import recursively_apply

        ranks = self.accelerator.num_processes
        # Gathered tensors are [ranks * n, ...]: keep the n rows of each ring's first rank.
        return recursively_apply(
            lambda x: x.unflatten(0, (ranks, -1))[self.firsts].flatten(0, 1),
            self._original(self.accelerator, "gather")(tensors),
        )

    @staticmethod
    def _original(owner: Any, name: str) -> Callable[..., Any]:
        """Return the class's own method, bound to the instance on which it is replaced."""
        return partial(getattr(type(owner), name), owner)


def trainer_hooks_of(trainer: Any) -> TrainerHooks | None:
    """Return the hooks that a Trainer has, or ``None``."""
    hooks = getattr(vars(trainer.accelerator).get("prepare_data_loader"), "__self__", None)
    return hooks if isinstance(hooks, TrainerHooks) else None


def _first_ranks(hooks: ModelHooks) -> tuple[list[int], int]:
    """Return the first global rank of each ring, and the index of this rank's ring among them.

    Raises:
        ValueError: The Trainer's ranks are not divided into rings of one size.
    """
    ranks = hooks.sharding.ranks
    world = dist.get_world_size() if dist.is_initialized() else 1
    first = 0 if ranks.group is None else min(dist.get_process_group_ranks(ranks.group))
    firsts, sizes = [first], [ranks.size]
    # Every rank tells all others the first rank and the size of its ring.
    if world > 1:
        local = torch.tensor(
            [first, ranks.size], device="cuda" if dist.get_backend() == "nccl" else "cpu"
        )
        by_rank = [torch.empty_like(local) for _ in range(world)]
        dist.all_gather(by_rank, local)
        firsts, sizes = torch.stack(by_rank, dim=1).tolist()
    starts = sorted({*firsts})
    if len({*sizes}) > 1 or any(firsts.count(x) != ranks.size for x in starts):
        raise ValueError(
            f"each of the {world} ranks of the Trainer has to be in one ring, all of one size; the "
            f"first ranks of their rings are {firsts}, and the sizes {sizes}: give ContextParallel a "
            f"dimension of a mesh over all ranks"
        )
    return starts, starts.index(first)


class _Metrics(dict[str, float]):
    """Dict of evaluation metrics that corrects steps per second when the Trainer adds its speed.

    The Trainer computes steps as if each rank ran its own, and logs the result within the method
    that does it, so the correction takes place where the dict is updated.

    Attributes:
        steps_of_one_counted: Real steps over the steps that the Trainer counts.
    """

    steps_of_one_counted = 1.0

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Update the dict, with corrected values of entries named ``*_steps_per_second``."""
        metrics = dict(*args, **kwargs)
        share = self.steps_of_one_counted
        super().update(
            (name, round(x * share, 3) if name.endswith("_steps_per_second") else x)
            for name, x in metrics.items()
        )


@dataclass(frozen=True)
class _LabelSmoother:
    """Label-smoothing loss of the whole batch, from each rank's logits or, if joined, from all.

    Attributes:
        smoother: The Trainer's label smoother.
        hooks: Hooks of the model.
    """

    smoother: Any
    hooks: ModelHooks

    def __call__(
        self,
        model_output: Any,
        labels: Tensor,
        shift_labels: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Return the loss of the whole batch; its gradient is this rank's part.

        Without ``num_items_in_batch`` it is multiplied by ``hooks.undivided_share``.

        Args:
            model_output: Output with logits: ``[B, T, V]`` if the model joins them, else ``[B,
                T_local, V]``.
            labels: Labels of the whole batch, int ``[B, T]``.
            shift_labels: True if token ``i`` predicts label ``i + 1``.
            num_items_in_batch: Divisor of the sum; ``None`` for the number of labels of this batch.
        """
        share = self.hooks.undivided_share if num_items_in_batch is None else 1
        if self.hooks.gathers_logits:
            kwargs = (
                {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
            )
            loss: Tensor = self.smoother(model_output, labels, shift_labels=shift_labels, **kwargs)
            return loss * share
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        sharding, ignored = self.hooks.sharding, self.smoother.ignore_index
        if shift_labels:
            labels = pad(labels[:, 1:], (0, 1), value=ignored)
        items = (labels != ignored).sum() if num_items_in_batch is None else num_items_in_batch
        padding = logits.shape[1] * sharding.ranks.size - labels.shape[1]
        labels = sharding.shard(pad(labels, (0, padding), value=ignored)).to(logits.device)
        part = loss_part(
            logits, labels, items, ignore_index=ignored, label_smoothing=self.smoother.epsilon
        )
        return self.hooks.total_of(part) * share
