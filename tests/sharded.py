"""Trains tiny models with Trainers whose weights FSDP2 shards over all ranks of rings."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from hf_models import Wide, build
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from trained import be_started, collate, documents
from transformers import Trainer, TrainingArguments
from trl_trained import rows_of, trainer_of

from ring_torch import ContextParallel, hf

#: Sizes of accelerate's ParallelismConfig.
MESHES: dict[str, dict[str, int]] = {
    "ring": {"cp_size": 2}, "ring of 3": {"cp_size": 3},
    "data x ring": {"dp_shard_size": 2, "cp_size": 2},
    "data x ring of 3": {"dp_shard_size": 2, "cp_size": 3},
    "data of 4 x ring": {"dp_shard_size": 4, "cp_size": 2},
    "HSDP": {"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 2},
    "TP": {"cp_size": 2, "tp_size": 2},
}  # fmt: skip

#: How torch's tensor parallelism splits the layers of Llama.
_SPLIT = {
    **{f"layers.*.self_attn.{x}_proj": ColwiseParallel() for x in "qkv"},
    **{f"layers.*.mlp.{x}_proj": ColwiseParallel() for x in ("gate", "up")},
    "layers.*.self_attn.o_proj": RowwiseParallel(), "layers.*.mlp.down_proj": RowwiseParallel(),
}  # fmt: skip


def be_fsdp2(args: TrainingArguments, sizes: dict[str, int] | None, **settings: Any) -> None:
    """Set accelerate's state to FSDP2 on a mesh of these sizes, as it is on GPUs.

    Accelerate makes FSDP for GPU kinds alone. So on CPU ranks tests set ``distributed_type`` and
    ``fsdp_plugin`` of its state, after the arguments are made, which reset it, and before the
    Trainer is, which reads it. No code of accelerate is replaced.
    """
    from accelerate import Accelerator, ParallelismConfig, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    state = Accelerator(mixed_precision=args.mixed_precision, cpu=True).state
    state.parallelism_config = ParallelismConfig(**sizes) if sizes else None
    # The state takes this from the PartialState each time that an Accelerator is made.
    PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        **{"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "state_dict_type": "FULL_STATE_DICT"}
        | settings
    )  # fmt: skip
    if args.mixed_precision != "no":
        state.fsdp_plugin.set_mixed_precision(args.mixed_precision)


def trainer_on(
    kind: str, sizes: dict[str, int] | None, folder: str, options: dict[str, Any], dtype: Any,
    **settings: Any,
) -> Any:  # fmt: skip
    """Return a Trainer; with sizes accelerate's state is FSDP2 on a mesh of these, if any."""
    way, options = "LoRA" if options.get("LoRA") else "", dict(options)
    name, changes = options.pop("model", ("Llama", {}))
    defaults: dict[str, Any] = {
        "output_dir": folder, "max_steps": 4, "logging_steps": 1, "learning_rate": 1e-3,
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_grad_norm": 0.5,
        "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2,
        "eval_strategy": "steps", "eval_steps": 2, "use_cpu": True, "bf16": False,
        "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False,
        "lr_scheduler_type": "constant", "include_num_input_tokens_seen": "all",
    }  # fmt: skip
    options = defaults | {n: x for n, x in options.items() if n != "LoRA"}

    def ready(args: TrainingArguments) -> None:
        if sizes is not None:
            be_fsdp2(args, sizes, **settings)

    if kind == "trainer":
        args = TrainingArguments(**options)
        ready(args)
        model = build(name, **changes).to(dtype)
        return Trainer(model, args, collate, documents(), documents(5))
    # A backward would compute what is checkpointed in float32.
    options = {"max_length": 96, "gradient_checkpointing": False} | options
    rows = rows_of(kind, 40 if kind == "sft" else 16)
    return trainer_of(kind, rows, options, dtype, way=way, ready=ready)


def sharded(
    rank: int, ranks: int, mesh: str | None, kind: str, folder: str, options: dict[str, Any],
    settings: dict[str, Any], checkpoint: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train a Trainer, evaluate and save; return its logs, weights and how they are split.

    Args:
        rank: Rank of this process.
        ranks: Number of ranks.
        mesh: A key of :data:`MESHES`; "none" for FSDP2 without a mesh, one ring of all ranks; "one"
            for that without a ring; ``None`` for neither.
        kind: "trainer", or a Trainer of TRL.
        folder: Where checkpoints are written.
        options: Options of the Trainer's arguments; ``LoRA``; ``dtype``; ``logits`` of Ring;
            ``model``, a name and changes of its config.
        settings: Settings of FSDP2; ``drifts`` for other weights on each rank at first.
        checkpoint: Folder to resume from.
    """
    be_started(rank, ranks)
    options, settings = dict(options), dict(settings)
    dtype, drifts = options.pop("dtype", torch.float64), settings.pop("drifts", False)
    logits = options.pop("logits", "local")
    sizes = None if mesh is None else MESHES.get(mesh, {})
    trainer = trainer_on(kind, sizes, folder, options, dtype, **settings)
    if drifts and rank:
        nn.init.zeros_(trainer.model.model.embed_tokens.weight)
    if trainer.args.fp16:  # as on a GPU; accelerate makes neither for CPUs
        trainer.accelerator.native_amp = True
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    if mesh == "none":
        hf.parallelize(trainer, ContextParallel())
    elif sizes:
        on_device = trainer.accelerator.torch_device_mesh
        if "tp_size" in sizes:
            parallelize_module(trainer.model.model, on_device["tp"], _SPLIT)
        cp = ContextParallel(on_device["cp"])
        assert hf.fsdp2(trainer, cp, logits=logits) is hf.fsdp2(trainer, cp, logits=logits)
    # KTO gathers the rewards of a batch that has none of a kind in torch's default dtype.
    torch.set_default_dtype(dtype)
    try:
        with Wide() if dtype is torch.float64 else nullcontext():
            trainer.train(resume_from_checkpoint=checkpoint)
            predicts = kind == "trainer" and not trainer.args.prediction_loss_only
            predicted = trainer.predict(documents(5)) if predicts else None
    finally:
        torch.set_default_dtype(torch.float32)
    if kind == "trainer" and sizes and not options:
        assert hf.verify(trainer, cp, collate(documents()[:2])).gradients is not None
    timed = ("runtime", "per_second", "preparation_time", "lr", "flos")
    weights = {
        name.replace("_checkpoint_wrapped_module.", ""): x.detach()
        for name, x in trainer.model.named_parameters()
    }
    return {
        "metrics": {
            f"{n} {name}": value
            for n, entry in enumerate(trainer.state.log_history)
            for name, value in entry.items() if not name.endswith(timed)
        },
        "predictions": torch.from_numpy(predicted.predictions) if predicted else torch.zeros(0),
        "tokens": trainer.state.num_input_tokens_seen,
        "samples": trainer.get_total_train_batch_size(trainer.args),
        "operations": trainer.state.total_flos,
        "weights": {
            name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in weights.items()
        },
        "split": {
            name.removeprefix("model."): round(x.numel() / x.to_local().numel(), 1)
            for name, x in weights.items() if isinstance(x, DTensor) and x.to_local().numel()
        },
        "files": sorted(x.name for x in Path(folder).glob("checkpoint-2/*")) if rank == 0 else [],
    }  # fmt: skip
