"""Dropout seeds of every integer type: all 64 bits count, and none is negative."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ring_jax import ring_attention
from ring_jax.dropout import seed_words

SMALL, WIDE, TOP = 9, (5 << 32) + 9, (1 << 63) + 5
INTEGERS = (
    np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64,
)  # fmt: skip
WITH_X64 = {"x64": True, "x32": False}


def _words(seed: Any) -> int:
    low, high = np.asarray(seed_words(seed)).tolist()
    return int(low + (high << 32))


@pytest.mark.parametrize("x64", WITH_X64.values(), ids=WITH_X64)
@pytest.mark.parametrize("seed", [SMALL, WIDE, TOP])
@pytest.mark.parametrize("kind", [int, *INTEGERS], ids=lambda kind: str(kind.__name__))
def test_integers_of_the_host(kind: Any, seed: int, *, x64: bool) -> None:
    """Seeds may be integers of Python or numpy, or arrays without dimensions."""
    if kind is not int and seed > np.iinfo(kind).max:
        seed = int(np.iinfo(kind).max)
    with jax.enable_x64() if x64 else nullcontext():
        assert _words(kind(seed)) == seed
        assert _words(np.array(seed, kind if kind is not int else np.uint64)) == seed


@pytest.mark.parametrize("x64", WITH_X64.values(), ids=WITH_X64)
def test_arrays_of_jax(*, x64: bool) -> None:
    """Arrays of JAX, traced or not, give all their bits, 64 with x64."""
    with jax.enable_x64() if x64 else nullcontext():
        seeds = [jnp.uint32(SMALL), jnp.int32(SMALL)]
        seeds += [jnp.int64(WIDE), jnp.uint64(TOP)] if x64 else []
        for seed in seeds:
            assert _words(seed) == int(seed)
            traced = jax.jit(seed_words)(seed).tolist()
            assert traced[0] + (traced[1] << 32) == int(seed)


@pytest.mark.parametrize("x64", WITH_X64.values(), ids=WITH_X64)
@pytest.mark.parametrize(
    "seed", [-1, 1 << 64, np.int8(-1), np.int64(-1), np.array(-5), np.bool_(1), True, jnp.int32(-1),
        jax.random.key(0)],
    ids=repr,
)  # fmt: skip
def test_what_is_no_seed(seed: Any, *, x64: bool) -> None:
    x = jnp.ones((1, 4, 2, 8))
    with (
        jax.enable_x64() if x64 else nullcontext(),
        pytest.raises(ValueError, match=r"dropout_seed must be an integer in \[0, 2\*\*64\)"),
    ):
        ring_attention(x, x, x, axis_name=None, dropout_p=0.5, dropout_seed=seed)


def test_wide_seeds_differ() -> None:
    x = jax.random.normal(jax.random.key(0), (1, 16, 2, 8))
    seeds: list[Any] = [np.int64(SMALL), np.int64(WIDE), WIDE]
    outs = [
        np.asarray(ring_attention(x, x, x, axis_name=None, dropout_p=0.5, dropout_seed=seed))
        for seed in seeds
    ]
    assert not np.array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[1], outs[2])
