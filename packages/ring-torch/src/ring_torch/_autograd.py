"""The ring as one differentiable operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ring_torch._backward import run_backward
from ring_torch._call import Call, Inputs
from ring_torch._forward import run_forward
from ring_torch.kernels._api import Upstream


class RingAttention(torch.autograd.Function):
    """``(out, lse)`` of a call.

    Saved for the backward: the inputs, ``out``, ``lse`` and the K/V that arrived last.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, q_ids: Tensor | None,
        k_ids: Tensor | None,
        sinks: Tensor | None, bias: Tensor | None, slopes: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run the forward loop and add the sinks."""
        inputs = Inputs(q, k, v, q_ids, k_ids, sinks, bias, slopes)
        with torch.autocast(q.device.type, enabled=False):
            wide_out, lse, last = run_forward(call, inputs)
            if sinks is not None:
                lse = _add_sinks(wide_out, lse, sinks)
        out = wide_out.to(call.dtype)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, out, lse, last)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the backward loop."""
        call: Call = ctx.call
        *tensors, out, lse, last = ctx.saved_tensors
        inputs = Inputs(*tensors)
        dout = torch.zeros_like(out) if dout is None else dout
        with torch.autocast(out.device.type, enabled=False):
            delta = (dout.to(call.wide) * out.to(call.wide)).sum(dim=-1).transpose(1, 2)
            delta = delta if dlse is None else delta - dlse
            grads = run_backward(call, inputs, Upstream(dout, out, lse, delta), last)
            dsinks = None if inputs.sinks is None else _sink_grads(inputs.sinks, lse, delta)
        dq, dk, dv = (grad.to(call.dtype) for grad in grads[:3])
        dbias = (
            None
            if grads.dbias is None or inputs.bias is None
            else grads.dbias.to(inputs.bias.dtype)
        )
        return None, dq, dk, dv, None, None, dsinks, dbias, None


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """:func:`ring_core.finalize`, ``out`` in place; returns the new ``lse``."""
    folded = sinks.to(lse.dtype).reshape(sinks.shape[0], -1).logsumexp(dim=1)
    with_sinks = torch.logaddexp(lse, folded[:, None])
    weight = (lse - with_sinks.masked_fill(with_sinks == -torch.inf, 0.0)).exp_()
    out.mul_(weight.transpose(1, 2).unsqueeze(-1))
    return with_sinks


def _sink_grads(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """This rank's part: ``dsink = -sum(exp(sink - lse) * delta)`` over its rows."""
    safe = lse.masked_fill(lse == -torch.inf, torch.inf)
    grads = [
        -(torch.exp(column[:, None] - safe) * delta).sum(dim=(0, 2))
        for column in sinks.to(lse.dtype).reshape(sinks.shape[0], -1).unbind(dim=1)
    ]
    return torch.stack(grads, dim=1).reshape(sinks.shape).to(sinks.dtype)
