"""Read a long prompt and answer it, over processes and in one: the tokens are the same.

The model is a small Llama of transformers with seeded weights, in float64; the prompt is bytes of
Python's help topics. Over processes the prompt and the cache of its keys are split
(``hf.ShardedCache``); one process then does the same with transformers' own cache::

    nox -s demo_generate
    python examples/generate.py --cp 2 --tokens 4096 --new 32

It prints both answers, their time, and the memory of a process. The exit code is 0, 1 if tokens
differ, or 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from train_packed import documents
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from ring_torch import ContextParallel, hf
from ring_torch.local import LocalRanks

BYTES = 256  # values of a token
WIDTH = 40  # of the bar


@dataclass(frozen=True)
class Run:
    """Results of a generation.

    Attributes:
        tokens: The new tokens.
        seconds: Time of prompt and answer.
        cache: Bytes of keys and values in a process.
        grown: Most bytes by which the memory of a process grew.
    """

    tokens: tuple[int, ...]
    seconds: float
    cache: int
    grown: int


def prompt_of(tokens: int) -> Tensor:
    """Return bytes of help topics, ``[1, tokens]``."""
    pieces, length = list[Tensor](), 0
    while length < tokens:
        for topic in documents(1 << 20):
            pieces.append(topic)
            length += len(topic)
    return torch.cat(pieces)[None, :tokens].long()


def model_of(options: argparse.Namespace) -> Any:
    """Return a small Llama with seeded weights."""
    config = LlamaConfig(
        vocab_size=BYTES, hidden_size=options.dim, intermediate_size=2 * options.dim,
        num_hidden_layers=options.layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=1 << 20, eos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).double().train(mode=False)


class Bar:
    """A progress bar of tokens that went through a model.

    Args:
        total: Tokens of prompt and answer.
        share: Part of the tokens of a prompt that this process sees.
    """

    def __init__(self, model: Any, total: int, share: int, title: str) -> None:
        self.total, self.share, self.title, self.done = total, share, title, 0
        model.get_input_embeddings().register_forward_hook(self.step)

    def step(self, _module: Any, args: tuple[Tensor, ...], _output: Any) -> None:
        """Count the tokens of a forward, of a prompt if they are many."""
        n = args[0].shape[1]
        self.done += n * self.share if n > 1 else 1
        part = min(1.0, self.done / self.total)
        bar = "#" * round(part * WIDTH)
        print(f"\r{self.title:>14} [{bar:<{WIDTH}}] {part:4.0%}", end="", flush=True)


def generate(rank: int, options: argparse.Namespace, split: bool) -> Run:
    """Generate over all processes, each of which calls this, or in one alone."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    prompt, model, cp = prompt_of(options.tokens), model_of(options), ContextParallel()
    if rank == 0:
        title = f"{options.cp} processes" if split else "one process"
        Bar(model, options.tokens + options.new, options.cp if split else 1, title)
    cache: Any = DynamicCache(config=model.config)
    arguments: dict[str, Any] = {"prefill_chunk_size": options.chunk}
    if split:
        hf.parallelize(model, cp)
        cache, arguments = hf.ShardedCache(cp, chunk=options.chunk), {}
    before, start = _most_memory(), time.perf_counter()
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, do_sample=False,
        max_new_tokens=options.new, **arguments,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    size = (
        cache.cache.bytes if split else sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
    )
    return Run(tuple(tokens[0, options.tokens :].tolist()), seconds, size, _most_memory() - before)


def _most_memory() -> int:
    """Return the most bytes that this process has had in memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def generated(processes: int, options: argparse.Namespace) -> Run:
    """Generate over new processes of this machine; return the largest of their results."""
    with LocalRanks(processes, timeout=600, threads=options.threads, patience=None) as ranks:
        runs: list[Run] = ranks.run(generate, options, processes > 1)
    print()
    return max(runs, key=lambda run: run.grown)


def report(split: Run, one: Run, options: argparse.Namespace) -> str:
    """Print both runs, and return what is wrong, in words; nothing if all is well."""
    for name, run in ((f"{options.cp} processes", split), ("one process", one)):
        text = bytes(run.tokens).decode("latin-1")
        print(
            f"{name:>14}: {run.seconds:.0f} s; a process keeps {run.cache / 2**20:.1f} MiB of keys and "
            f"values, and grew by {run.grown / 2**20:.0f} MiB; {text!r}"
        )
    return "" if split.tokens == one.tokens else "the tokens differ"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(usage="%(prog)s [options]")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add = parser.add_argument
    add("--cp", type=int, default=4, help="processes that share prompt and cache")
    add("--tokens", type=int, default=32768, help="bytes of the prompt")
    add("--new", type=int, default=16, help="bytes of the answer")
    add("--chunk", type=int, default=4096, help="bytes of the prompt at a time")
    add("--layers", type=int, default=2, help="layers of the model")
    add("--dim", type=int, default=32, help="width of the model")
    add("--threads", type=int, default=1, help="threads of a process")
    options = parser.parse_args(argv)
    for name in ("tokens", "new", "chunk", "layers", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.cp < 2:
        parser.error("--cp must be at least 2: one process is what it is compared with")
    if options.dim % 8 or options.dim < 8:
        parser.error("--dim must be a multiple of 8")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; return the exit code."""
    options = arguments(argv)
    split, one = generated(options.cp, options), generated(1, options)
    problem = report(split, one, options)
    print(problem or "the tokens are the same")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
