"""Attention on one GPU in JAX behind one interface: ours, cuDNN's, and by definition.

Each takes ``q [B, T, H, D]``, ``k`` and ``v [B, T, K, D]``, and a mask.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import ring_jax_gpu
from ring_core import Mask

Attend = Callable[..., Any]


def ours(q: Any, k: Any, v: Any, bias: Any = None, *, mask: Mask, kernel: str = "triton") -> Any:
    """Run the kernels of ``ring_jax_gpu`` on one device."""
    return ring_jax_gpu.ring_attention(
        q, k, v, axis_name=None, causal=mask.causal, window=mask.window, bias=bias, kernel=kernel
    )


def cudnn(q: Any, k: Any, v: Any, bias: Any = None, *, mask: Mask) -> Any:
    """Run cuDNN as JAX calls it; V is zero-padded to the head dim of Q and K."""
    padded, window = (
        jnp.pad(v, [(0, 0)] * 3 + [(0, q.shape[3] - v.shape[3])]),
        cast("Any", mask.window),
    )
    out = jax.nn.dot_product_attention(
        q, k, padded, bias, is_causal=mask.causal, local_window_size=window,
        implementation="cudnn",
    )  # fmt: skip
    return out[..., : v.shape[3]]


def exact(q: Any, k: Any, v: Any, bias: Any = None, *, mask: Mask) -> Any:
    """Compute attention by its definition; inputs are float32."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") * q.shape[3] ** -0.5
    scores = scores if bias is None else scores + bias
    visible = mask.dense(np.arange(q.shape[1]), np.arange(k.shape[1]))
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhij,bjhd->bihd", weights, v, precision="highest")


def both(attend: Attend, *arrays: Any) -> Any:
    """Return the output, and the gradients of all arrays but the last one, ``dout``."""
    *x, dout = arrays
    out, pull = jax.vjp(attend, *x)
    return (out, *pull(dout.astype(out.dtype)))


def layered(attend: Attend, layers: int) -> Attend:
    """Return attention in ``layers`` layers: the output of one is the ``q`` of the next.

    Each begins when the one before has ended, as in a model: nothing of it can be computed or sent
    earlier, or once for several.
    """

    def run(q: Any, k: Any, v: Any) -> Any:
        out = attend(q, k, v)
        for _ in range(layers - 1):
            out = attend(*lax.optimization_barrier((out, k, v)))
        return out

    return run


def random_arrays(shapes: Sequence[Sequence[int]], seed: int) -> list[Any]:
    """Return a random bfloat16 array for each shape."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [
        jax.random.normal(key, tuple(shape), "float32").astype("bfloat16")
        for key, shape in zip(keys, shapes, strict=True)
    ]


def seconds(run: Callable[[], Any], calls: int = 1) -> float:
    """Return the seconds of ``calls`` queued calls, until the last one is ready."""
    start = time.perf_counter()
    for _ in range(calls):
        last = run()
    jax.block_until_ready(last)
    return time.perf_counter() - start
