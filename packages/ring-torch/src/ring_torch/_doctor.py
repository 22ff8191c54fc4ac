"""What can run on this machine, why the rest cannot, and whether what runs is right."""

from __future__ import annotations

import platform
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ring_core
import ring_torch
from ring_core import reference
from ring_torch.kernels import in_order
from ring_torch.kernels._api import Kernel

LIBRARIES = ("numpy", "torch", "triton", "flash-attn-4", "flash-attn-3", "flash-attn")
TRANSPORTS = ("p2p", "gather", "pull")
RESULTS = ("out", "dq", "dk", "dv")
TOKENS, _HEADS = 128, (4, 2, 2, 4)  # of q, k, v and dout


@dataclass(frozen=True)
class Gpu:
    """A device that torch sees, and the others whose memory it reaches."""

    name: str
    capability: tuple[int, int]
    reaches: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """Whether a kernel or transport can run here; ``why`` is empty if it can."""

    name: str
    devices: tuple[str, ...]  # types it runs on; empty means any
    available: bool
    why: str


@dataclass(frozen=True)
class Check:
    """One result of a kernel: its largest error against float64, and the most it may be.

    There is no error where a result is not finite, or the kernel raised what ``trace`` shows.
    """

    kernel: str
    device: str
    what: str
    error: float | None
    limit: float
    passed: bool
    trace: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All that the doctor found; kernels stand in the order in which ``auto`` tries them."""

    versions: dict[str, str]
    device: str
    gpus: tuple[Gpu, ...]
    kernels: tuple[Report, ...]
    transports: tuple[Report, ...]
    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        """Whether there is a kernel that runs, and nothing failed."""
        return bool(self.checks) and all(check.passed for check in self.checks)


def diagnose() -> Diagnosis:
    """Look at this machine and run the self-test of each kernel that can run on it."""
    device, found = accelerator(), gpus()
    kernels = in_order(device)
    reports = [kernel_report(kernel, device) for kernel in kernels]
    able = [kernel for kernel, one in zip(kernels, reports, strict=True) if one.available]
    return Diagnosis(
        versions=versions(),
        device=device,
        gpus=found,
        kernels=tuple(reports),
        transports=tuple(
            Report(name, ("cuda",) if name == "pull" else (), available=not why, why=why)
            for name, why in ((name, _no_transport(name, device, found)) for name in TRANSPORTS)
        ),
        checks=tuple(check for kernel in able for check in self_test(kernel, device)),
    )


def accelerator() -> str:
    """The type of the devices beside the host's, or ``cpu`` where there are none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that CUDA (or ROCm, which goes by that name in torch) shows this process."""
    every = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return tuple(
        Gpu(
            torch.cuda.get_device_name(one),
            torch.cuda.get_device_capability(one),
            tuple(i for i in every if i != one and torch.cuda.can_device_access_peer(one, i)),
        )
        for one in every
    )


def versions() -> dict[str, str]:
    """Python, the libraries there are, and what torch was built with."""
    found = {"python": platform.python_version()}
    for package in (ring_core, ring_torch):
        name = package.__name__.replace("_", "-")
        found[name] = _installed(name) or f"{package.__version__} (not installed)"
    found |= {name: has for name in LIBRARIES if (has := _installed(name))}
    cudnn = torch.version.cuda and torch.backends.cudnn.version()
    nccl = torch.version.cuda and dist.is_available() and dist.is_nccl_available()
    built_with = {
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "cuDNN": cudnn and f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        "NCCL": nccl and ".".join(str(part) for part in torch.cuda.nccl.version()),
    }
    return found | {name: has for name, has in built_with.items() if has}


