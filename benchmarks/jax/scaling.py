"""Time attention over several GPUs in JAX, beside methods in plain JAX: ``nox -s bench_jax_gpus``.

Every method first has to agree with float32 attention at 2,048 tokens, output and gradients; one
that does not gets no time. Batch 1, bfloat16. Times are medians of rounds of whole calls, in
which all methods of a setting take turns. Scaling efficiency is the rate per GPU over that of
``one`` GPU with the whole sequence, at 128k tokens where it did not run this one. ``GiB`` is what
XLA sets aside on a GPU for results and temporaries. ``gather, kept`` keeps gathered K/V for the
backward, ``gather, again`` gathers them anew, whatever their size.

``--program 1 32`` runs no kernels: it measures how many seconds programs of so many layers, forward
and backward, take to trace, lower and compile, and their sizes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import ring_jax_gpu
from benchmarks.common import report as _report
from benchmarks.common.cases import (
    JAX_SETTINGS,
    PASSES,
    SCALING_GATE as GATE_LENGTH,
    K,
    Setting,
    mask_of,
    pairs_of,
)
from benchmarks.common.report import Report, parser_of, reason_of, rows_of, show
from benchmarks.common.turns import Run, take_turns
from benchmarks.jax.columns import both, exact, layered, random_arrays, seconds
from benchmarks.jax.methods import METHODS, Method, in_order, mesh_of, sharding_of
from ring_core.tools.bench import watched

DEFAULT = ("one", "ring", "gather", "all-gather cudnn", "zigzag cudnn")
WRONG = 0.1  # a method is right if its largest error is below this
LONG = 256 * K  # tokens above which there are fewer rounds
RESULTS = ("out", "dq", "dk", "dv")
SLOW = 0.2  # seconds per call above which a turn is one call
TURN = 0.05  # seconds of calls in a turn
REST = 0.05  # seconds before a turn


class Entrant(NamedTuple):
    """A method in a setting, with its programs, which threads compile.

    Attributes:
        passes: Programs by pass.
        gate: Program of forward + backward at 2,048 tokens, for the comparison.
        gate_method: The method at 2,048 tokens.
    """

    method: Method
    mesh: Mesh
    passes: dict[str, Future[Any]]
    gate: Future[Any]
    gate_method: Method


def shapes_of(setting: Setting, length: int) -> list[tuple[int, ...]]:
    """Return the shapes of q, k, v and dout."""
    heads = (setting.heads, setting.kv_heads, setting.kv_heads, setting.heads)
    return [(1, length, h, setting.dim) for h in heads]


def arrays_of(setting: Setting, length: int, mesh: Mesh) -> list[Any]:
    """Return random q, k, v and dout, split over the GPUs of a mesh."""
    make = partial(random_arrays, shapes_of(setting, length), 1)
    return list(jax.jit(make, out_shardings=sharding_of(mesh))())


def abstract_arrays(setting: Setting, length: int, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    """Return shapes, dtype and sharding of q, k, v and dout, to compile programs for."""
    return [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding_of(mesh))
        for shape in shapes_of(setting, length)
    ]


def enter(name: str, setting: Setting, mesh: Mesh, pool: ThreadPoolExecutor) -> Entrant:
    """Start to compile a method's programs for a setting."""
    short, long = GATE_LENGTH, setting.seq_len
    mesh = mesh_of(1) if name == "one" else mesh
    gate_method, method = (
        METHODS[name](mesh, mask_of(setting.mask, length), length) for length in (short, long)
    )

    def compiled(run: Any, arrays: list[jax.ShapeDtypeStruct]) -> Future[Any]:
        return pool.submit(jax.jit(run).lower(*arrays).compile)

    arrays = abstract_arrays(setting, long, mesh)
    passes = {
        "forward": compiled(method.attend, arrays[:3]),
        "both": compiled(partial(both, method.attend), arrays),
    }
    gate = compiled(partial(both, gate_method.attend), abstract_arrays(setting, short, mesh))
    return Entrant(method, mesh, passes, gate, gate_method)


