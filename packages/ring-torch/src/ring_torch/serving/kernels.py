"""Choice of the kernel that attends to a rank's pages: torch's operations, or one in Triton."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from ring_core import UnsupportedError
from ring_torch.optional import has_triton
from ring_torch.serving import paged
from ring_torch.serving.paged import PagedKeys, Rules

#: Function like :func:`ring_torch.serving.paged.attend`.
Attend = Callable[[Tensor, Tensor, PagedKeys, range, Rules], tuple[Tensor, Tensor]]

_LEAST_DIM = 16  # numbers of a key, of products on tensor cores


def chosen(name: str, q: Tensor) -> tuple[str, str]:
    """Return the kernel that a name or ``"auto"`` stands for, and why it is not the fastest.

    Raises:
        UnsupportedError: The kernel of that name cannot do it.
    """
    if name == "eager":
        return name, "it was asked for"
    reason = reason_against_triton(q)
    if reason and name == "triton":
        raise UnsupportedError(f"kernel='triton': {reason}. Instead: kernel='auto', or 'eager'")
    return ("eager", reason) if reason else ("triton", "")


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
    """Return the function of a kernel."""
    if kernel == "eager":
        return paged.attend
    attend: Attend = import_module("ring_torch.serving.paged_kernel").attend
    return attend
