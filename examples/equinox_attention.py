"""An Equinox module on sequences split over four devices: the loss and gradient of one device.

The module sees one device's slice of the sequence, inside ``jax.shard_map``; its attention is
:func:`ring_jax.ring_attention`, which needs no more than the name of the mesh axis::

    python examples/equinox_attention.py
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ring_jax import ring_attention

Array = jax.Array
Attend = Callable[[Array, Array, Array], Array]

DEVICES, LENGTH, DIM, HEADS, KV_HEADS = 4, 512, 64, 4, 2
LIMIT = 1e-5  # of relative differences, in float32


class SelfAttention(eqx.Module):
    """Causal attention with grouped heads."""

    query: eqx.nn.Linear
    key_value: eqx.nn.Linear
    out: eqx.nn.Linear
    attend: Attend = eqx.field(static=True)

    def __init__(self, attend: Attend, key: Array) -> None:
        keys = jax.random.split(key, 3)
        width = DIM // HEADS
        self.query = eqx.nn.Linear(DIM, DIM, key=keys[0])
        self.key_value = eqx.nn.Linear(DIM, 2 * KV_HEADS * width, key=keys[1])
        self.out = eqx.nn.Linear(DIM, DIM, key=keys[2])
        self.attend = attend

    def __call__(self, x: Array) -> Array:
        """Map ``x [B, T, dim]``."""
        over_tokens = [jax.vmap(jax.vmap(part)) for part in (self.query, self.key_value, self.out)]
        q, kv = (part(x).reshape(*x.shape[:2], -1, DIM // HEADS) for part in over_tokens[:2])
        k, v = jnp.split(kv, 2, axis=2)
        mapped: Array = over_tokens[2](self.attend(q, k, v).reshape(x.shape))
        return mapped


def loss_of(model: SelfAttention, x: Array, wanted: Array) -> Array:
    """Mean square error of this device's tokens."""
    loss: Array = jnp.mean((model(x) - wanted) ** 2)
    return loss


def ring_loss(model: SelfAttention, x: Array, wanted: Array) -> Array:
    """The mean over all devices; ``x`` and ``wanted`` are global ``[B, T, dim]``."""
    devices = jax.devices()[:DEVICES]
    mesh = jax.make_mesh((DEVICES,), ("cp",), (AxisType.Auto,), devices=devices)

    def local(model: SelfAttention, x: Array, wanted: Array) -> Array:
        mean: Array = lax.pmean(loss_of(model, x, wanted), "cp")
        return mean

    tokens = P(None, "cp")
    split = jax.shard_map(local, mesh=mesh, in_specs=(P(), tokens, tokens), out_specs=P())
    loss: Array = split(model, x, wanted)
    return loss


def main() -> int:
    """Compare four devices with one; the exit code is 1 if they differ."""
    os.environ.setdefault("NPROC", "32")  # host devices wait for each other in threads of one pool
    jax.config.update("jax_num_cpu_devices", DEVICES)
    random = np.random.default_rng(0)
    x, wanted = (jnp.asarray(random.standard_normal((2, LENGTH, DIM)), jnp.float32) for _ in "xw")
    attends = {
        ring_loss: partial(ring_attention, axis_name="cp", causal=True),
        loss_of: partial(jax.nn.dot_product_attention, is_causal=True),
    }
    ring, single = (
        eqx.filter_jit(eqx.filter_value_and_grad(loss))(
            SelfAttention(attend, jax.random.key(0)), x, wanted
        )
        for loss, attend in attends.items()
    )
    worst = 0.0
    for a, b in zip(jax.tree.leaves(ring), jax.tree.leaves(single), strict=True):
        expected = np.asarray(b)
        worst = max(worst, float(np.abs(np.asarray(a) - expected).max() / np.abs(expected).max()))
    print(f"loss: {ring[0]:.7f} on {DEVICES} devices, {single[0]:.7f} on one")
    print(f"largest relative difference of loss and gradients: {worst:.1e}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
