"""``python -m ring_jax``: show what can run on this machine, test it and time it.

``doctor`` shows versions, devices and which kernels can run on them, and compares a small ring over
up to 8 local devices with the float64 oracle; ``matrix`` shows what each kernel supports, and
``explain`` what one call would do; ``bench`` times a ring against one device that does all of it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress

import jax
from jax import Array, numpy as jnp

from ring_core import support_matrix
from ring_core.tools import commands
from ring_core.tools.bench import Result
from ring_core.tools.case import Case, timed_case
from ring_core.tools.doctor import Diagnosis
from ring_jax.kernels.absent import AbsentKernel
from ring_jax.kernels.plugins import installed_kernels
from ring_jax.prepare import call_with_traced_structs, check_call
from ring_jax.records import CallOptions
from ring_jax.strategies.explanation import explained
from ring_jax.tools import bench as _bench_jax, doctor


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code; see :func:`ring_core.tools.commands.main`."""
    return commands.main("ring_jax", "Exact context-parallel attention for JAX.", COMMANDS, argv)


def matrix() -> str:
    """Return what each kernel of the installed packages supports, as a Markdown table."""
    present = (x for x in installed_kernels() if not isinstance(x, AbsentKernel))
    return support_matrix([kernel.capabilities for kernel in present])


def _diagnose() -> Diagnosis:
    _ask_for_host_devices()
    return doctor.diagnose()


def _explained(case: Case, _args: argparse.Namespace) -> tuple[str, str]:
    """Return the platform, and what rank 0 would do."""
    q, k = (jax.ShapeDtypeStruct(x, jnp.dtype(case.dtype)) for x in case.local_shapes)

    def call(q: Array, k: Array) -> str:
        options = CallOptions(**case.options)
        spec, _, way = check_call(None, "cp", case.layout, case.ranks, q, k, k, options)
        return explained(spec, way)

    text = call_with_traced_structs(call, q, k)
    return doctor.platform(), text


def _bench(args: argparse.Namespace, _given: set[str]) -> Result:
    """Time a ring over local devices; raise a ValueError for what it refuses."""
    _ask_for_host_devices()
    on_cpu = jax.default_backend() == "cpu"
    case = timed_case(args, jax.local_device_count(), on_cpu=on_cpu)
    checks, times = _bench_jax.bench(case, args.seconds)
    where = f"devices: {jax.devices()[0].device_kind}"
    if times and times[0].work_fraction == 1:
        where += ", which share the cores that one device has alone"
    return Result(case, where, checks, times, doctor.versions())


def _ask_for_host_devices() -> None:
    """Make the CPU show two devices for a ring, unless the user set a number or JAX has started."""
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.config.jax_num_cpu_devices < 0 and "device_count" not in flags:
        with suppress(RuntimeError):  # raised if JAX has started
            jax.config.update("jax_num_cpu_devices", doctor.HOST_DEVICES)


COMMANDS = commands.framework_commands(
    diagnose=_diagnose, matrix=matrix, explained=_explained, timed=_bench, options={}
)
