"""``python -m ring_jax doctor``: show which kernels can run on this machine, and test them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P

from ring_core import KernelConfig, Mask, Request, make_plan, refusals, ring_program
from ring_core.tools import bench, doctor
from ring_jax.attention import RingAttention
from ring_jax.kernels import notes_of, sample_dtype
from ring_jax.kernels.absent import AbsentKernel, broken_kernels
from ring_jax.kernels.plugins import PACKAGES, installed_kernels
from ring_jax.records import Kernel
from ring_jax.strategies.explanation import trial_error
from ring_jax.tools.bench import compared, out_and_grads

LIBRARIES = (
    *PACKAGES, "numpy", "jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "jax-triton",
    "triton", "torch", "flax", "equinox",
)  # fmt: skip
#: The self-test takes as many local devices at most.
MOST_DEVICES = 8
#: Devices that the command makes of a CPU, so that something travels in the self-test.
HOST_DEVICES = 2
#: Head dim of the self-test, which all kernels take.
HEAD_DIM = 64


def diagnose() -> doctor.Diagnosis:
    """Look at this machine and test it; raise a RuntimeError if JAX finds no device as told."""
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # which of the two depends on the platform
        platforms = os.environ.get("JAX_PLATFORMS", "")
        raise RuntimeError(f"JAX finds no device; JAX_PLATFORMS={platforms!r}. {error}") from error
    kernels, here = installed_kernels(), platform()
    reports = [_report(kernel, here) for kernel in kernels]
    # A broken kernel for this platform fails its test, as every call here would. A kernel
    # with notes picks its code for 16-bit inputs when a program is lowered (on Hopper other
    # kernels), so it is tested in bfloat16, too.
    tested = [
        (kernel, dtype) for kernel, report in zip(kernels, reports, strict=True)
        for dtype in dict.fromkeys([sample_dtype(kernel.capabilities), *["bfloat16"] * bool(report.notes)])
        if report.available
        or (kernel in broken_kernels(kernels) and here in kernel.capabilities.devices)
    ]  # fmt: skip
    libraries, checks = versions(), (check for x in tested for check in self_test(*x))
    return doctor.Diagnosis(
        versions=libraries,
        clashes=doctor.clashes(libraries),
        checks=tuple(bench.watched(checks, len(doctor.RESULTS) * len(tested), "check")),
        tested="a causal ring over the local devices",
        device=jax.default_backend(),
        devices=tuple(f"{device} ({device.device_kind})" for device in devices),
        kernels=tuple(reports),
    )


def versions() -> dict[str, str]:
    """Return the versions of Python, of our packages and of the installed :data:`LIBRARIES`."""
    return doctor.versions(LIBRARIES, ["ring-core", "ring-jax"])


def self_test(kernel: Kernel, dtype: str) -> Iterator[doctor.Check]:
    """Check a causal ring with grouped heads over up to 8 local devices, forward and backward.

    Its errors are compared with those of JAX's own dense attention on the same devices, so that it
    also passes on platforms whose matmuls round their inputs.
    """
    can, devices = kernel.capabilities, jax.local_devices()[:MOST_DEVICES]
    where = f"{len(devices)} {platform()}"
    name = can.name if dtype == sample_dtype(can) else f"{can.name} in {dtype}"
    inputs = [jnp.asarray(x, dtype) for x in doctor.inputs_for(len(devices), HEAD_DIM)]
    mesh = jax.make_mesh((len(devices),), ("ring",), (AxisType.Auto,), devices=devices)
    call = partial(RingAttention((kernel,)), axis_name="ring", causal=True, kernel=can.name)
    tokens = P(None, "ring")
    ring = jax.shard_map(call, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens)
    yield from compared(name, where, lambda: out_and_grads(ring)(*inputs), inputs)


def _report(kernel: Kernel, here: str) -> doctor.Report:
    """Report whether a kernel's capabilities allow the self-test on the default platform.

    What it refuses besides, as an old library or GPU (:meth:`Kernel.refusals`), is not reported:
    that shows in the self-test. That it fails is reported on every platform.
    """
    can, package = kernel.capabilities, type(kernel).__module__.partition(".")[0]
    if isinstance(kernel, AbsentKernel):
        return doctor.Report(can.name, kernel.package, available=False, why=kernel.reason)
    error = trial_error(kernel)
    program = ring_program(make_plan(Mask(causal=True), seq_len=doctor.TOKENS, cp_size=1))
    sample = Request(here, sample_dtype(can), HEAD_DIM, HEAD_DIM, grad=True)
    if reasons := refusals(can, sample, program):
        why = "; ".join((*reasons, *[error] * bool(error)))
        return doctor.Report(can.name, package, available=False, why=why)
    in_16_bits = replace(sample, dtype="bfloat16")
    # Of a kernel that fails the self-test shows the error.
    notes = () if error else notes_of(kernel, in_16_bits, KernelConfig(can.name), program)
    return doctor.Report(can.name, package, available=True, why="", notes=notes)


def platform() -> str:
    """Return the platform that programs are compiled for by default, as kernels name it."""
    backend = jax.default_backend()
    if backend != "gpu":
        return backend
    return "rocm" if "rocm" in jax.local_devices()[0].client.platform_version.lower() else "cuda"
