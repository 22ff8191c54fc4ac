"""``python -m ring_jax``: what can run here, and whether it is right.

``doctor`` shows versions, devices and which kernels can run on them, and compares a small ring over
all local devices with the float64 oracle; ``matrix`` shows what each kernel supports.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ring_jax
from ring_core import Capabilities, Mask, Request, make_plan, reference, refusals, support_matrix
from ring_jax._attention import RingAttention
from ring_jax._types import Kernel

LIBRARIES = (
    "numpy", "ring-core", "ring-jax", "jax", "jaxlib", "libtpu", "ring-jax-tpu", "ring-jax-gpu",
    "jax-triton", "triton",
)  # fmt: skip
BACKENDS = {"ring_jax_tpu": "a TPU", "ring_jax_gpu": "an NVIDIA GPU"}
MOST_DEVICES, TOKENS = 8, 128  # tokens a device
_HEADS = {"q": 4, "k": 2, "v": 2, "dout": 4}
RESULTS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class KernelReport:
    """Whether a kernel can run here; ``why`` is empty if it can."""

    name: str
    package: str
    available: bool
    why: str


@dataclass(frozen=True)
class Check:
    """One result of a kernel: its largest error against float64, and the most it may be.

    There is no error where a result is not finite, or the kernel raised what ``trace`` shows.
    """

    kernel: str
    what: str
    error: float | None
    limit: float
    passed: bool
    trace: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All that the doctor found."""

    versions: dict[str, str]
    backend: str
    devices: tuple[str, ...]
    kernels: tuple[KernelReport, ...]
    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        """Whether there is a kernel that runs, and nothing failed."""
        return bool(self.checks) and all(check.passed for check in self.checks)


def diagnose() -> Diagnosis:
    """Look at this machine and run the self-test on it.

    Raises:
        RuntimeError: JAX finds no device of the platform it was told to use.
    """
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # which one, depends on the platform
        told = os.environ.get("JAX_PLATFORMS", "")
        raise RuntimeError(f"JAX finds no device; JAX_PLATFORMS={told!r}. {error}") from error
    found, missing = kernels()
    reports = [_report(package, kernel.capabilities) for package, kernel in found]
    able = [kernel for (_, kernel), one in zip(found, reports, strict=True) if one.available]
    return Diagnosis(
        versions=versions(),
        backend=jax.default_backend(),
        devices=tuple(f"{device} ({device.device_kind})" for device in devices),
        kernels=(*reports, *missing),
        checks=tuple(check for kernel in able for check in self_test(kernel)),
    )


def versions() -> dict[str, str]:
    """Python and the libraries of :data:`LIBRARIES` that there are."""
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            # Ours may also lie on the path; importing others could do anything.
            module = _imported(library.replace("-", "_")) if library.startswith("ring") else None
            if isinstance(module, ModuleType):
                found[library] = f"{module.__version__} (not installed)"
    return found


def kernels() -> tuple[list[tuple[str, Kernel]], list[KernelReport]]:
    """Kernels with the packages they are from, and packages that bring none here."""
    found = [("ring_jax", kernel) for kernel in ring_jax.ring_attention.kernels]
    missing = []
    for package, device in BACKENDS.items():
        module = _imported(package)
        known = {kernel.capabilities.name for _, kernel in found}
        every = getattr(getattr(module, "ring_attention", None), "kernels", ())
        own = [(package, one) for one in every if one.capabilities.name not in known]
        found += own
        if not own:
            why = "has no kernels yet" if isinstance(module, ModuleType) else module
            missing.append(KernelReport("-", package, False, f"{why}; it is for {device}"))
    return found, missing


def _imported(package: str) -> ModuleType | str:
    """A package, or why there is none."""
    if importlib.util.find_spec(package) is None:
        return "not installed"
    try:
        return importlib.import_module(package)
    except ImportError as error:
        return f"cannot be imported: {error}"


