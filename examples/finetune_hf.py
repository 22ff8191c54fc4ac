"""Train a Llama with transformers' Trainer, its sequences split over processes.

The model is small, with random weights. It reads the help topics that come with Python, byte by
byte; a sequence packs several topics, each a document of its own. One line makes it a ring:
``hf.parallelize``. Write the losses of one process, and compare those of a ring with them::

    python examples/finetune_hf.py --write losses.json
    torchrun --nproc-per-node 2 examples/finetune_hf.py --compare losses.json
    torchrun --nproc-per-node 8 examples/finetune_hf.py --dtype bfloat16

The exit code is 0, or 1 if losses were compared and differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    LlamaConfig,
    Trainer,
    TrainingArguments,
)

from ring_core import LAYOUTS, STRATEGIES
from ring_torch import ContextParallel, hf

BYTES = 256
LIMIT = 1e-4  # largest relative difference of losses, in float32


def documents(options: argparse.Namespace) -> list[dict[str, list[int]]]:
    """Return the help topics as token ids, each cut to an equal share of a sequence."""
    most = options.seq_len // options.documents
    return [{"input_ids": [*text.encode()[:most]]} for text in topics.values()]


def default_device() -> str:
    """Return ``cuda`` if there is a GPU for each process of this machine, else ``cpu``."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= processes else "cpu"


def train(options: argparse.Namespace) -> list[float]:
    """Train, and return the loss of every step."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(  # starts the group of several processes
            folder, max_steps=options.steps, per_device_train_batch_size=options.documents,
            gradient_accumulation_steps=options.accumulate, learning_rate=options.lr,
            logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
            use_cpu=options.device == "cpu", seed=options.seed,
            dataloader_pin_memory=options.device != "cpu",
        )  # fmt: skip
        torch.manual_seed(options.seed)
        config = LlamaConfig(
            vocab_size=BYTES, hidden_size=options.dim, intermediate_size=2 * options.dim,
            num_hidden_layers=options.layers, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=options.seq_len,
        )  # fmt: skip
        attention = hf.register(f"ring_{options.strategy}", strategy=options.strategy)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        trainer = Trainer(
            model.to(getattr(torch, options.dtype)), arguments,
            DataCollatorWithFlattening(return_flash_attn_kwargs=True), documents(options),
        )  # fmt: skip
        hf.parallelize(trainer, ContextParallel(layout=options.layout))
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def compare(options: argparse.Namespace, losses: list[float], others: list[float]) -> int:
    """Print the largest difference from another run's losses; return 1 if it is too large."""
    if len(losses) != len(others):
        print(f"error: {len(losses)} losses, and {len(others)} to compare with", file=sys.stderr)
        return 1
    difference = (torch.tensor(losses) / torch.tensor(others) - 1).abs().max()
    print(f"largest relative difference: {difference:.1e}")
    if options.dtype != "float32":
        print(f"{options.dtype} is coarse: the difference was not checked")
        return 0
    if not difference <= LIMIT:  # NaN is wrong too
        print(f"error: that is more than {LIMIT:.0e}", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Train, write or compare the losses, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layout", choices=LAYOUTS, default="zigzag")
    parser.add_argument("--strategy", choices=("auto", *STRATEGIES), default="auto")
    parser.add_argument("--seq-len", type=int, default=1000, help="bytes, at most")
    parser.add_argument("--documents", type=int, default=4, help="in a sequence")
    parser.add_argument("--accumulate", type=int, default=2, help="sequences to a step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64, help="width of the model")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    parser.add_argument("--write", type=Path, help="a file for the losses")
    parser.add_argument("--compare", type=Path, help="such a file, of another run")
    options = parser.parse_args(argv)
    losses = train(options)
    code = 0
    if int(os.environ.get("RANK", "0")) == 0:
        if options.write is not None:
            options.write.write_text(json.dumps(losses))
        if options.compare is not None:
            code = compare(options, losses, json.loads(options.compare.read_text()))
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
