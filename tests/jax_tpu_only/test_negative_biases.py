"""Very negative finite biases in the Pallas kernels: each row's shift is subtracted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends.tpu_interpreter import interpreted

from ring_core import KernelConfig
from ring_jax.attention import RingAttention
from ring_jax.kernels.xla import XlaKernel
from ring_jax_tpu import PallasKernel

ring_attention = RingAttention((PallasKernel(), XlaKernel()))
B, T, HEADS, BLOCK = 2, 300, 2, 128


@pytest.mark.nightly(unless=["shape0-True-True"])  # others: `test_kernels`, `bias-shared`
@pytest.mark.parametrize(
    ("shape", "fused", "segmented"),
    [((1, 1), True, True), ((1, HEADS), False, False), ((B, 1), False, True)],
)
def test_negative_biases_are_exact(shape: tuple[int, int], *, fused: bool, segmented: bool) -> None:
    """Results and gradients of biased whole rows, left columns and part of a row equal XLA's.

    With segment ids the shift has a row for each sequence, also where these share the bias.
    """
    rng = np.random.default_rng(0)
    bias = rng.standard_normal((*shape, T, T), np.float32)
    bias[..., -40:, :] -= 1e10
    bias[..., :50] = np.finfo(np.float32).min
    bias[..., 100, ::2] -= 1e6
    qkv = [jnp.asarray(rng.standard_normal((B, T, HEADS, 8), np.float32)) for _ in range(3)]
    ids = jnp.asarray(np.arange(T)[None] >= np.array([[200], [45]]), jnp.int32)
    weights = jnp.asarray(rng.standard_normal((B, HEADS, T), np.float32))

    def loss(x: Any, kernel: Any) -> Any:
        *qkv, bias = x
        out, lse = ring_attention(
            *qkv, axis_name=None, causal=True, bias=bias, segment_ids=ids if segmented else None,
            kernel=kernel, return_lse=True,
        )  # fmt: skip
        return jnp.sum(out**2) + jnp.sum(lse * weights), (out, lse)

    run = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    x = [*qkv, jnp.asarray(bias)]
    with interpreted():
        pallas = KernelConfig("pallas", BLOCK, BLOCK, fused_backward=fused)
        actual = jax.block_until_ready(run(x, pallas))
    for ours, expected in zip(*map(jax.tree.leaves, (actual, run(x, "xla"))), strict=True):
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)
