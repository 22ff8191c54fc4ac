"""Moving arrays along a mesh axis. Nothing here knows of attention."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Ring:
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


def together[*Ts](*values: *Ts) -> tuple[*Ts]:
    """Keep the compiler from moving work on one of these ahead of another.

    Transfers that are tied to the result of the kernel beside them can be neither hoisted above
    earlier kernels nor sunk below later ones, which is what XLA otherwise does on some targets.
    """
    return cast("tuple[*Ts]", lax.optimization_barrier(values))


def vary_alike(arrays: Any, axes: frozenset[Any]) -> Any:
    """Mark arrays as varying over mesh axes.

    A replicated array that meets varying ones is copied in spirit to every device; the transpose of
    this mark sums its gradient over the devices, once.
    """

    def mark(x: jax.Array) -> jax.Array:
        missing = axes - _varies_over(x)
        return lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(mark, arrays)


def axes_of(arrays: Any) -> frozenset[Any]:
    """The mesh axes over which any of the arrays varies."""
    return frozenset().union(*(_varies_over(x) for x in jax.tree.leaves(arrays)))


def _varies_over(x: jax.Array) -> frozenset[Any]:
    kind: Any = jax.typeof(x)
    axes: frozenset[Any] = kind.mat.varying if hasattr(kind, "mat") else kind.vma  # jax < 0.12
    return axes
