"""Settings of a Trainer under which its model can be split, checked before anything is changed."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

from ring_core import UnsupportedError
from ring_torch.hf.models.code import names_and_strings
from ring_torch.hf.models.releases import lacks

#: Names of the methods replaced on the Accelerator, and on the Trainer.
ACCELERATOR_METHODS = ("prepare_data_loader", "prepare_model", "gather_for_metrics")
TRAINER_METHODS = (
    "evaluation_loop", "training_step", "prediction_step", "get_total_train_batch_size",
    "floating_point_ops", "_track_num_input_tokens",
)  # fmt: skip

#: Trainers whose losses are right where each rank has its part of the logits: they have none of
#: their own, or read TRL's outputs of each token, which are joined.
TESTED = (
    "transformers.trainer.Trainer", "trl.trainer.sft_trainer.SFTTrainer",
    "trl.trainer.dpo_trainer.DPOTrainer", "trl.trainer.kto_trainer.KTOTrainer",
    "trl.trainer.reward_trainer.RewardTrainer", "trl.trainer.grpo_trainer.GRPOTrainer",
    "trl.trainer.rloo_trainer.RLOOTrainer",
)  # fmt: skip


#: Trainers whose losses read logits of the whole sequence, which are gathered for them; the first
#: two log means of logits over padding, too.
READ_LOGITS = (
    "trl.experimental.cpo.cpo_trainer.CPOTrainer", "trl.experimental.orpo.orpo_trainer.ORPOTrainer",
    "trl.experimental.tpo.tpo_trainer.TPOTrainer", "trl.experimental.gkd.gkd_trainer.GKDTrainer",
)  # fmt: skip
_READ_PADDING = READ_LOGITS[:2]

#: Trainers of TRL that are compared with one device.
TESTED_OF_TRL = (*(x for x in TESTED if x.startswith("trl.")), *READ_LOGITS)


def reads_logits(trainer: object) -> bool:
    """Return True for a Trainer of TRL whose loss reads logits of the whole sequence."""
    return _derives(trainer, READ_LOGITS)


def reads_padding(trainer: object) -> bool:
    """Return True for a Trainer of TRL whose metrics read logits of padding."""
    return _derives(trainer, _READ_PADDING)


def _derives(trainer: object, paths: tuple[str, ...]) -> bool:
    """Return True if an object's class is one of these paths, or derives from it."""
    return any(f"{x.__module__}.{x.__qualname__}" in paths for x in type(trainer).__mro__)


def untested_of_trl(cls: type) -> str | None:
    """Return the name of a Trainer's class of TRL that no test has compared; ``None`` if one has.

    Many of them sample, or gather results of all ranks, in code of their own.
    """
    for base in cls.__mro__:
        path = f"{base.__module__}.{base.__qualname__}"
        if path in TESTED_OF_TRL or base.__qualname__ == "_BaseTrainer":
            return None
        if path.startswith("trl."):
            return path
    return None


def trainer_class(x: object) -> Any:
    """Return the class ``transformers.Trainer`` if the object is an instance of it, else ``None``.

    It is found by name, as importing it takes long.
    """
    name = ("transformers.trainer", "Trainer")
    return next((cls for cls in type(x).__mro__ if (cls.__module__, cls.__name__) == name), None)


