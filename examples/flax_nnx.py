"""Split the sequences of a Flax NNX model over four devices: loss and gradient stay the same.

``nnx.MultiHeadAttention`` takes any function as its ``attention_fn``;
:func:`ring_jax.flax.make_attention_fn` makes one of the attention of a
:class:`ring_jax.ContextParallel`. Everything else of the model stays as it was::

    python examples/flax_nnx.py
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType

from ring_jax import ContextParallel
from ring_jax.flax import make_attention_fn

Array = jax.Array

DEVICES, LENGTH, VOCABULARY, DIM, HEADS = 4, 512, 64, 64, 4
LIMIT = 1e-5  # largest relative difference, in float32


class Model(nnx.Module):
    """A transformer block between an embedding and a head."""

    def __init__(self, attention_fn: Callable[..., Array], rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(VOCABULARY, DIM, rngs=rngs)
        self.places = nnx.Embed(LENGTH, DIM, rngs=rngs)
        self.norm = nnx.RMSNorm(DIM, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, DIM, use_bias=False, decode=False, attention_fn=attention_fn, rngs=rngs
        )
        self.head = nnx.Linear(DIM, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: Array, positions: Array) -> Array:
        """Return logits ``[B, T, vocabulary]`` of ``tokens [B, T]`` at global ``positions [T]``."""
        x = self.tokens(tokens) + self.places(positions)[None]
        x = x + self.attention(self.norm(x), is_causal=True)
        logits: Array = self.head(x)
        return logits


def loss_and_gradient(
    attention_fn: Callable[..., Array], tokens: Array, labels: Array, positions: Array
) -> tuple[Array, Any]:
    """Return the mean cross entropy of a newly initialized model, and its gradient."""

    @nnx.jit
    @nnx.value_and_grad
    def loss(model: Model) -> Array:
        logits = jax.nn.log_softmax(model(tokens, positions))
        return -jnp.mean(jnp.take_along_axis(logits, labels[..., None], axis=-1))

    result: tuple[Array, Any] = loss(Model(attention_fn, nnx.Rngs(0)))
    return result


def main() -> int:
    """Compare four devices with one; the exit code is 1 if they differ."""
    os.environ.setdefault("NPROC", "32")  # threads in which host devices wait for each other
    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = jax.make_mesh((DEVICES,), ("cp",), (AxisType.Auto,), devices=jax.devices()[:DEVICES])
    cp = ContextParallel(mesh, axis_name="cp")
    text = jnp.asarray(np.random.default_rng(0).integers(VOCABULARY, size=(2, LENGTH + 1)))
    tokens, labels = text[:, :-1], text[:, 1:]
    ring = loss_and_gradient(
        make_attention_fn(cp.attention), cp.shard(tokens), cp.shard(labels), cp.positions(LENGTH)
    )
    single = loss_and_gradient(nnx.dot_product_attention, tokens, labels, jnp.arange(LENGTH))
    worst = 0.0
    for a, b in zip(jax.tree.leaves(ring), jax.tree.leaves(single), strict=True):
        expected = np.asarray(b)
        worst = max(worst, float(np.abs(np.asarray(a) - expected).max() / np.abs(expected).max()))
    print(f"loss: {ring[0]:.7f} on {DEVICES} devices, {single[0]:.7f} on one")
    print(f"largest relative difference of loss and gradients: {worst:.1e}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
