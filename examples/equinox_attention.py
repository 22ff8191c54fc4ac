"""Split the sequences of an Equinox model over four devices: loss and gradient stay the same.

:func:`ring_jax.equinox.convert` gives every ``eqx.nn.MultiheadAttention`` of a model the attention
of a :class:`ring_jax.ContextParallel`. Everything else of the model stays as it was::

    python examples/equinox_attention.py
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from ring_jax import ContextParallel
from ring_jax.equinox import convert

Array = jax.Array

DEVICES, LENGTH, VOCABULARY, DIM, HEADS = 4, 512, 64, 64, 4
LIMIT = 1e-5  # largest relative difference, in float32


class Model(eqx.Module):
    """A transformer block between an embedding and a head."""

    tokens: eqx.nn.Embedding
    places: eqx.nn.Embedding
    norm: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    head: eqx.nn.Linear

    def __init__(self, key: Array) -> None:
        keys = jax.random.split(key, 4)
        self.tokens = eqx.nn.Embedding(VOCABULARY, DIM, key=keys[0])
        self.places = eqx.nn.Embedding(LENGTH, DIM, key=keys[1])
        self.norm = eqx.nn.RMSNorm(DIM)
        self.attention = eqx.nn.MultiheadAttention(HEADS, DIM, key=keys[2])
        self.head = eqx.nn.Linear(DIM, VOCABULARY, key=keys[3])

    def __call__(self, tokens: Array, positions: Array, mask: Array | None) -> Array:
        """Return logits ``[T, vocabulary]`` of ``tokens [T]`` at global ``positions [T]``."""
        x = jax.vmap(self.tokens)(tokens) + jax.vmap(self.places)(positions)
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y, mask)
        logits: Array = jax.vmap(self.head)(x)
        return logits


@eqx.filter_jit
@eqx.filter_value_and_grad
def loss(model: Model, tokens: Array, labels: Array, positions: Array, mask: Array | None) -> Array:
    """Return the mean cross entropy of ``labels [B, T]``; the decorator adds its gradient."""
    logits = jax.vmap(lambda row: model(row, positions, mask))(tokens)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
    return -jnp.mean(chosen)


def main() -> int:
    """Compare four devices with one; the exit code is 1 if they differ."""
    os.environ.setdefault("NPROC", "32")  # threads in which host devices wait for each other
    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = jax.make_mesh((DEVICES,), ("cp",), (AxisType.Auto,), devices=jax.devices()[:DEVICES])
    cp = ContextParallel(mesh, axis_name="cp")
    text = jnp.asarray(np.random.default_rng(0).integers(VOCABULARY, size=(2, LENGTH + 1)))
    tokens, labels = text[:, :-1], text[:, 1:]
    model = Model(jax.random.key(0))
    ring: Any = loss(
        convert(model, partial(cp.attention, causal=True)), cp.shard(tokens), cp.shard(labels),
        cp.positions(LENGTH), None,
    )  # fmt: skip
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    single: Any = loss(model, tokens, labels, jnp.arange(LENGTH), causal)
    worst = 0.0
    for a, b in zip(jax.tree.leaves(ring), jax.tree.leaves(single), strict=True):
        expected = np.asarray(b)
        worst = max(worst, float(np.abs(np.asarray(a) - expected).max() / np.abs(expected).max()))
    print(f"loss: {ring[0]:.7f} on {DEVICES} devices, {single[0]:.7f} on one")
    print(f"largest relative difference of loss and gradients: {worst:.1e}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
