"""Runs of attention forward and backward, and the time of runs on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor


def seconds_of(run: Callable[[], object], calls: int, device: str) -> float:
    """Return the mean seconds of ``calls`` calls, without waiting for the GPU between them.

    It waits for the GPU before the first call and after the last one, and warms nothing up.
    """
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def out_and_grads(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
) -> tuple[Tensor, ...]:
    """Return the output of an attention function, and dQ, dK and dV."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, dout)