def self_test(kernel: Kernel) -> Iterator[Check]:
    """A causal ring with grouped heads over all local devices, forward and backward.

    The error against float64 may be four times that of JAX's own dense attention on the same
    devices, which also covers platforms whose matmuls round their inputs, and a few ulps.
    """
    can, devices = kernel.capabilities, jax.local_devices()[:MOST_DEVICES]
    request = _request(can)
    shapes = [(1, TOKENS * len(devices), heads, request.head_dim) for heads in _HEADS.values()]
    q, k, v, dout = (
        jnp.asarray(np.random.default_rng(n).standard_normal(shape), request.dtype)
        for n, shape in enumerate(shapes)
    )
    exact = [np.asarray(x, np.float64) for x in (q, k, v, dout)]
    expected = [
        reference.attention(*exact[:3], causal=True)[0],
        *reference.attention_grads(exact[3], *exact[:3], causal=True)[:3],
    ]
    mesh = jax.make_mesh((len(devices),), ("ring",), (AxisType.Auto,), devices=devices)
    call = partial(RingAttention((kernel,)), axis_name="ring", causal=True)
    tokens = P(None, "ring")
    ring = jax.shard_map(call, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens)
    dense = partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
    try:
        found = _out_and_grads(ring, q, k, v, dout)
    except Exception:  # noqa: BLE001 - whatever it is, it is the finding
        yield Check(can.name, "runs", None, 0.0, passed=False, trace=traceback.format_exc())
        return
    plain = _out_and_grads(dense, q, k, v, dout)
    for what, got, near, true in zip(RESULTS, found, plain, expected, strict=True):
        error, usual = (float(np.abs(np.asarray(x, np.float64) - true).max()) for x in (got, near))
        ulp = float(jnp.finfo(q.dtype).eps)  # type: ignore[no-untyped-call]
        limit = 4 * usual + 16 * ulp * float(np.abs(true).max())
        number = error if np.isfinite(error) else None
        yield Check(can.name, what, number, limit, passed=error <= limit)  # NaN does not pass


def _out_and_grads(
    attend: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array
) -> tuple[jax.Array, ...]:
    @jax.jit
    def both(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    results: tuple[jax.Array, ...] = both(q, k, v, dout)
    return results


def _report(package: str, can: Capabilities) -> KernelReport:
    """Whether a kernel could do the self-test on the default devices."""
    plan = make_plan(Mask(causal=True), seq_len=TOKENS, cp_size=1)
    reasons = refusals(can, replace(_request(can), device=_platform()), plan)
    return KernelReport(can.name, package, available=not reasons, why="; ".join(reasons))


def _request(can: Capabilities) -> Request:
    """A call that suits a kernel, on no device in particular."""
    head_dim = max(64, can.head_dim_multiple)
    dtype = "float32" if not can.dtypes or "float32" in can.dtypes else can.dtypes[0]
    return Request("", dtype, head_dim, head_dim, grad=True)


def _platform() -> str:
    """The platform that programs are compiled for by default, as kernels name it."""
    backend = jax.default_backend()
    if backend != "gpu":
        return backend
    version = jax.local_devices()[0].client.platform_version
    return "rocm" if "rocm" in version.lower() else "cuda"


def shown(found: Diagnosis) -> str:
    """A diagnosis for people."""
    lines = [f"{name:14}{version}" for name, version in found.versions.items()]
    lines += ["", f"backend       {found.backend}, {len(found.devices)} local devices"]
    lines += [f"              {device}" for device in found.devices]
    lines += ["", "kernels"]
    for kernel in found.kernels:
        state = "available" if kernel.available else f"no: {kernel.why}"
        lines.append(f"  {kernel.name:10}{kernel.package:14}{state}")
    lines += ["", "self-test: a causal ring over the local devices against float64"]
    for check in found.checks:
        state = "ok" if check.passed else "FAILED"
        error = "not finite" if check.error is None else f"{check.error:.1e}"
        numbers = f"error {error}, limit {check.limit:.1e}"
        lines.append(f"  {check.kernel:10}{check.what:6}{state:8}{check.trace or numbers}")
    return "\n".join([*lines, "", "all is well" if found.healthy else "something is wrong"])


def matrix() -> str:
    """What each kernel of the installed packages supports, as a Markdown table."""
    return support_matrix([kernel.capabilities for _, kernel in kernels()[0]])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 when something fails."""
    parser = argparse.ArgumentParser(prog="python -m ring_jax", description="Ring for JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    doctor = commands.add_parser("doctor", help="show what can run here, and test it")
    doctor.add_argument("--json", action="store_true", help="for programs")
    commands.add_parser("matrix", help="show what each kernel supports")
    args = parser.parse_args(argv)
    if args.command == "matrix":
        print(matrix())
        return 0
    try:
        found = diagnose()
    except RuntimeError as error:
        print(f"ring_jax: error: {error}", file=sys.stderr)
        return 1
    as_json: dict[str, Any] = asdict(found) | {"healthy": found.healthy}
    print(json.dumps(as_json, indent=2) if args.json else shown(found))
    return 0 if found.healthy else 1


if __name__ == "__main__":
    sys.exit(main())
