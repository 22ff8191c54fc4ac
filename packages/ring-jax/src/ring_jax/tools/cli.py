"""``python -m ring_jax``: show what can run on this machine, test it and time it.

``doctor`` shows versions, devices and which kernels can run on them, and compares a small ring over
up to 8 local devices with the float64 oracle; ``matrix`` shows what each kernel supports, and
``explain`` what one call would do; ``bench`` times a ring against one device that does all of it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import jax
from jax import Array, numpy as jnp

from ring_core import support_matrix
from ring_core.tools import bench, doctor, explain
from ring_core.tools.commands import framework_commands, is_refused
from ring_jax.kernels.absent import AbsentKernel
from ring_jax.kernels.plugins import installed_kernels
from ring_jax.prepare import call_with_traced_structs, check_call
from ring_jax.records import CallOptions
from ring_jax.strategies.explanation import explained
from ring_jax.tools import bench as _bench_jax
from ring_jax.tools.doctor import HOST_DEVICES, _platform, diagnose, shown, versions


def _ask_for_host_devices() -> None:
    """Make the CPU show two devices for a ring, unless the user set a number or JAX has started."""
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.config.jax_num_cpu_devices < 0 and "device_count" not in flags:
        with suppress(RuntimeError):  # raised if JAX has started
            jax.config.update("jax_num_cpu_devices", HOST_DEVICES)


def matrix() -> str:
    """Return what each kernel of the installed packages supports, as a Markdown table."""
    present = (x for x in installed_kernels() if not isinstance(x, AbsentKernel))
    return support_matrix([kernel.capabilities for kernel in present])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0 if all is well; 1 if a check of ``bench`` or ``doctor`` fails, or
        ``doctor`` finds no device, nothing to check, or versions that clash; 2 if the command is
        refused, or ``bench`` or ``explain`` raises an error.
    """
    parser, *_ = framework_commands("ring_jax", "JAX")
    args = parser.parse_args(argv)
    if args.command == "matrix":
        print(matrix())
        return 0
    if args.command == "explain":
        return _explain(args)
    if is_refused("ring_jax", args.command):
        return 2
    _ask_for_host_devices()
    if args.command == "bench":
        return _bench(args)
    try:
        diagnosis = diagnose()
    except RuntimeError as error:
        print(f"ring_jax: error: {error}", file=sys.stderr)
        return 1
    print(doctor.report(diagnosis, shown, as_json=args.json))
    return 0 if diagnosis.healthy else 1


def _explain(args: argparse.Namespace) -> int:
    """Run the command ``explain`` and print its text; return the exit code."""
    try:
        case = explain.case_of(args)
        q, k = (jax.ShapeDtypeStruct(x, jnp.dtype(case.dtype)) for x in case.local_shapes)

        def call(q: Array, k: Array) -> str:
            options = CallOptions(**case.options)
            spec, _, way = check_call(None, "cp", case.layout, case.cp_size, q, k, k, options)
            return explained(spec, way)

        text = call_with_traced_structs(call, q, k)
    except (ValueError, RuntimeError) as error:
        print(f"ring_jax: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"{case.describe(_platform())}\n{text}")
    return 0


def _bench(args: argparse.Namespace) -> int:
    """Run the command ``bench`` and print its table; return the exit code."""
    try:
        setting = bench.setting_of(args, _bench_jax.defaults())
        checks, results = _bench_jax.bench(setting, args.seconds)
    except (ValueError, ImportError, RuntimeError) as error:
        print(f"ring_jax: error: {error}", file=sys.stderr)
        return 2
    if not results:
        print("\n".join(doctor.shown_checks("the ring to be timed", checks, healthy=False)))
        return 1
    where = f"devices: {jax.devices()[0].device_kind}"
    if results[0].work_fraction == 1:
        where += ", which share the cores that one device has alone"
    print(bench.report(setting, where, results, versions(), as_json=args.json))
    return 0
