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
from ring_torch.kernels.eager import EagerKernel
from ring_torch.kernels.sdpa import CpuFlashKernel, CudaFlashKernel

KERNELS: tuple[Kernel, ...] = (CudaFlashKernel(), CpuFlashKernel(), EagerKernel())
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
    every = [kernel.capabilities for kernel in KERNELS]
    if config.name != "auto":
        named = [kernel for kernel in KERNELS if kernel.capabilities.name == config.name]
        fitting = [kernel for kernel in named if request.device in kernel.capabilities.devices]
        kernel = (fitting or named)[0]
        require(kernel.capabilities, request, plan, others=every)
        return Choice(kernel, ())
    passed_over: list[tuple[Capabilities, tuple[str, ...]]] = []
    for kernel in KERNELS:
        reasons = refusals(kernel.capabilities, request, plan)
        if not reasons:
            return Choice(kernel, tuple(passed_over))
        passed_over.append((kernel.capabilities, reasons))
    why = "; ".join(f"{can.name}: {', '.join(reasons)}" for can, reasons in passed_over)
    raise UnsupportedError(f"no kernel can do this call. {why}")


def matrix() -> str:
    """The support matrix as a Markdown table."""
    return support_matrix([kernel.capabilities for kernel in KERNELS])
