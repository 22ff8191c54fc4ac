"""An array mask in the Pallas kernels: exact, and hidden blocks are not visited."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends.tpu_interpreter import interpreted

from ring_core import KernelConfig
from ring_jax.attention import RingAttention
from ring_jax.kernels.xla import XlaKernel
from ring_jax_tpu import PallasKernel, backward, forward

ring_attention = RingAttention((PallasKernel(), XlaKernel()))
T, HEADS, BLOCK = 300, 2, 128


def _given(shape: tuple[int, ...]) -> tuple[list[Any], Any]:
    """Return q, k and v, and a mask: a square below, part of one above, a row that sees nothing."""
    rng, positions = np.random.default_rng(0), np.arange(T)
    mask = (positions[:, None] < 40) == (positions < 150)
    mask = np.broadcast_to(mask, shape).copy()
    mask[..., :40, :150] &= rng.random((*shape[:-2], 40, 150)) < 0.5
    mask[..., 256:, :] = False
    qkv = [jnp.asarray(rng.standard_normal((2, T, HEADS, 8), np.float32)) for _ in range(3)]
    return qkv, jnp.asarray(mask)


@pytest.mark.nightly(unless=["shape0"])
@pytest.mark.parametrize("shape", [(2, 1, T, T), (1, HEADS, T, T)])
def test_hidden_blocks_are_not_visited(shape: tuple[int, ...]) -> None:
    qkv, mask = _given(shape)
    mask = mask.at[0, :, 128:256].set(False) if shape[0] > 1 else mask
    visited: list[int] = []

    def counting(plain: Any) -> Any:
        def listed(kinds: Any) -> Any:
            jax.debug.callback(lambda x: visited.append(int(x)), (kinds > 0).sum())
            return plain(kinds)

        return listed

    def loss(qkv: Any) -> Any:
        kernel = KernelConfig("pallas", BLOCK, BLOCK, fused_backward=False)
        attend = partial(ring_attention, softmax_scale=0.3)  # traced here, not in another test
        return jnp.sum(attend(*qkv, axis_name=None, mask=mask, kernel=kernel))

    patches = [
        mock.patch.object(module, name, counting(getattr(module, name)))
        for module, name in (
            (forward, "q_major"), (backward, "q_major"), (backward, "k_major"),
        )
    ]  # fmt: skip
    with interpreted(), patches[0], patches[1], patches[2]:
        jax.block_until_ready(jax.grad(loss)(qkv))
        jax.effects_barrier()
    blocks = -(-T // BLOCK)
    edges = ((0, 0), (0, blocks * BLOCK - T), (0, blocks * BLOCK - T))
    shown = np.pad(np.asarray(mask).any(axis=1), edges)
    live = shown.reshape(-1, blocks, BLOCK, blocks, BLOCK).any(axis=(2, 4)).sum()
    assert visited == [live] * 3
    assert live < shown.shape[0] * blocks**2
