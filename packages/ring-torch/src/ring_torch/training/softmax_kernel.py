"""Log-probabilities of labels, and the gradients of logits, in Triton: two reads and one write.

torch's operations read and write the logits of a piece of tokens some ten times; together that
takes as long as one of the products with the head.
"""

# Triton's decorator, and the arguments of kernels, have no types in Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_torch.capture import on_device

_BLOCK, _WARPS = 8192, 16  # classes that a program holds at a time


@triton.jit
def _scores(logits, columns, V, scale, cap, CAPPED: tl.constexpr):
    """Load logits and return them capped and scaled, and the derivative of the cap."""
    x = tl.load(logits + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
    slope = x
    if CAPPED:
        # tanh is 1 - 2 / (exp(2 x) + 1); near 0 that cancels, and a series takes its place.
        small = x / cap
        tanh = 1.0 - 2.0 / (tl.exp(2.0 * small) + 1.0)
        y = small * small
        series = 1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835))))
        tanh = tl.where(y < 0.0625, small * series, tanh)
        slope = 1.0 - tanh * tanh
        x = tl.where(columns < V, tanh * cap, -float("inf"))
    return x * scale, slope


@triton.jit
def _log_prob(
    logits, target, own, log_probs, stride, V, scale, cap, CAPPED: tl.constexpr,
    DIFFERENTIATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute a row's log-probability of its target; the row becomes ``own`` times its gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(target + row)
    top, total = -float("inf"), 0.0
    at_label = 0.0
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x, _ = _scores(logits, columns, V, scale, cap, CAPPED)
        new_top = tl.maximum(top, tl.max(x, 0))
        safe = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(x - safe), 0)
        at_label += tl.sum(tl.where(columns == label, x, 0.0), 0)
        top = new_top
    lse = top + tl.log(total)
    is_class = (label >= 0) & (label < V)
    tl.store(log_probs + row, tl.where(is_class, at_label - lse, float("nan")))
    if DIFFERENTIATES:
        factor = tl.load(own + row)
        for start in range(0, V, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x, slope = _scores(logits, columns, V, scale, cap, CAPPED)
            grad = (tl.where(columns == label, 1.0, 0.0) - tl.exp(x - lse)) * (factor * scale)
            if CAPPED:
                grad *= slope
            # Rows that do not count, with a factor of 0, may hold anything.
            grad = tl.where(factor == 0, 0.0, grad)
            tl.store(logits + columns, grad.to(logits.dtype.element_ty), mask=columns < V)


def log_probs_(
    logits: Tensor, target: Tensor, own: Tensor | None, temperature: float, softcap: float | None
) -> Tensor:
    """Return the log-probability of each row's target, float32 ``[n]``.

    With ``own`` the logits are overwritten by gradients of ``(own * log_probs).sum()``, rounded to
    their dtype.

    Args:
        logits: ``[n, V]`` in float32 or 16 bits, rows contiguous.
        target: int64 ``[n]``; what is no class gets NaN.
        own: float32 ``[n]``.
        temperature: Divisor of the logits.
        softcap: Bound of the logits, before they are divided.
    """
    log_probs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    with on_device(logits.device):
        _log_prob[(len(logits),)](
            logits, target, log_probs if own is None else own, log_probs, logits.stride(0),
            logits.shape[1], 1 / temperature, softcap or 1.0, CAPPED=softcap is not None,
            DIFFERENTIATES=own is not None, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return log_probs
