"""The ring as one differentiable operation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ring_torch.call import Call, header_device
from ring_torch.capture import on_device, owned
from ring_torch.comm.handshake import CallSignature, agree, check_graph, with_peer_errors
from ring_torch.memory_ops import has_triton
from ring_torch.payload import KVPayload
from ring_torch.records import BackwardInputs, Grads, Inputs
from ring_torch.strategies.gather import gathered_backward, gathered_forward
from ring_torch.strategies.ring import run_forward
from ring_torch.strategies.ring_backward import run_backward
from ring_torch.strategies.single import folded, only_item, single_backward, single_forward
from ring_torch.transports.api import Carrier
from ring_torch.transports.p2p import Messages

_DELTA_ROWS = 4096


class RingAttention(torch.autograd.Function):
    """``(out, lse)`` of a call.

    Saved for the backward: the inputs, ``out``, ``lse`` and the keys that arrived last, or
    all of them where they are few.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, q_ids: Tensor | None,
        k_ids: Tensor | None,
        sinks: Tensor | None, bias: Tensor | None, slopes: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run the forward loop and add the sinks."""
        inputs = Inputs(q, k, v, q_ids, k_ids, sinks, bias, slopes)
        out, lse, kept = forward_pass(call, inputs)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, out, lse, *kept)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the backward loop."""
        saved = ctx.saved_tensors  # read once: checkpointing asks for it
        count = len(Inputs._fields)
        inputs, (out, lse, *kept) = Inputs(*saved[:count]), saved[count:]
        grads = backward_pass(ctx.call, inputs, (out, lse), kept, (dout, dlse))
        return None, *grads


def forward_pass(call: Call, inputs: Inputs) -> tuple[Tensor, Tensor, list[Tensor]]:
    """``out`` in the inputs' dtype and ``lse``, sinks included, and keys for the backward."""
    check_graph(call.ring, call.forward_signature, header_device(call))
    with (
        on_device(call.device),
        _without_autocast(inputs.q.device),
        with_peer_errors(call.ring, call.number, call.forward_signature),
    ):
        out, lse, kept = _run_forward(call, inputs)
    return out.to(call.dtype), lse, kept


def backward_pass(
    call: Call,
    inputs: Inputs,
    results: tuple[Tensor, Tensor],
    kept: list[Tensor],
    grads: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor | None, ...]:
    """A gradient for each of the inputs, from those of ``results = (out, lse)``."""
    (out, lse), (dout, dlse) = results, grads
    if dlse is not None:
        call, kept = call.with_lse_grad(), kept if call.strategy != "gather" else []
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    check_graph(call.ring, call.backward_signature, header_device(call))
    with (
        on_device(call.device),
        _without_autocast(out.device),
        with_peer_errors(call.ring, call.number, call.backward_signature),
    ):
        delta = None
        if call.kernel.needs_delta:
            delta = _delta(dout, out, call.acc_dtype)
            delta = delta if dlse is None else delta - dlse
        found = _run_backward(call, inputs, BackwardInputs(dout, out, lse, delta), kept)
        dsinks = None
        if inputs.sinks is not None:
            dsinks = _sink_grads(inputs.sinks, BackwardInputs(dout, out, lse, delta), dlse)
    dq, dk, dv = (owned(grad.to(call.dtype).contiguous()) for grad in found[:3])
    dbias = None
    if found.dbias is not None and inputs.bias is not None:
        dbias = found.dbias.to(inputs.bias.dtype)
    return dq, dk, dv, None, None, dsinks, dbias, None


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """No autocast; entering that takes the host longer than asking whether there is any."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _run_forward(call: Call, inputs: Inputs) -> tuple[Tensor, Tensor, list[Tensor]]:
    """``(out, lse)``, sinks included, and keys that the backward starts from."""
    if (item := only_item(call, inputs)) is not None:
        return *single_forward(call, inputs, item), []
    if call.strategy != "gather":
        out, lse, last = run_forward(call, inputs)
        kept = [] if last is None else [last]
    else:
        carrier = _carrier(call, inputs, call.forward_signature, call.groups.forward)
        (out, lse), kept = gathered_forward(call, inputs, carrier)
    if inputs.sinks is not None:
        out = out.to(call.acc_dtype)
        lse = _add_sinks(out, lse, inputs.sinks)
    return out, lse, kept


def _run_backward(
    call: Call, inputs: Inputs, upstream: BackwardInputs, kept: list[Tensor]
) -> Grads:
    if (item := only_item(call, inputs)) is not None:
        return single_backward(call, inputs, upstream, item)
    if call.strategy != "gather":
        return run_backward(call, inputs, upstream, kept[0] if kept else None)
    carrier = _carrier(call, inputs, call.backward_signature, call.groups.backward)
    return gathered_backward(call, inputs, upstream, carrier, kept)


def _carrier(call: Call, inputs: Inputs, signature: CallSignature, groups: int) -> Carrier:
    """What moves keys in a pass whose ranks agree on what they are about to do."""
    keys = KVPayload.of(inputs, groups)
    if call.transport == "symm_mem":
        from ring_torch.transports.peer_copies import pulls

        return pulls(call, keys, groups, signature)
    agree(call.ring, call.number, call.seed, signature, header_device(call))
    return Messages(call, keys, groups)


def _delta(dout: Tensor, out: Tensor, acc_dtype: torch.dtype) -> Tensor:
    """``rowsum(dout * out)`` as ``[B, H, T_local]``, some rows at a time: the product is wide."""
    if _has_passes(out, acc_dtype):
        from ring_torch.memory_ops import row_dots_on_gpu

        return row_dots_on_gpu(dout, out)
    batch, length, heads, _ = out.shape
    delta = torch.empty(batch, heads, length, dtype=acc_dtype, device=out.device)
    for start in range(0, length, _DELTA_ROWS):
        rows = slice(start, start + _DELTA_ROWS)
        product = dout[:, rows].to(acc_dtype) * out[:, rows].to(acc_dtype)
        delta[:, :, rows] = product.sum(dim=-1).transpose(1, 2)
    return delta


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """:func:`ring_core.finalize`, ``out`` in place; returns the new ``lse``."""
    with_sinks = torch.logaddexp(lse, folded(sinks, lse.dtype)[:, None])
    weight = (lse - with_sinks.masked_fill(with_sinks == -torch.inf, 0.0)).exp_()
    out.mul_(weight.transpose(1, 2).unsqueeze(-1))
    return with_sinks


def _sink_grads(sinks: Tensor, upstream: BackwardInputs, dlse: Tensor | None) -> Tensor:
    """This rank's part: ``dsink = -sum(exp(sink - lse) * delta)`` over its rows."""
    dout, out, lse, delta = upstream
    one = folded(sinks, lse.dtype)
    if delta is None and dlse is None and _has_passes(out, lse.dtype):
        from ring_torch.memory_ops import sink_sums_on_gpu

        sums = sink_sums_on_gpu(dout, out, lse, one)
    else:
        if delta is None:
            delta = _delta(dout, out, lse.dtype)
            delta = delta if dlse is None else delta - dlse
        safe = lse.masked_fill(lse == -torch.inf, torch.inf)
        sums = (torch.exp(one[:, None] - safe) * delta).sum(dim=(0, 2))
    if sinks.ndim == 1:
        return -sums.to(sinks.dtype)
    shares = (sinks.to(lse.dtype) - one[:, None].nan_to_num(neginf=0.0)).exp()
    return -(shares * sums[:, None]).to(sinks.dtype)


def _has_passes(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether passes over memory are Triton kernels."""
    return x.is_cuda and dtype == torch.float32 and has_triton()
