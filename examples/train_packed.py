"""Train on packed documents of different lengths, with equal work for every process.

The documents are the help topics that come with Python, a few of them to a step. In ``zigzag`` the
ranks that hold long documents compute longer than the others, which wait. ``ring_torch.dataloader``
packs them, and with ``balanced=True`` gives each batch a layout of its own, in which all compute
equally long; the loss is ``ring_torch.linear_cross_entropy``, whose logits are never whole::

    nox -s demo_packing
    python examples/train_packed.py --cp 2 --documents 8
    torchrun --nproc-per-node 4 examples/train_packed.py --dtype bfloat16

A picture shows who works when, in both layouts, in the step that ``zigzag`` balances worst. The
exit code is 0, or 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from train_bytes import HEAD_DIM, Model, default_device, progress, run_apart, run_here
from train_bytes_report import Config

from ring_core import LayoutSpec, Mask, RingProgram, make_plan, ring_program
from ring_torch import ContextParallel, dataloader, linear_cross_entropy
from ring_torch.training.data import Batch


@dataclass(frozen=True)
class Step:
    """A training step: its loss, and its batch's program in zigzag and in its own layout."""

    loss: float
    zigzag: RingProgram
    balanced: RingProgram


def documents(longest: int) -> list[Tensor]:
    """Return the help topics, each cut to ``longest`` bytes, int64 ``[length]``."""
    texts = (text.encode()[:longest] for text in topics.values())
    return [torch.tensor(np.frombuffer(text, np.uint8).astype(np.int64)) for text in texts]


def batches(cp: ContextParallel, config: Config, longest: int, at_once: int) -> Iterator[Batch]:
    """Yield this rank's part of packed batches, epoch after epoch, each in another order."""
    topic: Any = documents(longest)  # torch takes a list as a dataset
    for number in count():
        order = torch.Generator().manual_seed(config.seed + number)  # the same on all ranks
        loader = DataLoader(topic, at_once, shuffle=True, generator=order, collate_fn=list)
        yield from dataloader(cp, loader, balanced=True)


def plan_of(batch: Batch, layout: LayoutSpec) -> RingProgram:
    """Return a batch's program in a layout: which rank computes what in which step."""
    mask = Mask(causal=True, cu_seqlens=batch.cu_seqlens)
    plan = make_plan(mask, seq_len=batch.seq_len, cp_size=batch.cp.cp_size, layout=layout)
    return ring_program(plan)


