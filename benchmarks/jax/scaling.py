"""Time our Triton kernels beside cuDNN and others on one GPU in JAX: ``nox -s bench_jax_gpu``.

Batch 1, 32 query heads, 8 key heads, head dim 128, bfloat16. First the root mean square errors of
out, dQ, dK and dV are measured at 2,048 tokens against float32 attention: a method with more than
1.1 times cuDNN's error gets no time, and if ours has more, nothing is timed. A time is the median
of five rounds of whole calls, in which all take turns. Besides cuDNN there are Mosaic GPU's
attention (Hopper, forward, float16: it multiplies nothing else) and ejkernel's Triton kernels; what
one of them does not support, or fails in, is listed as refused, with the reason.

With ``--ranks 4 8`` one GPU emulates the first, the middle and the last rank of such rings, without
communication: the efficiency of so many GPUs if nothing had to travel. The slowest rank counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from operator import le
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import ring_jax_gpu
from benchmarks.common import report as _report
from benchmarks.common.cases import (
    CAUSAL,
    DIM,
    FULL,
    HEADS,
    KV_HEADS,
    PASSES,
    SCALING_GATE as GATE_LENGTH,
    pairs_of,
    windowed,
)
from benchmarks.common.report import parser_of, reason_of, show
from benchmarks.common.turns import Run, take_turns
from benchmarks.jax.alone import as_rank, share
from benchmarks.jax.columns import (
    COLUMNS,
    both,
    exact,
    passes,
    random_arrays,
    seconds,
)
from ring_core import Mask
from ring_core.tools.bench import watched

GATE = 1.1  # largest error, in units of cuDNN's
SLOW = 0.2  # seconds per call above which a turn is one call
TURN = 0.05  # seconds of calls in a turn
REST = 0.05  # seconds before a turn
MASKS = {"causal": CAUSAL, "full": FULL, "window": windowed(1024)}
RESULTS = ("out", "dq", "dk", "dv")


class Report(_report.Report):
    """A report that also keeps errors, and the reasons of what has no time."""

    def __init__(self, path: Path | None) -> None:
        super().__init__(path, environment)
        self.errors: dict[str, dict[str, list[float]]] = {}
        self.refused: list[dict[str, Any]] = []

    def refuse(self, reason: str, **fields: Any) -> None:
        """Keep the reason why something has no time, and print it."""
        self.refused.append({**fields, "reason": reason})
        print("refused:", *fields.values(), "-", reason, flush=True)
        self.save()

    @property
    def found(self) -> dict[str, Any]:
        """Contents of the file: the environment, rows, errors and refusals."""
        return super().found | {"errors": self.errors, "refused": self.refused}


def keys_of(mask: Mask) -> int | None:
    """Return how many keys a query sees, its own included; ``None`` for all."""
    return None if mask.window is None or mask.window[0] is None else mask.window[0] + 1


def name_of(mask: Mask) -> str:
    """Return a mask's name in tables."""
    if mask.window is not None:
        return f"window {keys_of(mask)}"
    return "causal" if mask.causal else "full"


def teraflops(mask: Mask, length: int) -> float:
    """Return a forward's FLOPs in units of 1e12; causal masks count half of all pairs."""
    pairs = length**2 // 2 if mask == CAUSAL else pairs_of(mask, length)
    return 4 * pairs * HEADS * DIM / 1e12


def inputs(length: int, seed: int) -> list[Any]:
    """Return random q, k, v and dout."""
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return random_arrays([(1, length, h, DIM) for h in heads], seed)


def environment() -> dict[str, str]:
    """Return the GPU, versions of libraries, and XLA's flags."""
    libraries = ("jax", "jaxlib", "triton", "jax-triton", "ejkernel")
    gpu, flags = jax.devices()[0].device_kind, os.environ.get("XLA_FLAGS", "")
    return _report.environment(gpu, *libraries, XLA_FLAGS=flags)


