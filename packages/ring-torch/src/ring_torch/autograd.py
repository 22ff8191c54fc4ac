"""Autograd function of a call, and its forward and backward pass.

A strategy moves the tensors and launches the kernels. This module has what all strategies need:
strides, dtypes, the current device, the shift of a bias, gradients of sinks, errors of peers and
the check of results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ring_core import WrongResultError
from ring_torch import tripwire
from ring_torch.buffers import Shapes
from ring_torch.call import Call, Saved, attend
from ring_torch.capture import NO_CONTEXT, as_own, is_capturing
from ring_torch.checking.watch import Watch
from ring_torch.comm.handshake import GuardedPass, check_graph
from ring_torch.derivatives import NEEDS_COMPILED_FORWARD, check_backward
from ring_torch.optional import has_triton
from ring_torch.records import GIVEN, BackwardInputs, Inputs, folded, with_unit_strides
from ring_torch.strategies.bias_shift import bias_shift, sent_for_shift

_DELTA_ROWS = 4096


class AttentionFunction(torch.autograd.Function):
    """Autograd function from the tensors of a call to ``(out, lse)``.

    It saves the inputs, ``out``, ``lse`` and what the strategy saves for the backward.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> tuple[Tensor, Tensor]:
        """Run the forward of a call, and save for the backward.

        ``tensors`` are the first ``GIVEN`` fields of :class:`Inputs`, in order; some are ``None``.
        """
        out, lse, saved = forward_pass(call, Inputs(*tensors))
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, out, lse, *saved)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the backward of a call; it has no derivative itself."""
        check_backward(dout, dlse)
        tensors = ctx.saved_tensors  # read once: checkpointing asks for it
        inputs, out, lse = Inputs(*tensors[:GIVEN]), tensors[GIVEN], tensors[GIVEN + 1]
        saved = [*tensors[GIVEN + 2 :]]  # a list in graphs of compiled autograd, too
        del tensors  # once autograd releases them, `saved` alone holds what the strategy saved
        run_pass, release_saved = backward_pass, ctx.maybe_clear_saved_tensors
        if torch.compiler.is_compiling():
            # Compiled autograd would trace the messages between ranks; it must not look inside.
            run_pass, release_saved = _backward_alone, None
        return None, *run_pass(ctx.call, inputs, (out, lse), saved, (dout, dlse), release_saved)


def forward_pass(call: Call, inputs: Inputs) -> tuple[Tensor, Tensor, Saved]:
    """Run the forward of a call; return ``out``, ``lse`` and what to save for the backward.

    ``out`` is in the inputs' dtype, and both include the sinks. If the rows of a bias are shifted,
    what is saved begins with the shift and the ``lse`` of shifted scores.

    Raises:
        ValueError: The pass is captured into a CUDA graph before the ranks have compared it.
        UnsupportedError: It is captured with an option or a kernel that a graph cannot hold.
        RankMismatchError: Ranks make different calls.
        WrongResultError: The tripwire checked this call and found a wrong result.
        RuntimeError: A peer failed or did not answer, or a pass of an earlier call failed.
    """
    if torch.is_autocast_enabled(call.request.device):
        with torch.autocast(call.request.device, enabled=False):
            return forward_pass(call, inputs)
    if call.request.device == "cuda" and is_capturing():
        call.check_capture()
        check_graph(call.ranks, call.forward_signature, call.strategy)
    # Autograd saves the caller's own tensors: these copies live only as long as the pass.
    if False in [x is None or x.stride()[-1] == 1 for x in inputs]:
        inputs = with_unit_strides(inputs)
    with GuardedPass(call.ranks, call.number, call.forward_signature, call.device):
        # The tripwire counts what is sent and received inside, if it checks this call.
        with Watch(call.device) if call.checked else NO_CONTEXT as watch:
            if call.params.shifts_bias:
                inputs = inputs._replace(bias_shift=bias_shift(call, inputs))
            (out, lse), saved = attend(call, inputs)
            if inputs.sinks is not None and call.plan.q_layout.pad_to is not None:
                # Rows of padding see nothing, not even a sink.
                tokens = int(call.plan.q_layout.num_tokens(call.ranks.rank))
                lse[:, :, tokens:].fill_(-torch.inf)
        # Libraries may return results with the inputs' strides; callers get contiguous ones. And of
        # views, which torch would not let callers change in place, what lies below.
        # (Dtypes are compared first: a `to` that does nothing takes the host longer.)
        out = out if out.dtype == call.dtype else out.to(call.dtype)
        out, lse = [
            x.detach() if x._is_view() else x  # noqa: SLF001 - no public way
            for x in (out.contiguous(), lse.contiguous())
        ]
        error_message = None
        if watch is not None:
            error_message = tripwire.forward_faults(
                call, inputs, out, lse, watch, sent_before=sent_for_shift(call, inputs)
            )
    if error_message is not None:
        raise WrongResultError(error_message)
    if inputs.bias_shift is not None:
        # The backward needs the lse of the scores that it computes again, which are shifted.
        saved = [inputs.bias_shift, lse, *saved]
        lse = lse + inputs.bias_shift
    return out, lse, saved


def saved_shapes(call: Call, inputs: Inputs, *, plan_known: bool) -> Shapes:
    """Return the shapes and dtypes of the tensors that a compiled forward saves, in order.

    ``plan_known`` is false where the graph serves several plans; then the shapes fit all of them.
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
    release_saved: Callable[[], object] | None = None,
) -> tuple[Tensor | None, ...]:
    """Run the backward of a call; return a gradient for each field of ``Inputs`` that is given.

    ``results`` are ``(out, lse)`` as the forward returned them, ``saved`` what it saved, and
    ``grads`` the gradients of the results, of which either may be ``None``. Gradients are in the
    inputs' dtypes, and ``None`` for segment ids and slopes. ``release_saved`` drops autograd's
    references to saved tensors, unless the graph is retained. It is called when this rank's own
    checks have passed; after that the backward cannot be repeated.

    Raises:
        ValueError: The pass is captured into a CUDA graph before the ranks have compared it.
        RankMismatchError: Ranks make different calls.
        UnsupportedError: ``lse`` has a gradient, and the kernel that was named cannot take it; or
            the pass is captured with an option or a kernel that a graph cannot hold.
        WrongResultError: The tripwire checked this call and found a wrong gradient.
        RuntimeError: A peer failed or did not answer, or a pass of an earlier call failed.
    """
    if torch.is_autocast_enabled(call.request.device):
        with torch.autocast(call.request.device, enabled=False):
            return backward_pass(call, inputs, results, saved, grads, release_saved)
    (out, lse), (dout, dlse) = results, grads
    if call.params.shifts_bias:
        shift, lse = saved.pop(0), saved.pop(0)
        inputs = inputs._replace(bias_shift=shift)
    if dlse is not None:
        # Some kernels cannot take a gradient of lse. Another one then runs this backward.
        call = call.with_lse_grad()
    # A loss of lse alone leaves out without a gradient.
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    if False in [x is None or x.stride()[-1] == 1 for x in inputs]:
        inputs = with_unit_strides(inputs)
    if call.request.device == "cuda" and is_capturing():
        call.check_capture()
        check_graph(call.ranks, call.backward_signature, call.strategy)
    with GuardedPass(call.ranks, call.number, call.backward_signature, call.device):
        # Computed once and shared by all work items: it depends on the final results alone.
        delta = _delta(dout, out, dlse, call.acc_dtype) if call.kernel.needs_delta else None
        upstream = BackwardInputs(dout, out, lse, delta)
        fetches = not saved
        if release_saved is not None:
            release_saved()
        with Watch(call.device) if call.checked else NO_CONTEXT as watch:
            # All ranks are here, or fail: K/V and gradients of peers move inside.
            computed = call.strategy.backward(call, inputs, upstream, saved)
        dsinks = None
        if inputs.sinks is not None:
            # From the kernel, if it computed delta for itself.
            row_stats = computed.row_stats if delta is None and dlse is None else None
            if row_stats is None:
                row_stats = lse, _delta(dout, out, dlse, call.acc_dtype) if delta is None else delta
            dsinks = _sink_grads(inputs.sinks, *row_stats)
        dq, dk, dv = [
            as_own((x if x.dtype == call.dtype else x.to(call.dtype)).contiguous())
            for x in computed[:3]
        ]
        error_message = None
        if watch is not None:
            error_message = tripwire.backward_faults(
                call, inputs, upstream, dlse, (dq, dk, dv), watch, fetches=fetches
            )
    if error_message is not None:
        raise WrongResultError(error_message)
    dbias = None
    if computed.dbias is not None and inputs.bias is not None:
        dbias = computed.dbias.to(inputs.bias.dtype)
    return dq, dk, dv, None, None, dsinks, dbias, None


