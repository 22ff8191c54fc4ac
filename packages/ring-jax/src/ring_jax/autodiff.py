"""A checked call as one differentiable function, with the strategy's forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.extend.core.primitives import custom_lin_p
from jax.interpreters import ad, batching, mlir

from ring_core import UnsupportedError
from ring_jax import tripwire
from ring_jax.bias_shift import with_bias_shift
from ring_jax.records import (
    Array,
    BackwardInputs,
    CallSpec,
    Direction,
    Inputs,
)
from ring_jax.strategies import STRATEGIES
from ring_jax.strategies.steps import add_sinks, to_bhtd

#: Names of what the backward needs besides q, k and v, for policies of ``jax.checkpoint``: with
#: these saved, rematerialisation does not run the ring again.
RESIDUALS = ("ring_attention_out", "ring_attention_lse", "ring_attention_kv")


class Saved(NamedTuple):
    """The residuals of a forward, from which the backward starts."""

    inputs: Inputs
    out: Array  # [B, T, H, Dv]
    lse: Array  # [B, H, T], of scores less the inputs' shift of the bias
    last: Any  # the K/V that arrived last, or all that were gathered, or the inputs by heads


def attend(call: CallSpec, inputs: Inputs) -> tuple[Array, Array]:
    """Return ``(out [B, T, H, Dv], lse [B, H, T])`` of a checked call.

    It is compiled also where nothing around it is: run operation by operation, a ring takes
    seconds.
    """
    return _compiled(call)(inputs)


@lru_cache(maxsize=128)
def _compiled(call: CallSpec) -> Callable[[Inputs], tuple[Array, Array]]:
    """Return the jitted function of a call. Equal calls share it, and are not traced again."""

    def run(x: Inputs) -> tuple[Array, Array]:
        q, k, v, sinks, bias = jax.tree.map(
            lambda array: _guarded("forward", array, ()), (x.q, x.k, x.v, x.sinks, x.bias)
        )
        slopes = None if x.slopes is None else _without_gradient(x.slopes)
        return _attend(call, x._replace(q=q, k=k, v=v, sinks=sinks, bias=bias, slopes=slopes))

    return jax.jit(run)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: CallSpec, inputs: Inputs) -> tuple[Array, Array]:
    return _forward(call, inputs)[0]


def _forward(call: CallSpec, inputs: Inputs) -> tuple[tuple[Array, Array], Saved]:
    """Run the strategy's forward, add sinks, cast to the inputs' dtype, and check if asked to."""
    # Kernels have no derivative rules: JAX must not differentiate what follows. `_guarded` raises
    # if somebody asks for a second derivative.
    origins, inputs = inputs, with_bias_shift(call, lax.stop_gradient(inputs))
    if (shift := inputs.bias_shift) is not None:
        # lse is saved less the shift, so a policy that saves the one must save the other.
        shift = checkpoint_name(shift, RESIDUALS[1])
        inputs = inputs._replace(bias_shift=shift)
    strategy, x, checked_call, start_time = STRATEGIES[call.strategy], inputs, None, None
    if call.check_every and x.q.size:
        checked_call = tripwire.CheckedCall.of(call, x.q)
        tripwire.check_traffic(
            call, x, "forward", strategy.sent(call, x, "forward"),
            lambda x: strategy.forward(call, with_bias_shift(call, x)), x,
        )  # fmt: skip
        start_time, (q,) = tripwire.start_clock(checked_call, x, x.q)
        x = x._replace(q=q)
    result, last = strategy.forward(call, x)
    if inputs.sinks is not None and not strategy.adds_sinks:
        result = add_sinks(call, result, inputs.sinks)
    result, last = _guarded("backward", (result, last), origins)
    out = checkpoint_name(result.out.swapaxes(1, 2).astype(inputs.q.dtype), RESIDUALS[0])
    lse = checkpoint_name(result.lse, RESIDUALS[1])
    if checked_call is not None:
        tripwire.check_forward(checked_call, call, inputs, out, lse)
        tripwire.check_rate(checked_call, call, inputs, "forward", start_time, out, lse)
    last = jax.tree.map(lambda x: checkpoint_name(x, RESIDUALS[2]), last)
    # The user's lse is that of scores with the shift added back; -inf stays.
    return (out, lse if shift is None else lse + shift), Saved(inputs, out, lse, last)


def _backward(call: CallSpec, saved: Saved, gradients: tuple[Array, Array]) -> tuple[Inputs]:
    """Run the strategy's backward, and check it if asked to.

    Gradients of replicated arrays are this device's part: the transpose of
    :func:`ring_jax.collectives.match_varying` sums them over the devices, once.
    """
    grads = _gradients(call, *lax.stop_gradient((saved, gradients)))
    return (_guarded("backward", grads, (saved, gradients)),)


def _gradients(call: CallSpec, saved: Saved, gradients: tuple[Array, Array]) -> Inputs:
    """Return the gradient of each input of a call; ``None`` for those without one."""
    dout, dlse = gradients
    # The softmax's backward is probs * (dprobs - delta), and lse, whose derivative by a score is
    # its probability, only subtracts from delta: kernels need no dlse.
    x, wide = saved.inputs, call.wide
    delta = (dout.astype(wide) * saved.out.astype(wide)).sum(axis=-1).swapaxes(1, 2) - dlse
    upstream = BackwardInputs(to_bhtd(dout), saved.lse, delta, to_bhtd(saved.out))
    strategy, checked_call, start_time = STRATEGIES[call.strategy], None, None
    if call.check_every and x.q.size:
        checked_call = tripwire.CheckedCall.of(call, x.q)
        tripwire.check_traffic(
            call, x, "backward", strategy.sent(call, x, "backward"),
            partial(strategy.backward, call), x, upstream, saved.last,
        )  # fmt: skip
        start_time, (q, dout_bhtd) = tripwire.start_clock(checked_call, x, x.q, upstream.dout)
        x, upstream = x._replace(q=q), upstream._replace(dout=dout_bhtd)
    grads = strategy.backward(call, x, upstream, saved.last)
    dk, dv = jnp.split(grads.dkv, [call.head_dim], axis=-1)
    dq, dk, dv = (g.swapaxes(1, 2).astype(x.q.dtype) for g in (grads.dq, dk, dv))
    if checked_call is not None:
        results = (saved.out, saved.lse)
        tripwire.check_backward(checked_call, call, x, results, gradients, (dq, dk, dv))
        tripwire.check_rate(checked_call, call, x, "backward", start_time, dq, dk, dv)
    dsinks = None if x.sinks is None else _sink_grads(x.sinks, saved.lse, delta)
    dbias = None if x.bias is None or grads.dbias is None else grads.dbias.astype(x.bias.dtype)
    return Inputs(dq, dk, dv, None, None, dsinks, dbias, None, None, None)


_attend.defvjp(_forward, _backward)


#: ``guard_p`` returns its first operand; the tangent is ``refusal_p`` of the tangents of all, which
#: raises once it is evaluated.
guard_p, refusal_p = Primitive("ring_guard"), Primitive("ring_refusal")


def _guarded[T](direction: Direction, results: T, origins: Any) -> T:
    """Return ``results`` so that derivatives other than a call's gradient raise an error.

    The inputs of a call (``forward``) have gradients but no tangents. What a call computes on the
    way to its gradient (``backward``), of ``origins``, has neither. Without the guard JAX's own
    error would name the loops and kernels inside the call.
    """
    # One guard a result: what computes a result that nobody uses is dead code to JAX.
    leaves = jax.tree.leaves(origins)
    return cast("T", jax.tree.map(lambda x: guard_p.bind(x, *leaves, direction=direction), results))


def _guard_jvp(
    primals: list[Array], tangents: list[Any], *, direction: Direction
) -> tuple[Array, Any]:
    """Replace the result's tangent by the primitive that refuses it, unless all are zero."""
    result, tangent = primals[0], tangents[0]
    nonzero = [x for x in tangents if type(x) is not ad.Zero]
    if nonzero and jnp.issubdtype(result.dtype, jnp.floating):  # integers have no tangents
        tangent = refusal_p.bind(*nonzero, like=jax.typeof(result), direction=direction)
    return result, tangent


