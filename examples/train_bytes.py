"""Train a language model on sequences split over processes, and on one process: equal losses.

The text is English: the help topics that come with Python. A byte-level causal transformer reads it
4,096 bytes at a time. Each of four processes holds a quarter of the sequence, from embedding to
loss; only attention needs the rest, and :class:`ring_torch.ContextParallel` fetches it. The same
code then runs on one process, with a ring of one::

    nox -s demo
    python examples/train_bytes.py --layout striped
    python examples/train_bytes.py --packed --window 512
    torchrun --nproc-per-node 4 examples/train_bytes.py --dtype bfloat16
    torchrun --nproc-per-node 4 --max-restarts 3 examples/train_bytes.py --checkpoint out/checkpoint

With ``--checkpoint`` a run that was cut off goes on where it last saved, with the same losses.
The exit code is 0 if both learn and agree, 1 if not, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.functional import silu
from train_bytes_report import Config, Run, draw, explain, failures, report

from ring_core import LAYOUTS, STRATEGIES, Layout, Mask
from ring_torch import ContextParallel, cross_entropy
from ring_torch.local import LocalRanks

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

BYTES, HEAD_DIM, WARMUP = 256, 32, 10
IGNORED = -100  # the label of a byte that has nothing to predict
EXACT = 4  # steps of the float64 run


class Block(nn.Module):
    """Transformer block: attention, two query heads to a K/V head, and a gated MLP; pre-norm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = (nn.RMSNorm(dim, eps=1e-6) for _ in range(2))
        self.query, self.key_value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.up, self.gate = (nn.Linear(dim, 2 * dim, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        """Map ``x [B, T, dim]``; ``attend`` applies the mask and fetches other ranks' tokens."""
        y = self.norm_attention(x)
        q = self.query(y).unflatten(-1, (-1, HEAD_DIM))  # [B, T, H, D]
        k, v = self.key_value(y).unflatten(-1, (-1, HEAD_DIM)).chunk(2, dim=2)  # [B, T, H / 2, D]
        x = x + self.out(attend(rotate(q, angles), rotate(k, angles), v).flatten(-2))
        y = self.norm_mlp(x)
        mlp: Tensor = self.down(silu(self.gate(y)) * self.up(y))
        return x + mlp


class Model(nn.Module):
    """A causal transformer over bytes; its initial weights depend on the seed alone."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, config.dim)
        self.blocks = nn.ModuleList(Block(config.dim) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.head = nn.Linear(config.dim, BYTES, bias=False)
        random = torch.Generator().manual_seed(config.seed)
        for part in self.modules():
            if isinstance(part, nn.Embedding | nn.Linear):
                std = 1.0 if part is self.embedding else 0.02
                nn.init.normal_(part.weight, std=std, generator=random)

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the head's inputs ``[B, T, dim]`` for ``tokens [B, T]`` at ``positions [T]``."""
        x = self.embedding(tokens)
        exponents = torch.arange(0, 1, 2 / HEAD_DIM, dtype=torch.float64, device=x.device)
        angles = positions[:, None, None] * 10000.0**-exponents  # [T, 1, D / 2]
        for block in self.blocks:
            x = block(x, angles, attend)
        normed: Tensor = self.norm(x)
        return normed

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return logits ``[B, T, 256]`` of ``tokens [B, T]`` at global ``positions [T]``."""
        logits: Tensor = self.head(self.hidden(tokens, positions, attend))
        return logits


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Apply rotary embedding to heads ``x [B, T, H, D]`` (Su et al., arXiv 2104.09864)."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def sequence(config: Config, step: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return a step's whole tokens and labels ``[1, T]``, and its mask as options of attention.

    If packed, each topic is a document, and the label of a document's last byte is ignored: the
    next byte belongs to another one.
    """
    topic = [text.encode() for text in topics.values()]
    text, ends = np.frombuffer(b"".join(topic), np.uint8), np.cumsum([len(x) for x in topic])
    start = np.random.default_rng((config.seed, step)).choice(ends if config.packed else len(text))
    taken = np.take(text, start + np.arange(config.seq_len + 1), mode="wrap")
    tokens, labels = (torch.tensor(x[None], dtype=torch.int64) for x in (taken[:-1], taken[1:]))
    window = None if config.window is None else (config.window, 0)
    options: dict[str, Any] = {"causal": True, "window": window}
    if config.packed:
        rounds = np.arange(2 + config.seq_len // len(text))[:, None]
        stops = (rounds * len(text) + ends).ravel() - start
        stops = stops[(stops > 0) & (stops <= config.seq_len)]
        labels[:, stops - 1] = IGNORED
        options["cu_seqlens"] = tuple(np.union1d(stops, [0, config.seq_len]).tolist())
    return tokens, labels, options


def train(config: Config, *, quiet: bool = False) -> Run:
    """Train a model, and return its losses, speed and memory. All processes call this."""
    before = peak_memory(config.device)
    cp = ContextParallel(layout=config.layout)
    model = Model(config).to(config.device, getattr(torch, config.dtype))  # drawn in float32
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=config.lr, betas=(0.9, 0.95))
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / WARMUP))
    positions = cp.positions(config.seq_len, device=config.device)
    kept = [model, optimizer, warmup]
    losses = load(config, kept)
    taken_up, started = len(losses), time.perf_counter()
    for step in progress(config, losses, quiet=quiet or cp.cp_rank > 0):
        *whole, options = sequence(config, step)
        tokens, labels = (cp.shard(x.to(config.device), dim=1) for x in whole)
        attend = partial(cp.attention, strategy=config.strategy, **options)
        logits = model(tokens, positions, attend)
        count = int(
            (whole[1] != IGNORED).sum()
        )  # of the whole labels, so that ranks need not ask each other
        loss = cross_entropy(cp, logits, labels, count=count)  # this rank's part of the mean
        optimizer.zero_grad()
        loss.backward()
        if cp.cp_size > 1:
            for part in (loss.detach(), *(x.grad for x in weights if x.grad is not None)):
                dist.all_reduce(part)
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(weights, 1.0)  # the norm of the sum: the same on every rank
        optimizer.step()
        warmup.step()
        if cp.cp_rank == 0:
            save(config, kept, losses)
    seconds, peak = time.perf_counter() - started, peak_memory(config.device)
    memory = torch.tensor([peak - before, peak], device=config.device)
    if cp.cp_size > 1:
        dist.all_reduce(memory, dist.ReduceOp.MAX)
    seen = config.seq_len * (len(losses) - taken_up)
    return Run(tuple(losses), seconds, seen, *memory.tolist())


