"""Attention on one GPU in JAX: ours, cuDNN's, Mosaic GPU's and ejkernel's, called alike.

Each takes ``q [B, T, H, D]``, ``k`` and ``v [B, T, K, D]``, and a mask. What one cannot do it
refuses with a reason, which a table says in place of its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import ring_jax_gpu
from ring_core import Mask

Attend = Callable[..., Any]


@dataclass(frozen=True)
class Column:
    """A way to attend.

    Attributes:
        attend: A function of ``q``, ``k``, ``v`` and ``mask``.
        prepare: What is done to ``q``, ``k`` and ``v`` before, outside of the time.
        backward: It has gradients.
    """

    attend: Attend
    prepare: Attend = lambda q, k, v: (q, k, v)
    backward: bool = True


def ours(q: Any, k: Any, v: Any, bias: Any = None, *, mask: Mask, kernel: str = "triton") -> Any:
    """The kernels of ``ring_jax_gpu`` on one device."""
    return ring_jax_gpu.ring_attention(
        q, k, v, axis_name=None, causal=mask.causal, window=mask.window, bias=bias, kernel=kernel
    )


def cudnn(q: Any, k: Any, v: Any, bias: Any = None, *, mask: Mask) -> Any:
    """What JAX brings; it wants V as wide as Q and K."""
    padded, window = (
        jnp.pad(v, [(0, 0)] * 3 + [(0, q.shape[3] - v.shape[3])]),
        cast("Any", mask.window),
    )
    out = jax.nn.dot_product_attention(
        q, k, padded, bias, is_causal=mask.causal, local_window_size=window,
        implementation="cudnn",
    )  # fmt: skip
    return out[..., : v.shape[3]]


def mosaic(q: Any, k: Any, v: Any, *, mask: Mask) -> Any:
    """FlashAttention-3 in Pallas for Hopper, which jax ships; the scale is in ``q``.

    The sizes are those that it is timed with there for head dim 128.

    Raises:
        ValueError: It has no windows.
    """
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    if mask.window is not None:
        raise ValueError("attention_mgpu has no windows")
    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=128, max_concurrent_steps=2, causal=mask.causal
    )
    return attention_mgpu.attention(q, k, v, config)


def _for_mosaic(q: Any, k: Any, v: Any) -> Any:
    """It multiplies float16 only, whatever it says, and knows no scale."""
    scaled = q.astype("float32") * q.shape[-1] ** -0.5
    return tuple(x.astype("float16") for x in (scaled, k, v))


def ejkernel(q: Any, k: Any, v: Any, *, mask: Mask) -> Any:
    """Its flash attention in Triton, with the sizes that it chooses by itself."""
    module = import_module("ejkernel.kernels._triton.flash_attention")
    return module.flash_attention(q, k, v, causal=mask.causal, sliding_window=mask.window)


def exact(q: Any, k: Any, v: Any, bias: Any = None, *, mask: Mask) -> Any:
    """The definition, in float32."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") * q.shape[3] ** -0.5
    scores = scores if bias is None else scores + bias
    visible = mask.dense(np.arange(q.shape[1]), np.arange(k.shape[1]))
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhij,bjhd->bihd", weights, v, precision="highest")


COLUMNS: dict[str, Column] = {
    "triton": Column(ours),
    "cudnn": Column(cudnn),
    "mosaic": Column(mosaic, prepare=_for_mosaic, backward=False),
    "ejkernel": Column(ejkernel),
}


def both(attend: Attend, *arrays: Any) -> Any:
    """The output and the gradients of all that is given but ``dout``, the last."""
    *x, dout = arrays
    out, pull = jax.vjp(attend, *x)
    return (out, *pull(dout.astype(out.dtype)))


def layered(attend: Attend, layers: int) -> Attend:
    """So many layers one behind the other: what one yields is the ``q`` of the next.

    Each begins when the one before has ended, as in a model: nothing of it can be done or sent
    earlier, or once for several.
    """

    def run(q: Any, k: Any, v: Any) -> Any:
        out = attend(q, k, v)
        for _ in range(layers - 1):
            out = attend(*lax.optimization_barrier((out, k, v)))
        return out

    return run


def passes(column: Column, mask: Mask) -> dict[str, Attend]:
    """What a column can compute, by name, as functions that are compiled when called.

    ``forward`` takes what ``prepare`` returns, ``both`` takes ``dout`` behind it.
    """
    attend = partial(column.attend, mask=mask)
    functions: dict[str, Attend] = {"forward": jax.jit(attend)}
    return functions | ({"both": jax.jit(partial(both, attend))} if column.backward else {})


def random_arrays(shapes: Sequence[Sequence[int]], seed: int) -> list[Any]:
    """As many as there are shapes, bfloat16."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [
        jax.random.normal(key, tuple(shape), "float32").astype("bfloat16")
        for key, shape in zip(keys, shapes, strict=True)
    ]


def seconds(run: Callable[[], Any], calls: int = 1) -> float:
    """Of so many calls that are queued."""
    start = time.perf_counter()
    for _ in range(calls):
        last = run()
    jax.block_until_ready(last)
    return time.perf_counter() - start
