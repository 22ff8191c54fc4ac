"""Attention on one GPU in JAX behind one interface: ours, cuDNN's, Mosaic GPU's and ejkernel's.

Each takes ``q [B, T, H, D]``, ``k`` and ``v [B, T, K, D]``, and a mask. It raises an error for what
it does not support; a table shows the reason in place of its time.
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
    """An attention implementation, a column of the table.

    Attributes:
        attend: A function of ``q``, ``k``, ``v`` and ``mask``.
        prepare: Converts ``q``, ``k`` and ``v`` before, outside of the time.
        backward: True if it has gradients.
    """

    attend: Attend
    prepare: Attend = lambda q, k, v: (q, k, v)
    backward: bool = True


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


def mosaic(q: Any, k: Any, v: Any, *, mask: Mask) -> Any:
    """Run FlashAttention-3 in Pallas for Hopper, which jax ships; ``q`` is already scaled.

    The block sizes are those that jax's own benchmark uses for head dim 128.

    Raises:
        ValueError: The mask has a window.
    """
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    if mask.window is not None:
        raise ValueError("attention_mgpu has no windows")
    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=128, max_concurrent_steps=2, causal=mask.causal
    )
    return attention_mgpu.attention(q, k, v, config)


def _for_mosaic(q: Any, k: Any, v: Any) -> Any:
    """Scale ``q``, which ``attention_mgpu`` does not, and cast all to float16.

    Its kernel multiplies float16 only, whatever it says.
    """
    scaled = q.astype("float32") * q.shape[-1] ** -0.5
    return tuple(x.astype("float16") for x in (scaled, k, v))


def ejkernel(q: Any, k: Any, v: Any, *, mask: Mask) -> Any:
    """Run ejkernel's flash attention in Triton, with the block sizes that it chooses itself."""
    module = import_module("ejkernel.kernels._triton.flash_attention")
    return module.flash_attention(q, k, v, causal=mask.causal, sliding_window=mask.window)


def exact(q: Any, k: Any, v: Any, bias: Any = None, *, mask: Mask) -> Any:
    """Compute attention by its definition; inputs are float32."""
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


def passes(column: Column, mask: Mask) -> dict[str, Attend]:
    """Return the passes that a column supports, by name, as jitted functions.

    ``forward`` takes what ``prepare`` returns, ``both`` takes ``dout`` after it.
    """
    attend = partial(column.attend, mask=mask)
    functions: dict[str, Attend] = {"forward": jax.jit(attend)}
    return functions | ({"both": jax.jit(partial(both, attend))} if column.backward else {})


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
