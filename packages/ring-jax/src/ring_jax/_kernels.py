"""The choice among kernels: for each platform the first that can do a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ring_core import Capabilities, KernelConfig, Plan, Request, UnsupportedError, refusals, require
from ring_jax._types import Kernel, LocalShape


@dataclass(frozen=True)
class Choice:
    """The kernels of a call, and why not the faster ones among them.

    The platform is not known before the program is compiled, so each is for some platforms, the
    last one for all others.
    """

    kernels: tuple[Kernel, ...]
    passed_over: tuple[tuple[Capabilities, tuple[str, ...]], ...]
    forward_only: tuple[tuple[Kernel, tuple[str, ...]], ...] = ()

    def describe(self) -> str:
        """A few lines for ``explain``."""
        rest = "any other device" if len(self.kernels) > 1 else "any device"
        chosen = (kernel.capabilities for kernel in self.kernels)
        lines = [f"kernel {can.name} ({', '.join(can.devices) or rest})" for can in chosen]
        lines += [
            f"  not {can.name} ({', '.join(can.devices) or rest}): {'; '.join(why)}"
            for can, why in self.passed_over
        ]
        lines += [
            f"  not the backward of {kernel.capabilities.name}: {'; '.join(why)}"
            for kernel, why in self.forward_only
        ]
        return "\n".join(lines)


def kernel_names(kernels: Sequence[Kernel]) -> tuple[str, ...]:
    """What ``kernel=`` may name."""
    return ("auto", *dict.fromkeys(kernel.capabilities.name for kernel in kernels))


def choose(
    kernels: Sequence[Kernel], config: KernelConfig, request: Request, plan: Plan, local: LocalShape
) -> Choice:
    """The kernel a call named, or with ``auto`` the first for each platform that can do it.

    A kernel that can do the forward alone is taken for that.

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
        why_not = kernel.refusals("forward", local, config, plan)
        if why_not:
            raise UnsupportedError(f"kernel {config.name!r}: {'; '.join(why_not)}")
        return Choice((kernel,), (), _forward_only((kernel,), local, config, plan))
    chosen: list[Kernel] = []
    passed_over: list[tuple[Capabilities, tuple[str, ...]]] = []
    served: set[str] = set()
    for kernel in kernels:
        if kernel.capabilities.devices and served.issuperset(kernel.capabilities.devices):
            continue  # a faster one is there
        reasons = refusals(kernel.capabilities, _on_its_device(request, kernel), plan)
        reasons = reasons or kernel.refusals("forward", local, config, plan)
        if reasons:
            passed_over.append((kernel.capabilities, reasons))
            continue
        chosen.append(kernel)
        served.update(kernel.capabilities.devices)
        if not kernel.capabilities.devices:
            forward_only = _forward_only(chosen, local, config, plan)
            return Choice(tuple(chosen), tuple(passed_over), forward_only)
    why = "; ".join(f"{can.name}: {', '.join(reasons)}" for can, reasons in passed_over)
    raise UnsupportedError(f"no kernel can do this call. {why}")


def _forward_only(
    kernels: Sequence[Kernel], local: LocalShape, config: KernelConfig, plan: Plan
) -> tuple[tuple[Kernel, tuple[str, ...]], ...]:
    """The kernels that cannot do the backward, and why not."""
    each = ((one, one.refusals("backward", local, config, plan)) for one in kernels)
    return tuple((kernel, reasons) for kernel, reasons in each if reasons)


def _on_its_device(request: Request, kernel: Kernel) -> Request:
    return replace(request, device=next(iter(kernel.capabilities.devices), ""))
