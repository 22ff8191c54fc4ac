"""Attention on one GPU in JAX: ours, cuDNN's, Mosaic GPU's and ejkernel's, called alike.

Each takes ``q [B, T, H, D]``, ``k`` and ``v [B, T, K, D]``, and a mask. What one cannot do it
refuses with a reason, which a table says in place of its time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import ring_jax_gpu

Attend = Callable[..., Any]


@dataclass(frozen=True)
class Seen:
    """Which keys a query sees.

    Attributes:
        causal: No later ones.
        window: The last so many, its own included; ``None`` for all. Only with ``causal``.
    """

    causal: bool
    window: int | None = None

    def pairs(self, length: int) -> int:
        """How many pairs of a query and a key there are; half of all if causal, as is usual."""
        if self.window is not None and self.window < length:
            return self.window * length - self.window * (self.window - 1) // 2
        return length**2 // 2 if self.causal else length**2

    def __str__(self) -> str:
        if self.window is not None:
            return f"window {self.window}"
        return "causal" if self.causal else "full"


@dataclass(frozen=True)
class Column:
    """A way to attend.

    Attributes:
        attend: A function of ``q``, ``k``, ``v`` and ``seen``.
        prepare: What is done to ``q``, ``k`` and ``v`` before, outside of the time.
        backward: It has gradients.
    """

    attend: Attend
    prepare: Attend = lambda q, k, v: (q, k, v)
    backward: bool = True


def ours(q: Any, k: Any, v: Any, *, seen: Seen) -> Any:
    """The kernels of ``ring_jax_gpu`` on one device."""
    window = None if seen.window is None else (seen.window - 1, 0)
    return ring_jax_gpu.ring_attention(
        q, k, v, axis_name=None, causal=seen.causal, window=window, kernel="triton"
    )


def cudnn(q: Any, k: Any, v: Any, *, seen: Seen) -> Any:
    """What JAX brings."""
    window = None if seen.window is None else (seen.window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=seen.causal, local_window_size=window, implementation="cudnn"
    )


def mosaic(q: Any, k: Any, v: Any, *, seen: Seen) -> Any:
    """FlashAttention-3 in Pallas for Hopper, which jax ships; the scale is in ``q``.

    The sizes are those that it is timed with there for head dim 128.

    Raises:
        ValueError: It has no windows.
    """
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    if seen.window is not None:
        raise ValueError("attention_mgpu has no windows")
    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=128, max_concurrent_steps=2, causal=seen.causal
    )
    return attention_mgpu.attention(q, k, v, config)


def _for_mosaic(q: Any, k: Any, v: Any) -> Any:
    """It multiplies float16 only, whatever it says, and knows no scale."""
    scaled = q.astype("float32") * q.shape[-1] ** -0.5
    return tuple(x.astype("float16") for x in (scaled, k, v))


def ejkernel(q: Any, k: Any, v: Any, *, seen: Seen) -> Any:
    """Its flash attention in Triton, with the sizes that it chooses by itself."""
    module = import_module("ejkernel.kernels._triton.flash_attention")
    window = None if seen.window is None else (seen.window - 1, 0)
    return module.flash_attention(q, k, v, causal=seen.causal, sliding_window=window)


def exact(q: Any, k: Any, v: Any, *, seen: Seen) -> Any:
    """The definition, in float32."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") * q.shape[3] ** -0.5
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
    visible = (j <= i) | (not seen.causal)
    if seen.window is not None:
        visible &= j > i - seen.window
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhij,bjhd->bihd", weights, v, precision="highest")


COLUMNS: dict[str, Column] = {
    "triton": Column(ours),
    "cudnn": Column(cudnn),
    "mosaic": Column(mosaic, prepare=_for_mosaic, backward=False),
    "ejkernel": Column(ejkernel),
}


def both(attend: Attend, q: Any, k: Any, v: Any, dout: Any) -> Any:
    """``(out, dq, dk, dv)``."""
    out, pull = jax.vjp(attend, q, k, v)
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


def passes(column: Column, seen: Seen, layers: int = 1) -> dict[str, Attend]:
    """What a column can compute, by name, as functions that are compiled when called.

    ``forward`` takes what ``prepare`` returns, ``both`` takes ``dout`` behind it.
    """
    way = layered(partial(column.attend, seen=seen), layers)
    found: dict[str, Attend] = {"forward": jax.jit(way)}
    return found | ({"both": jax.jit(partial(both, way))} if column.backward else {})


def reason_of(error: Exception) -> str:
    """An error in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
