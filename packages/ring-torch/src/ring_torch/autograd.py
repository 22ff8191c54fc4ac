"""The ring as one differentiable operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ring_core import WrongResultError
from ring_torch import tripwire
from ring_torch.call import Call, Saved, Shapes, attend
from ring_torch.capture import as_own, on_device
from ring_torch.comm.handshake import check_graph, with_peer_errors
from ring_torch.derivatives import check_backward
from ring_torch.optional import has_triton
from ring_torch.records import GIVEN, BackwardInputs, Inputs, folded, with_unit_strides
from ring_torch.strategies.bias_shift import bias_shift, sent_for_shift

_DELTA_ROWS = 4096
_NOTHING: AbstractContextManager[None] = nullcontext()


class RingAttention(torch.autograd.Function):
    """``(out, lse)`` of a call.

    Saved for the backward: the inputs, ``out``, ``lse`` and what the strategy saves.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, q_ids: Tensor | None,
        k_ids: Tensor | None,
        sinks: Tensor | None, bias: Tensor | None, slopes: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run the strategy's forward."""
        inputs = Inputs(q, k, v, q_ids, k_ids, sinks, bias, slopes)
        out, lse, saved = forward_pass(call, inputs)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:GIVEN], out, lse, *saved)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the strategy's backward, which is not differentiable itself."""
        check_backward(dout, dlse)
        tensors = ctx.saved_tensors  # read once: checkpointing asks for it
        inputs, (out, lse, *saved) = Inputs(*tensors[:GIVEN]), tensors[GIVEN:]
        # Compiled autograd would trace the ring's messages; it may look into nothing here.
        run = _backward_alone if torch.compiler.is_compiling() else backward_pass
        return None, *run(ctx.call, inputs, (out, lse), tuple(saved), (dout, dlse))


def forward_pass(call: Call, inputs: Inputs) -> tuple[Tensor, Tensor, Saved]:
    """``out`` in the inputs' dtype and ``lse``, sinks included, and what to save.

    Where the rows of a bias are shifted, that begins with the shift and ``lse`` of shifted scores.
    """
    if call.device.type == "cuda":
        check_graph(call.ranks, call.forward_signature, call.device)
    # What is saved for the backward stays the caller's own: copies live as long as a pass.
    if False in [x is None or x.stride(-1) == 1 for x in inputs]:
        inputs = with_unit_strides(inputs)
    with (
        _on_device(call.device),
        with_peer_errors(call.ranks, call.number, call.forward_signature),
    ):
        with tripwire.Watch(call.device) if call.checked else _NOTHING as seen:
            if call.params.shifts_bias:
                inputs = inputs._replace(bias_shift=bias_shift(call, inputs))
            (out, lse), saved = attend(call, inputs)
        # Libraries allocate what they return with the strides of what they are given.
        out, lse = out.to(call.dtype).contiguous(), lse.contiguous()
        wrong = None
        if seen is not None:
            wrong = tripwire.forward_faults(
                call, inputs, out, lse, seen, sent_before=sent_for_shift(call, inputs)
            )
    if wrong is not None:
        raise WrongResultError(wrong)
    if inputs.bias_shift is not None:
        saved = (inputs.bias_shift, lse, *saved)
        lse = lse + inputs.bias_shift
    return out, lse, saved


def saved_shapes(call: Call, inputs: Inputs, *, plan_known: bool) -> Shapes:
    """Return the shapes and dtypes of what a compiled forward saves.

    ``plan_known`` is whether the plan is that of the call; otherwise any plan saves as much.
    """
    shapes = call.strategy.saved_shapes(call, inputs, plan_known=plan_known)
    if inputs.bias is None or not call.params.shifts_bias:
        return shapes
    batch, length, heads, _ = inputs.q.shape
    shared = inputs.bias.shape[0] if inputs.k_ids is None else batch
    shift = shared, inputs.bias.shape[1], length
    return [(shift, call.acc_dtype), ((batch, heads, length), call.acc_dtype), *shapes]


