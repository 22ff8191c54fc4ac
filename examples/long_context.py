"""Find the longest sequence that a training step can hold on this hardware, by doubling it.

The step is that of ``train_bytes.py``: a byte-level transformer, forward, backward and AdamW. Each
process holds its part of the sequence from embedding to loss. Memory grows with the tokens of a
process, so twice the processes hold twice the sequence; time grows with its square::

    python examples/long_context.py
    python examples/long_context.py --cp 1
    torchrun --nproc-per-node 8 examples/long_context.py --dtype bfloat16

The memory of each length is estimated from the two lengths before it, so that no process runs out.
On a CPU the time limit ends the search first, unless ``--seconds`` is large.
The exit code is 0, or 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from train_bytes import HEAD_DIM, default_device, run_apart, run_here, train
from train_bytes_report import Config, Run

from ring_core import LAYOUTS

if TYPE_CHECKING:
    from tqdm import tqdm

    Bar = tqdm[NoReturn]

GIB = 2**30
FREE = "SC_AVPHYS_PAGES"
SPARE = 0.9  # usable share of the free memory: allocators keep a little


@dataclass(frozen=True)
class Limits:
    """Limits that end the search: memory of a process in GiB, seconds of a step, tokens.

    Without a limit on memory nine tenths of what is free may be used.
    """

    memory: float | None
    seconds: float
    tokens: int


def allowed(config: Config, limits: Limits) -> float:
    """Return how many bytes a process may use in all: the least over all processes."""
    if limits.memory is not None:
        own = limits.memory * GIB
    elif config.device == "cuda":
        own = SPARE * (torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved())
    else:
        free = os.sysconf(FREE) * os.sysconf("SC_PAGE_SIZE")
        own = SPARE * free / int(os.environ.get("LOCAL_WORLD_SIZE", config.cp))
    least = torch.tensor(own, dtype=torch.float64, device=config.device)
    if config.cp > 1:
        dist.all_reduce(least, dist.ReduceOp.MIN)
    return least.item()


def measured(config: Config) -> Run:
    """Run a training step: seconds of the slowest process, memory of the largest."""
    if config.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = train(config, quiet=True)
    seconds = torch.tensor(run.seconds, dtype=torch.float64, device=config.device)
    if config.cp > 1:
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return replace(run, seconds=seconds.item())


def obstacle(runs: Sequence[Run], room: float, limits: Limits) -> str | None:
    """Return why the next length, twice the last one, is not tried; ``None`` if it is."""
    last = runs[-1]
    if 2 * last.tokens > limits.tokens:
        return f"--most {limits.tokens} was asked for"
    if 4 * last.seconds > limits.seconds:  # attention of twice the tokens meets four times the keys
        return (
            f"a step of it would take {4 * last.seconds:.0f} s, and --seconds is {limits.seconds:g}"
        )
    if len(runs) < 2:
        return None
    needed = last.peak + 2 * (last.peak - runs[-2].peak)
    if needed > room:
        return f"it needs {needed / GIB:.2f} GiB a process, and there are {room / GIB:.2f}"
    return None


def search(rank: int, config: Config, limits: Limits) -> tuple[list[Run], str]:
    """Double the length until a limit is met; return the runs and the limit. All ranks call it."""
    train(replace(config, seq_len=64 * config.cp), quiet=True)  # warm-up: libraries load lazily
    room, runs = allowed(config, limits), list[Run]()
    bar = tqdm_of(rank)
    say(
        rank,
        f"{'tokens':>12}{'a process':>12}{'seconds':>10}{'tokens/s':>12}{'memory a process':>20}",
    )
    why = None
    while why is None:
        if bar is not None:
            bar.set_description(f"{config.seq_len:,} tokens")
        runs.append(run := measured(config))
        say(rank, f"{run.tokens:12,}{run.tokens // config.cp:12,}{run.seconds:10.2f}"
                  f"{run.tokens_per_second:12,.0f}{run.peak / GIB:16.2f} GiB", bar)  # fmt: skip
        if bar is not None:
            bar.update()
        why = obstacle(runs, room, limits)
        config = replace(config, seq_len=2 * config.seq_len)
    if bar is not None:
        bar.close()
    return runs, why


def tqdm_of(rank: int) -> Bar | None:
    """Return a progress bar without an end; ``None`` if there is no terminal, or not rank 0."""
    if rank or not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        return None
    from tqdm import tqdm

    return tqdm(unit="length")


def say(rank: int, line: str, bar: Bar | None = None) -> None:
    """Print a line on rank 0, above its progress bar."""
    if rank == 0 and bar is not None:
        bar.write(line, file=sys.stdout)
    elif rank == 0:
        print(line, flush=True)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(usage="%(prog)s [options]")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add, world = parser.add_argument, int(os.environ.get("WORLD_SIZE", "0"))
    add("--cp", type=int, default=world or 4, help="processes that share a sequence")
    add("--layout", choices=LAYOUTS, default="zigzag", help="which process holds which bytes")
    add("--window", type=int, metavar="LEFT", help="how many bytes back a byte sees")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if each process has a GPU")
    add("--layers", type=int, default=2, help="of the model")
    add("--dim", type=int, default=64, help="width of the model")
    add("--first", type=int, default=1024, help="tokens a process to begin with")
    add("--most", type=int, default=2**30, help="tokens to end with")
    add(
        "--memory", type=float, metavar="GIB", help="of a process; else nine tenths of what is free"
    )
    add("--seconds", type=float, default=60.0, help="that a step may take")
    options = parser.parse_args(argv)
    options.device = options.device or default_device(options.cp)
    if options.dim < 1 or options.dim % (2 * HEAD_DIM):
        parser.error(f"--dim must be a multiple of {2 * HEAD_DIM}, got {options.dim}")
    if min(options.cp, options.layers) < 1 or options.first < 2 or options.first % 2:
        parser.error("--cp and --layers must be 1 or more, --first even and 2 or more")
    if options.window is not None and options.window < 0:
        parser.error(f"--window must be 0 or more, got {options.window}")
    if options.memory is None and options.device == "cpu" and FREE not in os.sysconf_names:
        parser.error("--memory has to be given: this system does not say how much is free")
    if world not in (0, options.cp):
        parser.error(f"--cp is {options.cp}, but WORLD_SIZE is {world}")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", options.cp))
    if options.device == "cuda" and torch.cuda.device_count() < local:
        parser.error(f"--device cuda needs {local} GPUs, found {torch.cuda.device_count()}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Search, and print the longest length and why the next one was not tried."""
    options = arguments(argv)
    config = Config(
        cp=options.cp, layout=options.layout, strategy="auto", seq_len=options.first * options.cp,
        window=options.window, packed=False, steps=1, dtype=options.dtype, device=options.device,
        layers=options.layers, dim=options.dim, lr=3e-3, seed=0,
    )  # fmt: skip
    limits = Limits(options.memory, options.seconds, options.most)
    start = run_here if "WORLD_SIZE" in os.environ else run_apart
    runs, why = start(config, search, config, limits)
    longest = runs[-1].tokens
    say(
        int(os.environ.get("RANK", "0")),
        f"the longest: {longest:,} tokens on {config}. {2 * longest:,}: {why}.",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