def check_trainer(trainer: Any, logits: str) -> None:
    """Refuse a Trainer whose settings split batches or reduce gradients in another way.

    Raises:
        ValueError: Its loss function reads logits of the whole sequence, and ``logits`` is not
            ``"gather"``; or another setting reads them, and it is ``"none"``.
        UnsupportedError: A setting conflicts, which the message names; or the installed release has
            no method of a name that is replaced.
    """
    args, accelerator = trainer.args, trainer.accelerator
    config = getattr(accelerator, "parallelism_config", None)
    parallel_dims = [
        name for name in ("tp_enabled", "cp_enabled", "sp_enabled") if getattr(config, name, False)
    ]
    if (untested := untested_of_trl(type(trainer))) is not None:
        raise UnsupportedError(
            f"{untested} is not known to be exact on split sequences; of TRL's Trainers "
            f"{', '.join(x.rpartition('.')[2] for x in TESTED_OF_TRL)} are"
        )
    settings = {
        "deepspeed": trainer.is_deepspeed_enabled,
        "several GPUs in one process (DataParallel)": args.n_gpu > 1,
        f"parallelism_config ({', '.join(parallel_dims)})": parallel_dims,
        "train_sampling_strategy='batch_rebalance'": (
            getattr(args, "train_sampling_strategy", "") == "batch_rebalance"
        ),
        "dispatch_batches=True": accelerator.dispatch_batches is True,
        "generate_during_eval (a split model generates nothing)": (
            getattr(trainer, "generate_during_eval", False)
        ),
        "FSDP, and GKD samples": (
            hasattr(trainer, "generate_on_policy_outputs")
            and trainer.is_fsdp_enabled
            and (trainer.lmbda > 0 or trainer.seq_kd)
        ),
    }
    if conflicts := [name for name, is_set in settings.items() if is_set]:
        raise UnsupportedError(
            f"the Trainer is set to {' and '.join(conflicts)}, which splits batches or reduces gradients "
            f"in a way of its own; leave it out"
        )
    replaced = [
        *((accelerator, name) for name in ACCELERATOR_METHODS),
        *((trainer, name) for name in (*TRAINER_METHODS, "gather_function", "label_smoother")),
    ]
    for owner, method in replaced:
        if not hasattr(owner, method):
            raise UnsupportedError(lacks(type(owner).__name__, method))
    name = "compute_loss_func" if trainer.compute_loss_func is not None else _custom_loss(trainer)
    if name and logits != "gather":
        raise ValueError(
            f"the Trainer's {name} reads logits of the whole sequence: give logits='gather' to "
            f"hf.parallelize"
        )
    needs_logits = {
        "compute_metrics": trainer.compute_metrics is not None and not args.prediction_loss_only,
        "label_smoothing_factor": trainer.label_smoother is not None,
    }
    if logits == "none" and (names := [x for x, is_set in needs_logits.items() if is_set]):
        raise ValueError(
            f"the Trainer's {' and '.join(names)} reads logits, and logits='none' makes none: give "
            f"logits='local' to hf.parallelize, or leave it out (prediction_loss_only=True evaluates "
            f"the loss alone)"
        )


def _custom_loss(trainer: Any) -> str | None:
    """Return the name of a function of the Trainer's loss that reads logits; ``None`` if none does.

    The loss is ``compute_loss`` and all that it calls: methods and functions that their code names,
    to any depth. A function reads logits if its code has that name or string. Functions of
    :data:`TESTED` classes are followed, as they may call what a subclass overrides, but trusted.
    """
    owners = [(vars(trainer), False)]
    for cls in type(trainer).__mro__:
        # Classes below a tested one are part of what was tested.
        is_tested = owners[-1][1] or f"{cls.__module__}.{cls.__qualname__}" in TESTED
        owners.append((vars(cls), is_tested))
    visited: set[str | FunctionType] = set()
    waiting: list[str | FunctionType] = ["compute_loss"]
    while waiting:
        visited.add(current := waiting.pop())
        functions = [(current, False)]
        if isinstance(current, str):
            functions = [(x[current], is_tested) for x, is_tested in owners if current in x]
        for value, is_trusted in functions:
            function: Any = inspect.unwrap(value) if callable(value) else value
            function = getattr(function, "__func__", function)
            if not isinstance(function, FunctionType):
                continue
            names, strings = names_and_strings(function)
            if not is_trusted and "logits" in names | strings:
                return f"loss ({function.__qualname__})"
            called = {
                x for x in map(function.__globals__.get, names) if isinstance(x, FunctionType)
            }
            waiting += (names | (set() if is_trusted else called)) - visited
    return None
