"""Choice of a call's kernels: torch's operations, a library's, or Ring's own in Triton."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ring_torch.capture import is_traced
from ring_torch.optional import has_triton
from ring_torch.recurrent import fla
from ring_torch.recurrent.fla import LEAST_CAPABILITY
from ring_torch.recurrent.kernels import Kernel, SelectiveScan

_MOST_NUMBERS = 256  # of a state's channel, all of which a program holds for its tokens


def chosen(
    name: str, kernel: Kernel, inputs: Sequence[Tensor], dtype: torch.dtype, *, needs_grad: bool
) -> tuple[str, str]:
    """Return the library that a name or ``"auto"`` stands for, and why it is not a faster one."""
    if name == "eager":
        return "eager", "it was asked for"
    is_scan = name == "auto" and isinstance(kernel, SelectiveScan)
    library = "triton" if is_scan or name == "triton" else "fla"
    reason = "it is not called in graphs" if is_traced(inputs[0]) else ""
    if library == "fla":
        reasons = fla.reasons_against(kernel, inputs, dtype, needs_grad=needs_grad)
    else:
        reasons = reasons_against_triton(kernel, inputs, dtype)
    reason = reason or next(reasons, "")
    return (library, "") if not reason else ("eager", reason)


def reasons_against_triton(
    kernel: Kernel, inputs: Sequence[Tensor], dtype: torch.dtype
) -> Iterator[str]:
    """Yield the reasons why Ring's own kernels do not take a call."""
    if not isinstance(kernel, SelectiveScan):
        yield f"Ring has a kernel of selective_scan, and none of {kernel.name}"
    if inputs[0].device.type != "cuda":
        yield f"its kernel needs CUDA, and tensors are on {inputs[0].device.type}"
    if dtype != torch.float32:
        yield "its kernel computes in float32"
    if inputs[-1].shape[-1] > _MOST_NUMBERS:
        yield f"its kernel takes at most {_MOST_NUMBERS} numbers of a channel, got {inputs[-1].shape[-1]}"
    if torch.cuda.get_device_capability(inputs[0].device) < LEAST_CAPABILITY:
        yield "its kernel needs compute capability 8.0"
    if not has_triton():
        yield "Triton is not installed"
