"""Time head dims, window and bias on one GPU in JAX, beside cuDNN: ``nox -s bench_jax_options``.

Batch 1, causal, bfloat16. Methods are the kernel that ``kernel="auto"`` takes, our Triton kernels,
and cuDNN as ``jax.nn.dot_product_attention`` calls it, with V zero-padded to the head dim of Q and
K. A bias is one for all heads, and has a gradient. First the output and all gradients of each are
compared with float32 attention at 1,024 tokens: a method that errs more than twice as much as the
best of the others gets no time. Times are of queued calls, in rounds in which all take turns, each
round in a random order; a ratio is of two times of one round, and each is kept as its quartiles.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import turns
from benchmarks.common.cases import (
    CAUSAL,
    JAX_ROWS,
    OPTIONS_GATE as GATE_LENGTH,
    OURS,
    Row,
    windowed,
)
from benchmarks.common.report import environment, reason_of
from benchmarks.common.turns import Errors, Run
from benchmarks.jax.methods import Attend, both, cudnn, exact, kernel, random_arrays, seconds
from ring_core import Mask

TURN = 0.03  # seconds of calls in a turn
WINDOW = 1024
METHODS: dict[str, Attend] = {
    OURS: kernel, "triton": partial(kernel, name="triton"), "cudnn": cudnn,
}  # fmt: skip


def mask_of(row: Row) -> Mask:
    """Return the mask of a row."""
    return windowed(WINDOW) if row.option == "window" else CAUSAL


def inputs(row: Row, length: int) -> list[Any]:
    """Return random q, k, v, the bias if there is one, and dout, in bfloat16."""
    *qkv, dout = [(1, length, *shape) for shape in row.shapes]
    bias = [(1, 1, length, length)] * (row.option == "bias")
    return random_arrays([*qkv, *bias, dout], seed=length)


def compiled(way: str, row: Row, names: Sequence[str], x: Sequence[Any]) -> dict[str, Run | str]:
    """Return each method's compiled run of a pass, or why there is none.

    Methods are compiled in parallel: cuDNN and Triton take seconds for each.
    """
    arguments = x if way == "both" else x[:-1]

    def run_of(name: str) -> Run | str:
        try:
            attend = partial(METHODS[name], mask=mask_of(row))
            function = partial(both, attend) if way == "both" else attend
            return partial(jax.jit(function).lower(*arguments).compile(), *arguments)
        except Exception as error:  # noqa: BLE001 - a library's own; the row says so
            return reason_of(error)

    with ThreadPoolExecutor(len(METHODS)) as pool:
        return dict(zip(names, pool.map(run_of, names), strict=True))


def errors(row: Row) -> Errors:
    """Return the largest relative RMS error of out and gradients, or why a method has none."""
    x = inputs(row, GATE_LENGTH)
    wide = [y.astype("float32") for y in x]
    expected = jax.jit(partial(both, partial(exact, mask=mask_of(row))))(*wide)
    runs = compiled("both", row, [rival.name for rival in row.entrants], x)
    return {
        name: run if isinstance(run, str) else max(map(_error, run(), expected))
        for name, run in runs.items()
    }


def _error(result: Any, expected: Any) -> float:
    off = jnp.square(result.astype("float32") - expected).mean()
    return float(jnp.sqrt(off) / expected.std())


def _calls(run: Run) -> int:
    """Return how many calls fill a turn."""
    return max(1, round(TURN * 1e3 / _milliseconds(run, 1)))


def _milliseconds(run: Run, calls: int) -> float:
    jax.block_until_ready(run())  # what follows finds the queue empty, and a GPU that is awake
    return 1e3 * seconds(run, calls) / calls


def measured(row: Row, length: int, count: int) -> dict[str, Any]:
    """Measure a row, and return it with the kernel that ours took."""
    x = inputs(row, length)
    rounds = partial(turns.take_turns, count=count, calls_of=_calls, time_of=_milliseconds)
    programs = partial(compiled, row=row, x=x)
    lowered = jax.jit(partial(METHODS[OURS], mask=mask_of(row))).lower(*x[:-1])
    taken = "cudnn" if "__cudnn$" in str(lowered.as_text()) else "triton"
    result = turns.timed_row(
        row, errors(row), lambda way, names: programs(way, names=names), rounds
    )
    return result | {"kernel": taken}


def _environment() -> dict[str, Any]:
    return environment(jax.devices()[0].device_kind, jax=jax.__version__)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare results, then time each row; return the exit code."""
    return turns.run_rows(__doc__, JAX_ROWS, measured, _environment, argv)


if __name__ == "__main__":
    sys.exit(main())
