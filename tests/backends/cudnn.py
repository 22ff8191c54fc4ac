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
from jax.nn import logsumexp

from backends.jax_devices import Arrays, JaxBackend
from ring_core import LayoutSpec, Mask
from ring_jax_gpu import fmha, ring_attention
from ring_jax_gpu.fmha import Pattern


def case_of(
    name: str, mask: Mask, layout: LayoutSpec = "contiguous", size: int = 1, **options: Any
) -> Case:
    """Return a case in bfloat16, if ``options`` don't say otherwise."""
    return Case(
        f"cudnn-{name}", mask, layout, size, **{"dtype": "bfloat16", "heads": (4, 2), **options}
    )


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
        wide = jnp.broadcast_to(bias[0], (q.shape[0], q.shape[2], *bias[0].shape[2:]))
        x += wide.astype(x.dtype).transpose(0, 2, 1, 3).reshape(x.shape) - 0 * wide.min()
    i, j = (lax.broadcasted_iota("int32", x.shape, axis) for axis in (1, 4))
    visible = (j <= i) | (not pattern.causal)
    if pattern.window is not None:
        visible &= j > i - pattern.window
    return jnp.where(visible, x, -jnp.inf)


def _forward(pattern: Pattern, q: Any, k: Any, v: Any, *bias: Any) -> tuple[Any, Any]:
    x = _scores(pattern, q, k, bias)
    lse = logsumexp(x, axis=-1)
    out = _sum("btkgs,bskd->btkgd", jnp.exp(x - lse[..., None]).astype(v.dtype), v)
    out = out.reshape(*q.shape[:3], v.shape[3]).astype(q.dtype)
    return out, lse.reshape(q.shape[:3]).swapaxes(1, 2)


def _backward(
    pattern: Pattern, q: Any, k: Any, v: Any, lse: Any, out: Any, dout: Any, *bias: Any
) -> tuple[Any, ...]:
    x = _scores(pattern, q, k, bias)
    rows = (*x.shape[:4], -1)
    p = jnp.exp(x - lse.swapaxes(1, 2).reshape(rows))
    grad = dout.reshape(rows)
    delta = (dout.astype(x.dtype) * out.astype(x.dtype)).sum(axis=-1).reshape(rows)
    dx = p * (_sum("btkgd,bskd->btkgs", grad, v) - delta)
    scaled = (dx * pattern.scale).astype(q.dtype)
    grads = [
        _sum("btkgs,bskd->btkgd", scaled, k).reshape(q.shape),
        _sum("btkgs,btkgd->bskd", scaled, q.reshape(rows)),
        _sum("btkgs,btkgd->bskd", p.astype(q.dtype), grad),
    ]
    if bias and pattern.bias_grad:
        dbias = dx.reshape(*q.shape[:3], -1).transpose(0, 2, 1, 3)
        shared = tuple(axis for axis in (0, 1) if bias[0].shape[axis] == 1)
        grads.append(dbias.sum(axis=shared, keepdims=True))
    return tuple(x.astype(q.dtype) for x in grads)


def _sum(spec: str, a: Any, b: Any) -> Any:
    return jnp.einsum(spec, a.astype("float32"), b.astype("float32"))