def checkpoint_file(config: Config) -> Path | None:
    """Return the checkpoint file of a configuration; ``None`` if it has no folder."""
    if config.checkpoint is None:
        return None
    return Path(config.checkpoint) / f"{config.cp}-{config.dtype}.pt"


def facts(config: Config) -> str:
    """Return the settings that a resumed run must have in common with the one cut off."""
    return str(replace(config, steps=0, checkpoint=None, save_every=0).__dict__)


def save(config: Config, kept: Sequence[Any], losses: list[float]) -> None:
    """Write all that the next steps depend on, every ``save_every`` steps.

    Every process holds the same, so one of them calls this.
    """
    file = checkpoint_file(config)
    if file is None or len(losses) % config.save_every:
        return
    state = {"facts": facts(config), "losses": losses, "kept": [x.state_dict() for x in kept]}
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    torch.save(state, new)
    new.replace(file)  # atomic: the file is whole or the old one


def load(config: Config, kept: Sequence[Any]) -> list[float]:
    """Restore a run from its checkpoint, and return the losses of its steps so far."""
    file = checkpoint_file(config)
    if file is None or not file.exists():
        return []
    state = torch.load(file, map_location=config.device, weights_only=True)
    if state["facts"] != facts(config):
        raise ValueError(f"{file} is of another run: {state['facts']}, not {facts(config)}")
    for part, its in zip(kept, state["kept"], strict=True):
        part.load_state_dict(its)
    losses: list[float] = state["losses"]
    return losses[: config.steps]


