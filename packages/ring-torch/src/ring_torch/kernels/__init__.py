"""Attention kernels of ring_torch, and the choice among them by their order on a device."""

from __future__ import annotations

from dataclasses import replace

import torch

from ring_core import (
    Capabilities,
    KernelConfig,
    Request,
    RingProgram,
    UnsupportedError,
    refusals,
    require,
    support_matrix,
)
from ring_torch.kernels.api import Kernel, Selection
from ring_torch.kernels.eager import EagerKernel
from ring_torch.kernels.fa4 import FA4
from ring_torch.kernels.flash_attn import FA2, FA3
from ring_torch.kernels.library import capability
from ring_torch.kernels.measured import measured
from ring_torch.kernels.sdpa import CUDA_FLASH, CUDNN, CpuFlashKernel
from ring_torch.kernels.triton import TritonKernel

_TRITON, _EAGER, _CPU_FLASH = TritonKernel(), EagerKernel(), CpuFlashKernel()

#: All kernels, in the order in which ``auto`` tries them: the fastest first, by times of an H200
#: (``benchmarks/results``), and the same on Blackwell.
KERNELS: tuple[Kernel, ...] = (FA4, FA3, CUDNN, FA2, CUDA_FLASH, _CPU_FLASH, _TRITON, _EAGER)

#: On Hopper (an H200) Triton's kernels are faster than FlashAttention-2 up to this head dim: 1.07
#: to 1.8 times as fast.
_TRITON_BEFORE_FA2 = 128


def kernel_names() -> tuple[str, ...]:
    """Return the names that ``kernel=`` takes."""
    return ("auto", *dict.fromkeys(kernel.capabilities.name for kernel in KERNELS))


def choose(config: KernelConfig, request: Request, program: RingProgram) -> Selection:
    """Return the kernel that a call names or, with ``auto``, the first in order that can do it.

    Raises:
        UnsupportedError: The named kernel cannot do the call, or none can; every reason is named.
        ValueError: ``RING_RATES`` names a file that is no table of times.
    """
    request = replace(
        request,
        block_sizes=config.block_q is not None or config.block_k is not None,
        fused_backward=config.fused_backward is not None,
    )
    if config.name != "auto":
        return Selection(_named(config, request, program), ())
    kernels = in_order(request.device, max(request.head_dim, request.v_head_dim))
    # A user's own times come before our order; kernels that these lack come after those in them.
    fastest = measured().order(device_name(request.device), request, program.plan.mask)
    places = {name: place for place, name in enumerate(fastest)}
    refused: list[tuple[Capabilities, tuple[str, ...]]] = []
    for kernel in sorted(kernels, key=lambda x: places.get(x.capabilities.name, len(places))):
        reasons = (
            refusals(kernel.capabilities, request, program)
            or _unavailable_reasons(kernel, request)
            or kernel.config_refusals(config, request, program)
        )
        if not reasons:
            return Selection(kernel, tuple(refused))
        refused.append((kernel.capabilities, reasons))
    all_reasons = "; ".join(f"{can.name}: {', '.join(reasons)}" for can, reasons in refused)
    raise UnsupportedError(f"no kernel can do this call. {all_reasons}")


def device_name(device: str) -> str:
    """Return the name of the current device in tables of measured times: ``sm_90``, ``cpu``."""
    if device != "cuda" or torch.version.hip:
        return device
    return f"sm_{''.join(map(str, capability()))}"


def in_order(device: str, head_dim: int = 128) -> tuple[Kernel, ...]:
    """Return the kernels in the order of ``auto``: of device types, and of generations of GPUs."""
    places = {kernel.capabilities.name: float(n) for n, kernel in enumerate(KERNELS)}
    triton, fa2 = (x.capabilities.name for x in (_TRITON, FA2))
    if device == "cuda" and capability()[0] < 9:
        places[fa2] = -1.0
    if device == "cuda" and capability() == (9, 0) and head_dim <= _TRITON_BEFORE_FA2:
        places[triton] = places.get(fa2, len(places)) - 0.5
    return tuple(sorted(KERNELS, key=lambda kernel: places[kernel.capabilities.name]))


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