def check(names: Iterable[str], mask: Mask, report: Report) -> dict[str, set[str]]:
    """Compare columns with float32 attention; return the passes of each that may be timed."""
    *qkv, dout = inputs(GATE_LENGTH, seed=2)
    wide = [x.astype("float32") for x in qkv]
    expected = jax.jit(partial(both, partial(exact, mask=mask)))(*wide, dout)
    errors_of_mask, allowed = report.errors.setdefault(name_of(mask), {}), {}
    for name in dict.fromkeys(("cudnn", *names)):  # all are compared with cuDNN
        allowed[name] = set[str]()
        for kind, run in passes(COLUMNS[name], mask).items():
            arguments = [*COLUMNS[name].prepare(*qkv), *([dout] if kind == "both" else [])]
            try:
                errors = _errors(run(*arguments), expected)
            except Exception as error:  # noqa: BLE001  # whatever it is, others go on
                report.refuse(reason_of(error), mask=name_of(mask), column=name, what=kind)
                continue
            if len(errors_of_mask.setdefault(name, [])) < len(errors):
                errors_of_mask[name] = errors
            limits = [GATE * error for error in errors_of_mask.get("cudnn", [])]
            if len(limits) >= len(errors) and all(map(le, errors, limits)):
                allowed[name].add(kind)
            else:
                reason = f"errors of {RESULTS[: len(errors)]} are {errors}; at most {limits}"
                report.refuse(reason, mask=name_of(mask), column=name, what=kind)
    return allowed


def _errors(results: Any, expected: Any) -> list[float]:
    """Return RMS errors of out, dq, dk and dv; for a forward that of its output alone."""
    results = results if isinstance(results, tuple) else (results,)
    pairs = zip(results, expected, strict=False)
    return [float(jnp.sqrt(jnp.mean(jnp.square(x.astype("float32") - y)))) for x, y in pairs]


