"""Train a small Qwen3.5 on packed text: recurrent layers and attention split over processes.

Three layers of four are linear attention (the gated delta rule behind a short convolution), as in
Qwen3.5. A row holds several of Python's help topics, each of which begins with a new state. The
model is of transformers, from a config with seeded weights, and ``hf.parallelize`` splits it; one
process then trains the same model on the same rows::

    nox -s demo_hybrid
    python examples/train_hybrid.py --cp 2 --layout contiguous

It prints the losses of both, what a process keeps for the backward, and what a rank sends for its
states. A picture shows how these go from rank to rank. The exit code is 0, 1 if the losses differ,
or 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from train_packed import documents
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from ring_core import Layout
from ring_core.recurrence import runs_of_documents
from ring_torch import ContextParallel, hf
from ring_torch.local import LocalRanks

BYTES = 256  # values of a token
HEADS, HEAD_DIM = 4, 16  # of linear attention
CLOSE = 1e-4  # relative difference of losses that float32 may make
LAYOUTS = ("zigzag", "contiguous")


@dataclass(frozen=True)
class Run:
    """Results of a training run.

    Attributes:
        losses: Loss of each step.
        kept: Most bytes that a process kept for a backward.
        sent: What a rank sends for the states of a recurrent layer, in words.
    """

    losses: tuple[float, ...]
    kept: int
    sent: str


def rows(seq_len: int, longest: int) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Yield packed rows of bytes, ``[1, seq_len]``, and the offsets of their documents."""
    while True:
        pieces, length, offsets = list[Tensor](), 0, [0]
        for topic in documents(longest):
            piece = topic[: seq_len - length]
            pieces.append(piece)
            length += len(piece)
            offsets.append(length)
            if length == seq_len:
                yield torch.cat(pieces)[None], tuple(offsets)
                pieces, length, offsets = [], 0, [0]


def batch_of(tokens: Tensor, offsets: Sequence[int]) -> dict[str, Tensor]:
    """Return the batch of a row: positions begin again with each document."""
    lengths = torch.tensor(offsets).diff().tolist()
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    # The last byte of a document does not predict the first of the next.
    labels = tokens.where(positions > 0, -100)
    return {"input_ids": tokens, "position_ids": positions, "labels": labels}


