"""Small models, texts and arguments for Trainers, and what they log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from hf_models import build
from torch import Tensor
from transformers import TrainingArguments

from ring_torch import ContextParallel

LENGTH, ROWS = 45, 64

#: Arguments of Trainers that print and save nothing.
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "logging_steps": 1,
    "learning_rate": 1e-3, "lr_scheduler_type": "constant", "seed": 7, "bf16": False,
    "use_cpu": not torch.cuda.is_available(), "report_to": "none", "save_strategy": "no",
    "disable_tqdm": True, "dataloader_pin_memory": False,
}  # fmt: skip
#: Parts of names of metrics that tell of time and memory.
TIMED = ("runtime", "per_second", "_time", "flos", "mem_")


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
    return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


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
    return TrainingArguments(str(folder), **{"max_steps": 20, **SETTINGS, **options})


def logged(trainer: Any) -> dict[str, float]:
    """Return what a Trainer has logged, by the entry's number and name."""
    return {
        f"{n} {name}": x
        for n, entry in enumerate(trainer.state.log_history)
        for name, x in entry.items()
        if not any(part in name for part in TIMED)
    }
