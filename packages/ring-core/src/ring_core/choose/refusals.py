"""Refuse calls that a kernel cannot do: its capabilities are compared with the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ring_core.base.config import OPTION_WORDS, Capabilities, Request
from ring_core.base.errors import UnsupportedError
from ring_core.programs.ring import RingProgram


def refusals(capabilities: Capabilities, request: Request, program: RingProgram) -> tuple[str, ...]:
    """Return every reason why a kernel cannot do a call; empty if it can.

    >>> from ring_core import Capabilities, Mask, Request, make_plan, refusals, ring_program
    >>> mine = Capabilities("mine", devices=("cuda",), max_head_dim=128)
    >>> request = Request("cuda", "bfloat16", head_dim=256, v_head_dim=256)
    >>> refusals(mine, request, ring_program(make_plan(Mask(), seq_len=8, cp_size=2)))
    ('takes head dims up to 128, not 256',)

    Args:
        capabilities: The kernel's.
        request: The call's options, sizes and dtype.
        program: The items of its mask over the ranks.
    """
    can, dims = capabilities, (request.head_dim, request.v_head_dim)
    largest, max_deterministic = max(dims), can.deterministic_head_dim
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
        f"is deterministic for head dims up to {max_deterministic}, not {largest}": (
            request.deterministic
            and can.deterministic
            and max_deterministic is not None
            and largest > max_deterministic
        ),
        "has no backward": request.grad and not can.backward,
    }
    reasons |= _mask_refusals(can, program)
    return tuple(reason for reason, applies in reasons.items() if applies)


def _mask_refusals(can: Capabilities, program: RingProgram) -> dict[str, Any]:
    """Return reasons that the mask gives, each with a value that is true if the reason applies.

    With a predicate there is no other: its items are tiles, without bands and documents.
    """
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

    Args:
        capabilities, request, program: As in :func:`refusals`.
        others: Kernels that may be suggested instead. Those of them that can do the call are.

    Raises:
        UnsupportedError: The kernel cannot; the message has every reason and what to use instead.
    """
    reasons = refusals(capabilities, request, program)
    if not reasons:
        return
    names = [candidate.name for candidate in others if not refusals(candidate, request, program)]
    advice = (
        f"use kernel={_one_of([repr(name) for name in names])} or 'auto'"
        if names
        else "no kernel here can do this call"
    )
    raise UnsupportedError(f"kernel {capabilities.name!r}: {'; '.join(reasons)}. Instead: {advice}")


def support_matrix(kernels: Sequence[Capabilities]) -> str:
    """Return a Markdown table of what each kernel supports, with a column for each.

    >>> from ring_core import Capabilities, support_matrix
    >>> print(support_matrix([Capabilities("mine", devices=("cpu",))]).split("| dtypes")[0])
    | | `mine` |
    |---|---|
    | devices | cpu |
    <BLANKLINE>
    """
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
