"""``python -m ring_jax_gpu``: tune the block sizes of the plain Triton kernels for this GPU.

``tune FILE`` times other block sizes, warps and stages for the chosen rows of the table, each
checked against the table's own results first, and writes the table with the fastest ones to FILE.
Rows of FILE that are not chosen stay, and so does a row that is not beaten twice.
Set ``RING_TRITON_BLOCKS=FILE`` to use it. The kernels for Hopper have no such sizes.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from ring_core import KernelConfig
from ring_core.tools import commands
from ring_core.tools.bench import progress
from ring_core.tools.case import Options
from ring_core.triton.tile_configs import (
    KERNEL_PASSES,
    Row,
    Table,
    default_table,
    read_table,
    to_text,
)
from ring_jax.attention import RingAttention
from ring_jax.records import Array
from ring_jax_gpu.kernel import TritonKernel

Seconds = Callable[[Row], float]  # times a call with a row; infinite if the row cannot be used
Say = Callable[[str], None]

SIZES, WARPS, STAGES = (32, 64, 128), (4, 8), (1, 2, 3, 4)
HEADS, KV_HEADS = 16, 4
_LIMIT = 0.02  # largest error of a result, as a fraction of its norm
_DEFAULT_KERNELS = ("fwd", "bwd_dq", "bwd_dkv")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 for mistakes of the user."""
    tune = commands.Command(
        "tune", "Find the fastest block sizes of the plain Triton kernels for this GPU.",
        _tune_table, OPTIONS, "blocks.json --head-dims 128",
        "Each size, number of warps and of stages is checked against the table's own results "
        "before it is timed. The table with the fastest ones is written to FILE; rows that are not "
        "chosen stay, and so does a row that is not beaten twice. RING_TRITON_BLOCKS=FILE uses it. "
        "The kernels for Hopper have no such sizes.",
    )  # fmt: skip
    return commands.main("ring_jax_gpu", "Ring's kernels for JAX on NVIDIA GPUs.", (tune,), argv)


def _tune_table(options: argparse.Namespace, _given: set[str]) -> tuple[str, int]:
    """Tune the chosen rows of a table one after another, and write it after each."""
    gpu, path = device(), Path(options.file)
    table = read_table(str(path)) if path.exists() else default_table()
    chosen = [
        row
        for row in table
        if row.kernel in options.kernels and row.itemsize in options.itemsize
        and row.head_dim in options.head_dims and row.per_score_inputs == options.per_score_inputs
    ]  # fmt: skip
    if not chosen:
        raise ValueError("the table has no such rows; see --help for what can be chosen")
    path.write_text(to_text(table))  # fails now, not after minutes, if the file cannot be written
    with progress(len(chosen), "row") as bar:
        for row in chosen:
            print(f"{name_of(row)}, on {gpu}", flush=True)
            say = print if options.verbose else lambda _: None
            best, ratio = tuned(row, timer(table, row, options.tokens, options.rounds, say))
            print(f"  {row.blocks} -> {best.blocks}: {ratio:.2f} times as fast", flush=True)
            table = tuple(best if x == row else x for x in table)
            path.write_text(to_text(table))  # an interrupted run keeps the rows tuned so far
            bar.update()
    return f"written to {path}: RING_TRITON_BLOCKS={path} uses it", 0


