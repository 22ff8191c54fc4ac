"""Attention kernels of ring_torch, and the choice among them by measured times or by order."""

from __future__ import annotations

from dataclasses import replace

import torch

from ring_core import (
    KernelConfig,
    Request,
    RingProgram,
    UnsupportedError,
    refusals,
    require,
    support_matrix,
)
from ring_core.choose.rates import Case, default, expected
from ring_core.choose.refusals import split_by_reasons
from ring_torch.kernels.api import Kernel, Selection
from ring_torch.kernels.eager import EagerKernel
from ring_torch.kernels.fa4 import FA4
from ring_torch.kernels.flash_attn import FA2, FA3
from ring_torch.kernels.library import capability
from ring_torch.kernels.sdpa import CUDA_FLASH, CUDNN, CpuFlashKernel
from ring_torch.kernels.triton import TritonKernel

#: All kernels, the fastest on Hopper and Blackwell first: the order of ``auto`` without timings.
KERNELS: tuple[Kernel, ...] = (
    FA4, FA3, CUDNN, FA2, CUDA_FLASH, CpuFlashKernel(), TritonKernel(), EagerKernel(),
)  # fmt: skip


def kernel_names() -> tuple[str, ...]:
    """Return the names that ``kernel=`` takes."""
    return ("auto", *dict.fromkeys(kernel.capabilities.name for kernel in KERNELS))


def choose(config: KernelConfig, request: Request, program: RingProgram) -> Selection:
    """Return the kernel that a call names or, with ``auto``, the fastest that can do it.

    Without measured times of this GPU the first that can do it counts as the fastest.

    Raises:
        UnsupportedError: The named kernel cannot do the call, or none can; every reason is named.
    """
    request = replace(
        request,
        block_sizes=config.block_q is not None or config.block_k is not None,
        fused_backward=config.fused_backward is not None,
    )
    cases, has_predicate = timed(request.device), program.plan.mask.predicate is not None
    if config.name != "auto":
        kernel = _named(config, request, program)
        times = expected(cases, request, program, [config.name], grad=request.grad)
        return Selection(kernel, (), times, has_predicate)
    able, refused = split_by_reasons(
        ((kernel, kernel.capabilities) for kernel in in_order(request.device)),
        lambda kernel: (
            refusals(kernel.capabilities, request, program)
            or _unavailable_reasons(kernel, request)
            or kernel.config_refusals(config, request, program)
        ),
        {name for case in cases for name, _ in case.kernels},
        request.device,
    )
    if not able:
        all_reasons = "; ".join(
            f"{capabilities.name}: {', '.join(reasons)}" for capabilities, reasons in refused
        )
        raise UnsupportedError(f"no kernel can do this call. {all_reasons}")
    names = [kernel.capabilities.name for kernel in able]
    times = expected(cases, request, program, names, grad=request.grad)
    chosen = able[names.index(times.fastest(names, grad=request.grad))]
    not_chosen = [kernel.capabilities for kernel in able if kernel is not chosen]
    slower = ((capabilities, (times.time(capabilities.name),)) for capabilities in not_chosen)
    return Selection(chosen, (*slower, *refused), times, has_predicate)


def timed(device: str) -> tuple[Case, ...]:
    """Return the measured cases for GPUs like the current one or, for ``"cpu"``, for the host."""
    return default().cases_of("torch", capability_number(device))


def capability_number(device: str) -> int | None:
    """Return the current device's key in the table of rates: ``90`` for sm_90, 0 for the CPU.

    It is ``None`` for devices that the table does not have, such as AMD's.
    """
    if device == "cpu":
        return 0
    if device != "cuda" or torch.version.hip:
        return None
    major, minor = capability()
    return 10 * major + minor


def in_order(device: str) -> tuple[Kernel, ...]:
    """Return the kernels in the order of ``auto`` without timings."""
    if device != "cuda" or capability()[0] >= 9:
        return KERNELS
    return tuple(sorted(KERNELS, key=lambda kernel: not kernel.leads_before_hopper))


def _named(config: KernelConfig, request: Request, program: RingProgram) -> Kernel:
    """Return the kernel that a call names, or refuse the call: it never falls back.

    Several kernels may share a name, for different devices.

    Raises:
        UnsupportedError: The kernel cannot do the call.
    """
    name = config.name
    candidates = [kernel for kernel in KERNELS if kernel.capabilities.name == name]
    kernel = next(
        (k for k in candidates if request.device in k.capabilities.devices), candidates[0]
    )
    available = [k.capabilities for k in KERNELS if not _unavailable_reasons(k, request)]
    require(kernel.capabilities, request, program, others=available)
    if reasons := _unavailable_reasons(kernel, request):
        raise UnsupportedError(f"kernel {name!r}: {reasons[0]}. Instead: use kernel='auto'")
    if config_refusals := kernel.config_refusals(config, request, program):
        raise UnsupportedError(
            f"kernel {name!r}: {'; '.join(config_refusals)}. Instead: use kernel='auto'"
        )
    return kernel


def _unavailable_reasons(kernel: Kernel, request: Request) -> tuple[str, ...]:
    """Return why a kernel cannot run here at all: another device, or something is missing."""
    devices = kernel.capabilities.devices
    if devices and request.device not in devices:
        return (f"runs on {', '.join(devices)}",)
    reason = kernel.unavailable_reason()
    return () if reason is None else (reason,)


def matrix() -> str:
    """Return the support matrix of all kernels as a Markdown table."""
    return support_matrix([kernel.capabilities for kernel in KERNELS])
