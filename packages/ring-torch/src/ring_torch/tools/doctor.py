"""Diagnosis of this machine: what can run, why the rest cannot, and if the results are right."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ring_core import LAYOUTS, Mask
from ring_core.programs.steps import takes_layout
from ring_core.tools import doctor
from ring_core.tools.bench import BenchCase, watched
from ring_core.tools.doctor import Check
from ring_torch import strategies
from ring_torch.attention import ring_attention
from ring_torch.kernels import in_order
from ring_torch.kernels.api import Kernel
from ring_torch.local import LocalRankError, LocalRanks
from ring_torch.sharding import Sharding
from ring_torch.strategies import Way, ways
from ring_torch.tools.timing import out_and_grads

LIBRARIES = (
    "numpy", "torch", "triton", "jax-triton", "flash-attn-4", "flash-attn-3", "flash-attn",
    "transformers",
)  # fmt: skip
RANKS = 2  # processes of the ring's self-test

Arrays = Sequence[npt.NDArray[Any]]


@dataclass(frozen=True)
class Gpu:
    """GPU that torch sees.

    Attributes:
        name: Its product name.
        capability: Its compute capability, ``(major, minor)``.
        reaches: Indices of the GPUs whose memory it can access directly (CUDA peer access).
    """

    name: str
    capability: tuple[int, int]
    reaches: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """Availability of a kernel, or of a strategy over a transport.

    Attributes:
        name: Name of the kernel, or ``strategy/transport``.
        devices: Types of devices it runs on; empty for any.
        available: True if it can run here.
        why: Reason why it cannot; empty if it can.
    """

    name: str
    devices: tuple[str, ...]
    available: bool
    why: str


@dataclass(frozen=True)
class Diagnosis(doctor.Diagnosis):
    """Everything that the doctor found.

    Attributes:
        device: Type of the accelerator, or ``cpu``.
        gpus: GPUs that torch sees.
        kernels: Kernels, in the order in which ``kernel="auto"`` tries them.
        strategies: Strategies, each over each transport that can carry it.
    """

    device: str
    gpus: tuple[Gpu, ...]
    kernels: tuple[Report, ...]
    strategies: tuple[Report, ...]


def diagnose() -> Diagnosis:
    """Examine this machine, and test each kernel and each way of moving keys that can run on it."""
    device, visible_gpus = accelerator(), gpus()
    kernels = in_order(device)
    reports = [kernel_report(kernel, device) for kernel in kernels]
    able = [kernel for kernel, report in zip(kernels, reports, strict=True) if report.available]
    possible = all_ways()
    way_reports = tuple(_way_report(way, device, visible_gpus) for way in possible)
    libraries = versions()
    ready = [
        (spec.name, transport.name)
        for (spec, transport), report in zip(possible, way_reports, strict=True)
        if report.available
    ]
    checks = chain(
        (check for kernel in able for check in self_test(kernel, device)),
        ring_test(ready, cuda=len(visible_gpus) >= RANKS),
    )
    return Diagnosis(
        versions=libraries,
        clashes=doctor.clashes(libraries),
        device=device,
        gpus=visible_gpus,
        kernels=tuple(reports),
        strategies=way_reports,
        checks=tuple(watched(checks, len(doctor.RESULTS) * (len(able) + len(ready)), "check")),
    )


def accelerator() -> str:
    """Return the type of the accelerator, or ``cpu`` if there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if device is None else device.type


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that this process sees, of CUDA or of ROCm, which torch calls CUDA too."""
    indices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return tuple(
        Gpu(
            torch.cuda.get_device_name(index),
            torch.cuda.get_device_capability(index),
            tuple(i for i in indices if i != index and torch.cuda.can_device_access_peer(index, i)),
        )
        for index in indices
    )


def versions() -> dict[str, str]:
    """Return the versions of Python, of installed libraries, and of those torch was built with."""
    cudnn = torch.version.cuda and torch.backends.cudnn.version()
    nccl = torch.version.cuda and dist.is_available() and dist.is_nccl_available()
    of_torch = {
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "cuDNN": cudnn and f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        "NCCL": nccl and ".".join(str(part) for part in torch.cuda.nccl.version()),
    }
    return doctor.versions(LIBRARIES, ("ring-core", "ring-torch")) | {
        name: version for name, version in of_torch.items() if version
    }


def kernel_report(kernel: Kernel, device: str) -> Report:
    """Report if a kernel can run on the accelerator or the CPU of this machine."""
    capabilities = kernel.capabilities
    if capabilities.devices and not {device, "cpu"} & set(capabilities.devices):
        reason: str | None = (
            f"runs on {', '.join(capabilities.devices)}; torch finds no such device here"
        )
    else:
        try:
            reason = kernel.unavailable_reason()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
            reason = f"looking for it failed: {error!r}"
    return Report(
        capabilities.name, capabilities.devices, available=reason is None, why=reason or ""
    )


def all_ways() -> tuple[Way, ...]:
    """Return every strategy over every transport that can carry it."""
    return tuple(way for spec in strategies.STRATEGIES for way in ways(spec.name))


def _way_report(way: Way, device: str, visible_gpus: tuple[Gpu, ...]) -> Report:
    """Report if a strategy and transport can move keys between processes of this machine."""
    spec, transport = way
    reason = "this torch is built without torch.distributed"
    if dist.is_available():
        reason = transport.missing(device, [gpu.reaches for gpu in visible_gpus])
    return Report(
        f"{spec.name}/{transport.name}", transport.devices, available=not reason, why=reason
    )


def self_test(kernel: Kernel, device: str) -> Iterator[Check]:
    """Test a kernel with a causal call with grouped heads on one device, forward and backward."""
    capabilities = kernel.capabilities
    device_type = device if not capabilities.devices or device in capabilities.devices else "cpu"
    name = (
        "float32"
        if not capabilities.dtypes or "float32" in capabilities.dtypes
        else capabilities.dtypes[0]
    )
    inputs = [
        torch.as_tensor(x, device="cpu").to(device_type, getattr(torch, name))
        for x in doctor.inputs_for(1, 64)
    ]
    yield from _compared(
        capabilities.name, device_type, inputs,
        lambda: out_and_grads(partial(ring_attention, causal=True, kernel=capabilities.name), *inputs),
    )  # fmt: skip


def working_kernels(device: str) -> list[str]:
    """Return the names of the kernels that can run on a type of device and pass their test."""
    return [
        kernel.capabilities.name
        for kernel in in_order(device)
        if device in (kernel.capabilities.devices or (device,))
        and kernel.unavailable_reason() is None
        and all(check.passed for check in self_test(kernel, device))
    ]


def ring_test(names: Sequence[tuple[str, str]], *, cuda: bool) -> Iterator[Check]:
    """Test each strategy and transport with the same call between two processes of this machine.

    Args:
        names: Pairs of names, of a strategy and of the transport that carries it.
        cuda: True to give each process a GPU.
    """
    if not names:
        return
    setting = BenchCase(
        RANKS, RANKS * doctor.TOKENS, 4, 2, 64, "bfloat16" if cuda else "float32", None, "zigzag",
        "auto", "auto",
    )  # fmt: skip
    with LocalRanks(RANKS, patience=300, cuda=cuda) as ranks:
        for strategy, transport in names:
            layout = next(x for x in (setting.layout, *LAYOUTS) if takes_layout(strategy, x))
            ring_setting = replace(setting, strategy=strategy, layout=layout)
            yield from ring_checks(ranks, ring_setting, transport, cuda=cuda)


def ring_checks(
    ranks: LocalRanks, setting: BenchCase, transport: str, *, cuda: bool
) -> Iterator[Check]:
    """Check the results of a setting on a short sequence, between the given ranks."""
    inputs = [
        torch.as_tensor(x, device="cpu").to(getattr(torch, setting.dtype))
        for x in doctor.inputs_for(len(ranks), setting.head_dim)
    ]
    yield from _compared(
        f"{setting.strategy}/{transport}", f"{len(ranks)} {'cuda' if cuda else 'cpu'} ranks", inputs,
        lambda: ranks.run(_ring_rank, [_float64_array(x) for x in inputs], setting, transport, cuda)[0],
        setting.mask,
    )  # fmt: skip


def _ring_rank(rank: int, arrays: Arrays, setting: BenchCase, transport: str, cuda: bool) -> Arrays:
    """Compute attention between ranks; return output and gradients whole, on every rank."""
    sharding = Sharding(None, setting.layout)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    inputs = [
        sharding.shard(
            torch.as_tensor(x, device="cpu").to(device, getattr(torch, setting.dtype)), dim=1
        )
        for x in arrays
    ]
    attend = partial(
        ring_attention, layout=setting.layout, mask=setting.mask, kernel=setting.kernel, strategy=setting.strategy,
        transport=transport,
    )  # fmt: skip
    return [_float64_array(sharding.unshard(x)) for x in out_and_grads(attend, *inputs)]


def _compared(
    name: str,
    device_name: str,
    inputs: Sequence[Tensor],
    run: Callable[[], Sequence[Tensor] | Arrays],
    mask: Mask = doctor.CAUSAL,
) -> Iterator[Check]:
    """Run a function, and yield the checks of its results against dense attention in float64.

    The errors allowed are a few times those of torch's own dense attention, in the dtype and on the
    device of ``inputs``. If the function raises, yield a failed check with the traceback.
    """
    try:
        results = [_float64_array(x) for x in run()]
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        trace = str(error) if isinstance(error, LocalRankError) else traceback.format_exc()
        yield doctor.failed(name, device_name, trace)
        return
    example = doctor.example_of([_float64_array(x) for x in inputs], mask)
    plain = [_float64_array(x) for x in out_and_grads(partial(_dense, mask), *inputs)]
    yield from doctor.compared(
        name, device_name, example, results, plain, torch.finfo(inputs[0].dtype).eps
    )


def _float64_array(x: Tensor | npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert a tensor to a float64 numpy array on the host."""
    return x.double().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)