def backward_pass(
    call: Call,
    inputs: Inputs,
    results: tuple[Tensor, Tensor],
    saved: Saved,
    grads: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor | None, ...]:
    """A gradient for each of the inputs, from those of ``results = (out, lse)``."""
    (out, lse), (dout, dlse) = results, grads
    if call.params.shifts_bias:
        shift, lse, *rest = saved
        inputs, saved = inputs._replace(bias_shift=shift), tuple(rest)
    if dlse is not None:
        call = call.with_lse_grad()
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    if False in [x is None or x.stride(-1) == 1 for x in inputs]:
        inputs = with_unit_strides(inputs)
    if call.device.type == "cuda":
        check_graph(call.ranks, call.backward_signature, call.device)
    with (
        _on_device(call.device),
        with_peer_errors(call.ranks, call.number, call.backward_signature),
    ):
        delta = _delta(dout, out, dlse, call.acc_dtype) if call.kernel.needs_delta else None
        upstream = BackwardInputs(dout, out, lse, delta)
        with tripwire.Watch(call.device) if call.checked else _NOTHING as seen:
            found = call.strategy.backward(call, inputs, upstream, saved)
        dsinks = None if inputs.sinks is None else _sink_grads(inputs.sinks, upstream, dlse)
        dq, dk, dv = [as_own(grad.to(call.dtype).contiguous()) for grad in found[:3]]
        wrong = None
        if seen is not None:
            wrong = tripwire.backward_faults(
                call, inputs, upstream, dlse, (dq, dk, dv), seen, fetches=not saved
            )
    if wrong is not None:
        raise WrongResultError(wrong)
    dbias = None
    if found.dbias is not None and inputs.bias is not None:
        dbias = found.dbias.to(inputs.bias.dtype)
    return dq, dk, dv, None, None, dsinks, dbias, None


_backward_alone = torch.compiler.disable(backward_pass)


@contextmanager
def _launches_on(device: torch.device) -> Iterator[None]:
    """Launch on a device, without autocast."""
    with on_device(device), torch.autocast(device.type, enabled=False):
        yield


def _on_device(device: torch.device) -> AbstractContextManager[object]:
    """Launch on a device, without autocast.

    A context that changes nothing is not entered: that would take the host longer than asking.
    """
    if torch.is_autocast_enabled(device.type):
        return _launches_on(device)
    return _NOTHING if device.type == "cpu" else on_device(device)


def _delta(dout: Tensor, out: Tensor, dlse: Tensor | None, acc_dtype: torch.dtype) -> Tensor:
    """``rowsum(dout * out) - dlse`` as ``[B, H, T_local]``.

    Some rows at a time: the product is wide.
    """
    if _has_passes(out, acc_dtype):
        from ring_torch.memory_ops import row_dots_on_gpu

        delta = row_dots_on_gpu(dout, out)
    else:
        batch, length, heads, _ = out.shape
        delta = torch.empty(batch, heads, length, dtype=acc_dtype, device=out.device)
        for start in range(0, length, _DELTA_ROWS):
            rows = slice(start, start + _DELTA_ROWS)
            products = dout[:, rows].to(acc_dtype) * out[:, rows].to(acc_dtype)
            delta[:, :, rows] = products.sum(dim=-1).transpose(1, 2)
    return delta if dlse is None else delta - dlse


def _sink_grads(sinks: Tensor, upstream: BackwardInputs, dlse: Tensor | None) -> Tensor:
    """This rank's part: ``dsink = -sum(exp(sink - lse) * delta)`` over its rows."""
    dout, out, lse, delta = upstream
    one = folded(sinks, lse.dtype)
    if delta is None and dlse is None and _has_passes(out, lse.dtype):
        from ring_torch.memory_ops import sink_sums_on_gpu

        sums = sink_sums_on_gpu(dout, out, lse, one)
    else:
        if delta is None:
            delta = _delta(dout, out, dlse, lse.dtype)
        safe = lse.masked_fill(lse == -torch.inf, torch.inf)
        sums = (torch.exp(one[:, None] - safe) * delta).sum(dim=(0, 2))
    if sinks.ndim == 1:
        return -sums.to(sinks.dtype)
    weights = (sinks.to(lse.dtype) - one[:, None].nan_to_num(neginf=0.0)).exp()
    return -(weights * sums[:, None]).to(sinks.dtype)


def _has_passes(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether passes over memory are Triton kernels."""
    return x.is_cuda and dtype == torch.float32 and has_triton()
