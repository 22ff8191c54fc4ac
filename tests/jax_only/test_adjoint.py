"""Inverse movements are adjoints: over all devices, ``<M x, y> == <x, M' y>``.

``M'`` is the reverse of the movement ``M``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from ring_jax.collectives import Ranks

SIZE, TOKENS = 4, 32
RANKS = Ranks("cp", SIZE)

#: A movement of a shard ``[2, T / P, 3]``, its reverse, and the layout of its result.
MOVEMENTS: dict[str, tuple[Any, Any, P]] = {
    "a hop": (lambda x: RANKS.move(x, 1), lambda y: RANKS.move(y, -1), P(None, "cp")),
    "a hop over two": (lambda x: RANKS.move(x, 3), lambda y: RANKS.move(y, -3), P(None, "cp")),
    "to some": (
        lambda x: RANKS.move(x, 1, (0, 2)), lambda y: RANKS.move(y, -1, (3, 1)), P(None, "cp")
    ),
    "gather": (lambda x: RANKS.gather(x, 1), lambda y: RANKS.scatter(y, 1), P("cp")),
}  # fmt: skip


def numbers(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def same(result: tuple[jax.Array, jax.Array], expected: tuple[jax.Array, jax.Array]) -> None:
    """Check that dot products are equal, and not trivially zero."""
    moved, returned = (
        float(np.vdot(*(np.asarray(x, np.float64) for x in pair))) for pair in (result, expected)
    )
    assert abs(moved) > 1e-3
    np.testing.assert_allclose(moved, returned, rtol=1e-4)


@pytest.mark.parametrize("name", MOVEMENTS)
def test_the_return_of_a_movement_is_its_adjoint(name: str) -> None:
    there, back, lies = MOVEMENTS[name]
    mesh = jax.make_mesh((SIZE,), ("cp",), (AxisType.Auto,))
    x, split = numbers(0, 2, TOKENS, 3), P(None, "cp")
    moved = jax.shard_map(there, mesh=mesh, in_specs=split, out_specs=lies, check_vma=False)(x)
    y = numbers(1, *moved.shape)
    returned = jax.shard_map(back, mesh=mesh, in_specs=lies, out_specs=split, check_vma=False)(y)
    same((moved, y), (x, returned))