def _dense(mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute dense attention with torch's own math implementation, ``[B, T, H, D]``."""
    positions = np.arange(q.shape[1])
    visible = torch.as_tensor(mask.dense(positions, positions), device=q.device)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    return out.transpose(1, 2)


def shown(diagnosis: Diagnosis) -> str:
    """Return a diagnosis as text for people."""
    lines = doctor.shown_versions(diagnosis.versions, diagnosis.clashes)
    lines += ["", f"device        {diagnosis.device}"]
    for n, gpu in enumerate(diagnosis.gpus):
        lines.append(
            f"  {n:<12}{gpu.name}, compute capability {'.'.join(map(str, gpu.capability))}, "
            f"reaches {', '.join(map(str, gpu.reaches)) or 'no other'}"
        )
    for title, reports in (
        (
            "kernels, in the order in which kernel='auto' tries them",
            diagnosis.kernels,
        ),
        ("strategies, over transports, between processes of this machine", diagnosis.strategies),
    ):
        lines += ["", title]
        for report in reports:
            state = "available" if report.available else f"no: {report.why}"
            lines.append(f"  {report.name:18}{', '.join(report.devices) or 'any':8}{state}")
    lines += doctor.shown_checks(
        "kernels on one device, then a ring of two processes, causal,",
        diagnosis.checks,
        healthy=diagnosis.healthy,
    )
    return "\n".join(lines)
