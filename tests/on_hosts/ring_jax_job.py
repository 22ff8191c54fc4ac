"""JAX process of a job on several hosts: checks all kinds of rings of four devices.

``hosts.py`` starts it. With ``cut`` it runs steps on one ring until a link is cut.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from ring_core import reference
from ring_jax import ContextParallel

LENGTH = 384  # tokens; zigzag can split them over 2, 3 and 4 devices


def checks(mesh: Mesh, data: int, batch_axis: str | None = None) -> Callable[[], None]:
    """Return a function that compares attention and gradients on a mesh with dense attention."""
    batch = 1 if batch_axis is None else mesh.shape[batch_axis]
    shape = (3, batch, LENGTH, 2, 16)
    whole = np.random.default_rng(data).standard_normal(shape).astype(np.float32)
    expected, _ = reference.attention(*whole, causal=True)
    grads = reference.attention_grads(2 * expected, *whole, causal=True)
    cp = ContextParallel(mesh, "cp", batch_axis=batch_axis)
    everywhere = NamedSharding(mesh, P())

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = cp.unshard(cp.attention(*(cp.shard(x) for x in (q, k, v)), causal=True))
        return (out * out).sum(), out

    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        grads, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return (out, *grads)

    run = jax.jit(both, out_shardings=everywhere)
    inputs = [jax.make_array_from_callback(x.shape, everywhere, x.__getitem__) for x in whole]

    def check() -> None:
        out, *own_grads = (np.asarray(x.addressable_data(0)) for x in run(*inputs))
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
        for grad, expected_value in zip(own_grads, grads[:3], strict=True):
            np.testing.assert_allclose(grad, expected_value, rtol=2e-4, atol=2e-4)

    return check


def mesh_of(devices: Any, *names: str) -> Mesh:
    """Make a mesh of devices in this order."""
    return Mesh(np.array(devices), names, axis_types=(AxisType.Auto,) * len(names))


def rings() -> Iterator[tuple[str, Mesh, str | None]]:
    """Yield rings of some or all devices: a name, the mesh, and its data axis."""
    devices = np.array(jax.devices())
    yield "all", mesh_of(devices, "cp"), None
    yield "permuted", mesh_of(devices[[3, 1, 0, 2]], "cp"), None
    yield "subset", mesh_of(devices[1:], "cp"), None
    yield "two at once", mesh_of(devices[[0, 2, 3, 1]].reshape(2, 2), "data", "cp"), "data"
    yield "data x context", mesh_of(devices.reshape(2, 2), "data", "cp"), "data"


def main() -> None:
    """Join the job and run its checks."""
    jax.distributed.initialize(
        os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"],
        num_processes=int(os.environ["WORLD_SIZE"]),
        process_id=int(os.environ["RANK"]),
        heartbeat_timeout_seconds=int(os.environ["RING_TIMEOUT"]),
        shutdown_timeout_seconds=int(os.environ["RING_TIMEOUT"]),
    )
    if sys.argv[1:] == ["cut"]:
        check = checks(mesh_of(jax.devices(), "cp"), 0)
        for step in range(100_000):
            check()
            print("step", step, flush=True)
    for data, (name, mesh, batch_axis) in enumerate(rings()):
        if jax.process_index() in {device.process_index for device in mesh.devices.flat}:
            checks(mesh, data, batch_axis)()
        print("ring", name, flush=True)
    print("equal", flush=True)


if __name__ == "__main__":
    main()
