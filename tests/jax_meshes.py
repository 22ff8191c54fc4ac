"""Meshes of host devices, calls over them, random arrays and comparisons."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec as P

from ring_core import LayoutSpec, reference
from ring_jax import ContextParallel

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
TOKENS = P(None, "cp")


def mesh_of(kind: AxisType = AxisType.Auto, **axes: int) -> Mesh:
    """Make a mesh of as many devices as its axes need, all axes of one type."""
    devices = jax.devices()[: prod(axes.values())]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (kind,) * len(axes), devices=devices)


def context(size: int = 2, layout: LayoutSpec = "zigzag", kind: str = "auto") -> ContextParallel:
    """Return a context over a ring of ``size`` devices, on a mesh without other axes."""
    return ContextParallel(mesh_of(KINDS[kind], cp=size), "cp", layout=layout)


def in_ring(call: Callable[..., Any], size: int = 2, **options: Any) -> Callable[..., Any]:
    """Return a call on local shards as a function of global arrays, split along their tokens."""
    arguments: dict[str, Any] = {"in_specs": TOKENS, "out_specs": TOKENS} | options
    return jax.shard_map(call, mesh=mesh_of(cp=size), **arguments)


def random(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def close(actual: Any, expected: Any, tolerance: float = 2e-5) -> None:
    """Compare arrays, or each array of two trees."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def check_passes(
    call: Callable[..., Any],
    inputs: Any,
    dout: Any,
    more: Any = None,
    tolerance: float = 2e-5,
    **options: Any,
) -> tuple[Any, Any]:
    """Compare ``call(q, k, v, **more)`` and all its gradients with the oracle's.

    ``more`` are sinks and a bias; ``options`` are the oracle's, among them a bias that is not the
    call's. Return the lowered program and the compiled one.
    """

    def loss(inputs: Any, more: Any, dout: Any) -> Any:
        out = call(*inputs, **more)
        sharding = jax.typeof(out).sharding
        if AxisType.Explicit in sharding.mesh.axis_types:
            dout = jax.reshard(dout, sharding)
        return (out * dout).sum(), out

    lowered = jax.jit(jax.grad(loss, (0, 1), has_aux=True)).lower(inputs, more or {}, dout)
    program = lowered.compile()
    (grads, others), out = program(inputs, more or {}, dout)
    exact, options = [*map(np.asarray, inputs)], jax.tree.map(np.asarray, more or {}) | options
    close(out, reference.attention(*exact, **options)[0], tolerance)
    expected: Any = reference.attention_grads(np.asarray(dout), *exact, **options)
    close(grads, [*expected[:3]], tolerance)
    for name, grad in others.items():
        wanted = getattr(expected, f"d{name}")
        if wanted.shape != grad.shape:  # by the batch, for which the oracle's is written out
            wanted = wanted.sum(axis=0, keepdims=True)
        close(grad, wanted, tolerance)
    return lowered, program
