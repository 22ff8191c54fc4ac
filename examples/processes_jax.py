"""Train an attention layer on several JAX processes, each of which loads only its own tokens.

``python examples/processes_jax.py localhost:29511 2 0`` starts process 0 of 2, and waits for
process 1, which is started by the same line with a 1 at its end. On GPUs and TPUs that is one
process per host; here each has two devices of the CPU. The loss is equal to that of one process.
"""

from __future__ import annotations

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from ring_jax import ContextParallel

LENGTH, WIDTH, HEADS, DIM, STEPS = 256, 32, 4, 8, 4


def main() -> None:
    """Train the layer; process 0 prints the losses."""
    address, count, number = sys.argv[1], *map(int, sys.argv[2:])
    # Both must come before any other use of JAX.
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(address, num_processes=count, process_id=number)
    mesh = jax.make_mesh((jax.device_count(),), ("cp",), axis_types=(AxisType.Auto,))
    cp = ContextParallel(mesh, "cp")

    # In layout order this process holds the tokens of its own devices, and loads no others.
    layout = cp.layout_of(LENGTH)
    ranks = [n for n, device in enumerate(mesh.devices) if device.process_index == number]
    positions = np.concatenate([layout.positions(rank) for rank in ranks])
    tokens = NamedSharding(mesh, P(None, "cp"))

    text = np.random.default_rng(1).standard_normal((1, LENGTH, WIDTH)).astype(np.float32)
    x = jax.make_array_from_process_local_data(tokens, text[:, positions], text.shape)

    def projections(weights: dict[str, jax.Array], x: jax.Array) -> list[jax.Array]:
        return [jnp.einsum("btw,whd->bthd", x, weights[name]) for name in ("q", "k", "v")]

    def loss(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        out = cp.attention(*projections(weights, x), causal=True)
        return jnp.mean((out.reshape(x.shape) - x) ** 2)

    @partial(jax.jit, donate_argnums=0)
    def step(weights: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        value, grads = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, grad: w - 5 * grad, weights, grads), value

    # All processes draw the same weights, which are replicated.
    draw = np.random.default_rng(0)
    everywhere = NamedSharding(mesh, P())
    weights = {
        name: jax.make_array_from_process_local_data(
            everywhere, draw.standard_normal((WIDTH, HEADS, DIM)).astype(np.float32) / 6
        )
        for name in ("q", "k", "v")
    }
    # Before the first step: if a process would make another call, all raise an error that names it.
    cp.check_agreement(*jax.jit(projections)(weights, x), causal=True)
    for n in range(STEPS):
        weights, value = step(weights, x)
        if number == 0:
            print(f"step {n}: loss {float(value):.4f}", flush=True)
    if number == 0:
        print(f"{count} processes, {jax.device_count()} devices")


if __name__ == "__main__":
    main()