_backward_alone = torch.compiler.disable(backward_pass, reason=NEEDS_COMPILED_FORWARD)


def _delta(dout: Tensor, out: Tensor, dlse: Tensor | None, acc_dtype: torch.dtype) -> Tensor:
    """Return ``delta = rowsum(dout * out) - dlse``, ``[B, H, T_local]`` in the accumulators' dtype.

    Without Triton it is computed some rows at a time, to bound the memory of the product.
    """
    if _can_use_triton(out, acc_dtype):
        from ring_torch.memory_ops import row_dots_on_gpu

        delta = row_dots_on_gpu(dout, out)
    else:
        batch, length, heads, _ = out.shape
        delta = torch.empty(batch, heads, length, dtype=acc_dtype, device=out.device)
        # Rows are independent, and the temporaries of one block are freed before the next.
        for start in range(0, length, _DELTA_ROWS):
            rows = slice(start, start + _DELTA_ROWS)
            products = dout[:, rows].to(acc_dtype) * out[:, rows].to(acc_dtype)
            delta[:, :, rows] = products.sum(dim=-1).transpose(1, 2)
    return delta if dlse is None else delta - dlse


def _sink_grads(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return this rank's part of the sinks' gradient, in their shape and dtype.

    A head's gradient is ``-sum(exp(sink - lse) * delta)`` over this rank's rows. Several sinks of a
    head act as one, their log-sum-exp, whose gradient they share by their softmax weights.

    Args:
        sinks: ``[H]`` or ``[H, n]``.
        lse: ``[B, H, T_local]``, with the sinks, or in parts as in
            :attr:`ring_torch.records.Grads.row_stats`.
        delta: Likewise.
    """
    one_per_head = sinks if sinks.ndim == 1 else folded(sinks, lse.dtype)
    if _can_use_triton(lse, lse.dtype):
        from ring_torch.memory_ops import sink_grads_on_gpu

        grads = sink_grads_on_gpu(one_per_head, lse, delta)
    else:
        safe = lse.masked_fill(lse == -torch.inf, torch.inf)
        logits = one_per_head.to(lse.dtype)[:, None]
        grads = -(torch.exp(logits - safe) * delta).sum(dim=(0, 2))
    if sinks.ndim == 1:
        return grads if grads.dtype == sinks.dtype else grads.to(sinks.dtype)
    weights = (sinks.to(lse.dtype) - one_per_head[:, None].nan_to_num(neginf=0.0)).exp()
    return (weights * grads[:, None]).to(sinks.dtype)


def _can_use_triton(x: Tensor, dtype: torch.dtype) -> bool:
    """Return True if the Triton kernels of ``memory_ops`` can process this tensor."""
    return x.is_cuda and dtype == torch.float32 and has_triton()
