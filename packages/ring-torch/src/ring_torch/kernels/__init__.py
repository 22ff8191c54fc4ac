"""The kernels of ring_torch, fastest first, and the choice among them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ring_core import (
    Capabilities,
    KernelConfig,
    Plan,
    Request,
    UnsupportedError,
    refusals,
    require,
    support_matrix,
)
from ring_torch.kernels._api import Kernel
from ring_torch.kernels._flash import FlashKernel, capability
from ring_torch.kernels.cudnn import CUDNN
from ring_torch.kernels.eager import EagerKernel
from ring_torch.kernels.fa2 import FA2
from ring_torch.kernels.fa3 import FA3
from ring_torch.kernels.fa4 import FA4
from ring_torch.kernels.sdpa import CUDA_FLASH, CpuFlashKernel
from ring_torch.kernels.triton import TritonKernel

#: As fast as they are on Hopper and Blackwell.
KERNELS: tuple[Kernel, ...] = (
    FA4, FA3, CUDNN, FA2, CUDA_FLASH, CpuFlashKernel(), TritonKernel(), EagerKernel(),
)  # fmt: skip
KERNEL_NAMES: tuple[str, ...] = (
    "auto",
    *dict.fromkeys(kernel.capabilities.name for kernel in KERNELS),
)


@dataclass(frozen=True)
class Choice:
    """The kernel of a call, and why not the faster ones before it."""

    kernel: Kernel
    passed_over: tuple[tuple[Capabilities, tuple[str, ...]], ...]

    def describe(self) -> str:
        """A few lines for ``explain``."""
        lines = [f"kernel {self.kernel.capabilities.name}"]
        lines += [
            f"  not {can.name} ({', '.join(can.devices) or 'any device'}): {'; '.join(why)}"
            for can, why in self.passed_over
        ]
        return "\n".join(lines)


def choose(config: KernelConfig, request: Request, plan: Plan) -> Choice:
    """The kernel a call named, or with ``auto`` the first that can do it.

    Raises:
        UnsupportedError: None can; every reason is named.
    """
    request = replace(
        request,
        block_sizes=config.block_q is not None or config.block_k is not None,
        fused_backward=config.fused_backward is not None,
    )
    if config.name != "auto":
        return Choice(_named(config, request, plan), ())
    passed_over: list[tuple[Capabilities, tuple[str, ...]]] = []
    for kernel in in_order(request.device):
        reasons = refusals(kernel.capabilities, request, plan) or _absence(kernel, request)
        reasons = reasons or _misfits(kernel, config, request, plan)
        if not reasons:
            return Choice(kernel, tuple(passed_over))
        passed_over.append((kernel.capabilities, reasons))
    why = "; ".join(f"{can.name}: {', '.join(reasons)}" for can, reasons in passed_over)
    raise UnsupportedError(f"no kernel can do this call. {why}")


def in_order(device: str) -> tuple[Kernel, ...]:
    """The kernels, fastest first on this machine: before Hopper ``fa2`` leads."""
    if device != "cuda" or capability()[0] >= 9:
        return KERNELS
    return (FA2, *(kernel for kernel in KERNELS if kernel is not FA2))


def _named(config: KernelConfig, request: Request, plan: Plan) -> Kernel:
    """The kernel of a name; it never falls back."""
    name = config.name
    named = [kernel for kernel in KERNELS if kernel.capabilities.name == name]
    fitting = [kernel for kernel in named if request.device in kernel.capabilities.devices]
    kernel = (fitting or named)[0]
    here = [k.capabilities for k in KERNELS if not _absence(k, request)]
    require(kernel.capabilities, request, plan, others=here)
    if absent := _absence(kernel, request):
        raise UnsupportedError(f"kernel {name!r}: {absent[0]}. Instead: use kernel='auto'")
    if misfits := _misfits(kernel, config, request, plan):
        raise UnsupportedError(f"kernel {name!r}: {'; '.join(misfits)}. Instead: use kernel='auto'")
    return kernel


def _misfits(kernel: Kernel, config: KernelConfig, request: Request, plan: Plan) -> tuple[str, ...]:
    """What a call's settings ask of a kernel that it cannot do on this machine."""
    if isinstance(kernel, TritonKernel | FlashKernel):
        return kernel.misfits(config, request, plan)
    return ()


def _absence(kernel: Kernel, request: Request) -> tuple[str, ...]:
    """Why a kernel cannot run on this machine; empty if it can."""
    devices = kernel.capabilities.devices
    if devices and request.device not in devices:
        return (f"runs on {', '.join(devices)}",)
    missing = kernel.missing()
    return () if missing is None else (missing,)


def matrix() -> str:
    """The support matrix as a Markdown table."""
    return support_matrix([kernel.capabilities for kernel in KERNELS])
