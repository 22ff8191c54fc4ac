"""Settings of a Trainer under which its model can be split, checked before anything is changed."""

from __future__ import annotations

import inspect
from typing import Any

from ring_core import UnsupportedError
from ring_torch.hf.models.releases import lacks

#: Names of the methods replaced on the Accelerator, and on the Trainer.
ACCELERATOR_METHODS = ("prepare_data_loader", "prepare_model", "gather_for_metrics")
TRAINER_METHODS = (
    "evaluation_loop", "training_step", "prediction_step", "get_total_train_batch_size",
    "floating_point_ops", "_track_num_input_tokens",
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
        *((accelerator, name) for name in ACCELERATOR_METHODS),
        *((trainer, name) for name in (*TRAINER_METHODS, "gather_function", "label_smoother")),
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
