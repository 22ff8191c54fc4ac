"""Meshes of host devices, calls over them, random arrays and comparisons."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec as P

from ring_core import LayoutSpec
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
