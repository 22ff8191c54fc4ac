"""Choose, for each platform, the fastest kernel that can do a call."""

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
    """The kernels chosen for a call, with the reasons.

    The platform is not known before the program is compiled, so there is a kernel for each.

    Attributes:
        kernels: The chosen ones; the last one runs on every platform that no other one names.
        rejected: Kernels that were not chosen, each with its reasons.
        forward_only: Chosen kernels whose backward another one does, each with its reasons.
        expected: The times that kernels for NVIDIA GPUs should take.
        notes: Lines on what chosen kernels decide only when the call is lowered.
    """

    kernels: tuple[Kernel, ...]
    rejected: tuple[tuple[Capabilities, tuple[str, ...]], ...]
    forward_only: tuple[tuple[Kernel, tuple[str, ...]], ...] = ()
    expected: Expected = UNKNOWN
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> str:
        """Names of the kernels of all passes in words."""
        passes = [[kernel.capabilities.name for kernel in self.kernels]]
        if self.forward_only:
            backward = [x for x in self.kernels if x not in dict(self.forward_only)]
            passes.append([kernel.capabilities.name for kernel in backward])
        return ", backward ".join(" or ".join(names) for names in passes)

    def describe(self) -> str:
        """Return the lines of ``explain`` about kernels: one for each, chosen or not."""
        rest = "any other device" if len(self.kernels) > 1 else "any device"
        lines = [
            f"kernel {can.name} ({', '.join(can.devices) or rest})"
            f"{self.expected.time_and_source(can.name)}"
            for can in (kernel.capabilities for kernel in self.kernels)
        ]
        lines += [f"  {note}" for note in self.notes]
        lines += [
            f"  not the backward of {kernel.capabilities.name}: {'; '.join(why)}"
            for kernel, why in self.forward_only
        ]
        lines += [
            f"  not {can.name} ({', '.join(can.devices) or rest}): {'; '.join(why)}"
            for can, why in self.rejected
        ]
        return "\n".join(lines)


def kernel_names(kernels: Sequence[Kernel]) -> tuple[str, ...]:
    """Return the values that ``kernel=`` may have: ``auto`` and each kernel's name."""
    return ("auto", *dict.fromkeys(kernel.capabilities.name for kernel in kernels))


def choose(
    kernels: Sequence[Kernel],
    config: KernelConfig,
    request: Request,
    program: RingProgram,
    local: LocalShape,
) -> Selection:
    """Choose the kernel a call asked for, or with ``auto`` the fastest for each platform.

    Where no times are known (other platforms, other GPUs) the first that can do the call counts as
    the fastest. A kernel that can do the forward but not the backward is taken for the forward.

    Raises:
        UnsupportedError: No kernel, or not the one asked for, can do the call; with all reasons.
    """
    request = replace(
        request,
        block_sizes=config.block_q is not None or config.block_k is not None,
        fused_backward=config.fused_backward is not None,
    )
    if config.name != "auto":
        (kernel,) = (kernel for kernel in kernels if kernel.capabilities.name == config.name)
        require(
            kernel.capabilities, _on_its_device(request, kernel), program,
            others=[other.capabilities for other in kernels],
        )  # fmt: skip
        reasons = kernel.refusals("forward", local, config, program)
        if reasons:
            raise UnsupportedError(f"kernel {config.name!r}: {'; '.join(reasons)}")
        times = expected(timed(kernels), request, program, [config.name], grad=True)
        return Selection(
            (kernel,), (), _forward_only((kernel,), local, config, program), times,
            kernel.notes(request, config, program),
        )  # fmt: skip
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
    too_slow = (
        (can, (times.time(can.name),)) for can in (kernel.capabilities for kernel in slower)
    )
    return Selection(
        chosen, (*too_slow, *refused), _forward_only(chosen, local, config, program), times,
        tuple(note for kernel in chosen for note in kernel.notes(request, config, program)),
    )  # fmt: skip


def timed(kernels: Sequence[Kernel]) -> tuple[Case, ...]:
    """Return the measured times for the GPU of this machine, or for Hopper if it has none.

    Empty if none of the kernels is for NVIDIA GPUs.
    """
    if not any("cuda" in kernel.capabilities.devices for kernel in kernels):
        return ()
    return default().cases_of("jax", compute_capability() or _HOPPER)


def compute_capability() -> int | None:
    """Return the compute capability of the first NVIDIA GPU, 90 for 9.0; ``None`` without one."""
    try:
        (device, *_) = jax.local_devices(backend="cuda")
    except RuntimeError:
        return None
    major, minor = device.compute_capability.split(".")
    return 10 * int(major) + int(minor)


def _forward_only(
    kernels: Sequence[Kernel], local: LocalShape, config: KernelConfig, program: RingProgram
) -> tuple[tuple[Kernel, tuple[str, ...]], ...]:
    """Return the kernels that refuse the backward, each with its reasons."""
    pairs = ((kernel, kernel.refusals("backward", local, config, program)) for kernel in kernels)
    return tuple((kernel, reasons) for kernel, reasons in pairs if reasons)


def _on_its_device(request: Request, kernel: Kernel) -> Request:
    """Return the request as if made on the first platform that the kernel names."""
    return replace(request, device=next(iter(kernel.capabilities.devices), ""))
