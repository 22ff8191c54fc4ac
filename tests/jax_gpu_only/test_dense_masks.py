"""An array mask in the Triton kernels: exact, and hidden blocks are on no list."""

from __future__ import annotations

from typing import Any
from unittest import mock

import backends.triton_interpreter  # noqa: F401 - imported for its effect: it interprets the kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ring_core import KernelConfig
from ring_jax_gpu import operands, ring_attention
from ring_jax_gpu.block_index import block_index

T, HEADS, BLOCK = 96, 2, 16
KERNEL = KernelConfig("triton", block_q=BLOCK, block_k=BLOCK)


def _given(shape: tuple[int, ...]) -> tuple[list[Any], Any]:
    """Return q, k and v, and a mask of diagonal squares that are no multiple of a block."""
    rng, chunk = np.random.default_rng(0), np.arange(T) // 24
    mask = (chunk[:, None] == chunk) & (rng.random(shape) < 0.7)
    mask[..., 3, :] = False
    qkv = [jnp.asarray(rng.standard_normal((2, T, HEADS, 16), np.float32)) for _ in range(3)]
    return qkv, jnp.asarray(mask)


@pytest.mark.nightly(unless=["shape1"])
@pytest.mark.parametrize("shape", [(2, 1, T, T), (1, HEADS, T, T)])
def test_hidden_blocks_are_on_no_list(shape: tuple[int, ...]) -> None:
    """Lists of the forward, of dQ and of dK/dV have visible blocks only; no dbias is computed."""
    qkv, mask = _given(shape)
    visited: list[int] = []

    def counting(plain: Any) -> Any:
        def listed(kinds: Any) -> Any:
            blocks, counts = plain(kinds)
            jax.debug.callback(lambda x: visited.append(int(x)), counts.sum())
            return blocks, counts

        return listed

    @jax.jit
    def grads(qkv: Any, mask: Any) -> Any:
        def loss(qkv: Any) -> Any:
            return jnp.sum(ring_attention(*qkv, axis_name=None, mask=mask, kernel=KERNEL))

        return jax.grad(loss)(qkv)

    listed = mock.patch.object(operands, "block_index", counting(block_index))
    with listed, mock.patch.object(operands.StepWork, "bwd_dbias") as bwd_dbias:
        jax.block_until_ready(grads(qkv, mask))
        jax.effects_barrier()
    blocks = np.asarray(mask).any(axis=1).reshape(-1, T // BLOCK, BLOCK, T // BLOCK, BLOCK)
    live = blocks.any(axis=(2, 4))
    assert visited == [live.sum()] * 3
    assert not live.all()
    bwd_dbias.assert_not_called()
