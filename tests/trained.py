"""Trains tiny models with ``transformers.Trainer`` or a plain loop, and returns their logs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from hf_models import Wide, build
from safetensors.torch import load_file
from torch import Tensor
from transformers import Trainer, TrainingArguments

import ring_torch
from ring_torch import ContextParallel, hf

LENGTH, ROWS = 45, 64


class Stream(torch.utils.data.IterableDataset[Any]):
    """Iterable data set of :func:`documents`."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from documents()


def mean_of_squares(
    outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Compute a loss that needs the logits of the whole sequence."""
    chosen = outputs["logits"].gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    total: Tensor = chosen.square().masked_fill(labels == -100, 0).sum()
    assert num_items_in_batch is not None
    return total / num_items_in_batch


def model_of(name: str, **changes: Any) -> Any:
    """Build a small model, or one with LoRA, with weights that are equal on all ranks."""
    if name != "LoRA":
        return build(name, **changes)
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    model = get_peft_model(build("Llama"), LoraConfig(target_modules=["q_proj", "down_proj"]))
    return model.double()


def documents(rows: int = ROWS, *, masked_tail: bool = False) -> list[dict[str, Any]]:
    """Return rows of bytes of Python's help texts; a seventh of the labels is ignored."""
    text = "".join(topics[name] for name in sorted(topics)).encode()
    rows_made = []
    for row in range(rows):
        tokens = torch.tensor([x % 61 for x in text[row * 97 : row * 97 + LENGTH]])
        labels = tokens.masked_fill(torch.arange(LENGTH) % 7 == row % 7, -100)
        if masked_tail:  # ranks other than the first have no labels
            labels[5:] = -100
        rows_made.append({"input_ids": tokens, "labels": labels})
    return rows_made


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack rows of equal length into a batch."""
    return {name: torch.stack([x[name] for x in samples]) for name in samples[0]}


def be_started(rank: int, ranks: int) -> None:
    """Set the environment variables that ``torchrun`` sets."""
    if ranks > 1:
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
        }  # fmt: skip


def context(cp_size: int) -> ContextParallel:
    """Return a context with rings of ``cp_size`` neighbouring ranks."""
    world = dist.get_world_size()
    if world == 1:
        return ContextParallel()
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", (world // cp_size, cp_size), mesh_dim_names=("dp", "cp")
    )
    return ContextParallel(mesh["cp"])


def arguments(folder: str | Path, **options: Any) -> TrainingArguments:
    """Return TrainingArguments that print and save nothing."""
    defaults: dict[str, Any] = {
        "max_steps": 20, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
        "logging_steps": 1, "learning_rate": 1e-3, "use_cpu": not torch.cuda.is_available(),
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "lr_scheduler_type": "constant",
        "dataloader_pin_memory": False, "seed": 7,
    }  # fmt: skip
    return TrainingArguments(str(folder), **defaults | options)


def history(trainer: Trainer) -> list[tuple[float, float]]:
    """Return the loss and gradient norm of each step."""
    return [(x["loss"], x["grad_norm"]) for x in trainer.state.log_history if "loss" in x]


def trained(
    rank: int, ranks: int, cp_size: int | None, name: str, dtype: str, data: dict[str, Any],
    options: dict[str, Any], changes: dict[str, Any] | None = None,
) -> list[tuple[float, float]]:  # fmt: skip
    """Train with a plain Trainer, parallelized if ``cp_size`` is given.

    Returns the loss and gradient norm of each step.
    """
    be_started(rank, ranks)
    model = model_of(name, **changes or {}).to(getattr(torch, dtype))
    dtypes = Wide() if dtype == "float64" else nullcontext()
    with tempfile.TemporaryDirectory() as folder, dtypes, ring_torch.check(every=5):
        rows: Any = Stream() if data.get("is_stream") else documents(**data)
        loss = mean_of_squares if options.get("logits") == "gather" else None
        settings = arguments(folder, **{n: x for n, x in options.items() if n != "logits"})
        trainer = Trainer(model, settings, collate, rows, compute_loss_func=loss)
        if cp_size is not None:
            hf.parallelize(trainer, context(cp_size), logits=options.get("logits", "local"))
        trainer.train()
    return history(trainer)


def session(
    rank: int, ranks: int, cp_size: int | None, folder: str, resumes: bool
) -> dict[str, Any]:
    """Train with evaluations, save, evaluate, predict, and resume in a new Trainer."""
    be_started(rank, ranks)
    options: dict[str, Any] = {
        "max_steps": 6, "save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps",
        "eval_steps": 3, "include_num_input_tokens_seen": "all", "label_smoothing_factor": 0.1,
    }  # fmt: skip

    def accuracy(result: Any) -> dict[str, float]:
        right = result.predictions.argmax(-1)[:, :-1] == result.label_ids[:, 1:]
        return {"accuracy": float(right[result.label_ids[:, 1:] != -100].mean())}

    def built() -> Trainer:
        trainer = Trainer(
            build("Llama").float(), arguments(folder, **options), collate, documents(),
            documents(7), compute_metrics=accuracy,
        )  # fmt: skip
        if cp_size is not None:
            cp = context(cp_size)
            handle = hf.parallelize(trainer, cp)
            assert hf.parallelize(trainer, cp) is handle
        return trainer

    first: Any = built()
    first.train()
    predicted = first.predict(documents(7))
    saved = sorted(load_file(f"{folder}/checkpoint-6/model.safetensors"))
    again = built()
    # Accelerate trains a model without DDP if it has prepared it for evaluation before.
    untrained = (built() if cp_size is None else again).evaluate()["eval_loss"]
    if resumes:
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    return {
        "history": history(first),
        "resumed": history(again if resumes else first),
        "untrained": untrained,
        "evaluated": [x["eval_loss"] for x in first.state.log_history if "eval_loss" in x],
        "accuracy": [x["eval_accuracy"] for x in first.state.log_history if "eval_accuracy" in x],
        "loss of predictions": predicted.metrics["test_loss"],
        "predictions": torch.from_numpy(predicted.predictions),
        "labels": torch.from_numpy(predicted.label_ids),
        "tokens": first.state.num_input_tokens_seen,
        "operations": first.state.total_flos,
        "samples": first.get_total_train_batch_size(first.args),
        "keys": saved,
        "weights": {name: x.detach() for name, x in first.model.state_dict().items()},
    }
