"""Movements: fill values of every dtype, and halos with traced segment ids."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ring_jax

SMALL = (jnp.int4, jnp.uint4, jnp.int8, jnp.uint32, jnp.bfloat16, jnp.float16)
SCALARS = (np.int8(1), np.int64(1), np.uint8(1), np.bool_(True), 1, True)
REAL = (np.float32(1), np.float16(1), np.float64(1), 1.0)


@pytest.mark.parametrize("dtype", SMALL, ids=lambda dtype: dtype.__name__)
def test_a_fill_may_be_any_number_of_the_dtype(dtype: Any) -> None:
    x = jnp.zeros((1, 4), dtype)
    fills: tuple[Any, ...] = SCALARS + (REAL if jnp.issubdtype(dtype, jnp.floating) else ())
    for fill in fills:
        out = ring_jax.shift(x, 1, fill=fill, axis_name=None)
        assert out.dtype == dtype
        assert out.astype(jnp.float32).tolist() == [[1, 0, 0, 0]], repr(fill)


def test_a_fill_beyond_the_dtype_is_refused() -> None:
    x = jnp.zeros((1, 4), jnp.int4)
    wrong: tuple[Any, ...] = (8, -9, np.int64(100), np.float32(0.5), "1", jnp.int32(1), None)
    for fill in wrong:
        with pytest.raises(ValueError, match=r"fill must be an integer in \[-8, 7\]"):
            ring_jax.shift(x, 1, fill=fill, axis_name=None)


def test_ids_of_a_halo_are_computed_and_not_kept_in_the_program() -> None:
    size = 4
    mesh = jax.make_mesh((size,), ("cp",))
    cp = ring_jax.ContextParallel(mesh, "cp")
    lengths = []
    for tokens in (1 << 12, 1 << 16):
        offsets = (0, 1000, 1000, tokens)
        run = jax.jit(lambda x, offsets=offsets: cp.halo(x, 3, 1, cu_seqlens=offsets))
        x = jax.device_put(jnp.ones((1, tokens), jnp.int8), jax.NamedSharding(mesh, P(None, "cp")))
        lowered = run.lower(x)
        lengths.append([len(lowered.as_text()), len(lowered.compile().as_text() or "")])
    assert abs(np.diff(lengths, axis=0)).max() < 4000, lengths
    _, positions, documents = run(x)
    layout = cp.layout_of(tokens)
    first = [np.arange(-3, layout.run_length + 1) + start for start in layout.run_positions(1)]
    np.testing.assert_array_equal(np.asarray(positions)[2:4], first)
    np.testing.assert_array_equal(np.asarray(documents)[2:4], (np.array(first) >= 1000) * 1)
