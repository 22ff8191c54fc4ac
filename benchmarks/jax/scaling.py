"""Triton kernels beside cuDNN's and others' attention in JAX: ``nox -s bench_jax_gpu``.

Batch 1, 32 query heads, 8 key heads, head dim 128, bfloat16. First the root mean square errors of
out, dQ, dK and dV at 2,048 tokens against float32 attention: what is off by more than 1.1 times
cuDNN's error gets no time, and where ours is, nothing is timed. A time is the median of five rounds
of whole calls, in which all take turns. Besides cuDNN there are Mosaic GPU's attention (Hopper,
forward, float16: it multiplies nothing else) and ejkernel's Triton kernels; what one of them cannot
do, or failed in, is among the refused, with the reason.

``--ranks 4 8`` lets one GPU emulate ranks of such rings without communication: the first, the
middle one and the last: what so many GPUs would reach if nothing had to travel. The slowest counts.
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

GATE = 1.1  # times cuDNN's error
SLOW = 0.2  # seconds per call, from which on a round is one call
TURN = 0.05  # seconds of calls in a turn
REST = 0.05  # seconds
MASKS = {"causal": CAUSAL, "full": FULL, "window": windowed(1024)}
RESULTS = ("out", "dq", "dk", "dv")


class Report(_report.Report):
    """With errors, and reasons for what has no time."""

    def __init__(self, path: Path | None) -> None:
        super().__init__(path, environment)
        self.errors: dict[str, dict[str, list[float]]] = {}
        self.refused: list[dict[str, Any]] = []

    def refuse(self, reason: str, **fields: Any) -> None:
        """Keep why something has no time."""
        self.refused.append({**fields, "reason": reason})
        print("refused:", *fields.values(), "-", reason, flush=True)
        self.save()

    @property
    def found(self) -> dict[str, Any]:
        """What is written."""
        return super().found | {"errors": self.errors, "refused": self.refused}


def keys_of(mask: Mask) -> int | None:
    """How many keys a query sees, its own included; ``None`` for all."""
    return None if mask.window is None or mask.window[0] is None else mask.window[0] + 1


def name_of(mask: Mask) -> str:
    """For tables."""
    if mask.window is not None:
        return f"window {keys_of(mask)}"
    return "causal" if mask.causal else "full"


def teraflops(mask: Mask, length: int) -> float:
    """Of a forward; the pairs of a causal one are half of all, as is usual."""
    pairs = length**2 // 2 if mask == CAUSAL else pairs_of(mask, length)
    return 4 * pairs * HEADS * DIM / 1e12


def inputs(length: int, seed: int) -> list[Any]:
    """Random q, k, v and dout."""
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return random_arrays([(1, length, h, DIM) for h in heads], seed)


def environment() -> dict[str, str]:
    """What ran."""
    libraries = ("jax", "jaxlib", "triton", "jax-triton", "ejkernel")
    gpu, flags = jax.devices()[0].device_kind, os.environ.get("XLA_FLAGS", "")
    return _report.environment(gpu, *libraries, XLA_FLAGS=flags)


def check(names: Iterable[str], mask: Mask, report: Report) -> dict[str, set[str]]:
    """Compare columns with the definition; what may be timed of each."""
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
    """Root mean square errors; of a forward that of its output."""
    results = results if isinstance(results, tuple) else (results,)
    pairs = zip(results, expected, strict=False)
    return [float(jnp.sqrt(jnp.mean(jnp.square(x.astype("float32") - y)))) for x, y in pairs]


def seconds_each[Key](runs: dict[Key, Run], rounds: int = 5) -> dict[Key, float]:
    """Medians over rounds in which all take turns, as a GPU's clock changes with its warmth.

    Each turn begins with a rest, so that nobody begins at the clock that another left.
    """
    took = take_turns(runs, rounds, _calls, _rested, shuffled=False)
    return {key: sorted(times)[rounds // 2] for key, times in took.items()}


def _calls(run: Run) -> int:
    """How many calls fill a turn, of a run that has run before."""
    once = seconds(run)
    return 1 if once > SLOW else max(2, min(60, int(TURN / max(once, 1e-5))))


def _rested(run: Run, calls: int) -> float:
    """Seconds per call, after a rest."""
    time.sleep(REST)
    return seconds(run, calls) / calls


def that_run[Key](runs: dict[Key, Run], refuse: Callable[[Key, str], None]) -> dict[Key, Run]:
    """Those that can be called; of the others the reason is kept."""
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
    """TFLOP/s forward and forward + backward."""
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
    """Rows of one GPU, each time beside cuDNN's."""
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
    """Rows of rings whose ranks one GPU emulates, and of one GPU that has all to itself."""
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
    """The options."""
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
    """Errors first, then times."""
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
