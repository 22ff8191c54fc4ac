"""What a kernel can do, what a call asks for, and the one place where the two are compared.

The same records drive refusals, their tests, the doctor and the support matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from ring_core._errors import UnsupportedError
from ring_core._plan import Plan
from ring_core.checks import check_flag

Band = Literal["full", "causal", "any"]


@dataclass(frozen=True)
class Capabilities:
    """What a kernel supports.

    Attributes:
        name: The kernel's name, as in ``kernel=``.
        devices: Device types, e.g. ``("cpu", "cuda")``; empty means any.
        dtypes: Names of input dtypes, e.g. ``("float32", "bfloat16")``.
        max_head_dim: Largest head dim of Q, K or V; ``None`` is unlimited.
        head_dim_multiple: Head dims must be a multiple of this.
        mixed_head_dims: The head dim of V may differ from that of Q and K.
        bands: Bands of a work item: ``full`` only, also square ``causal`` ones, or ``any``.
        documents: One launch may span several documents (``cu_seqlens``, ``chunk_size``).
        segment_ids, predicate, softcap, bias, alibi, dropout, deterministic: The options of the
            same names.
        deterministic_head_dim: Largest head dim with ``deterministic``; ``None`` is unlimited.
        any_scale: ``softmax_scale`` may be 0 or less; a kernel that scales what it has masked, or
            the maximum of a row, cannot do that.
        lse_grad: The gradient of ``lse`` reaches Q and K.
        backward: Whether there is a backward at all.
        exact_nan: A NaN or infinity reaches only rows that see it; without, also others of its
            tile, up to 255 positions away.
        block_sizes: ``KernelConfig.block_q`` and ``block_k`` may be chosen.
        fused_backward: ``KernelConfig.fused_backward`` may be chosen.
    """

    name: str
    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    mixed_head_dims: bool = False
    bands: Band = "full"
    documents: bool = False
    segment_ids: bool = False
    predicate: bool = False
    softcap: bool = False
    bias: bool = False
    alibi: bool = False
    dropout: bool = False
    deterministic: bool = False
    deterministic_head_dim: int | None = None
    any_scale: bool = False
    lse_grad: bool = False
    backward: bool = True
    exact_nan: bool = True
    block_sizes: bool = False
    fused_backward: bool = False


@dataclass(frozen=True)
class KernelConfig:
    """A kernel and its settings; ``None`` leaves a setting to the kernel.

    Attributes:
        name: As in ``kernel=``; ``auto`` lets the call choose among kernels that take the settings.
        block_q, block_k: Query rows and key columns a block.
        fused_backward: One backward kernel for dQ, dK and dV rather than two.
    """

    name: str = "auto"
    block_q: int | None = None
    block_k: int | None = None
    fused_backward: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be that of a kernel, or 'auto', got {self.name!r}")
        for name, size in (("block_q", self.block_q), ("block_k", self.block_k)):
            if size is not None and (
                not isinstance(size, int) or isinstance(size, bool) or not 1 <= size < 2**31
            ):
                raise ValueError(
                    f"{name} must be an integer >= 1 and < 2**31, or None, got {size!r}"
                )
        if self.fused_backward is not None:
            check_flag("fused_backward", self.fused_backward)


@dataclass(frozen=True)
class Request:
    """What one call asks of a kernel: static facts only, equal on every rank.

    ``batch``, ``q_heads`` and ``kv_heads`` say how large it is, on one device.
    """

    device: str
    dtype: str
    head_dim: int
    v_head_dim: int
    segment_ids: bool = False
    softcap: bool = False
    bias: bool = False
    alibi: bool = False
    dropout: bool = False
    deterministic: bool = False
    any_scale: bool = False
    grad: bool = False
    lse_grad: bool = False
    block_sizes: bool = False
    fused_backward: bool = False
    batch: int = 1
    q_heads: int = 1
    kv_heads: int = 1


OPTION_WORDS = {
    "segment_ids": "segment_ids",
    "softcap": "softcap",
    "bias": "bias",
    "alibi": "alibi_slopes",
    "dropout": "dropout_p",
    "deterministic": "deterministic=True",
    "any_scale": "softmax_scale <= 0",
    "lse_grad": "gradient through lse",
    "block_sizes": "choice of block_q and block_k",
    "fused_backward": "choice of fused_backward",
}


def refusals(capabilities: Capabilities, request: Request, plan: Plan) -> tuple[str, ...]:
    """Every reason why a kernel cannot do a call; empty if it can."""
    can, reasons = capabilities, []
    if can.devices and request.device not in can.devices:
        reasons.append(f"runs on {_either(can.devices)}, not on {request.device}")
    if can.dtypes and request.dtype not in can.dtypes:
        reasons.append(f"takes {_either(can.dtypes)}, not {request.dtype}")
    largest = max(request.head_dim, request.v_head_dim)
    if can.max_head_dim is not None and largest > can.max_head_dim:
        reasons.append(f"takes head dims up to {can.max_head_dim}, not {largest}")
    if request.head_dim % can.head_dim_multiple or request.v_head_dim % can.head_dim_multiple:
        reasons.append(f"takes head dims that are multiples of {can.head_dim_multiple}")
    if not can.mixed_head_dims and request.head_dim != request.v_head_dim:
        reasons.append(f"needs V's head dim {request.v_head_dim} to equal Q's {request.head_dim}")
    for option, words in OPTION_WORDS.items():
        if getattr(request, option) and not getattr(can, option):
            reasons.append(f"has no {words}")
    most = can.deterministic_head_dim
    if request.deterministic and can.deterministic and most is not None and largest > most:
        reasons.append(f"is deterministic for head dims up to {most}, not {largest}")
    if request.grad and not can.backward:
        reasons.append("has no backward")
    return (*reasons, *_mask_refusals(can, plan))


def _mask_refusals(can: Capabilities, plan: Plan) -> list[str]:
    if plan.mask.predicate is not None:
        return [] if can.predicate else ["has no predicate masks"]
    reasons = []
    traits = plan.traits
    if traits.several_documents and not can.documents:
        reasons.append("has no blocks of several documents or chunks")
    if can.bands == "full" and traits.causal + traits.banded:
        reasons.append(
            f"takes full blocks only, and this plan has {traits.causal + traits.banded} others"
        )
    if can.bands == "causal" and traits.banded:
        reasons.append(
            f"takes full and square causal blocks only, and this plan has {traits.banded} with windows"
        )
    return reasons


def require(
    capabilities: Capabilities, request: Request, plan: Plan, *, others: Sequence[Capabilities]
) -> None:
    """Raise unless a kernel can do a call.

    Raises:
        UnsupportedError: Naming every reason, and which of ``others`` could do it.
    """
    reasons = refusals(capabilities, request, plan)
    if not reasons:
        return
    able = [other.name for other in others if not refusals(other, request, plan)]
    instead = (
        f"use kernel={_either([repr(name) for name in able])} or 'auto'"
        if able
        else "no kernel here can do this call"
    )
    raise UnsupportedError(
        f"kernel {capabilities.name!r}: {'; '.join(reasons)}. Instead: {instead}"
    )


def support_matrix(kernels: Sequence[Capabilities]) -> str:
    """A Markdown table of what each kernel supports, one column a kernel."""
    lines = ["| | " + " | ".join(f"`{kernel.name}`" for kernel in kernels) + " |"]
    lines.append("|---|" + "---|" * len(kernels))
    for row in fields(Capabilities):
        if row.name != "name":
            cells = [_cell(getattr(kernel, row.name)) for kernel in kernels]
            lines.append(f"| {row.name.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None or value == ():
        return "any"
    if isinstance(value, tuple):
        return ", ".join(value)
    if value is True or value is False:
        return "yes" if value else "no"
    return str(value)


def _either(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
