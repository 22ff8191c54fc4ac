"""Train a Llama of transformers with its sequences split over processes, in a plain loop.

The model is small, its weights random; the text is the help topics that come with Python, byte by
byte, several to a sequence, each a document of its own. Two lines make it a ring: the name of the
attention, and ``shard_batch``. With ``--compare`` the first process also trains the whole model,
with attention of torch, and the losses are compared::

    torchrun --nproc-per-node 2 examples/finetune_transformers.py --compare
    torchrun --nproc-per-node 8 examples/finetune_transformers.py --device cuda --dtype bfloat16

The exit code is 0, or 1 if losses were compared and differ.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from ring_core import LAYOUTS, STRATEGIES
from ring_torch import ContextParallel, hf

BYTES, IGNORED = 256, -100
LIMIT = 1e-4  # of relative differences of losses, in float32


def batch_of(step: int, options: argparse.Namespace) -> dict[str, Tensor]:
    """A sequence ``[1, T]`` of whole topics, the last one cut short; the same on all ranks.

    Positions begin again with each topic, and its first byte is nobody's label, as in the batches
    of ``DataCollatorWithFlattening``.
    """
    texts = [text.encode() for text in topics.values()]
    random.Random(options.seed + step).shuffle(texts)
    tokens = list(b"".join(texts))[: options.seq_len]
    positions = [n for text in texts for n in range(len(text))][: options.seq_len]
    batch = {"input_ids": torch.tensor([tokens]), "position_ids": torch.tensor([positions])}
    batch["labels"] = batch["input_ids"].masked_fill(batch["position_ids"] == 0, IGNORED)
    return {name: x.to(options.device) for name, x in batch.items()}


def train(options: argparse.Namespace, cp: ContextParallel | None) -> list[float]:
    """Losses of all steps: on a ring, or of the whole model on this process alone."""
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=BYTES, hidden_size=options.dim, intermediate_size=2 * options.dim,
        num_hidden_layers=options.layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=options.seq_len, use_cache=False,
    )  # fmt: skip
    attention = "sdpa"
    if cp is not None:
        attention = hf.register(f"ring_{options.strategy}", strategy=options.strategy)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.to(options.device, getattr(torch, options.dtype)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses = []
    for step in range(options.steps):
        batch = batch_of(step, options)
        loss = model(**(batch if cp is None else cp.shard_batch(batch, model=model))).loss
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        if cp is not None:
            cp.reduce_gradients(model)
            if cp.cp_size > 1:
                dist.all_reduce(total)  # each rank has its part of the mean
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total.item())
    return losses


def report(options: argparse.Namespace, ranks: int, ring: list[float], whole: list[float]) -> int:
    """Print losses, beside those of the whole model if there are any; returns the exit code."""
    print(f"step  {f'{ranks} ranks':>10}" + ("       whole" if whole else ""))
    for step, loss in enumerate(ring):
        print(f"{step + 1:4}  {loss:10.6f}" + (f"  {whole[step]:10.6f}" if whole else ""))
    if not whole:
        return 0
    difference = (torch.tensor(ring) / torch.tensor(whole) - 1).abs().max()
    print(f"largest relative difference: {difference:.1e}")
    if options.dtype != "float32":
        print(f"{options.dtype} is coarse: the difference was not checked")
        return 0
    if not difference <= LIMIT:  # NaN is wrong too
        print(f"error: that is more than {LIMIT:.0e}", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layout", choices=LAYOUTS, default="zigzag")
    parser.add_argument("--strategy", choices=("auto", *STRATEGIES), default="auto")
    parser.add_argument("--seq-len", type=int, default=1000, help="bytes; padded where need be")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64, help="width of the model")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compare", action="store_true", help="with the whole model")
    options = parser.parse_args(argv)
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    elif "OMP_NUM_THREADS" not in os.environ:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))
    if "WORLD_SIZE" in os.environ:  # torchrun has started this process
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    cp = ContextParallel(layout=options.layout)
    ring = train(options, cp)
    code = 0
    if cp.cp_rank == 0:
        code = report(options, cp.cp_size, ring, train(options, None) if options.compare else [])
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
