"""Programs with ``jax_enable_x64``, in which Python's numbers have 64 bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from ring_jax import ring_attention


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_traced_with_x64(dtype: type) -> None:
    """Tracing works on a CPU, too: its program holds the kernels of other platforms."""

    def loss(x: jax.Array) -> jax.Array:
        return ring_attention(x, x, x, axis_name=None, causal=True).astype(jnp.float32).sum()

    with jax.enable_x64(True):
        x = jnp.ones((1, 32, 2, 8), dtype)
        assert jax.jit(jax.grad(loss)).lower(x).out_info.dtype == dtype
        assert jax.jit(loss).lower(x).out_info.dtype == jnp.float32
