"""A bias of -inf within a block that the mask shows wholly hides tokens, even if they are NaN."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from backends.tpu_interpreter import interpreted

from ring_core import KernelConfig
from ring_jax.attention import RingAttention
from ring_jax.kernels.xla import XlaKernel
from ring_jax_tpu import PallasKernel

T, HIDDEN = 256, 5


def test_a_bias_hides_what_is_not_finite() -> None:
    rng, attend = np.random.default_rng(0), RingAttention((PallasKernel(), XlaKernel()))
    qkv = [jnp.asarray(rng.standard_normal((1, T, 2, 8)), jnp.float32) for _ in range(3)]
    qkv = [qkv[0], *(x.at[:, HIDDEN].set(jnp.nan) for x in qkv[1:])]
    bias = jnp.zeros((1, 1, T, T)).at[..., HIDDEN].set(-jnp.inf)

    def loss(qkv: Any, kernel: Any) -> Any:
        out = attend(*qkv, axis_name=None, bias=bias, kernel=kernel)
        return jnp.sum(out**2), out

    run = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    with interpreted():
        actual = jax.block_until_ready(run(qkv, KernelConfig("pallas", block_q=128, block_k=128)))
    for ours, expected in zip(*map(jax.tree.leaves, (actual, run(qkv, "xla"))), strict=True):
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)
