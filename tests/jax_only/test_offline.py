"""Importing and running open no connections, except those of ``jax.distributed``."""

from __future__ import annotations

from offline import run_offline


def test_jax_stays_offline() -> None:
    run_offline("""
import jax
import jax.numpy as jnp
import ring_jax
x = jnp.ones((1, 8, 2, 8))
call = lambda x: ring_jax.ring_attention(x, x, x, axis_name=None, causal=True).sum()
jax.block_until_ready(jax.jit(jax.grad(call))(x))
""")