def errors_of(entrant: Entrant, arrays: list[Any], expected: Iterable[Any]) -> dict[str, float]:
    """Return the largest errors of the output and the gradients at 2,048 tokens."""
    order = in_order(entrant.gate_method.layout, GATE_LENGTH, entrant.mesh.size)
    place = sharding_of(entrant.mesh)
    results = entrant.gate.result()(*(jax.device_put(x[:, order], place) for x in arrays))
    return {
        name: float(
            jnp.abs(jax.device_get(x).astype("float32") - jax.device_get(y)[:, order]).max()
        )
        for name, x, y in zip(RESULTS, results, expected, strict=True)
    }


def environment() -> dict[str, str]:
    """Return the GPU, versions of libraries, and XLA's flags."""
    libraries = ("jax", "jaxlib", "triton", "jax-triton")
    gpu, flags = jax.devices()[0].device_kind, os.environ.get("XLA_FLAGS", "")
    return _report.environment(gpu, *libraries, XLA_FLAGS=flags)


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


def rows_of_setting(
    setting: Setting, names: list[str], mesh: Mesh, pool: ThreadPoolExecutor
) -> Iterator[dict[str, Any]]:
    """Yield a row for each method: all are compared first, then timed in turns."""
    began = perf_counter()
    key = {"gpus": mesh.size, "setting": setting.name}
    entrants: dict[str, Entrant] = {}
    for name in names:
        try:
            entrants[name] = enter(name, setting, mesh, pool)
        except Exception as error:  # noqa: BLE001  # whatever it is, others go on
            yield {**key, "method": name, "refused": reason_of(error)}
    lowered = perf_counter() - began

    *short, dout = arrays_of(setting, GATE_LENGTH, mesh_of(1))
    defined = partial(exact, mask=mask_of(setting.mask, GATE_LENGTH))
    wide = [x.astype("float32") for x in short]
    expected = jax.device_get(jax.jit(partial(both, defined))(*wide, dout))
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[tuple[str, str], Run] = {}
    on_mesh: dict[int, list[Any]] = {}
    for name, entrant in entrants.items():
        try:
            errors = errors_of(entrant, [*short, dout], expected)
            if not max(errors.values()) < WRONG:
                yield {**key, "method": name, "wrong": errors}
                continue
            if entrant.mesh.size not in on_mesh:
                on_mesh[entrant.mesh.size] = arrays_of(setting, setting.seq_len, entrant.mesh)
            arrays = on_mesh[entrant.mesh.size]
            passes = {
                way: partial(program.result(), *(arrays if way == "both" else arrays[:3]))
                for way, program in entrant.passes.items()
            }
            for run in passes.values():
                jax.block_until_ready(run())
        except Exception as error:  # noqa: BLE001  # whatever it is, others go on
            yield {**key, "method": name, "refused": reason_of(error)}
            continue
        runs |= {(name, way): run for way, run in passes.items()}
        rows[name] = {**key, "method": name, "errors": errors} | entrant.method.chosen(*arrays[:3])
    ready = perf_counter() - began

    took = seconds_each(runs, rounds=3 if setting.seq_len > LONG else 5)
    pairs = pairs_of(mask_of(setting.mask, setting.seq_len), setting.seq_len)
    flops = 4 * pairs * setting.heads * setting.dim
    for name, row in rows.items():
        shares = entrants[name].mesh.size
        for way, factor in PASSES.items():
            spent = took[name, way]
            row[way] = {
                "ms": 1e3 * spent, "tflops": factor * flops / shares / spent / 1e12,
                "peak_gib": _set_aside(entrants[name].passes[way].result()),
            }  # fmt: skip
        yield row
    print(f"lowered in {lowered:.0f} s, ready after {ready:.0f} s, all {perf_counter() - began:.0f} s",
          flush=True)  # fmt: skip