def model_of(layers: int, dim: int) -> Any:
    """Return a small Qwen3.5 with seeded weights."""
    kinds = ["full_attention" if n % 4 == 3 else "linear_attention" for n in range(layers)]
    qwen: Any = CONFIG_MAPPING["qwen3_5_text"]
    config = qwen(
        vocab_size=BYTES, hidden_size=dim, intermediate_size=2 * dim, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=2, head_dim=HEAD_DIM, layer_types=kinds,
        linear_num_key_heads=HEADS // 2, linear_num_value_heads=HEADS, linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@contextmanager
def counting(kept: list[int]) -> Iterator[None]:
    """Append how many bytes the operations in a block keep for the backward."""
    storages: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        yield
    kept.append(sum(storages.values()))


def train(_rank: int, options: argparse.Namespace) -> Run:
    """Train the model over all processes, each of which calls this; return what it has shown."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()  # of kernels that are not installed
    cp, model = ContextParallel(layout=options.layout), model_of(options.layers, options.dim)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    hf.parallelize(model, cp, recurrent="split")
    losses, kept, source = list[float](), list[int](), rows(options.seq_len, options.longest)
    for _step, (tokens, offsets) in zip(range(options.steps), source, strict=False):
        optimizer.zero_grad()
        with counting(kept):
            loss = model(**batch_of(tokens, offsets)).loss  # the whole row's, on every rank
        loss.backward()
        cp.reduce_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    length = cp.layout_of(options.seq_len, pad=True).local_len
    q, v, g = (torch.zeros(1, length, *x) for x in ((2, HEAD_DIM), (HEADS, HEAD_DIM), (HEADS,)))
    sent = cp.explain_recurrent("gated_delta_rule", q, q, v, g, g)
    return Run(tuple(losses), max(kept), sent)


def trained(processes: int, options: argparse.Namespace) -> Run:
    """Train over new processes of this machine."""
    # Five minutes is what a step may take, and the longest that a failed rank goes unnoticed.
    with LocalRanks(processes, timeout=300, threads=1, patience=None) as ranks:
        run: Run = ranks.run(train, options)[0]
    return run


def report(split: Run, one: Run, processes: int) -> str:
    """Print both runs, and return what is wrong, in words; nothing if all is well."""
    print(f"{'step':>4}{f'{processes} processes':>16}{'one process':>16}")
    for step, (a, b) in enumerate(zip(split.losses, one.losses, strict=True), 1):
        print(f"{step:4}{a:16.6f}{b:16.6f}")
    off = max(abs(a - b) / b for a, b in zip(split.losses, one.losses, strict=True))
    print(f"largest relative difference: {off:.1e}")
    print(
        f"kept for the backward: {split.kept / 2**20:.1f} MiB a process, {one.kept / 2**20:.1f} MiB "
        f"in one process, {split.kept / one.kept:.2f} of it"
    )
    print(split.sent)
    return "" if off <= CLOSE else f"losses differ by {off:.1e}, and may by {CLOSE}"


def draw(split: Run, one: Run, options: argparse.Namespace, path: Path) -> None:
    """Draw the losses, and the runs of the first row's documents with the states between them."""
    from matplotlib.figure import Figure

    _, offsets = next(rows(options.seq_len, options.longest))
    layout = Layout.padded(options.layout, options.seq_len, options.cp)
    runs = runs_of_documents(layout, offsets)
    figure = Figure(figsize=(11, 4), layout="constrained")
    loss, states = figure.subplots(1, 2, width_ratios=(1, 2))
    loss.plot(
        range(1, len(one.losses) + 1), one.losses, label="one process", linewidth=4, alpha=0.4
    )
    loss.plot(range(1, len(split.losses) + 1), split.losses, label=f"{options.cp} processes")
    loss.set(title="loss in nats a byte", xlabel="training step")
    loss.legend()
    for n, (rank, start, length) in enumerate(zip(runs.rank, runs.start, runs.length, strict=True)):
        color = f"C{runs.document[n] % 10}"
        states.barh(rank, length, left=start, height=0.5, color=color, edgecolor="white")
        if runs.continues[n]:
            end = start + length
            states.annotate(
                "", (end, runs.rank[n + 1]), (end, rank),
                arrowprops={"arrowstyle": "-|>", "color": "black", "shrinkA": 8, "shrinkB": 8},
            )  # fmt: skip
    states.set(
        title=f"{options.layout}: a color is a document, an arrow a state that goes on",
        xlabel="byte of the row", ylabel="rank",
    )  # fmt: skip
    states.set_yticks(range(options.cp))
    states.invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(usage="%(prog)s [options]")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add = parser.add_argument
    add("--cp", type=int, default=4, help="processes that share a row")
    add("--layout", choices=LAYOUTS, default="zigzag", help="which process holds which bytes")
    add("--seq-len", type=int, default=1536, help="bytes of a row")
    add("--longest", type=int, default=600, help="bytes of a document")
    add("--steps", type=int, default=8, help="rows to train on")
    add("--layers", type=int, default=4, help="of the model")
    add("--dim", type=int, default=64, help="width of the model")
    add("--out", default="out/train_hybrid.png", help="picture to write, or none")
    options = parser.parse_args(argv)
    for name in ("cp", "seq_len", "steps", "layers", "dim"):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} must be 1 or more, got {getattr(options, name)}")
    if options.longest < 2:
        parser.error(f"--longest must be 2 or more, got {options.longest}")
    if options.out != "none" and importlib.util.find_spec("matplotlib") is None:
        parser.error("--out needs matplotlib: install ring-core[viz], or give --out none")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Train over processes and in one, compare, and draw; return the exit code."""
    options = arguments(argv)
    split, one = (trained(processes, options) for processes in (options.cp, 1))
    wrong = report(split, one, options.cp)
    if options.out != "none":
        draw(split, one, options, Path(options.out))
        print(f"picture: {options.out}")
    if wrong:
        print(wrong, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