def _positive(text: str) -> int:
    """Read a positive integer of the command line."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


OPTIONS: Options = {
    "file": {"metavar": "FILE", "help": "the table, JSON; one that is there is tuned further"},
    "--kernels": {
        "nargs": "+", "choices": KERNEL_PASSES, "default": _DEFAULT_KERNELS,
        "help": f"kernels to tune; default: {' '.join(_DEFAULT_KERNELS)}",
    },
    "--itemsize": {
        "nargs": "+", "type": int, "choices": (2, 4), "default": (2,),
        "help": "bytes of a number: 2 for bfloat16 and float16, 4 for float32; default: 2",
    },
    "--head-dims": {
        "nargs": "+", "type": int, "default": (64, 128), "metavar": "D",
        "help": "head dims to tune for; default: 64 128",
    },
    "--per-score-inputs": {
        "action": "store_true", "help": "tune for calls with dropout, a bias or a predicate",
    },
    "--tokens": {
        "type": _positive, "default": 4096, "metavar": "N",
        "help": "tokens of the timed sequence; default: %(default)s",
    },
    "--rounds": {
        "type": _positive, "default": 5, "metavar": "N",
        "help": "timings of each size, of which the median counts; default: %(default)s",
    },
    "--verbose": {"action": "store_true", "help": "print a line for each size that is tried"},
}  # fmt: skip


def tuned(row: Row, seconds: Seconds) -> tuple[Row, float]:
    """Find the fastest block sizes, warps and stages in the place of ``row``.

    First sizes and warps are tried, then stages. The least of many times is partly luck, so the
    winner and ``row`` are timed once more, and ``row`` stays unless it is slower again.

    Returns:
        The fastest row, and how many times as fast as ``row`` it is.
    """
    others = [replace(row, q=q, k=k, warps=warps) for q, k, warps in product(SIZES, SIZES, WARPS)]
    best = _fastest([row, *others], seconds)
    best = _fastest([best, *(replace(best, stages=stages) for stages in STAGES)], seconds)
    ratio = 1.0 if best == row else seconds(row) / seconds(best)
    return (best, ratio) if ratio > 1.0 else (row, 1.0)


def _fastest(rows: Iterable[Row], seconds: Seconds) -> Row:
    took = {row: seconds(row) for row in dict.fromkeys(rows)}
    return min(took, key=lambda row: took[row])


def timer(table: Table, row: Row, tokens: int, rounds: int, say: Say) -> Seconds:
    """Return a function that times a causal call with another row in the place of ``row``.

    Results are compared with those of the unchanged table; a row whose results are off by more than
    a fiftieth of their norm, or that fails, gets an infinite time. Rows for per-score inputs are
    timed with dropout, rows of ``bwd_dbias`` with a bias.

    Args:
        table: The table.
        row: The row of it that is tuned.
        tokens: Length of the sequence.
        rounds: Number of timings, each of four calls, of which the median counts.
        say: Called with a line about each row that was tried.
    """
    expected = [np.asarray(x, np.float32) for x in _call(table, row, tokens)()]

    def seconds(new: Row) -> float:
        try:
            run = _call(tuple(new if x == row else x for x in table), row, tokens)
            results = [np.asarray(x, np.float32) for x in run()]
        except Exception as error:  # noqa: BLE001  # any error means that the row cannot be used
            say(f"{_described(new)}: {str(error).strip().splitlines()[0][:90]}")
            return math.inf
        distance = max(
            float(np.linalg.norm(x - y)) / max(float(np.linalg.norm(y)), 1e-30)
            for x, y in zip(results, expected, strict=True)
        )
        if not distance <= _LIMIT:
            say(f"{_described(new)}: wrong by {distance:.3g} of the norm")
            return math.inf
        took = _seconds(run, rounds)
        say(f"{_described(new)}: {took * 1e3:.3f} ms")
        return took

    return seconds


def _call(table: Table, row: Row, tokens: int) -> Callable[[], tuple[Array, ...]]:
    """Return a function that runs the forward or backward that the kernel of ``row`` is part of.

    Its inputs are random, and block sizes are those of ``table``. A backward starts from a forward
    that has run here, once.
    """
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(1, tokens, heads, row.head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, dout = (
        jax.random.normal(key, shape).astype("bfloat16" if row.itemsize == 2 else "float32")
        for key, shape in zip(keys[:4], shapes, strict=True)
    )
    has_bias = row.kernel == "bwd_dbias"
    bias = jax.random.normal(keys[4], (1, 1, tokens, tokens)) if has_bias else None
    options: dict[str, Any] = {"dropout_p": 0.1, "dropout_seed": 0} if row.per_score_inputs else {}
    kernel = KernelConfig("triton", fused_backward=row.kernel == "bwd_fused" or None)
    attention = partial(
        RingAttention((TritonKernel(blocks=table, roles=False),)), axis_name=None,
        causal=True, kernel=kernel, **options,
    )  # fmt: skip

    def attend(q: Array, k: Array, v: Array, bias: Array | None) -> Array:
        return attention(q, k, v, bias=bias)

    if row.kernel == "fwd":
        forward = jax.jit(attend)
        return lambda: (forward(q, k, v, bias),)
    _, pull = jax.jit(partial(jax.vjp, attend))(q, k, v, bias)
    backward = jax.jit(lambda pull, dout: tuple(jax.tree.leaves(pull(dout))))
    return partial(backward, pull, dout)


def _seconds(run: Callable[[], Any], rounds: int) -> float:
    """Return the median time of a call over ``rounds`` rounds of four calls."""
    took = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready([run() for _ in range(4)])
        took.append((time.perf_counter() - start) / 4)
    return sorted(took)[rounds // 2]


def _described(row: Row) -> str:
    """Describe the block sizes, warps and stages of a row."""
    return f"{row.q} x {row.k}, {row.warps} warps, {row.stages} stages"


def name_of(row: Row) -> str:
    """Describe the calls that a row of the table is for."""
    per_score_inputs = ", per-score inputs" if row.per_score_inputs else ""
    return f"{row.kernel}, {row.itemsize} bytes, head dims up to {row.head_dim}{per_score_inputs}"


def device() -> str:
    """Return the name of the GPU to tune for.

    Raises:
        ValueError: JAX does not run on a GPU.
    """
    if jax.default_backend() != "gpu":
        raise ValueError(
            f"tune times kernels on an NVIDIA GPU, and jax runs on {jax.default_backend()} here. "
            "Install ring-jax-gpu[cuda13] on a machine with one"
        )
    return cast("str", jnp.zeros(1).devices().pop().device_kind)
