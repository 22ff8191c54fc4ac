"""Moving arrays along a mesh axis. Nothing here knows of attention."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import cast

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

        def permute(leaf: jax.Array) -> jax.Array:
            moved: jax.Array = lax.ppermute(leaf, self.axis_name, pairs)
            return moved

        return cast("T", jax.tree.map(permute, x))

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """The arrays of all ranks, one behind the other along a dimension."""
        if self.axis_name is None:
            return x
        gathered: jax.Array = lax.all_gather(x, self.axis_name, axis=axis, tiled=True)
        return gathered

    def scatter(self, x: jax.Array, axis: int) -> jax.Array:
        """The reverse for sums: of all ranks' arrays, this rank's piece along a dimension."""
        if self.axis_name is None:
            return x
        piece: jax.Array = lax.psum_scatter(x, self.axis_name, scatter_dimension=axis, tiled=True)
        return piece
