"""Time attention over several GPUs in JAX, beside methods in plain JAX: ``nox -s bench_jax_gpus``.

Every method first has to agree with float32 attention at 2,048 tokens, output and gradients; one
that does not gets no time. Batch 1, bfloat16. Times are medians of rounds of whole calls, in
which all methods of a setting take turns. Scaling efficiency is the rate per GPU over that of
``one`` GPU with the whole sequence, at 128k tokens where it did not run this one. ``GiB`` is what
XLA sets aside on a GPU for results and temporaries.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import ring_jax_gpu
from benchmarks.common import report as _report
from benchmarks.common.cases import JAX_SETTINGS, PASSES, SCALING_GATE, K, Setting, mask_of
from benchmarks.common.report import Report, rates, reason_of
from benchmarks.common.turns import Run, take_turns
from benchmarks.jax import methods
from benchmarks.jax.methods import METHODS, Method, both, mesh_of, sharding_of
from ring_core.tools.bench import watched

GATE_LENGTH = SCALING_GATE
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


def arrays_of(setting: Setting, length: int, mesh: Mesh) -> list[Any]:
    """Return random q, k, v and dout, split over the GPUs of a mesh."""
    make = partial(methods.random_arrays, [(1, length, *shape) for shape in setting.shapes], 1)
    return list(jax.jit(make, out_shardings=sharding_of(mesh))())


def abstract_arrays(setting: Setting, length: int, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    """Return shapes, dtype and sharding of q, k, v and dout, to compile programs for."""
    return [
        jax.ShapeDtypeStruct((1, length, *shape), jnp.bfloat16, sharding=sharding_of(mesh))
        for shape in setting.shapes
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
    order = methods.in_order(entrant.gate_method.layout, GATE_LENGTH, entrant.mesh.size)
    place = sharding_of(entrant.mesh)
    results = entrant.gate.result()(*(jax.device_put(x[:, order], place) for x in arrays))
    return {
        name: float(
            jnp.abs(jax.device_get(x).astype("float32") - jax.device_get(y)[:, order]).max()
        )
        for name, x, y in zip(RESULTS, results, expected, strict=True)
    }


def _environment() -> dict[str, Any]:
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
    once = methods.seconds(run)
    return 1 if once > SLOW else max(2, min(60, int(TURN / max(once, 1e-5))))


def _rested(run: Run, calls: int) -> float:
    """Return seconds per call, after a rest."""
    time.sleep(REST)
    return methods.seconds(run, calls) / calls


def rows_of_setting(
    setting: Setting, names: list[str], mesh: Mesh, pool: ThreadPoolExecutor
) -> Iterator[dict[str, Any]]:
    """Yield a row for each method: all are compared first, then timed in turns."""
    key = {"gpus": mesh.size, "setting": setting.name}
    entrants: dict[str, Entrant] = {}
    for name in names:
        try:
            entrants[name] = enter(name, setting, mesh, pool)
        except Exception as error:  # noqa: BLE001  # whatever it is, others go on
            yield {**key, "method": name, "failed": reason_of(error)}

    *short, dout = arrays_of(setting, GATE_LENGTH, mesh_of(1))
    defined = partial(methods.exact, mask=mask_of(setting.mask, GATE_LENGTH))
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
            yield {**key, "method": name, "failed": reason_of(error)}
            continue
        runs |= {(name, way): run for way, run in passes.items()}
        rows[name] = {**key, "method": name, "errors": errors} | entrant.method.chosen(*arrays[:3])
    took = seconds_each(runs, rounds=3 if setting.seq_len > LONG else 5)
    for name, row in rows.items():
        entrant = entrants[name]
        times = {
            way: {"ms": 1e3 * took[name, way], "peak_gib": _set_aside(entrant.passes[way].result())}
            for way in PASSES
        }
        yield row | rates(times, setting, entrant.mesh.size)


def _set_aside(program: Any) -> float:
    """Return the GiB that a program takes on a GPU for results and temporaries."""
    memory = program.memory_analysis()
    size: float = memory.temp_size_in_bytes + memory.output_size_in_bytes
    return size / 2**30


def main(argv: list[str] | None = None) -> int:
    """Run the settings asked for, one after the other; rows already in the JSON are kept."""
    names = [setting.name for setting in JAX_SETTINGS]
    parser = _report.parser_of(__doc__, json_path=Path("out/bench_jax_gpus.json"))
    parser.add_argument("--gpus", type=int, help="how many; by default all")
    parser.add_argument("--settings", nargs="+", choices=names, default=names)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(DEFAULT))
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="that compile")
    parser.add_argument("--xla-flags", action="store_true", help="ring_jax_gpu.set_xla_flags()")
    options = parser.parse_args(argv)
    if options.table:
        return _report.show(options.table)
    if options.xla_flags:
        ring_jax_gpu.set_xla_flags()
    report, mesh = Report(options.json, _environment), mesh_of(options.gpus or len(jax.devices()))
    chosen = [setting for setting in JAX_SETTINGS if setting.name in options.settings]
    with ThreadPoolExecutor(options.threads) as pool:
        for setting in watched(chosen, len(chosen), "setting"):
            key = {"gpus": mesh.size, "setting": setting.name}
            left = [name for name in options.methods if not report.has(**key, method=name)]
            for row in rows_of_setting(setting, left, mesh, pool):
                report.add(row)
                print(_report.scaling_line(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
