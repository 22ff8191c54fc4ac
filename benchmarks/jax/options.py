"""Time head dims, window and bias on one GPU in JAX, beside cuDNN: ``nox -s bench_jax_options``.

Batch 1, causal, bfloat16. Methods are the kernel that ``kernel="auto"`` takes, our Triton kernels,
and cuDNN as ``jax.nn.dot_product_attention`` calls it, with V zero-padded to the head dim of Q and
K. A bias is one for all heads, and has a gradient. First the output and all gradients of each are
compared with float32 attention at 1,024 tokens: a method that errs more than twice as much as the
best of the others gets no time. Times are of queued calls, in rounds in which all take turns, each
round in a random order; a ratio is of two times of one round.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from benchmarks.common import report, turns
from benchmarks.common.cases import (
    CAUSAL,
    JAX_ROWS,
    OPTIONS_GATE as GATE_LENGTH,
    OPTIONS_LENGTH,
    OURS,
    PASSES,
    ROUNDS,
    Row,
    windowed,
)
from benchmarks.common.report import reason_of
from benchmarks.common.turns import Errors, Run, Times, passing
from benchmarks.jax.columns import Attend, both, cudnn, exact, ours, random_arrays, seconds
from ring_core import Mask

TURN = 0.03  # seconds of calls in a turn
WINDOW = 1024
METHODS: dict[str, Attend] = {
    OURS: partial(ours, kernel="auto"), "triton": ours, "cudnn": cudnn,
}  # fmt: skip


def mask_of(row: Row) -> Mask:
    """Return the mask of a row."""
    return windowed(WINDOW) if row.option == "window" else CAUSAL


def inputs(row: Row, length: int) -> list[Any]:
    """Return random q, k, v, the bias if there is one, and dout, in bfloat16."""
    *qkv, dout = [(1, length, *shape) for shape in row.shapes]
    bias = [(1, 1, length, length)] * (row.option == "bias")
    return random_arrays([*qkv, *bias, dout], seed=length)


def compiled(
    kind: str, row: Row, names: Sequence[str], x: Sequence[Any]
) -> tuple[dict[str, Run | str], str]:
    """Return each method's compiled run, or why there is none; and the kernel that ours took.

    Methods are compiled in parallel: cuDNN and Triton take seconds for each.
    """
    arguments = x if kind == "both" else x[:-1]
    runs: dict[str, Run | str] = {}
    kernel = ""
    with ThreadPoolExecutor(len(METHODS)) as pool:
        coming: dict[str, Future[Any]] = {}
        for name in names:
            attend = partial(METHODS[name], mask=mask_of(row))
            try:
                function = partial(both, attend) if kind == "both" else attend
                lowered = jax.jit(function).lower(*arguments)
            except Exception as error:  # noqa: BLE001 - a library's own; the row says so
                runs[name] = reason_of(error)
                continue
            if name == OURS:
                kernel = "cudnn" if "__cudnn$" in str(lowered.as_text()) else "triton"
            coming[name] = pool.submit(lowered.compile)
        for name, program in coming.items():
            failed = program.exception()
            runs[name] = partial(program.result(), *arguments) if not failed else reason_of(failed)
    return {name: runs[name] for name in names}, kernel


def errors(row: Row) -> Errors:
    """Return the largest relative RMS error of out and gradients, or why a method has none."""
    x = inputs(row, GATE_LENGTH)
    wide = [y.astype("float32") for y in x]
    expected = jax.jit(partial(both, partial(exact, mask=mask_of(row))))(*wide)
    runs, _ = compiled("both", row, [rival.name for rival in row.entrants], x)
    return {
        name: run if isinstance(run, str) else max(map(_error, run(), expected))
        for name, run in runs.items()
    }


def _error(result: Any, expected: Any) -> float:
    off = jnp.square(result.astype("float32") - expected).mean()
    return float(jnp.sqrt(off) / expected.std())


def rounds(runs: Mapping[str, Run]) -> Times:
    """Return milliseconds per call of each method, in every round."""
    return turns.take_turns(runs, ROUNDS, _calls, _milliseconds)


def _calls(run: Run) -> int:
    """Return how many calls fill a turn."""
    return max(1, round(TURN * 1e3 / _milliseconds(run, 1)))


def _milliseconds(run: Run, calls: int) -> float:
    jax.block_until_ready(run())  # what follows finds the queue empty, and a GPU that is awake
    return 1e3 * seconds(run, calls) / calls


def measure(row: Row, length: int, names: Sequence[str]) -> tuple[dict[str, Times], str]:
    """Return milliseconds by pass and method, and the kernel that ours took."""
    x = inputs(row, length)
    took, kernel = {}, ""
    for direction in PASSES:
        programs, kernel = compiled(direction, row, names, x)
        runs = {name: run for name, run in programs.items() if not isinstance(run, str)}
        took[direction] = rounds(runs)
        for name in programs.keys() - runs.keys():
            print(f"{row.name}, {direction}: {name} has no time: {programs[name]}", file=sys.stderr)
    return took, kernel


def spread(times: Sequence[float]) -> list[float]:
    """Return the least, the median and the most."""
    return [min(times), statistics.median(times), max(times)]


def row_of(row: Row, wrong: Errors, took: Mapping[str, Times], kernel: str) -> dict[str, Any]:
    """Return a row of the result file."""
    usable_times = turns.kept(took, spread)
    return {"setting": row.name, "kernel": kernel, "error": wrong, **usable_times}


def main(argv: Sequence[str] | None = None) -> int:
    """Compare results, then time each row; return the exit code."""
    parser = report.parser_of(__doc__)
    names = [row.name for row in JAX_ROWS]
    parser.add_argument("--length", type=int, default=OPTIONS_LENGTH)
    parser.add_argument("--settings", nargs="+", choices=names, default=names)
    options = parser.parse_args(argv)
    if options.table:
        return report.show(options.table)
    gpu = jax.devices()[0].device_kind
    environment = report.environment(gpu, jax=jax.__version__, length=options.length)
    results = report.Report(options.json, lambda: environment)
    rows = [row for row in JAX_ROWS if row.name in options.settings]
    for row in (bar := tqdm(rows, unit="row")):
        bar.set_description(row.name)
        wrong = errors(row)
        took, kernel = measure(row, options.length, passing(wrong))
        results.add(row_of(row, wrong, took, kernel))
        print(json.dumps(results.rows[-1]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
