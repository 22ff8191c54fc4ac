"""The ring as one differentiable function."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ring_core import UnsupportedError
from ring_jax import tripwire
from ring_jax.bias_shift import unshifted, with_bias_shift
from ring_jax.records import (
    Array,
    AttentionState,
    BackwardInputs,
    Inputs,
    KVPayload,
    Pass,
    Static,
)
from ring_jax.strategies import STRATEGIES
from ring_jax.strategies.steps import to_bhtd

#: Names of what the backward needs besides q, k and v, for policies of ``jax.checkpoint``: with
#: these saved, rematerialisation does not run the ring again.
RESIDUALS = ("ring_attention_out", "ring_attention_lse", "ring_attention_kv")


class Saved(NamedTuple):
    """What the backward starts from."""

    inputs: Inputs
    out: Array  # [B, T, H, Dv]
    lse: Array  # [B, H, T], of scores less the inputs' shift of the bias
    last: KVPayload | None  # the K/V that arrived last, or all that were gathered


def attend(static: Static, inputs: Inputs) -> tuple[Array, Array]:
    """``(out [B, T, H, Dv], lse [B, H, T])`` of a checked call.

    Where nothing around it is compiled, this is: run operation by operation a ring takes seconds.
    """
    return _compiled(static)(inputs)


@lru_cache(maxsize=128)
def _compiled(static: Static) -> Callable[[Inputs], tuple[Array, Array]]:
    def run(x: Inputs) -> tuple[Array, Array]:
        q, k, v, sinks, bias = _without_others("forward", (x.q, x.k, x.v, x.sinks, x.bias))
        slopes = None if x.slopes is None else _without_gradient(x.slopes)
        return _attend(static, x._replace(q=q, k=k, v=v, sinks=sinks, bias=bias, slopes=slopes))

    return jax.jit(run, inline=True)  # within other programs as if it were not there


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, inputs: Inputs) -> tuple[Array, Array]:
    return _forward(static, inputs)[0]


def _forward(static: Static, inputs: Inputs) -> tuple[tuple[Array, Array], Saved]:
    inputs = with_bias_shift(static, inputs)
    if inputs.bias_shift is not None:
        shift = checkpoint_name(inputs.bias_shift, RESIDUALS[1])  # without it lse means nothing
        inputs = inputs._replace(bias_shift=shift)
    strategy, x, turn, at = STRATEGIES[static.strategy], inputs, None, None
    if static.check and x.q.size:
        turn = tripwire.Turn.of(static, x.q)
        tripwire.check_traffic(
            static, x, "forward", strategy.sent(static, x, "forward"),
            lambda x: strategy.forward(static, with_bias_shift(static, x)), x,
        )  # fmt: skip
        at, (q,) = tripwire.start(turn, x, x.q)
        x = x._replace(q=q)
    result, last = strategy.forward(static, x)
    result = result if inputs.sinks is None else _add_sinks(result, inputs.sinks)
    out = checkpoint_name(result.out.swapaxes(1, 2).astype(inputs.q.dtype), RESIDUALS[0])
    lse = checkpoint_name(result.lse, RESIDUALS[1])
    if turn is not None:
        tripwire.check_forward(turn, static, inputs, out, lse)
        tripwire.check_rate(turn, static, inputs, "forward", at, out, lse)
    last = jax.tree.map(lambda x: checkpoint_name(x, RESIDUALS[2]), last)
    return (out, unshifted(lse, inputs.bias_shift)), Saved(inputs, out, lse, last)


def _backward(static: Static, saved: Saved, gradients: tuple[Array, Array]) -> tuple[Inputs]:
    """Run the strategy's backward.

    Gradients of replicated arrays are this device's part: whoever made them vary over the mesh
    sums them, once.
    """
    dout, dlse = gradients
    x, wide = saved.inputs, static.wide
    delta = (dout.astype(wide) * saved.out.astype(wide)).sum(axis=-1).swapaxes(1, 2) - dlse
    upstream = BackwardInputs(to_bhtd(dout), saved.lse, delta, to_bhtd(saved.out))
    strategy, turn, at = STRATEGIES[static.strategy], None, None
    if static.check and x.q.size:
        turn = tripwire.Turn.of(static, x.q)
        tripwire.check_traffic(
            static, x, "backward", strategy.sent(static, x, "backward"),
            partial(strategy.backward, static), x, upstream, saved.last,
        )  # fmt: skip
        at, (q, held) = tripwire.start(turn, x, x.q, upstream.dout)
        x, upstream = x._replace(q=q), upstream._replace(dout=held)
    grads = strategy.backward(static, x, upstream, saved.last)
    dk, dv = jnp.split(grads.dkv, [static.head_dim], axis=-1)
    dq, dk, dv = (g.swapaxes(1, 2).astype(x.q.dtype) for g in (grads.dq, dk, dv))
    if turn is not None:
        tripwire.check_backward(turn, static, x, (saved.out, saved.lse), gradients, (dq, dk, dv))
        tripwire.check_rate(turn, static, x, "backward", at, dq, dk, dv)
    dsinks = None if x.sinks is None else _sink_grads(x.sinks, saved.lse, delta)
    dbias = None if x.bias is None or grads.dbias is None else grads.dbias.astype(x.bias.dtype)
    dq, dk, dv, dsinks, dbias = _without_others("backward", (dq, dk, dv, dsinks, dbias))
    return (Inputs(dq, dk, dv, None, None, dsinks, dbias, None, None, None),)


_attend.defvjp(_forward, _backward)


#: The identity, whose tangents are refused; and a tangent that is, once it is asked for.
guard_p, refusal_p = Primitive("ring_guard"), Primitive("ring_refusal")


def _without_others[T](direction: Pass, arrays: T) -> T:
    """Refuse by name all derivatives but the gradient of a call, of which JAX would name its loops.

    The inputs of a ``forward`` have gradients and no tangents; the results of a ``backward`` have
    neither.
    """
    return cast("T", jax.tree.map(partial(guard_p.bind, direction=direction), arrays))


def _guarded(primals: tuple[Array], tangents: tuple[Any], *, direction: Pass) -> tuple[Array, Any]:
    (x,), (tangent,) = primals, tangents
    if type(tangent) is ad.Zero:
        return x, tangent
    return x, refusal_p.bind(tangent, direction=direction)


guard_p.def_impl(lambda x, **_: x)
guard_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(guard_p, mlir.lower_fun(lambda x, **_: x, multiple_results=False))
ad.primitive_jvps[guard_p] = _guarded
batching.defvectorized(guard_p)


def _refuse(*_: Any, direction: Pass) -> Any:
    asked = {
        "forward": "forward mode (jax.jvp, jax.jacfwd, a function of jax.linearize)",
        "backward": "the derivative of a gradient (jax.hessian, jax.grad of jax.grad)",
    }
    raise UnsupportedError(
        f"ring attention has a gradient, by reverse mode (jax.grad, jax.vjp), and this is "
        f"{asked[direction]}. Instead: use gradients alone, and differences of them for products with a "
        f"Hessian; or attention in plain JAX, on one device"
    )


def _transposed(gradient: Array, _: Array, *, direction: Pass) -> list[Array]:
    return [gradient] if direction == "forward" else _refuse(direction=direction)


refusal_p.def_impl(_refuse)
refusal_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(refusal_p, mlir.lower_fun(_refuse, multiple_results=False))
ad.deflinear2(refusal_p, _transposed)
batching.primitive_batchers[refusal_p] = _refuse  # a batch of tangents, where a gradient has none


def _add_sinks(result: AttentionState, sinks: Array) -> AttentionState:
    """:func:`ring_core.finalize`: sinks take softmax mass and yield no value."""
    out, lse = result
    folded = jax.nn.logsumexp(sinks.astype(lse.dtype).reshape(sinks.shape[0], -1), axis=1)
    with_sinks = jnp.logaddexp(lse, folded[None, :, None])
    weight = jnp.exp(lse - jnp.where(with_sinks == -jnp.inf, 0.0, with_sinks))
    return AttentionState(out * weight[..., None], with_sinks)


def _sink_grads(sinks: Array, lse: Array, delta: Array) -> Array:
    """``dsink = -sum(exp(sink - lse) * delta)`` over this device's rows."""
    safe = jnp.where(lse == -jnp.inf, jnp.inf, lse)
    grads = [
        -(jnp.exp(column[None, :, None] - safe) * delta).sum(axis=(0, 2))
        for column in sinks.astype(lse.dtype).reshape(sinks.shape[0], -1).T
    ]
    return jnp.stack(grads, axis=1).reshape(sinks.shape).astype(sinks.dtype)


@jax.custom_vjp
def _without_gradient(slopes: Array) -> Array:
    """ALiBi slopes; asking for their gradient is an error, not a zero."""
    return slopes


def _refuse_gradient(slopes: Any) -> tuple[Array, None]:
    if slopes.perturbed:
        raise ValueError(
            "alibi_slopes have no gradient; pass jax.lax.stop_gradient(alibi_slopes), or add a "
            "bias that has one"
        )
    return slopes.value, None


_without_gradient.defvjp(_refuse_gradient, lambda _, _gradient: (None,), symbolic_zeros=True)