guard_p.def_impl(lambda x, *_, **__: x)
guard_p.def_abstract_eval(lambda x, *_, **__: x)
mlir.register_lowering(guard_p, lambda _, x, *__, **___: [x])
ad.primitive_jvps[guard_p] = _guard_jvp
batching.primitive_batchers[guard_p] = lambda arrays, dims, **params: (
    guard_p.bind(*arrays, **params), dims[0]
)  # fmt: skip


def _refuse(*_: Any, direction: Direction, **__: Any) -> Any:
    """Raise ``UnsupportedError`` for the kind of derivative that was asked for."""
    derivatives = {
        "forward": "forward mode (jax.jvp, jax.jacfwd, a function of jax.linearize)",
        "backward": "the derivative of a gradient (jax.hessian, jax.grad of jax.grad)",
    }
    raise UnsupportedError(
        f"ring attention has a gradient, by reverse mode (jax.grad, jax.vjp), and this is "
        f"{derivatives[direction]}. Instead: use gradients alone, and differences of them for products with a "
        f"Hessian; or attention in plain JAX, on one device"
    )


refusal_p.def_impl(_refuse)
refusal_p.def_abstract_eval(lambda *_, like, **__: like)
mlir.register_lowering(refusal_p, lambda _, *__, direction, **___: _refuse(direction=direction))
# Reverse mode of a forward is the one derivative there is: it passes the gradient through.
ad.deflinear2(
    refusal_p,
    lambda gradient, *_, direction, **__: (
        [gradient] if direction == "forward" else _refuse(direction=direction)
    ),
)
# Only who differentiates a tangent asks for a tangent of it: `grad` of `jvp`, `vjp` of `linearize`.
ad.primitive_jvps[refusal_p] = _refuse


