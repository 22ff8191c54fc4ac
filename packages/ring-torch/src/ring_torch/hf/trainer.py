"""What a Trainer that is already built does otherwise on a ring, replaced on the instance alone."""

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
from torch.nn.functional import cross_entropy, pad

from ring_core import UnsupportedError
from ring_torch.hf.models.hooks import ModelHooks, replace_attribute


def trainer_class(x: object) -> Any:
    """The class ``transformers.Trainer``, where it is one, without importing that."""
    name = ("transformers.trainer", "Trainer")
    return next((cls for cls in type(x).__mro__ if (cls.__module__, cls.__name__) == name), None)


def check_trainer(trainer: Any, logits: str) -> None:
    """Refuse a Trainer that splits batches, or adds up gradients, in a way of its own.

    Raises:
        ValueError: Its loss function needs logits of the whole sequence.
        UnsupportedError: The message names the setting.
    """
    args, accelerator = trainer.args, trainer.accelerator
    config = getattr(accelerator, "parallelism_config", None)
    own = [
        name for name in ("tp_enabled", "cp_enabled", "sp_enabled") if getattr(config, name, False)
    ]
    given = {
        "deepspeed": trainer.is_deepspeed_enabled,
        "several GPUs in one process (DataParallel)": args.n_gpu > 1,
        f"parallelism_config ({', '.join(own)})": own,
        "train_sampling_strategy='batch_rebalance'": (
            getattr(args, "train_sampling_strategy", "") == "batch_rebalance"
        ),
        "dispatch_batches=True": accelerator.dispatch_batches is True,
    }
    if found := [name for name, is_set in given.items() if is_set]:
        raise UnsupportedError(
            f"the Trainer is set to {' and '.join(found)}, which splits batches or reduces gradients "
            f"in a way of its own; leave it out"
        )
    name = "compute_loss_func" if trainer.compute_loss_func is not None else _own_loss(trainer)
    if name and logits == "local":
        raise ValueError(
            f"the Trainer's {name} reads logits of the whole sequence: give logits='gather' to "
            f"hf.parallelize"
        )


def _own_loss(trainer: Any) -> str | None:
    """Return the name of a user's ``compute_loss`` that reads logits, if there is one."""
    method = trainer.compute_loss
    function = inspect.unwrap(getattr(method, "__func__", method))
    if function.__module__.partition(".")[0] in ("transformers", "trl"):
        return None  # trl's metrics are of a rank's logits, its losses of the whole batch
    code = function.__code__
    is_reading = "logits" in {*code.co_names, *map(str, code.co_consts)}
    return f"compute_loss ({function.__qualname__})" if is_reading else None


class TrainerHooks:
    """The methods that stand in place of a Trainer's and its Accelerator's own.

    Ranks of a ring are copies of one device to it: they draw the same batches, have the same loss,
    and count as one where tokens, samples and results are counted.
    """

    def __init__(self, trainer: Any, hooks: ModelHooks) -> None:
        self.trainer = trainer
        self.accelerator = trainer.accelerator
        self.hooks = hooks
        self.owner: object = None
        self.evaluated: Any = None  # the model that was prepared to be evaluated alone
        self.firsts, self.ring_index = _first_ranks(hooks)
        self.cp_size = hooks.sharding.ring.size
        counts_all = trainer.args.average_tokens_across_devices
        # Before transformers 5.20 its loss asks for no get_tp_size: labels are counted on each rank
        # then, in what the sum is divided by and in what it is multiplied by.
        is_asked = "get_tp_size" in trainer_class(trainer).compute_loss.__code__.co_names
        self.counts_once = counts_all and is_asked
        if counts_all and not is_asked:
            if not hooks.divides_by_items(trainer.model):
                raise UnsupportedError(
                    "the model's loss is no sum over labels: before transformers 5.20 a Trainer "
                    "counts it on each rank of a ring; set average_tokens_across_devices=False"
                )
            hooks.undivided_share = 1 / self.cp_size

    def install(self) -> Iterator[Callable[[], object]]:
        """Put the methods on the instances; yields what takes each off."""
        for name in ("prepare_data_loader", "prepare_model", "gather_for_metrics"):
            yield replace_attribute(self.accelerator, name, getattr(self, name))
        for name in (
            "evaluation_loop", "prediction_step", "get_tp_size", "get_total_train_batch_size", "floating_point_ops",
            "_track_num_input_tokens",
        ):  # fmt: skip
            yield replace_attribute(self.trainer, name, getattr(self, name))
        yield replace_attribute(self.trainer, "gather_function", partial(
            self.gather_for_metrics, use_gather_object=self.trainer.args.eval_use_gather_object
        ))  # fmt: skip
        if (own := self.trainer.label_smoother) is not None:
            yield replace_attribute(self.trainer, "label_smoother", _LabelSmoother(own, self.hooks))

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """As of the Accelerator; the ranks of a ring draw the same batches.

        Streams are read on every rank.
        """
        from accelerate.data_loader import prepare_data_loader

        accelerator = self.accelerator
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return self._own(accelerator, "prepare_data_loader")(data_loader, device_placement)
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
        accelerator._dataloaders.append(prepared)  # noqa: SLF001 - as its own method does
        return prepared

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """As of the Accelerator, once to evaluate and once to train.

        It takes a model that was evaluated for prepared, and would train it without DDP: weights of
        ranks would drift apart.
        """
        if model is self.evaluated and not evaluation_mode:
            model._is_accelerate_prepared = False  # noqa: SLF001 - its only sign of that
            if (forward := vars(model).pop("_original_forward", None)) is not None:
                model.forward = forward
        prepared = self._own(self.accelerator, "prepare_model")(
            model, device_placement, evaluation_mode
        )
        self.evaluated = prepared if evaluation_mode else None
        return prepared

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As of the Accelerator; what the ranks of a ring have alike is gathered once."""
        own = self._own(self.accelerator, "gather_for_metrics")
        if use_gather_object:
            is_first = self.hooks.sharding.ring.rank == 0
            return own(input_data if is_first else [], use_gather_object=True)
        undo = replace_attribute(self.accelerator, "gather", self._gather)
        try:
            return own(input_data)
        finally:
            undo()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As of the Trainer; steps a second are those of a ring's ranks, which count as one."""
        output = self._own(self.trainer, "evaluation_loop")(*args, **kwargs)
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
        """As of the Trainer; logits are those of the whole sequence, where they are wanted."""
        with self.hooks.with_whole_logits(not prediction_loss_only):
            return self._own(self.trainer, "prediction_step")(
                model, inputs, prediction_loss_only, ignore_keys=ignore_keys
            )

    def get_tp_size(self) -> int:
        """How many ranks hold the same batch: so the Trainer counts the labels of each once.

        Where it counts a rank's own alone, each is counted once already.
        """
        own: int = self._own(self.trainer, "get_tp_size")()
        return own * (self.cp_size if self.counts_once else 1)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of a step."""
        own: int = self._own(self.trainer, "get_total_train_batch_size")(args)
        return own if self.counts_once else own // self.cp_size

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """This rank's part of those of the whole batch."""
        return int(self._own(self.trainer, "floating_point_ops")(inputs)) // self.cp_size

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        state = self.trainer.state
        before = state.num_input_tokens_seen
        self._own(self.trainer, "_track_num_input_tokens")(inputs)
        state.num_input_tokens_seen = (
            before + (state.num_input_tokens_seen - before) // self.cp_size
        )

    def _gather(self, tensors: Any) -> Any:
        from accelerate.utils import recursively_apply

        ranks = self.accelerator.num_processes
        return recursively_apply(
            lambda x: x.unflatten(0, (ranks, -1))[self.firsts].flatten(0, 1),
            self._own(self.accelerator, "gather")(tensors),
        )

    @staticmethod
    def _own(owner: Any, name: str) -> Callable[..., Any]:
        return partial(getattr(type(owner), name), owner)


