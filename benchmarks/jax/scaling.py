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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import ring_jax_gpu
from benchmarks.common.cases import JAX_SETTINGS, PASSES, SCALING_GATE, K, Setting, mask_of
from benchmarks.common.report import Report, command, environment, reason_of
from benchmarks.common.tables import scaling_line
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
    """A method in a setting: compiled passes, and errors at 2,048 tokens."""

    method: Method
    mesh: Mesh
    passes: dict[str, Any]
    errors: dict[str, float]


def arrays_of(setting: Setting, length: int, mesh: Mesh) -> list[Any]:
    """Return random q, k, v and dout, split over the GPUs of a mesh."""
    make = partial(methods.random_arrays, [(1, length, *shape) for shape in setting.shapes], 1)
    return list(jax.jit(make, out_shardings=sharding_of(mesh))())


def enter(name: str, setting: Setting, mesh: Mesh, short: list[Any], expected: Any) -> Entrant:
    """Compile a method's programs for a setting, and compare it at 2,048 tokens."""
    mesh = mesh_of(1) if name == "one" else mesh
    split = sharding_of(mesh)
    gate, method = (
        METHODS[name](mesh, mask_of(setting.mask, length), length)
        for length in (GATE_LENGTH, setting.seq_len)
    )
    order = methods.in_order(gate.layout, GATE_LENGTH, mesh.size)
    results = jax.jit(partial(both, gate.attend))(
        *(jax.device_put(x[:, order], split) for x in short)
    )
    errors = {
        key: float(np.abs(np.asarray(x, np.float32) - y[:, order]).max())
        for key, x, y in zip(RESULTS, results, expected, strict=True)
    }
    shapes = [
        jax.ShapeDtypeStruct((1, setting.seq_len, *shape), jnp.bfloat16, sharding=split)
        for shape in setting.shapes
    ]
    passes = {
        "forward": jax.jit(method.attend).lower(*shapes[:3]).compile(),
        "both": jax.jit(partial(both, method.attend)).lower(*shapes).compile(),
    }
    return Entrant(method, mesh, passes, errors)


def _environment() -> dict[str, Any]:
    libraries = ("jax", "jaxlib", "triton", "jax-triton")
    gpu, flags = jax.devices()[0].device_kind, os.environ.get("XLA_FLAGS", "")
    return environment(gpu, *libraries, XLA_FLAGS=flags)


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
    *short, dout = arrays_of(setting, GATE_LENGTH, mesh_of(1))
    defined = partial(methods.exact, mask=mask_of(setting.mask, GATE_LENGTH))
    wide = [x.astype("float32") for x in short]
    expected = jax.device_get(jax.jit(partial(both, defined))(*wide, dout))
    coming = {
        name: pool.submit(enter, name, setting, mesh, [*short, dout], expected) for name in names
    }
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[tuple[str, str], Run] = {}
    on_mesh: dict[int, list[Any]] = {}
    entrants: dict[str, Entrant] = {}
    for name, future in coming.items():
        row = {**key, "method": name}
        try:
            entrant = entrants[name] = future.result()
            if not max(entrant.errors.values()) < WRONG:
                yield row | {"wrong": entrant.errors}
                continue
            if entrant.mesh.size not in on_mesh:
                on_mesh[entrant.mesh.size] = arrays_of(setting, setting.seq_len, entrant.mesh)
            arrays = on_mesh[entrant.mesh.size]
            passes = {
                way: partial(program, *(arrays if way == "both" else arrays[:3]))
                for way, program in entrant.passes.items()
            }
            for run in passes.values():
                jax.block_until_ready(run())
        except Exception as error:  # noqa: BLE001  # whatever it is, others go on
            yield row | {"failed": reason_of(error)}
            continue
        runs |= {(name, way): run for way, run in passes.items()}
        rows[name] = row | {"errors": entrant.errors} | entrant.method.chosen(*arrays[:3])
    took = seconds_each(runs, rounds=3 if setting.seq_len > LONG else 5)
    for name, row in rows.items():
        entrant = entrants[name]
        times = {
            way: {"ms": 1e3 * took[name, way], "peak_gib": _set_aside(entrant.passes[way])}
            for way in PASSES
        }
        yield row | setting.rates(times, entrant.mesh.size)


def _set_aside(program: Any) -> float:
    """Return the GiB that a program takes on a GPU for results and temporaries."""
    memory = program.memory_analysis()
    size: float = memory.temp_size_in_bytes + memory.output_size_in_bytes
    return size / 2**30


def body(options: Any) -> int:
    """Run the settings asked for, one after the other; rows already in the JSON are kept."""
    if options.xla_flags:
        ring_jax_gpu.set_xla_flags()
    report = Report(options.json, _environment, scaling_line, keep=True)
    mesh = mesh_of(options.gpus or len(jax.devices()))
    chosen = [x for x in JAX_SETTINGS if x.name in (options.settings or [x.name])]
    with ThreadPoolExecutor(options.threads) as pool:
        for setting in watched(chosen, len(chosen), "setting"):
            key = {"gpus": mesh.size, "setting": setting.name}
            left = [name for name in options.methods if not report.has(**key, method=name)]
            for row in rows_of_setting(setting, left, mesh, pool):
                report.add(row)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Time the settings asked for; return the exit code."""
    names = [setting.name for setting in JAX_SETTINGS]
    arguments: dict[str, dict[str, Any]] = {
        "--gpus": {"type": int, "help": "how many; by default all"},
        "--settings": {"nargs": "+", "choices": names},
        "--methods": {"nargs": "+", "choices": METHODS, "default": list(DEFAULT)},
        "--threads": {"type": int, "default": os.cpu_count(), "help": "that compile"},
        "--xla-flags": {"action": "store_true", "help": "ring_jax_gpu.set_xla_flags()"},
    }
    return command(__doc__, arguments, body, argv, Path("out/bench_jax_gpus.json"))


if __name__ == "__main__":
    sys.exit(main())
