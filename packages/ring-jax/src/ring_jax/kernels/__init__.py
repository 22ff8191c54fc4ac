"""Choose, for each platform, the fastest kernel that can do a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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
from ring_jax.kernels.absent import AbsentKernel, broken_kernels, described, is_fault, or_broken
from ring_jax.records import Kernel, LocalShape

_HOPPER = 90


@dataclass(frozen=True)
class Selection:
    """The kernels chosen for a call, with the reasons.

    The platform is not known before the program is compiled, so there is a kernel for each.

    Attributes:
        kernels: The chosen ones; the last one runs on every platform that no other one names.
        rejected: Kernels that were not chosen, each with its reasons.
        request: The request by which they were chosen.
        forward_only: Chosen kernels whose backward another one does, each with its reasons.
        broken: Installed kernels that cannot be used, in whose place ``auto`` takes no other.
    """

    kernels: tuple[Kernel, ...]
    rejected: tuple[tuple[Capabilities, tuple[str, ...]], ...]
    request: Request
    forward_only: tuple[tuple[Kernel, tuple[str, ...]], ...] = ()
    broken: tuple[AbsentKernel, ...] = ()

    @property
    def names(self) -> str:
        """Names of the kernels of all passes in words."""
        passes = [[kernel.capabilities.name for kernel in self.kernels]]
        if self.forward_only:
            backward = [x for x in self.kernels if x not in dict(self.forward_only)]
            passes.append([kernel.capabilities.name for kernel in backward])
        return ", backward ".join(" or ".join(names) for names in passes)

    def describe(self, notes: Sequence[str]) -> str:
        """Return the lines of ``explain`` about kernels: one for each, chosen or not.

        ``notes`` are lines on what the chosen ones decide only when the call is lowered.
        """
        rest = "any other device" if len(self.kernels) > 1 else "any device"
        lines = [
            f"kernel {can.name} ({', '.join(can.devices) or rest})"
            for can in (kernel.capabilities for kernel in self.kernels)
        ]
        lines += [f"  {note}" for note in notes]
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

    It is the first that can do the call, after those that lead on this GPU (:meth:`Kernel.leads`).
    A kernel that can do the forward but not the backward is taken for the forward.

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
        answers = ask(kernel, request, config, program, local)
        if answers.forward:
            raise UnsupportedError(f"kernel {config.name!r}: {'; '.join(answers.forward)}")
        return Selection((kernel,), (), request, _forward_only({kernel: answers}))
    answers_of: dict[Kernel, Answers] = {}
    broken = [*broken_kernels(kernels)]

    def why_not(kernel: Kernel) -> tuple[str, ...]:
        """Return every reason why a kernel cannot do the call, and keep what else it answers."""
        if reasons := refusals(kernel.capabilities, _on_its_device(request, kernel), program):
            return reasons
        answers = or_broken(kernel, lambda: ask(kernel, request, config, program, local))
        if isinstance(answers, AbsentKernel):
            broken.append(answers)
            return (answers.reason,)
        answers_of[kernel] = answers
        return answers.forward

    able, refused = _able(_in_order(kernels, request, program), why_not)
    if all(kernel.capabilities.devices for kernel in able):
        why = "; ".join(f"{can.name}: {', '.join(reasons)}" for can, reasons in refused)
        raise UnsupportedError(f"no kernel can do this call. {why}")
    rejected: dict[Kernel, str] = {}
    for kernel in able:
        if names := [x.name for x in broken if x.platform in kernel.capabilities.devices]:
            rejected[kernel] = (
                f"auto takes no other kernel for one that is broken: {', '.join(names)}"
            )
    chosen = {kernel: answers_of[kernel] for kernel in able if kernel not in rejected}
    return Selection(
        tuple(chosen), (*((x.capabilities, (why,)) for x, why in rejected.items()), *refused),
        request, _forward_only(chosen), tuple(broken),
    )  # fmt: skip


def _in_order(
    kernels: Sequence[Kernel], request: Request, program: RingProgram
) -> Sequence[Kernel]:
    """Return the kernels, those first that lead on the GPU of this machine, or on Hopper."""
    if not any("cuda" in kernel.capabilities.devices for kernel in kernels):
        return kernels
    capability, mask = compute_capability() or _HOPPER, program.plan.mask
    return sorted(kernels, key=lambda kernel: not kernel.leads(capability, request, mask))


def _able(
    kernels: Sequence[Kernel], why_not: Callable[[Kernel], tuple[str, ...]]
) -> tuple[list[Kernel], list[tuple[Capabilities, tuple[str, ...]]]]:
    """Return the first kernel for each platform that can do a call, and why those before cannot."""
    able: list[Kernel] = []
    refused: list[tuple[Capabilities, tuple[str, ...]]] = []
    served: set[str] = set()
    for kernel in kernels:
        can = kernel.capabilities
        if can.devices and served.issuperset(can.devices):
            continue
        if reasons := why_not(kernel):
            refused.append((can, reasons))
            continue
        able.append(kernel)
        served.update(can.devices)
        if not can.devices:
            break
    return able, refused


class Answers(NamedTuple):
    """A kernel's own answers about a call that fits its capabilities.

    Attributes:
        forward: Why it cannot do the forward; then nothing else is asked.
        backward: Why it cannot do the backward.
    """

    forward: tuple[str, ...]
    backward: tuple[str, ...] = ()


def ask(
    kernel: Kernel, request: Request, config: KernelConfig, program: RingProgram, local: LocalShape
) -> Answers:
    """Ask a kernel about a call."""
    # A batch that jax.export keeps symbolic. The kernel of all platforms, in plain XLA, takes it.
    if kernel.capabilities.devices and not _is_number(request.batch):
        reason = (
            f"its blocks depend on the symbolic dimension {request.batch}. Instead: export with "
            f"numbers, or with kernel='xla'"
        )
        return Answers((reason,))
    if forward := tuple(kernel.refusals("forward", local, config, program)):
        return Answers(forward)
    return Answers((), tuple(kernel.refusals("backward", local, config, program)))


def notes_of(
    kernel: Kernel, request: Request, config: KernelConfig, program: RingProgram
) -> tuple[str, ...]:
    """Return a kernel's notes on a call; of one that fails to tell them, its error."""
    try:
        return tuple(kernel.notes(request, config, program))
    except BaseException as error:
        if not is_fault(error):
            raise
        return (f"{kernel.capabilities.name} has no notes, {described(error)}",)


def _is_number(size: object) -> bool:
    """Return True if a dimension is not symbolic."""
    return isinstance(size, int)


def _forward_only(
    answers_of: Mapping[Kernel, Answers],
) -> tuple[tuple[Kernel, tuple[str, ...]], ...]:
    """Return the kernels that refuse the backward, each with its reasons."""
    return tuple((kernel, x.backward) for kernel, x in answers_of.items() if x.backward)


def sample_dtype(can: Capabilities) -> str:
    """Return the dtype in which every kernel is tried: float32 if the kernel takes it."""
    return "float32" if not can.dtypes or "float32" in can.dtypes else can.dtypes[0]


def compute_capability() -> int | None:
    """Return the compute capability of the first NVIDIA GPU, 90 for 9.0; ``None`` without one."""
    try:
        (device, *_) = jax.local_devices(backend="cuda")
    except RuntimeError:
        return None
    major, minor = device.compute_capability.split(".")
    return 10 * int(major) + int(minor)


def _on_its_device(request: Request, kernel: Kernel) -> Request:
    """Return the request as if made on the first platform that the kernel names."""
    return replace(request, device=next(iter(kernel.capabilities.devices), ""))
