"""Shared inputs and comparisons for the tests of adapters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from ring_core import reference
from ring_jax import ContextParallel, ring_attention

B, T, H, K, D = 2, 16, 4, 2, 8
ONE = partial(ring_attention, axis_name=None)
IDS = np.repeat([[0, 1, 2, -1], [5, 5, 7, 9]], 4, axis=1).astype(np.int32)
SHOWN = np.arange(T) < np.array([[11], [16]])
CAUSAL = jnp.tril(jnp.ones((T, T), bool))
HIDDEN = {"bias": np.where(SHOWN, 0, -np.inf)[:, None, None].repeat(T, axis=2)}
KEY = jax.random.key(3)


def random(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


QKV = [random(B, T, heads, D, seed=seed) for seed, heads in enumerate((H, K, K))]
BIAS = random(1, H, T, T, seed=4)


def mesh_of(size: int) -> Mesh:
    return jax.make_mesh((size,), ("cp",), (AxisType.Auto,), devices=jax.devices()[:size])


def context(size: int = 2, layout: Any = "zigzag") -> ContextParallel:
    return ContextParallel(mesh_of(size), "cp", layout=layout)


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=2e-5, atol=2e-5)


def all_close(actual: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        close(a, b)


def dense(**options: Any) -> Any:
    return reference.attention(*map(np.asarray, QKV), **options)[0]


def compiled(function: Callable[..., Any], **arguments: Any) -> Any:
    return jax.jit(partial(function, **arguments))(*QKV)


def program(function: Callable[..., Any], **arguments: Any) -> str:
    return str(jax.make_jaxpr(partial(function, **arguments))(*QKV))


def parameters(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    all_parameters = inspect.signature(function).parameters.values()
    return {parameter.name: (parameter.kind, parameter.default) for parameter in all_parameters}