def train(rank: int, config: Config, longest: int, at_once: int) -> list[Step]:
    """Train a model, and return what each step did. Every process calls this."""
    cp = ContextParallel()
    model = Model(config).to(config.device, getattr(torch, config.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    steps, losses = list[Step](), list[float]()
    source = batches(cp, config, longest, at_once)
    for _ in progress(config, losses, quiet=rank > 0):
        batch = next(source).to(config.device)
        attend = partial(
            batch.cp.attention, causal=True, cu_seqlens=batch.cu_seqlens, seq_len=batch.seq_len
        )
        hidden = model.hidden(batch.tokens, batch.positions, attend)
        loss = linear_cross_entropy(
            batch.cp, hidden, model.head.weight, batch.labels, count=batch.count
        )  # this rank's part of the mean
        optimizer.zero_grad()
        loss.backward()
        cp.reduce_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        whole = loss.detach().clone()
        if cp.cp_size > 1:
            dist.all_reduce(whole)
        losses.append(whole.item())
        steps.append(Step(losses[-1], plan_of(batch, "zigzag"), plan_of(batch, batch.cp.layout)))
    return steps


def report(steps: Sequence[Step]) -> None:
    """Print a line for each step, the imbalance of both layouts, and the step that is drawn."""
    print(f"{'step':>4}{'bytes':>8}{'loss':>8}{'zigzag':>9}{'balanced':>10}  imbalance in all")
    for number, step in enumerate(steps, 1):
        print(
            f"{number:4}{step.zigzag.plan.seq_len:8,}{step.loss:8.3f}{step.zigzag.imbalance:9.3f}"
            f"{step.balanced.imbalance:10.3f}"
        )
    drawn = worst(steps)
    print(
        "imbalance: the busiest rank's work over the mean, in zigzag and in the batches' own layouts"
    )
    for title, of_steps in (
        (f"mean of {len(steps)} steps", steps),
        (f"step {drawn + 1}, which zigzag balances worst", [steps[drawn]]),
    ):
        print(title)
        for name, means in imbalances(of_steps).items():
            print(f"  {name:33}{means[0]:6.3f}{means[1]:10.3f}")


def worst(steps: Sequence[Step]) -> int:
    """Return the index of the step that zigzag balances worst."""
    return max(range(len(steps)), key=lambda n: steps[n].zigzag.imbalance)


def imbalances(steps: Sequence[Step]) -> dict[str, list[float]]:
    """Return mean imbalances of zigzag and of the batches' own layouts, by what they compare."""
    names = {"imbalance_by_step": "if ranks wait at each ring step", "imbalance": "in all"}
    return {
        name: [
            float(np.mean([getattr(getattr(step, layout), field) for step in steps]))
            for layout in ("zigzag", "balanced")
        ]
        for field, name in names.items()
    }


def draw(steps: Sequence[Step], path: Path) -> None:
    """Draw the losses, and who works when in the step that zigzag balances worst."""
    from matplotlib.figure import Figure

    number = worst(steps)
    step, by_name = steps[number], imbalances([steps[number]])
    figure = Figure(figsize=(11, 4), layout="constrained")
    figure.suptitle(f"right: training step {number + 1}, which zigzag balances worst")
    loss, *cells = figure.subplots(1, 3)
    loss.plot(range(1, len(steps) + 1), [step.loss for step in steps])
    loss.set(title="loss in nats a byte", xlabel="training step")
    loss.axvline(number + 1, color="silver", zorder=0)
    for n, (work, name) in enumerate(zip(cells, ("zigzag", "balanced"), strict=True)):
        program: RingProgram = getattr(step, name)
        share = program.work().T * (100 / program.work().mean())  # [rank, step]
        work.imshow(share, cmap="Blues", vmin=0, vmax=300, aspect="auto")
        for (rank, at), value in np.ndenumerate(share if share.size <= 256 else share[:0]):
            work.text(at, rank, f"{value:.0f}" if value else "idle", ha="center", va="center")
        lines = [f"work, {name}; 100 is the mean. Imbalance"]
        lines += [f"{what}: {means[n]:.2f}" for what, means in by_name.items()]
        work.set_title("\n".join(lines), fontsize=10)
        work.set(xlabel="step of the ring", ylabel="rank")
        work.locator_params(integer=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(usage="%(prog)s [options]")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add, world = parser.add_argument, int(os.environ.get("WORLD_SIZE", "0"))
    add("--cp", type=int, default=world or 4, help="processes that share a batch")
    add("--documents", type=int, default=4, help="packed into a step")
    add("--longest", type=int, default=4096, help="bytes of a document")
    add("--steps", type=int, default=24, help="batches to train on")
    add("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if each process has a GPU")
    add("--layers", type=int, default=2, help="of the model")
    add("--dim", type=int, default=64, help="width of the model")
    add("--lr", type=float, default=3e-3, help="learning rate")
    add("--seed", type=int, default=0, help="of weights and of the order of documents")
    add("--out", default="out/train_packed.png", help="picture to write, or none")
    options = parser.parse_args(argv)
    options.device = options.device or default_device(options.cp)
    for name in ("cp", "documents", "steps", "layers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more, got {getattr(options, name)}")
    if options.longest < 2:
        parser.error(f"--longest must be 2 or more, got {options.longest}")
    if options.documents > len(topics):
        parser.error(f"--documents must be at most {len(topics)}, got {options.documents}")
    if options.dim < 1 or options.dim % (2 * HEAD_DIM):
        parser.error(f"--dim must be a multiple of {2 * HEAD_DIM}, got {options.dim}")
    if world not in (0, options.cp):
        parser.error(f"--cp is {options.cp}, but WORLD_SIZE is {world}")
    if options.out != "none" and importlib.util.find_spec("matplotlib") is None:
        parser.error("--out needs matplotlib: install ring-core[viz], or give --out none")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print how even the work was, and draw it; return the exit code."""
    options = arguments(argv)
    config = Config(
        cp=options.cp, layout="zigzag", strategy="auto", seq_len=options.longest, window=None,
        packed=True, steps=options.steps, dtype=options.dtype, device=options.device,
        layers=options.layers, dim=options.dim, lr=options.lr, seed=options.seed,
    )  # fmt: skip
    start = run_here if "WORLD_SIZE" in os.environ else run_apart
    steps: list[Step] = start(config, train, config, options.longest, options.documents)
    if os.environ.get("RANK", "0") != "0":
        return 0
    report(steps)
    if options.out != "none":
        draw(steps, Path(options.out))
        print(f"picture: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
