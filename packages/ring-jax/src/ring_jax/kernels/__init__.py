"""The choice among kernels: for each platform the fastest that can do a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from ring_core import (
    Capabilities,
    KernelConfig,
    Request,
    RingProgram,
    UnsupportedError,
    refusals,
    require,
)
from ring_core.choose.rates import UNKNOWN, Case, Expected, default, expected
from ring_core.choose.refusals import split_by_reasons
from ring_jax.records import Kernel, LocalShape

_HOPPER = 90


@dataclass(frozen=True)
class Selection:
    """The kernels of a call, why not others, and how long those for NVIDIA GPUs should take.

    The platform is not known before the program is compiled, so each is for some platforms, the
    last one for all others.
    """

    kernels: tuple[Kernel, ...]
    rejected: tuple[tuple[Capabilities, tuple[str, ...]], ...]
    forward_only: tuple[tuple[Kernel, tuple[str, ...]], ...] = ()
    expected: Expected = UNKNOWN

    def describe(self) -> str:
        """A few lines for ``explain``."""
        rest = "any other device" if len(self.kernels) > 1 else "any device"
        lines = [
            f"kernel {can.name} ({', '.join(can.devices) or rest})"
            f"{self.expected.time_and_source(can.name)}"
            for can in (kernel.capabilities for kernel in self.kernels)
        ]
        lines += [
            f"  not {can.name} ({', '.join(can.devices) or rest}): {'; '.join(why)}"
            for can, why in self.rejected
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
    kernels: Sequence[Kernel],
    config: KernelConfig,
    request: Request,
    program: RingProgram,
    local: LocalShape,
) -> Selection:
    """The kernel a call named, or with ``auto`` the fastest for each platform that can do it.

    Without times of this GPU, and on other platforms, that is the first. A kernel that can do the
    forward alone is taken for that.

    Raises:
        UnsupportedError: None can; every reason is named.
    """
    request = replace(
        request,
        block_sizes=config.block_q is not None or config.block_k is not None,
        fused_backward=config.fused_backward is not None,
    )
    if config.name != "auto":
        (kernel,) = (one for one in kernels if one.capabilities.name == config.name)
        require(
            kernel.capabilities, _on_its_device(request, kernel), program,
            others=[one.capabilities for one in kernels],
        )  # fmt: skip
        why_not = kernel.refusals("forward", local, config, program)
        if why_not:
            raise UnsupportedError(f"kernel {config.name!r}: {'; '.join(why_not)}")
        times = expected(timed(kernels), request, program, [config.name], grad=True)
        return Selection((kernel,), (), _forward_only((kernel,), local, config, program), times)
    cases = timed(kernels)
    able, refused = split_by_reasons(
        ((kernel, kernel.capabilities) for kernel in kernels),
        lambda kernel: (
            refusals(kernel.capabilities, _on_its_device(request, kernel), program)
            or kernel.refusals("forward", local, config, program)
        ),
        {name for case in cases for name, _ in case.kernels},
        device=None,
    )
    if all(kernel.capabilities.devices for kernel in able):
        why = "; ".join(f"{can.name}: {', '.join(reasons)}" for can, reasons in refused)
        raise UnsupportedError(f"no kernel can do this call. {why}")
    for_gpus = [kernel for kernel in able if "cuda" in kernel.capabilities.devices]
    names = [kernel.capabilities.name for kernel in for_gpus]
    times = expected(cases, request, program, names, grad=True)
    fastest = times.fastest(names, grad=True) if names else ""
    slower = [kernel for kernel in for_gpus if kernel.capabilities.name != fastest]
    chosen = tuple(kernel for kernel in able if kernel not in slower)
    why_slower = ((one.capabilities, (times.time(one.capabilities.name),)) for one in slower)
    return Selection(
        chosen, (*why_slower, *refused), _forward_only(chosen, local, config, program), times
    )


def timed(kernels: Sequence[Kernel]) -> tuple[Case, ...]:
    """The cases of the table in use for GPUs like the one at hand.

    Without one a program is for one like that of the figures.
    """
    if not any("cuda" in kernel.capabilities.devices for kernel in kernels):
        return ()
    return default().of("jax", compute_capability() or _HOPPER)


def compute_capability() -> int | None:
    """Of the first NVIDIA GPU, as in ``sm_90``; ``None`` where there is none."""
    try:
        (device, *_) = jax.local_devices(backend="cuda")
    except RuntimeError:
        return None
    major, minor = device.compute_capability.split(".")
    return 10 * int(major) + int(minor)


def _forward_only(
    kernels: Sequence[Kernel], local: LocalShape, config: KernelConfig, program: RingProgram
) -> tuple[tuple[Kernel, tuple[str, ...]], ...]:
    each = ((one, one.refusals("backward", local, config, program)) for one in kernels)
    return tuple((kernel, reasons) for kernel, reasons in each if reasons)


def _on_its_device(request: Request, kernel: Kernel) -> Request:
    return replace(request, device=next(iter(kernel.capabilities.devices), ""))