def peak_memory(device: str) -> int:
    """Return the most bytes that this process has used so far: on its GPU, or in RAM."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def progress(config: Config, losses: Sequence[float], *, quiet: bool) -> Iterator[int]:
    """Yield the steps to do; show a bar if there is a terminal, else print a few lines."""
    name, steps = f"{config}, {config.dtype}", range(len(losses), config.steps)
    if bar := not quiet and sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
        from tqdm import tqdm
    for step in tqdm(steps, desc=name, unit="step") if bar else steps:
        yield step
        if not quiet and not bar and (step + 1) % 10 == 0:
            print(f"{name}: step {step + 1:3}, loss {losses[-1]:.3f}", file=sys.stderr, flush=True)


def run_apart(config: Config, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(rank, *args)`` in new processes of this machine; return rank 0's result.

    An error in one of them ends all and is raised.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave cores to others
    threads = max(1, (os.cpu_count() or 1) // config.cp)  # more would only spin
    cuda = config.device == "cuda"
    # Five minutes is what a step may take, and the longest that a failed rank goes unnoticed.
    with LocalRanks(config.cp, timeout=300, threads=threads, patience=None, cuda=cuda) as ranks:
        return ranks.run(function, *args)[0]


def run_here(config: Config, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(rank, *args)`` in this process, which torchrun started."""
    if config.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # After a restart torchrun may keep its store, which holds addresses of the old processes.
    store, rank, size = next(rendezvous("env://"))
    life = PrefixStore(f"life {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "nccl" if config.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=life, rank=rank, world_size=size)
    result = function(dist.get_rank(), *args)
    dist.destroy_process_group()
    return result


def train_all(_: int, configs: Sequence[Config]) -> list[Run]:
    """Train with one configuration after the other; every rank calls this."""
    first = configs[0]
    # Warm-up: libraries load lazily.
    train(replace(first, seq_len=64 * first.cp, steps=1, checkpoint=None), quiet=True)
    return [train(config) for config in configs]


def default_device(processes: int) -> str:
    """Return ``cuda`` if there is a GPU for each process of this machine, else ``cpu``."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= processes else "cpu"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(usage="%(prog)s [options]")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add, world = parser.add_argument, int(os.environ.get("WORLD_SIZE", "0"))
    add("--cp", type=int, default=world or 4, help="processes that share a sequence")
    add("--layout", choices=LAYOUTS, default="zigzag", help="which process holds which bytes")
    add("--strategy", choices=("auto", *STRATEGIES), default="auto", help="how they move")
    add("--seq-len", type=int, default=4096, help="bytes in a sequence")
    add("--window", type=int, metavar="LEFT", help="how many bytes back a byte sees")
    add("--packed", action="store_true", help="keep help topics apart, with cu_seqlens")
    add("--steps", type=int, default=24, help="sequences to train on")
    add("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if each process has a GPU")
    add("--layers", type=int, default=2, help="of the model")
    add("--dim", type=int, default=64, help="width of the model")
    add("--lr", type=float, default=3e-3, help="learning rate")
    add("--seed", type=int, default=0, help="of weights and data")
    add("--checkpoint", metavar="FOLDER", help="keep the run there, and go on with one kept there")
    add("--save-every", type=int, default=10, metavar="STEPS", help="how often it is kept")
    add("--out", default="out/train_bytes.png", help="picture to write, or none")
    add("--compare", action=argparse.BooleanOptionalAction, default=not world, help="to 1 process")
    add("--no-float64", action="store_true", help="compare in --dtype only")
    options = parser.parse_args(argv)
    options.device = options.device or default_device(options.cp)
    if wrong := next(mistakes(options, world), None):
        parser.error(wrong)
    return options


def mistakes(options: argparse.Namespace, world: int) -> Iterator[str]:
    """Yield an error message for each wrong argument."""
    limits = {"cp": 0, "seq_len": 0, "window": -1, "steps": 0, "layers": 0, "lr": 0, "seed": -1,
              "save_every": 0}  # fmt: skip
    for name, limit in limits.items():
        if (value := getattr(options, name)) is not None and not value > limit:
            yield f"--{name.replace('_', '-')} must be more than {limit}, got {value}"
    try:
        Layout(options.layout, options.seq_len, options.cp)
    except ValueError as error:
        yield f"--seq-len: {error}"
    if options.dim < 1 or options.dim % (2 * HEAD_DIM):
        yield f"--dim must be a multiple of {2 * HEAD_DIM}, got {options.dim}"
    if world not in (0, options.cp):
        yield f"--cp is {options.cp}, but WORLD_SIZE is {world}"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", options.cp))
    if options.device == "cuda" and torch.cuda.device_count() < local:
        yield f"--device cuda needs {local} GPUs, found {torch.cuda.device_count()}"
    if options.out != "none" and importlib.util.find_spec("matplotlib") is None:
        yield "--out needs matplotlib: install ring-core[viz], or give --out none"


def main(argv: Sequence[str] | None = None) -> int:
    """Train on a ring and, if asked to, on one process; compare; returns the exit code."""
    options = arguments(argv)
    config = Config(**{name: getattr(options, name) for name in Config.__annotations__})
    configs = [config]
    if options.compare and config.dtype == "float32" and not options.no_float64:
        configs.append(replace(config, dtype="float64", steps=min(EXACT, config.steps)))
    by_torchrun = "WORLD_SIZE" in os.environ  # this process is one of the ranks
    ring: list[Run] = (run_here if by_torchrun else run_apart)(config, train_all, configs)
    if os.environ.get("RANK", "0") != "0":
        return 0
    alone = [replace(each, cp=1) for each in configs]
    single: list[Run] = run_apart(alone[0], train_all, alone) if options.compare else []
    report(config, ring[0], single[0] if single else None)
    wrong = [text for runs in zip_longest(configs, ring, single) for text in failures(*runs)]
    if len(configs) > 1 and not wrong:
        explain(ring, single)
    if options.out != "none":
        mask = Mask(**sequence(config, 0)[2])
        draw(config, mask, ring, single, Path(options.out))
        print(f"picture: {options.out}")
    sys.stderr.writelines(f"error: {text}\n" for text in wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