def trainer_hooks_of(trainer: Any) -> TrainerHooks | None:
    """Those that a Trainer has."""
    found = getattr(vars(trainer.accelerator).get("prepare_data_loader"), "__self__", None)
    return found if isinstance(found, TrainerHooks) else None


def _first_ranks(hooks: ModelHooks) -> tuple[list[int], int]:
    """The first rank of each ring, and which ring is this rank's.

    Raises:
        ValueError: Rings are no parts of the Trainer's ranks, of equal sizes.
    """
    ring = hooks.sharding.ring
    world = dist.get_world_size() if dist.is_initialized() else 1
    first = 0 if ring.group is None else min(dist.get_process_group_ranks(ring.group))
    firsts, sizes = [first], [ring.size]
    if world > 1:
        mine = torch.tensor(
            [first, ring.size], device="cuda" if dist.get_backend() == "nccl" else "cpu"
        )
        every = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(every, mine)
        firsts, sizes = torch.stack(every, dim=1).tolist()
    starts = sorted({*firsts})
    if len({*sizes}) > 1 or any(firsts.count(x) != ring.size for x in starts):
        raise ValueError(
            f"each of the {world} ranks of the Trainer has to be in one ring, all of one size; the "
            f"first ranks of their rings are {firsts}, and the sizes {sizes}: give ContextParallel a "
            f"dimension of a mesh over all ranks"
        )
    return starts, starts.index(first)


class _Metrics(dict[str, float]):
    """Metrics of an evaluation: the Trainer adds its speed, and counts a step of each rank.

    It divides samples by its batches on all ranks, in the middle of methods that log the result.
    """

    steps_of_one_counted = 1.0

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As of a dictionary, with steps a second of rings."""
        more = dict(*args, **kwargs)
        share = self.steps_of_one_counted
        super().update(
            (name, round(x * share, 3) if name.endswith("_steps_per_second") else x)
            for name, x in more.items()
        )


@dataclass(frozen=True)
class _LabelSmoother:
    """In place of the Trainer's: the loss of the whole batch, from each rank's part of logits."""

    own: Any
    hooks: ModelHooks

    def __call__(
        self,
        model_output: Any,
        labels: Tensor,
        shift_labels: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        share = self.hooks.undivided_share if num_items_in_batch is None else 1
        if self.hooks.joins_logits:
            more = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
            whole: Tensor = self.own(model_output, labels, shift_labels=shift_labels, **more)
            return whole * share
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        sharding, ignored = self.hooks.sharding, self.own.ignore_index
        if shift_labels:
            labels = pad(labels[:, 1:], (0, 1), value=ignored)
        items = (labels != ignored).sum() if num_items_in_batch is None else num_items_in_batch
        padding = logits.shape[1] * sharding.ring.size - labels.shape[1]
        labels = sharding.shard(pad(labels, (0, padding), value=ignored)).to(logits.device)
        part = cross_entropy(
            logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)),
            labels.flatten(),
            ignore_index=ignored,
            reduction="sum",
            label_smoothing=self.own.epsilon,
        )
        return self.hooks.total_of(part / items) * share