def _refuse_tangents(*_: Any, bwd: Any, **__: Any) -> Any:
    """Refuse to differentiate the tangent of a call, whose backward is ``bwd``, as JAX does others.

    JAX has no such rule. In a compiled function it would say so before the refusal of the tangent
    is evaluated.
    """
    if __file__ in str(getattr(bwd, "debug_info", None)):
        _refuse(direction="forward")
    raise NotImplementedError("Differentiation rule for 'custom_lin' not implemented")


ad.primitive_jvps.setdefault(custom_lin_p, _refuse_tangents)
# Only forward mode makes a batch of tangents.
batching.primitive_batchers[refusal_p] = _refuse


def _sink_grads(sinks: Array, lse: Array, delta: Array) -> Array:
    """Compute ``dsink = -sum(exp(sink - lse) * delta)`` over this device's rows."""
    safe = jnp.where(lse == -jnp.inf, jnp.inf, lse)
    grads = [
        -(jnp.exp(column[None, :, None] - safe) * delta).sum(axis=(0, 2))
        for column in sinks.astype(lse.dtype).reshape(sinks.shape[0], -1).T
    ]
    return jnp.stack(grads, axis=1).reshape(sinks.shape).astype(sinks.dtype)


@jax.custom_vjp
def _without_gradient(slopes: Array) -> Array:
    """Return ALiBi slopes, whose gradient is refused instead of being zero."""
    return slopes


def _refuse_gradient(slopes: Any) -> tuple[Array, None]:
    """Raise ``ValueError`` if a gradient of the slopes is asked for."""
    if slopes.perturbed:
        raise ValueError(
            "alibi_slopes have no gradient; pass jax.lax.stop_gradient(alibi_slopes), or add a "
            "bias that has one"
        )
    return slopes.value, None


_without_gradient.defvjp(_refuse_gradient, lambda _, _gradient: (None,), symbolic_zeros=True)
