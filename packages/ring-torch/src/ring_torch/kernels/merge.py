"""Merge a part of a result into what was found so far."""

from __future__ import annotations

import torch
from torch import Tensor

from ring_torch.optional import has_triton
from ring_torch.records import AttentionState

_MERGED_ROWS = 512


def merge_into(into: AttentionState, out: Tensor, lse: Tensor) -> None:
    """Merge a kernel's ``(out, lse)`` into what was accumulated, in place.

    The formula of :func:`ring_core.merge`; outputs whose ``lse`` is ``-inf`` are never read.
    """
    if out.is_cuda and into.lse.dtype == torch.float32 and has_triton():
        from ring_torch.memory_ops import merge_on_gpu

        merge_on_gpu(into.out, into.lse, out, lse)
        return
    for start in range(0, out.shape[1], _MERGED_ROWS):  # a bounded number of rows in temporaries
        rows = slice(start, start + _MERGED_ROWS)
        _merge_rows(into.take(rows), out[:, rows], lse[:, :, rows])


def _merge_rows(into: AttentionState, out: Tensor, lse: Tensor) -> None:
    lse = lse.to(into.lse.dtype)
    merged = torch.logaddexp(into.lse, lse)
    safe = merged.masked_fill(merged == -torch.inf, 0.0)
    old = (into.lse - safe).exp_().transpose(1, 2).unsqueeze(-1)
    new = (lse - safe).exp_().transpose(1, 2).unsqueeze(-1)
    into.out.mul_(old)
    into.out.add_(torch.where(new > 0, out * new, 0.0))
    into.lse.copy_(merged)
