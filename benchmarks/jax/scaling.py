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
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.common.cases import JAX_SETTINGS, SCALING_GATE, K, Setting, mask_of
from benchmarks.common.report import Report, command, environment, selected
from benchmarks.common.turns import Run, attempted, take_turns
from benchmarks.jax import methods
from benchmarks.jax.methods import METHODS, Method, both, mesh_of, seconds, sharding_of
from ring_core.tools.bench import watched
from ring_jax.tools.doctor import versions

GATE_LENGTH = SCALING_GATE
DEFAULT = ["one", "ring", "gather", "all-gather cudnn", "zigzag cudnn"]
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


def _calls(run: Run) -> int:
    """Return how many calls fill a turn; the run has been called before."""
    once = seconds(run)
    return 1 if once > SLOW else max(2, min(60, int(TURN / max(once, 1e-5))))


def _milliseconds(run: Run, calls: int) -> float:
    """Return milliseconds per call.

    A GPU's clock changes with its warmth, so a turn begins with a rest, and no run begins at the
    clock that another one left.
    """
    time.sleep(REST)
    return 1e3 * seconds(run, calls) / calls


def rows_of_setting(
    setting: Setting, names: list[str], mesh: Mesh, pool: ThreadPoolExecutor
) -> Iterator[dict[str, Any]]:
    """Yield a row for each method: all are compared first, then timed in turns."""
    rows: dict[str, dict[str, Any]] = {
        name: {"gpus": mesh.size, "setting": setting.name, "method": name} for name in names
    }
    *short, dout = arrays_of(setting, GATE_LENGTH, mesh_of(1))
    defined = partial(methods.exact, mask=mask_of(setting.mask, GATE_LENGTH))
    wide = [x.astype("float32") for x in short]
    expected = jax.device_get(jax.jit(partial(both, defined))(*wide, dout))
    entered = partial(enter, setting=setting, mesh=mesh, short=[*short, dout], expected=expected)
    entrants = attempted(names, entered, pool.map)
    on_mesh: dict[int, list[Any]] = {}

    def passes_of(name: str) -> dict[str, Run]:
        size = entrants[name].mesh.size
        if size not in on_mesh:
            on_mesh[size] = arrays_of(setting, setting.seq_len, entrants[name].mesh)
        rows[name] |= entrants[name].method.chosen(*on_mesh[size][:3])
        passes: dict[str, Run] = {
            way: partial(program, *(on_mesh[size] if way == "both" else on_mesh[size][:3]))
            for way, program in entrants[name].passes.items()
        }
        for run in passes.values():
            jax.block_until_ready(run())
        return passes

    for name, entrant in entrants.items():
        if isinstance(entrant, str):
            yield rows.pop(name) | {"failed": entrant}
        elif not max(entrant.errors.values()) < WRONG:
            yield rows.pop(name) | {"wrong": entrant.errors}
    passes = attempted([*rows], passes_of)
    for name in [name for name, runs in passes.items() if isinstance(runs, str)]:
        yield rows.pop(name) | {"failed": passes.pop(name)}
    runs = {(name, way): run for name, of in passes.items() for way, run in of.items()}
    took = take_turns(runs, 3 if setting.seq_len > LONG else 5, _calls, _milliseconds)
    for name, row in rows.items():
        entrant = entrants[name]
        times = {
            way: {"ms": median(took[name, way]), "peak_gib": _set_aside(program)}
            for way, program in entrant.passes.items()
        }
        yield row | {"errors": entrant.errors} | setting.rates(times, entrant.mesh.size)


def _set_aside(program: Any) -> float:
    """Return the GiB that a program takes on a GPU for results and temporaries."""
    memory = program.memory_analysis()
    size: float = memory.temp_size_in_bytes + memory.output_size_in_bytes
    return size / 2**30


@command(
    __doc__,
    {
        "--gpus": {"type": int, "help": "how many; by default all"},
        "--settings": {"nargs": "+", "metavar": "NAME"},
        "--methods": {"nargs": "+", "default": DEFAULT},
    },
)
def main(options: Any) -> int:
    """Time the settings asked for, one after the other; rows already in the JSON are kept."""
    gpu, flags = jax.devices()[0].device_kind, os.environ.get("XLA_FLAGS", "")
    report = Report(options, environment(gpu, versions(), XLA_FLAGS=flags), keep=True)
    mesh = mesh_of(options.gpus or len(jax.devices()))
    chosen = selected(JAX_SETTINGS, options.settings)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for setting in watched(chosen, len(chosen), "setting"):
            key = {"gpus": mesh.size, "setting": setting.name}
            left = [name for name in options.methods if not report.has(**key, method=name)]
            for row in rows_of_setting(setting, left, mesh, pool):
                report.add(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
