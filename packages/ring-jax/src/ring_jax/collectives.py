"""Arrays inside ``shard_map``: moved along a mesh axis; over which axes they vary.

Nothing here knows of attention.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Ranks:
    """The devices along a mesh axis, inside ``shard_map``; without an axis, one device alone."""

    axis_name: Hashable | None
    size: int

    def rank(self) -> jax.Array:
        """This device's place, int32."""
        if self.axis_name is None:
            return jnp.int32(0)
        return lax.axis_index(self.axis_name)

    def move[T](self, x: T, hop: int, receivers: Sequence[int] | None = None) -> T:
        """Send arrays to the rank ``hop`` ahead; what is not among ``receivers`` gets zeros."""
        to = range(self.size) if receivers is None else receivers
        pairs = [((r - hop) % self.size, r) for r in to]
        if self.axis_name is None or not pairs:
            return cast("T", jax.tree.map(jnp.zeros_like, x))

        def moved(part: jax.Array) -> jax.Array:
            return cast("jax.Array", lax.ppermute(part, self.axis_name, pairs))

        return cast("T", jax.tree.map(moved, x))

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """The arrays of all ranks, one behind the other along a dimension."""
        if self.axis_name is None:
            return x
        return cast("jax.Array", lax.all_gather(x, self.axis_name, axis=axis, tiled=True))

    def scatter(self, x: jax.Array, axis: int) -> jax.Array:
        """The reverse for sums: of all ranks' arrays, this rank's piece along a dimension."""
        if self.axis_name is None:
            return x
        return cast(
            "jax.Array", lax.psum_scatter(x, self.axis_name, scatter_dimension=axis, tiled=True)
        )


def match_varying[T](arrays: T, axes: frozenset[Any]) -> T:
    """Mark arrays as varying over mesh axes.

    A replicated array that meets varying ones is copied in spirit to every device; the transpose of
    this mark sums its gradient over the devices, once.
    """

    def mark(x: jax.Array) -> jax.Array:
        missing = axes - _varying(x)
        return lax.pcast(x, tuple(missing), to="varying") if missing else x

    return cast("T", jax.tree.map(mark, arrays))


def varying_axes(arrays: Any) -> frozenset[Any]:
    """The mesh axes over which any of the arrays varies."""
    return frozenset().union(*(_varying(x) for x in jax.tree.leaves(arrays)))


def _varying(x: jax.Array) -> frozenset[Any]:
    kind: Any = jax.typeof(x)
    return cast(
        "frozenset[Any]", kind.mat.varying if hasattr(kind, "mat") else kind.vma
    )  # jax < 0.12
