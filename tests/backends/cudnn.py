"""Runs cases with kernel ``cudnn``, which returns no ``lse``; without a GPU a formula replaces it.

Like cuDNN, the formula takes ``[B, T, H, D]``, rounds results and probabilities, and gives NaN for
infinities in a bias.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from cases import Case
from jax import lax

from backends.jax_devices import Arrays, JaxBackend
from ring_jax_gpu import fmha, ring_attention
from ring_jax_gpu.fmha import Pattern


def run(case: Case, strategy: str = "auto") -> Arrays:
    """Run a case; its ``lse`` is copied from the oracle."""
    results = JaxBackend(_without_lse).run(case, kernel="cudnn", strategy=strategy)
    return results | {"lse": case.expected["lse"]}


def stand_in(patched: pytest.MonkeyPatch) -> None:
    """Replace cuDNN by the formula."""
    patched.setattr(fmha, "call_forward", _forward)
    patched.setattr(fmha, "call_backward", _backward)


def _without_lse(*arrays: Any, return_lse: bool, **options: Any) -> tuple[Any, Any]:
    assert return_lse
    out = ring_attention(*arrays, **options)
    return out, 0 * out[..., 0].swapaxes(1, 2).astype("float32")


def _scores(pattern: Pattern, q: Any, k: Any, bias: Any) -> Any:
    """Return masked scores, ``[B, T, K, G, S]``."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    x = _sum("btkgd,bskd->btkgs", grouped, k) * pattern.scale
    if bias:
        assert bias[0].dtype == q.dtype
        full_bias = jnp.broadcast_to(bias[0], (q.shape[0], q.shape[2], *bias[0].shape[2:]))
        x += full_bias.astype(x.dtype).transpose(0, 2, 1, 3).reshape(x.shape) - 0 * full_bias.min()
    i, j = (lax.broadcasted_iota("int32", x.shape, axis) for axis in (1, 4))
    visible = (j <= i) | (not pattern.causal)
    if pattern.window is not None:
        visible &= j > i - pattern.window
    return jnp.where(visible, x, -jnp.inf)


def _forward(pattern: Pattern, q: Any, k: Any, v: Any, *bias: Any) -> tuple[Any, Any]:
    x = _scores(pattern, q, k, bias)
    top = x.max(axis=-1, keepdims=True)
    weights = jnp.exp(x - top)
    total = weights.sum(axis=-1, keepdims=True)
    out = _sum("btkgs,bskd->btkgd", (weights / total).astype(v.dtype), v)
    lse = (top + jnp.log(total))[..., 0].reshape(q.shape[:3])
    return out.reshape(*q.shape[:3], v.shape[3]).astype(q.dtype), lse.swapaxes(1, 2)


def _backward(
    pattern: Pattern, q: Any, k: Any, v: Any, lse: Any, out: Any, dout: Any, *bias: Any
) -> tuple[Any, ...]:
    x = _scores(pattern, q, k, bias)
    p = jnp.exp(x - lse.swapaxes(1, 2).reshape(*x.shape[:4], 1))
    groups = (*x.shape[:4], v.shape[3])
    grad = dout.reshape(groups)
    delta = (dout.astype(x.dtype) * out.astype(x.dtype)).sum(axis=-1).reshape(*x.shape[:4], 1)
    dx = p * (_sum("btkgd,bskd->btkgs", grad, v) - delta)
    scaled = (dx * pattern.scale).astype(q.dtype)
    dq = _sum("btkgs,bskd->btkgd", scaled, k).reshape(q.shape)
    dk = _sum("btkgs,btkgd->bskd", scaled, q.reshape(*x.shape[:4], q.shape[3]))
    dv = _sum("btkgs,btkgd->bskd", p.astype(q.dtype), grad)
    grads = [dq, dk, dv]
    if bias and pattern.bias_grad:
        dbias = dx.reshape(*q.shape[:3], -1).transpose(0, 2, 1, 3)
        shared = tuple(axis for axis in (0, 1) if bias[0].shape[axis] == 1)
        grads.append(dbias.sum(axis=shared, keepdims=True))
    return tuple(x.astype(q.dtype) for x in grads)


def _sum(spec: str, a: Any, b: Any) -> Any:
    return jnp.einsum(spec, a.astype("float32"), b.astype("float32"))
