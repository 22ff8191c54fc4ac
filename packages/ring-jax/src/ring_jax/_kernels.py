"""The choice among kernels: for each platform the first that can do a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ring_core import KernelConfig, Plan, Request, UnsupportedError, refusals, require
from ring_jax._types import Kernel


def kernel_names(kernels: Sequence[Kernel]) -> tuple[str, ...]:
    """What ``kernel=`` may name."""
    return ("auto", *dict.fromkeys(kernel.capabilities.name for kernel in kernels))


def choose(
    kernels: Sequence[Kernel], config: KernelConfig, request: Request, plan: Plan
) -> tuple[Kernel, ...]:
    """The kernel a call named, or with ``auto`` the first for each platform that can do it.

    The platform is not known before the program is compiled, so what is chosen is a kernel for
    some platforms each, the last one for all others.

    Raises:
        UnsupportedError: None can; every reason is named.
    """
    request = replace(
        request,
        block_sizes=config.block_q is not None or config.block_k is not None,
        fused_backward=config.fused_backward is not None,
    )
    every = [kernel.capabilities for kernel in kernels]
    if config.name != "auto":
        (kernel,) = (one for one in kernels if one.capabilities.name == config.name)
        require(kernel.capabilities, _on_its_device(request, kernel), plan, others=every)
        return (kernel,)
    chosen: list[Kernel] = []
    why = []
    for kernel in kernels:
        reasons = refusals(kernel.capabilities, _on_its_device(request, kernel), plan)
        if reasons:
            why.append(f"{kernel.capabilities.name}: {', '.join(reasons)}")
            continue
        chosen.append(kernel)
        if not kernel.capabilities.devices:
            return tuple(chosen)
    raise UnsupportedError(f"no kernel can do this call. {'; '.join(why)}")


def _on_its_device(request: Request, kernel: Kernel) -> Request:
    return replace(request, device=next(iter(kernel.capabilities.devices), ""))
