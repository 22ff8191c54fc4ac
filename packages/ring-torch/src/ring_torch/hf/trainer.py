"""Methods that replace a Trainer's own, so that the ranks of a ring count as one device to it.

They are set on the instance of a Trainer that is built already, not on its class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ring_core import UnsupportedError
from ring_torch.comm.groups import default_device
from ring_torch.hf.models.check import unwrapped
from ring_torch.hf.models.classes import name_of
from ring_torch.hf.models.hooks import ModelHooks, hooks_of, replace_attribute
from ring_torch.hf.models.releases import installed_release, lacks
from ring_torch.hf.trainer_settings import (
    ACCELERATOR_METHODS,
    TRAINER_METHODS,
    has_mesh,
    reads_padding,
    trainer_class,
)
from ring_torch.sharding import Sharding
from ring_torch.training.part import loss_part


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
        ring = _ranks_of_batch(hooks, self.accelerator)
        self.firsts, self.ring_index = _first_ranks(ring)
        self.cp_size = len(ring)
        counts_all = trainer.args.average_tokens_across_devices
        # Since transformers 5.20 compute_loss divides the number of ranks by get_tp_size. Older
        # releases count the labels of each rank: the loss is divided by the count of all ranks, and
        # multiplied by the number of all ranks.
        is_asked = "get_tp_size" in trainer_class(trainer).compute_loss.__code__.co_names
        is_older = tuple(map(int, installed_release().split(".")[:2])) < (5, 20)
        if not is_asked and (has_mesh(self.accelerator) or not is_older):
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
        if reads_padding(self.trainer):
            yield replace_attribute(self.hooks, "reads_padding", True)
        for name in ACCELERATOR_METHODS:
            yield replace_attribute(self.accelerator, name, getattr(self, name))
        for name in (*TRAINER_METHODS, "get_tp_size"):
            yield replace_attribute(self.trainer, name, getattr(self, name))
        if has_mesh(self.accelerator):
            yield from self._take_mesh()
        yield replace_attribute(self.trainer, "gather_function", partial(
            self.gather_for_metrics, use_gather_object=self.trainer.args.eval_use_gather_object
        ))  # fmt: skip
        if (smoother := self.trainer.label_smoother) is not None:
            yield replace_attribute(
                self.trainer, "label_smoother",
                _LabelSmoother(smoother, self.hooks, _shifts_labels(self.trainer.model)),
            )  # fmt: skip

    def _take_mesh(self) -> Iterator[Callable[[], object]]:
        """Leave accelerate only the weights on its ``cp`` mesh; yield what undoes that.

        Accelerate would prepare torch's own ring, and the Trainer split batches for it.
        """
        accelerator, trainer = self.accelerator, self.trainer
        yield replace_attribute(accelerator, "_prepare_cp", lambda *args: args)
        yield replace_attribute(accelerator, "_cp_context", lambda **_: nullcontext())
        yield replace_attribute(
            trainer, "_prepare_context_parallel_inputs", lambda _, inputs: (nullcontext, inputs)
        )
        # Tensor parallelism is torch's. What it leaves whole stays so: accelerate makes it tensors
        # of the mesh, by a class that transformers has no more.
        yield replace_attribute(accelerator, "_prepare_tp", lambda *args: args)
        # Ranks of a batch count once: get_tp_size has all of them, and what is gathered is of one.
        for name in ("_get_num_items_in_batch", "get_total_train_batch_size"):
            yield replace_attribute(
                trainer, name, self._counting_by_tp_size(getattr(trainer, name))
            )
        if hasattr(trainer, "_tp_size"):  # of TRL, by which it divides gathered counts
            yield replace_attribute(trainer, "_tp_size", 1)

    def _counting_by_tp_size(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that divides by ``get_tp_size``, and not by ``get_cp_size``, too."""

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            undo = replace_attribute(self.trainer, "get_cp_size", lambda: 1)
            try:
                return method(*args, **kwargs)
            finally:
                undo()

        return call

    def check_models(self) -> None:
        """Refuse models that were set on the Trainer after it was parallelized, so are not split.

        Raises:
            ValueError: Its model is another one, or its reference model is not parallelized.
        """
        if hooks_of(self.trainer.model) is not self.hooks:
            raise ValueError(
                "the Trainer's model is not the one that hf.parallelize has split: give the model when "
                "the Trainer is made (model_init makes a new one in each train()), and call "
                "hf.parallelize after that"
            )
        reference = getattr(self.trainer, "ref_model", None)
        if reference is not None and hooks_of(reference) is None:
            raise ValueError(
                "the Trainer's ref_model was set after hf.parallelize and is not split: call "
                "hf.parallelize with this Trainer again"
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

        self.check_models()  # TRL may run the reference model on all data before the first step
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
        if use_gather_object and len(self.firsts) == 1:
            # Accelerate makes a list of the objects of several processes, and leaves one process
            # its own, which the ranks of one ring all have.
            state = self.accelerator.gradient_state
            is_partial = state.end_of_dataloader and state.remainder > 0
            return input_data[: state.remainder] if is_partial else input_data
        if use_gather_object:
            is_first = self.accelerator.process_index in self.firsts
            return original(input_data if is_first else [], use_gather_object=True)
        undo = replace_attribute(self.accelerator, "gather", self.gather_rings)
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

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the Trainer's training step, if all of its models are split."""
        self.check_models()
        loss: Tensor = self._original(self.trainer, "training_step")(*args, **kwargs)
        return loss

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Run the Trainer's prediction step, with whole logits if predictions are wanted."""
        self.check_models()
        if self.hooks.logits == "none" and not prediction_loss_only:
            raise ValueError(
                "a prediction needs logits, and logits='none' was given to hf.parallelize: set "
                "prediction_loss_only=True, or call remove() of the handle and hf.parallelize with "
                "logits='local'"
            )
        with self.hooks.with_whole_logits(not prediction_loss_only):
            return self._original(self.trainer, "prediction_step")(
                model, inputs, prediction_loss_only, ignore_keys=ignore_keys
            )

    def get_tp_size(self) -> int:
        """Return the number of ranks with the same batch, by which the Trainer divides its counts.

        If the Trainer averages each rank's loss by that rank's own count
        (``average_tokens_across_devices=False``), labels count once already, and it is 1.
        """
        return self.cp_size if self.counts_once else 1

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

    def gather_rings(self, tensors: Any) -> Any:
        """Gather tensors of all ranks, and keep those of each ring's first rank."""
        from accelerate.utils import recursively_apply

        ranks = self.accelerator.num_processes
        gathered = self._original(self.accelerator, "gather")(tensors)
        if ranks == 1:  # then a number stays one, without rows
            return gathered
        # Gathered tensors are [ranks * n, ...]: keep the n rows of each ring's first rank.
        return recursively_apply(
            lambda x: x.unflatten(0, (ranks, -1))[self.firsts].flatten(0, 1),
            gathered,
        )

    @staticmethod
    def _original(owner: Any, name: str) -> Callable[..., Any]:
        """Return the class's own method, bound to the instance on which it is replaced."""
        return partial(getattr(type(owner), name), owner)


def trainer_hooks_of(trainer: Any) -> TrainerHooks | None:
    """Return the hooks that a Trainer has, or ``None``."""
    hooks = getattr(vars(trainer.accelerator).get("prepare_data_loader"), "__self__", None)
    return hooks if isinstance(hooks, TrainerHooks) else None


def _ranks_of_batch(hooks: ModelHooks, accelerator: Any) -> list[int]:
    """Return this rank and those with the same batch: of its ring, and of tensor parallelism."""
    if has_mesh(accelerator) and accelerator.parallelism_config.tp_enabled:
        mesh: list[int] = accelerator.torch_device_mesh["cp", "tp"].mesh.flatten().tolist()
        return mesh
    group = hooks.sharding.ranks.group
    return [0] if group is None else dist.get_process_group_ranks(group)


def _first_ranks(ring: list[int]) -> tuple[list[int], int]:
    """Return the first global rank of each ring, and the index of this rank's ring among them.

    Args:
        ring: Global ranks of this rank's ring, those of tensor parallelism included.

    Raises:
        ValueError: The Trainer's ranks are not divided into rings of one size.
        RankMismatchError: Another rank makes another call.
    """
    world, first = Sharding(None, "contiguous"), min(ring)
    mine = torch.tensor([[first, len(ring)]], device=default_device(world.ranks))
    # Every rank tells all others the first rank and the size of its ring.
    firsts, sizes = world.unshard(mine, dim=0).T.tolist()
    starts = sorted({*firsts})
    if len({*sizes}) > 1 or any(firsts.count(x) != len(ring) for x in starts):
        raise ValueError(
            f"each of the {len(firsts)} ranks of the Trainer has to be in one ring, all of one size; the "
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


def _shifts_labels(model: Any) -> bool:
    """Return True where token ``i`` predicts label ``i + 1``, as the Trainer finds it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return name_of(unwrapped(model)) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


@dataclass(frozen=True)
class _LabelSmoother:
    """Label-smoothing loss of the whole batch, from each rank's logits or, if joined, from all.

    Attributes:
        smoother: The Trainer's label smoother.
        hooks: Hooks of the model.
        shifts: True if it is a causal language model. The Trainer asks for shifted labels by the
            name of its class, which FSDP2 changes.
    """

    smoother: Any
    hooks: ModelHooks
    shifts: bool

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
        shift_labels |= self.shifts
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
