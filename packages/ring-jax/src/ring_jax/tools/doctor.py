"""``python -m ring_jax doctor``: show which kernels can run on this machine, and test them."""

from __future__ import annotations

import importlib.util
import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P

from ring_core import Capabilities, Mask, Request, make_plan, refusals, ring_program
from ring_core.tools import bench, doctor
from ring_jax.attention import RingAttention, ring_attention
from ring_jax.records import Kernel
from ring_jax.tools.bench import compared, out_and_grads

LIBRARIES = (
    "numpy", "jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "jax-triton",
    "triton", "torch", "flax", "equinox",
)  # fmt: skip
BACKENDS = {"ring_jax_tpu": "a TPU", "ring_jax_gpu": "an NVIDIA GPU"}
MOST_DEVICES, HOST_DEVICES = 8, 2


@dataclass(frozen=True)
class KernelReport:
    """The doctor's finding on one kernel."""

    name: str
    package: str
    available: bool  # it can run on this machine
    why: str  # the reasons if it cannot, else empty


@dataclass(frozen=True)
class Diagnosis(doctor.Diagnosis):
    """The doctor's findings on this machine."""

    backend: str
    devices: tuple[str, ...]
    kernels: tuple[KernelReport, ...]


def diagnose() -> Diagnosis:
    """Look at this machine and run the self-test on it.

    Raises:
        RuntimeError: JAX finds no device of the platform it was told to use.
    """
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # which of the two depends on the platform
        platforms = os.environ.get("JAX_PLATFORMS", "")
        raise RuntimeError(f"JAX finds no device; JAX_PLATFORMS={platforms!r}. {error}") from error
    installed, missing = kernels()
    reports = [_report(package, kernel.capabilities) for package, kernel in installed]
    able = [
        kernel for (_, kernel), report in zip(installed, reports, strict=True) if report.available
    ]
    libraries, checks = versions(), (check for kernel in able for check in self_test(kernel))
    return Diagnosis(
        versions=libraries,
        clashes=doctor.clashes(libraries),
        backend=jax.default_backend(),
        devices=tuple(f"{device} ({device.device_kind})" for device in devices),
        kernels=(*reports, *missing),
        checks=tuple(bench.watched(checks, len(doctor.RESULTS) * len(able), "check")),
    )


def versions() -> dict[str, str]:
    """Return the versions of Python, of the installed :data:`LIBRARIES` and of our packages."""
    packages = (
        x for x in ("ring_core", "ring_jax", *BACKENDS) if isinstance(_module_of(x), ModuleType)
    )
    return doctor.versions(LIBRARIES, [name.replace("_", "-") for name in packages])


def kernels() -> tuple[list[tuple[str, Kernel]], list[KernelReport]]:
    """Return the kernels of all installed packages, and reports of packages that have none.

    Each kernel comes with the name of its package.
    """
    installed = [("ring_jax", kernel) for kernel in ring_attention.kernels]
    missing = []
    for package, device in BACKENDS.items():
        module = _module_of(package)
        known = {kernel.capabilities.name for _, kernel in installed}
        exported = getattr(getattr(module, "ring_attention", None), "kernels", ())
        own = [(package, kernel) for kernel in exported if kernel.capabilities.name not in known]
        installed += own
        if not own:
            why = "has no kernels yet" if isinstance(module, ModuleType) else module
            missing.append(KernelReport("-", package, False, f"{why}; it is for {device}"))
    return installed, missing


def _module_of(package: str) -> ModuleType | str:
    """Import a package and return it, or return why it cannot be imported."""
    if importlib.util.find_spec(package) is None:
        return "not installed"
    try:
        return importlib.import_module(package)
    except ImportError as error:
        return f"cannot be imported: {error}"


def self_test(kernel: Kernel) -> Iterator[doctor.Check]:
    """Check a causal ring with grouped heads over all local devices, forward and backward.

    Its errors are compared with those of JAX's own dense attention on the same devices, so that it
    also passes on platforms whose matmuls round their inputs.
    """
    can, devices = kernel.capabilities, jax.local_devices()[:MOST_DEVICES]
    request, where = _sample_request(can), f"{len(devices)} {_platform()}"
    inputs = [
        jnp.asarray(x, request.dtype) for x in doctor.inputs_for(len(devices), request.head_dim)
    ]
    mesh = jax.make_mesh((len(devices),), ("ring",), (AxisType.Auto,), devices=devices)
    call = partial(RingAttention((kernel,)), axis_name="ring", causal=True, kernel=can.name)
    tokens = P(None, "ring")
    ring = jax.shard_map(call, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens)
    try:
        results = list(jax.block_until_ready(out_and_grads(ring)(*inputs)))
    except Exception:  # noqa: BLE001 - any error is a finding
        yield doctor.failed(can.name, where, traceback.format_exc())
        return
    yield from compared(can.name, results, inputs, where=where, mask=doctor.CAUSAL)


def _report(package: str, can: Capabilities) -> KernelReport:
    """Report whether a kernel could do the self-test on the default devices."""
    program = ring_program(make_plan(Mask(causal=True), seq_len=doctor.TOKENS, cp_size=1))
    reasons = refusals(can, replace(_sample_request(can), device=_platform()), program)
    return KernelReport(can.name, package, available=not reasons, why="; ".join(reasons))


def _sample_request(can: Capabilities) -> Request:
    """Return a request that fits a kernel's capabilities, for no device in particular."""
    dtype = "float32" if not can.dtypes or "float32" in can.dtypes else can.dtypes[0]
    return Request("", dtype, 64, 64, grad=True)


def _platform() -> str:
    """Return the platform that programs are compiled for by default, as kernels name it."""
    backend = jax.default_backend()
    if backend != "gpu":
        return backend
    return "rocm" if "rocm" in jax.local_devices()[0].client.platform_version.lower() else "cuda"


def shown(diagnosis: Diagnosis) -> str:
    """Format a diagnosis as text for people."""
    lines = [
        *doctor.shown_versions(diagnosis.versions, diagnosis.clashes),
        "", f"backend       {diagnosis.backend}, {len(diagnosis.devices)} local devices",
        *(f"              {device}" for device in diagnosis.devices),
        "", "kernels",
    ]  # fmt: skip
    for kernel in diagnosis.kernels:
        state = "available" if kernel.available else f"no: {kernel.why}"
        lines.append(f"  {kernel.name:10}{kernel.package:14}{state}")
    title = "a causal ring over the local devices"
    return "\n".join(
        lines + doctor.shown_checks(title, diagnosis.checks, healthy=diagnosis.healthy)
    )
