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

#: Trainers that are compared with one device where accelerate has a ``cp`` mesh.
TESTED_ON_MESH = tuple(x for x in TESTED if not x.endswith(("GRPOTrainer", "RLOOTrainer")))

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


def untested_of_trl(cls: type, tested: tuple[str, ...] = TESTED_OF_TRL) -> str | None:
    """Return the name of a Trainer's class of TRL that no test has compared; ``None`` if one has.

    Many of them sample, or gather results of all ranks, in code of their own.
    """
    for base in cls.__mro__:
        path = f"{base.__module__}.{base.__qualname__}"
        if path in tested or base.__qualname__ == "_BaseTrainer":
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


def has_mesh(accelerator: Any) -> bool:
    """Return True if an Accelerator has a mesh with a dimension ``cp``."""
    return bool(getattr(getattr(accelerator, "parallelism_config", None), "cp_enabled", False))


def check_trainer(trainer: Any, logits: str, ring: set[int] | None = None) -> None:
    """Refuse a Trainer whose settings split batches or reduce gradients in another way.

    Args:
        trainer: The Trainer.
        logits: What ``parallelize`` was asked to return.
        ring: For a Trainer that accelerate shards over its own ``cp`` mesh, the global ranks of the
            ring; else ``None``.

    Raises:
        ValueError: Its loss function reads logits of the whole sequence, and ``logits`` is not
            ``"gather"``; another setting reads them, and it is ``"none"``; or accelerate does not
            shard weights over the ring.
        UnsupportedError: A setting conflicts, which the message names; or the installed release has
            no method of a name that is replaced.
    """
    args, accelerator = trainer.args, trainer.accelerator
    if ring is not None:
        _check_class_on_mesh(trainer)
    config = getattr(accelerator, "parallelism_config", None)
    parallel_dims = [
        name for name in ("tp_enabled", "cp_enabled", "sp_enabled") if getattr(config, name, False)
    ]
    if ring is not None:
        parallel_dims = [x for x in parallel_dims if x == "sp_enabled"]
    if (untested := untested_of_trl(type(trainer))) is not None:
        raise UnsupportedError(
            f"{untested} is not known to be exact on split sequences; of TRL's Trainers "
            f"{', '.join(x.rpartition('.')[2] for x in TESTED_OF_TRL)} are"
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    settings = {
        "deepspeed": trainer.is_deepspeed_enabled,
        "several GPUs in one process (DataParallel)": args.n_gpu > 1,
        f"parallelism_config ({', '.join(parallel_dims)})": parallel_dims,
        "FSDP1": getattr(plugin, "fsdp_version", 2) == 1,
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
    if ring is not None:
        # The second is never given to accelerate's fully_shard, and weights of the third reach all
        # ranks of tensor parallelism as the first rank's part.
        settings |= {
            "precompute_ref_log_probs (TRL has gathered them as if each rank of a ring had samples of its own)": (
                getattr(args, "precompute_ref_log_probs", False)
            ),
            "a model of transformers' DistributedConfig": (
                getattr(trainer, "is_distributed_loading_by_transformers", False)
            ),
            "cpu_ram_efficient_loading beside tensor parallelism": (
                getattr(config, "tp_enabled", False)
                and getattr(plugin, "cpu_ram_efficient_loading", False)
            ),
        }
    if conflicts := [name for name, is_set in settings.items() if is_set]:
        raise UnsupportedError(
            f"the Trainer is set to {' and '.join(conflicts)}, which splits batches or reduces gradients "
            f"in a way of its own; leave it out{' or call hf.fsdp2' * ('cp_enabled' in parallel_dims)}"
        )
    if ring is not None:
        _check_mesh(accelerator, ring)
    replaced = [
        *((accelerator, name) for name in ACCELERATOR_METHODS),
        *((trainer, name) for name in (*TRAINER_METHODS, "gather_function", "label_smoother")),
    ]
    if ring is not None:
        replaced += [(accelerator, "_prepare_cp"), (accelerator, "_prepare_tp")]
        replaced += [
            (trainer, "_prepare_context_parallel_inputs"), (trainer, "_get_num_items_in_batch"),
            (trainer, "get_cp_size"),
        ]  # fmt: skip
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


def _check_class_on_mesh(trainer: Any) -> None:
    """Refuse Trainers that do not train on a ``cp`` mesh: configs of many raise there, too.

    Raises:
        UnsupportedError: Its class is not tested on one, or it packs.
    """
    packs = any(getattr(trainer.args, name, False) for name in ("packing", "eval_packing"))
    if packs or untested_of_trl(type(trainer), TESTED_ON_MESH):
        other = (
            "nor does hf.parallelize take it, as no test compares it with one device"
            if untested_of_trl(type(trainer))
            else "leave parallelism_config and fsdp out and call hf.parallelize(trainer, cp), which "
            "leaves gradients to the Trainer's own DDP"
        )
        raise UnsupportedError(
            f"{type(trainer).__name__}{' with packing' * packs} does not train on a cp mesh of accelerate: {other}"
        )


def _check_mesh(accelerator: Any, ring: set[int]) -> None:
    """Refuse an Accelerator that does not shard weights over this ring.

    Raises:
        ValueError: It has no FSDP2 or no ``cp`` mesh, or one of other ranks.
    """
    if not has_mesh(accelerator) or not accelerator.is_fsdp2:
        missing = "FSDP2" if has_mesh(accelerator) else "cp mesh"
        raise ValueError(
            f"hf.fsdp2 takes a Trainer with FSDP2 on a cp mesh of accelerate, and this one has no {missing}: "
            f"give TrainingArguments fsdp=True and parallelism_config=ParallelismConfig(cp_size=...), or the "
            f"Trainer to hf.parallelize"
        )
    mesh = accelerator.torch_device_mesh["cp"].mesh.tolist()
    if ring != {*mesh}:
        raise ValueError(
            f"cp is a ring of the ranks {sorted(ring)}, and accelerate's cp mesh has {mesh}: give "
            f"ContextParallel(trainer.accelerator.torch_device_mesh['cp'])"
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