def seconds_each[Key](runs: dict[Key, Run], rounds: int = 5) -> dict[Key, float]:
    """Return medians of the times per call, over rounds in which all take turns.

    A GPU's clock changes with its warmth, so each turn begins with a rest, and no run begins at the
    clock that another one left.
    """
    took = take_turns(runs, rounds, _calls, _rested, shuffled=False)
    return {key: sorted(times)[rounds // 2] for key, times in took.items()}


def _calls(run: Run) -> int:
    """Return how many calls fill a turn; the run has been called before."""
    once = seconds(run)
    return 1 if once > SLOW else max(2, min(60, int(TURN / max(once, 1e-5))))


def _rested(run: Run, calls: int) -> float:
    """Return seconds per call, after a rest."""
    time.sleep(REST)
    return seconds(run, calls) / calls


def that_run[Key](runs: dict[Key, Run], refuse: Callable[[Key, str], None]) -> dict[Key, Run]:
    """Return the runs that can be called; tell ``refuse`` the reasons of the others."""
    able = {}
    for key, run in runs.items():
        try:
            jax.block_until_ready(run())
        except Exception as error:  # noqa: BLE001  # whatever it is, others go on
            refuse(key, reason_of(error))
        else:
            able[key] = run
    return able


def measure(
    allowed: dict[str, set[str]], length: int, mask: Mask, report: Report
) -> dict[str, dict[str, float]]:
    """Return TFLOP/s by column, forward and forward + backward."""
    *qkv, dout = inputs(length, seed=1)
    flops = teraflops(mask, length)
    runs: dict[tuple[str, str], Run] = {}
    for name, kinds in allowed.items():
        arguments = COLUMNS[name].prepare(*qkv) if kinds else ()
        for kind, run in passes(COLUMNS[name], mask).items():
            if kind in kinds:
                runs[name, kind] = partial(run, *arguments, *([dout] if kind == "both" else []))

    def refuse(key: tuple[str, str], reason: str) -> None:
        report.refuse(reason, mask=name_of(mask), length=length, column=key[0], what=key[1])

    rates: dict[str, dict[str, float]] = {}
    for (name, kind), took in seconds_each(that_run(runs, refuse)).items():
        rates.setdefault(name, {})[kind] = flops * PASSES[kind] / took
    return rates


def one_gpu(names: list[str], mask: Mask, lengths: list[int], report: Report) -> None:
    """Add the rows of one GPU for a mask to the report, and print them."""
    if not lengths:
        return
    allowed = {name: kinds for name, kinds in check(names, mask, report).items() if name in names}
    if "triton" in names and allowed["triton"] != PASSES.keys():
        raise SystemExit("wrong: no times")
    print(
        f"{name_of(mask)}: errors {report.errors[name_of(mask)]}; forward, forward + backward: TFLOP/s",
        flush=True,
    )
    for length in lengths:
        rates = measure(allowed, length, mask, report)
        window = {} if mask.window is None else {"window": keys_of(mask)}
        report.add({"length": length, "causal": mask.causal, **window, **rates})
        cells = [
            f"{name} " + " / ".join(f"{rates[name].get(key, 0):.0f}" for key in PASSES)
            for name in rates
        ]
        print(f"{length:6} {name_of(mask):12} {'   '.join(cells)}", flush=True)


def emulated(size: int, lengths: list[int], report: Report) -> None:
    """Add rows of rings whose ranks one GPU emulates, in the report.

    Their efficiency is relative to the same GPU with the whole sequence.
    """
    allowed = check(["triton"], CAUSAL, report)["triton"]
    if allowed != PASSES.keys():
        raise SystemExit("wrong: no times")
    for length in lengths:
        *whole, whole_dout = inputs(length, seed=1)
        *qkv, dout = inputs(length // size, seed=2)
        single, runs = share("ring"), dict[tuple[str, int, str], Run]()
        runs["one", 0, "forward"] = partial(jax.jit(single), *whole)
        runs["one", 0, "both"] = partial(jax.jit(partial(both, single)), *whole, whole_dout)
        for strategy, rank in product(("ring", "gather"), sorted({0, size // 2, size - 1})):
            attend = share(strategy)
            forward, backward = as_rank(rank, size, attend), partial(both, attend)
            runs[strategy, rank, "forward"] = partial(jax.jit(forward), *qkv)
            runs[strategy, rank, "both"] = partial(
                jax.jit(as_rank(rank, size, backward)), *qkv, dout
            )
        for run in runs.values():
            jax.block_until_ready(run())
        took = seconds_each(runs, rounds=3)
        for strategy in ("ring", "gather"):
            row: dict[str, Any] = {"ranks": size, "length": length, "strategy": strategy}
            for kind in PASSES:
                ranks = {str(key[1]): took[key] for key in runs if key[::2] == (strategy, kind)}
                row[f"ms {kind}"] = {rank: 1e3 * x for rank, x in ranks.items()}
                row[f"efficiency {kind}"] = took["one", 0, kind] / size / max(ranks.values())
            report.add(row)
            print(row, flush=True)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    arguments = parser_of(__doc__)
    arguments.add_argument("--lengths", type=int, nargs="*", default=[4096, 8192, 16384, 32768])
    arguments.add_argument("--window-lengths", type=int, nargs="*", default=[32768])
    arguments.add_argument("--masks", nargs="*", choices=MASKS, default=list(MASKS))
    arguments.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    arguments.add_argument("--ranks", type=int, nargs="*", default=[], help="emulated by one GPU")
    arguments.add_argument("--split-lengths", type=int, nargs="+", default=[32768, 131072])
    arguments.add_argument("--xla-flags", action="store_true", help="ring_jax_gpu.set_xla_flags()")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Compare results, then time; return the exit code."""
    options = parser().parse_args(argv)
    if options.table:
        return show(options.table)
    if options.xla_flags:
        ring_jax_gpu.set_xla_flags()
    report = Report(options.json)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    for name in watched(options.masks, len(options.masks), "mask"):
        lengths = options.window_lengths if name == "window" else options.lengths
        one_gpu(options.columns, MASKS[name], lengths, report)
    for size in options.ranks:
        emulated(size, options.split_lengths, report)
    report.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
