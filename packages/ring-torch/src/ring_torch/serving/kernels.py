"""Choice of the kernel that attends to a rank's pages."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ring_core import UnsupportedError
from ring_torch.optional import has_triton
from ring_torch.serving import flash_pages, paged
from ring_torch.serving.paged import PagedKeys, Rules

#: Function like :func:`ring_torch.serving.paged.attend`.
Attend = Callable[[Tensor, Tensor, PagedKeys, range, Rules], tuple[Tensor, Tensor]]

_LEAST_DIM = 16  # numbers of a key, of products on tensor cores


def chosen(name: str, operation: str, q: Tensor, v_dim: int, rules: Rules) -> tuple[str, str]:
    """Return the kernel that a name or ``"auto"`` stands for, and why it is not the fastest.

    Raises:
        UnsupportedError: The kernel of that name cannot do it.
    """
    if name == "eager":
        return name, "it was asked for"
    reasons = {"triton": reason_against_triton(q)}
    if operation == "prefill":
        # What flash-attn-4 leaves is for Triton's.
        reason = flash_pages.reason_against(q, v_dim, rules) or reasons["triton"]
        reasons = {"fa4": reason, **reasons}
    if name == "auto":
        kernel = next((x for x, reason in reasons.items() if not reason), "eager")
        return kernel, "; ".join(dict.fromkeys(reason for reason in reasons.values() if reason))
    reason = reasons.get(name, "it is for prefill, as flash-attn-4 has no split-KV on Hopper")
    if reason:
        raise UnsupportedError(f"kernel={name!r}: {reason}. Instead: kernel='auto', or 'eager'")
    return name, "it was asked for" if name != next(iter(reasons)) else ""


def reason_against_triton(q: Tensor) -> str:
    """Return why the kernel in Triton does not take queries; nothing if it does."""
    if not q.is_cuda:
        return f"the kernel in Triton needs CUDA, and tensors are on {q.device.type}"
    if q.dtype == torch.float64:
        return "the kernel in Triton computes in float32, and tensors are in float64"
    if q.shape[3] < _LEAST_DIM:
        return f"the kernel in Triton takes head dims from {_LEAST_DIM} on, got {q.shape[3]}"
    return "" if has_triton() else "Triton is not installed"


def attend_by(kernel: str) -> Attend:
    """Return the function of a kernel; what ``fa4`` leaves is for Triton's."""
    if kernel == "eager":
        return paged.attend
    attend: Attend = import_module("ring_torch.serving.paged_kernel").attend
    return attend


def step_kernels(device: torch.device) -> Any:
    """Return the module of kernels for the rest of a step, or ``None`` where torch has to do it."""
    if device.type != "cuda" or not has_triton():
        return None
    return import_module("ring_torch.serving.step_kernels")
