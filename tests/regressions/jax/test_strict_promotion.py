"""Programs do not mix dtypes, which users may forbid (``jax_numpy_dtype_promotion``)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from ring_jax import ContextParallel


@pytest.mark.parametrize("x64", [True, False])
def test_strict_promotion(x64: bool) -> None:
    mesh = jax.make_mesh((2,), ("cp",), (AxisType.Auto,), devices=jax.devices()[:2])
    cp = ContextParallel(mesh, "cp")
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        x = jnp.ones((1, 16, 2, 8), jnp.float32)

        def loss(x: jax.Array) -> jax.Array:
            return cp.attention(x, x, x, causal=True, dropout_p=0.1, dropout_seed=3).sum()

        jax.jit(jax.grad(loss)).lower(x)