def _installed(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def kernel_report(kernel: Kernel, device: str) -> Report:
    """Whether a kernel can run on this machine's devices, which include the host."""
    can = kernel.capabilities
    if can.devices and not {device, "cpu"} & set(can.devices):
        why: str | None = f"runs on {', '.join(can.devices)}; torch finds no such device here"
    else:
        try:
            why = kernel.missing()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
            why = f"looking for it failed: {error!r}"
    return Report(can.name, can.devices, available=why is None, why=why or "")


def _no_transport(name: str, device: str, found: tuple[Gpu, ...]) -> str:
    """Why keys cannot travel this way between processes on this machine; empty if they can."""
    if not dist.is_available():
        return "this torch is built without torch.distributed"
    if name != "pull":
        return ""
    if device != "cuda":
        return "copies out of other GPUs' memory; torch finds no GPU here"
    if not dist.is_nccl_available():
        return "this torch is built without nccl"
    if len(found) < 2:
        return "there is no other GPU to copy from"
    apart = [
        f"{a} and {b}"
        for a, b in combinations(range(len(found)), 2)
        if b not in found[a].reaches or a not in found[b].reaches
    ]
    return f"GPUs do not reach each other's memory: {', '.join(apart)}" if apart else ""


def self_test(kernel: Kernel, device: str) -> Iterator[Check]:
    """A causal call with grouped heads on one device, forward and backward.

    The error against float64 may be four times that of torch's own dense attention in the same
    dtype on the same device, and a few ulps.
    """
    can = kernel.capabilities
    where = device if not can.devices or device in can.devices else "cpu"
    name = "float32" if not can.dtypes or "float32" in can.dtypes else can.dtypes[0]
    dtype, dim = getattr(torch, name), max(64, can.head_dim_multiple)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, TOKENS, heads, dim, generator=generator).to(where, dtype) for heads in _HEADS
    )
    exact = [x.double().cpu().numpy() for x in (q, k, v, dout)]
    expected = [
        reference.attention(*exact[:3], causal=True)[0],
        *reference.attention_grads(exact[3], *exact[:3], causal=True)[:3],
    ]
    ours = partial(ring_torch.ring_attention, causal=True, kernel=can.name)
    try:
        found = _out_and_grads(ours, q, k, v, dout)
    except Exception:  # noqa: BLE001 - whatever it is, it is the finding
        trace = traceback.format_exc()
        yield Check(can.name, where, "runs", None, 0.0, passed=False, trace=trace)
        return
    plain = _out_and_grads(_dense, q, k, v, dout)
    for what, got, near, true in zip(RESULTS, found, plain, expected, strict=True):
        wide = torch.as_tensor(true)
        error, usual = (float((x.double().cpu() - wide).abs().max()) for x in (got, near))
        limit = 4 * usual + 16 * torch.finfo(dtype).eps * float(wide.abs().max())
        number = error if error < float("inf") else None  # neither is NaN less
        yield Check(can.name, where, what, number, limit, passed=error <= limit)


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def _out_and_grads(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def shown(found: Diagnosis) -> str:
    """A diagnosis for people."""
    lines = [f"{name:14}{has}" for name, has in found.versions.items()]
    lines += ["", f"device        {found.device}"]
    for n, gpu in enumerate(found.gpus):
        reaches = ", ".join(str(other) for other in gpu.reaches) or "no other"
        major, minor = gpu.capability
        lines.append(f"  {n:<12}{gpu.name}, compute capability {major}.{minor}, reaches {reaches}")
    for title, reports in (("kernels", found.kernels), ("transports", found.transports)):
        lines += ["", f"{title}, {_ORDER[title]}"]
        for one in reports:
            devices = ", ".join(one.devices) or "any"
            state = "available" if one.available else f"no: {one.why}"
            lines.append(f"  {one.name:12}{devices:8}{state}")
    lines += ["", "self-test: a causal call on one device against float64"]
    for check in found.checks:
        state = "ok" if check.passed else "FAILED"
        error = "not finite" if check.error is None else f"{check.error:.1e}"
        numbers = f"error {error}, limit {check.limit:.1e}"
        name = f"{check.kernel:12}{check.device:8}{check.what:6}"
        lines.append(f"  {name}{state:8}{check.trace or numbers}")
    return "\n".join([*lines, "", "all is well" if found.healthy else "something is wrong"])


_ORDER = {
    "kernels": "in the order in which kernel='auto' tries them",
    "transports": "between processes of this machine",
}
