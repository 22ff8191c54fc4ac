"""The check for running jobs on calls of a few tokens in half precision: right calls pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ring_jax
from ring_jax import ring_attention

CALLS = 60


@pytest.mark.nightly(unless=["bfloat16"])  # it has the fewest digits
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_right_calls_pass(dtype: str) -> None:
    """Scores are peaked, so gradients are small differences."""

    def loss(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out = ring_attention(q, k, v, axis_name=None, window=(2, 9), softmax_scale=0.3)
        return (out * dout).astype(jnp.float32).sum()

    with ring_jax.check():
        grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        for seed in range(CALLS):
            rng = np.random.default_rng(seed)
            x = [rng.standard_normal((2, 6, 4, 8)) * size for size in (6, 1, 1, 1)]
            jax.block_until_ready(grads(*(jnp.asarray(y, dtype) for y in x)))
