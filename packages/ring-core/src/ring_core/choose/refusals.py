"""Whether a kernel can do a call: where what it can is compared with what is asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields
from typing import Any

from ring_core.base.config import OPTION_WORDS, Capabilities, Request
from ring_core.base.errors import UnsupportedError
from ring_core.programs.ring import RingProgram


def refusals(capabilities: Capabilities, request: Request, program: RingProgram) -> tuple[str, ...]:
    """Every reason why a kernel cannot do a call; empty if it can."""
    can, dims = capabilities, (request.head_dim, request.v_head_dim)
    largest, most = max(dims), can.deterministic_head_dim
    reasons: dict[str, Any] = {
        f"runs on {_one_of(can.devices)}, not on {request.device}": (
            can.devices and request.device not in can.devices
        ),
        f"takes {_one_of(can.dtypes)}, not {request.dtype}": (
            can.dtypes and request.dtype not in can.dtypes
        ),
        f"takes head dims up to {can.max_head_dim}, not {largest}": (
            can.max_head_dim is not None and largest > can.max_head_dim
        ),
        f"needs V's head dim {dims[1]} to equal Q's {dims[0]}": (
            not can.mixed_head_dims and dims[0] != dims[1]
        ),
        **{
            f"has no {words}": getattr(request, option) and not getattr(can, option)
            for option, words in OPTION_WORDS.items()
        },
        f"is deterministic for head dims up to {most}, not {largest}": (
            request.deterministic and can.deterministic and most is not None and largest > most
        ),
        "has no backward": request.grad and not can.backward,
    }
    reasons |= _mask_refusals(can, program)
    return tuple(reason for reason, applies in reasons.items() if applies)


def _mask_refusals(can: Capabilities, program: RingProgram) -> dict[str, Any]:
    if program.plan.mask.predicate is not None:
        return {"has no predicate masks": not can.predicate}
    counts = program.item_counts
    banded, others = counts.banded, counts.causal + counts.banded
    return {
        "has no blocks of several documents or chunks": (
            counts.several_documents and not can.documents
        ),
        f"takes full blocks only, and this plan has {others} others": (
            can.bands == "full" and others
        ),
        f"takes full and square causal blocks only, and this plan has {banded} with windows": (
            can.bands == "causal" and banded
        ),
    }


def require(
    capabilities: Capabilities,
    request: Request,
    program: RingProgram,
    *,
    others: Sequence[Capabilities],
) -> None:
    """Raise unless a kernel can do a call.

    Raises:
        UnsupportedError: Naming every reason, and which of ``others`` could do it.
    """
    reasons = refusals(capabilities, request, program)
    if not reasons:
        return
    names = [other.name for other in others if not refusals(other, request, program)]
    words = (
        f"use kernel={_one_of([repr(name) for name in names])} or 'auto'"
        if names
        else "no kernel here can do this call"
    )
    raise UnsupportedError(f"kernel {capabilities.name!r}: {'; '.join(reasons)}. Instead: {words}")


def split_by_reasons[Kernel](
    kernels: Iterable[tuple[Kernel, Capabilities]],
    why_not: Callable[[Kernel], tuple[str, ...]],
    timed: Collection[str],
    device: str | None,
) -> tuple[list[Kernel], tuple[tuple[Capabilities, tuple[str, ...]], ...]]:
    """The kernels that can do a call, in their order, and why others cannot.

    Where there is one for a device already, those that were never timed are not asked: they would
    not be taken. One that is for every device is the last.

    Args:
        kernels: With what they can do.
        why_not: Every reason why one cannot do the call.
        timed: Names of those that were.
        device: Where the call runs; ``None`` where each of the kernels' own counts.
    """
    able: list[Kernel] = []
    refused: list[tuple[Capabilities, tuple[str, ...]]] = []
    served: set[str] = set()
    for kernel, can in kernels:
        devices = can.devices if device is None else (device,)
        if devices and served.issuperset(devices) and can.name not in timed:
            continue
        if reasons := why_not(kernel):
            refused.append((can, reasons))
            continue
        able.append(kernel)
        served.update(devices)
        if not devices:
            break
    return able, tuple(refused)


def support_matrix(kernels: Sequence[Capabilities]) -> str:
    """A Markdown table of what each kernel supports, one column a kernel."""
    names = " | ".join(f"`{kernel.name}`" for kernel in kernels)
    lines = [f"| | {names} |", "|---|" + "---|" * len(kernels)]
    for row in fields(Capabilities)[1:]:  # all but the name
        cells = " | ".join(_cell(getattr(kernel, row.name)) for kernel in kernels)
        lines.append(f"| {row.name.replace('_', ' ')} | {cells} |")
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(value) or "any"
    return "any" if value is None else str(value)


def _one_of(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