def _set_aside(program: Any) -> float:
    """Return the GiB that a program takes on a GPU for results and temporaries."""
    memory = program.memory_analysis()
    size: float = memory.temp_size_in_bytes + memory.output_size_in_bytes
    return size / 2**30


def program_row(name: str, setting: Setting, layers: int, mesh: Mesh) -> dict[str, Any]:
    """Return seconds and sizes of a program of ``layers`` layers, forward and backward."""
    method = METHODS[name](mesh, mask_of(setting.mask, setting.seq_len), setting.seq_len)
    shapes = abstract_arrays(setting, setting.seq_len, mesh)
    jax.clear_caches()
    marks = [perf_counter()]
    traced = jax.jit(partial(both, layered(method.attend, layers))).trace(*shapes)
    marks.append(perf_counter())
    lowered = traced.lower()
    marks.append(perf_counter())
    program = lowered.compile()
    marks.append(perf_counter())
    spent = (after - before for before, after in pairwise(marks))
    return {
        "gpus": mesh.size, "setting": setting.name, "method": name, "layers": layers,
        "seconds": dict(zip(("trace", "lower", "compile"), spent, strict=True)),
        "megabytes": {
            what: len(str(x.as_text())) / 1e6
            for what, x in (("StableHLO", lowered), ("HLO", program))
        },
    }  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    keys = ("gpus", "setting", "method")
    head = " ".join(str(row[key]) for key in keys)
    if "forward" not in row:
        return f"{head} { {key: x for key, x in row.items() if key not in keys} }"
    rates = [f"{row[way]['tflops']:6.0f} TFLOP/s {row[way]['ms']:9.3f} ms" for way in PASSES]
    memory, error = row["both"]["peak_gib"], max(row["errors"].values())
    return (
        f"{head} {' | '.join(rates)} | {memory:.2f} GiB | error {error:.4f} {row.get('auto', '')}"
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    names = [setting.name for setting in JAX_SETTINGS]
    arguments = parser_of(__doc__, json_path=Path("out/bench_jax_gpus.json"))
    arguments.add_argument("--gpus", type=int, help="how many; by default all")
    arguments.add_argument("--settings", nargs="+", choices=names, default=names)
    arguments.add_argument("--methods", nargs="+", choices=METHODS, default=list(DEFAULT))
    arguments.add_argument("--program", type=int, nargs="+", metavar="LAYERS", default=[])
    arguments.add_argument("--threads", type=int, default=os.cpu_count(), help="that compile")
    arguments.add_argument("--xla-flags", action="store_true", help="ring_jax_gpu.set_xla_flags()")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run the settings asked for, one after the other; rows already in the JSON are kept."""
    options = parser().parse_args(argv)
    if options.table:
        return show(options.table)
    if options.xla_flags:
        ring_jax_gpu.set_xla_flags()
    report, mesh = Report(options.json, environment), mesh_of(options.gpus or len(jax.devices()))
    if options.json.exists():
        report.rows = rows_of(options.json)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    chosen = [setting for setting in JAX_SETTINGS if setting.name in options.settings]

    def missing(key: dict[str, Any]) -> bool:
        return not any(key.items() <= row.items() for row in report.rows)

    def add(row: dict[str, Any]) -> None:
        report.add(row)
        print(_line(row), flush=True)

    for setting, name, layers in product(chosen, options.methods, options.program):
        key = {"gpus": mesh.size, "setting": setting.name, "method": name, "layers": layers}
        if missing(key):
            add(program_row(name, setting, layers, mesh))
    with ThreadPoolExecutor(options.threads) as pool:
        for setting in watched([] if options.program else chosen, len(chosen), "setting"):
            key = {"gpus": mesh.size, "setting": setting.name}
            names = [name for name in options.methods if missing(key | {"method": name})]
            for row in rows_of_setting(setting, names, mesh, pool):
                add(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
