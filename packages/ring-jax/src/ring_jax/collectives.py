"""Arrays inside ``shard_map``: moved along a mesh axis; over which axes they vary; what overlaps.

XLA decides what runs beside what; it cannot undo barriers and data dependencies. Nothing here knows
of attention.
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
        return jnp.int32(0) if self.axis_name is None else lax.axis_index(self.axis_name)

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


def overlap[*Ts](*values: *Ts) -> tuple[*Ts]:
    """Tie arrays that arrive during a kernel to that kernel's results.

    The compiler can then neither hoist all transfers above the first kernel nor sink them below the
    last, as XLA otherwise does on some TPUs.
    """
    return cast("tuple[*Ts]", lax.optimization_barrier(values))


def order_after[M](moved: M, results: Any) -> M:
    """On TPUs the same arrays, one element of which seems to depend on the results of a kernel.

    XLA can be told to remove barriers there (``xla_tpu_aggressive_opt_barrier_removal``); this tie
    stays. For GPUs barriers last until all is scheduled, and a tie would only copy the arrays.
    """
    return cast(
        "M",
        lax.platform_dependent(moved, results, tpu=_order_after, default=lambda moved, _: moved),
    )


def _order_after[M](moved: M, results: Any) -> M:
    never = _opaque_false(results)
    if never is None:
        return moved

    def order(x: jax.Array) -> jax.Array:
        if x.size == 0:
            return x
        at = (0,) * x.ndim
        first = lax.slice(x, at, (1,) * x.ndim)
        return lax.dynamic_update_slice(x, jnp.where(never, jnp.zeros_like(first), first), at)

    return cast("M", jax.tree.map(order, moved))


def reload_after[A](arrays: A, results: Any) -> A:
    """The same arrays, all elements of which seem to depend on the results of a kernel.

    For what is read once, later: nothing is written, and no copy of the arrays is kept until then.
    """
    never = _opaque_false(results)
    if never is None:
        return arrays
    return cast("A", jax.tree.map(lambda x: jnp.where(never, jnp.zeros_like(x), x), arrays))


def _opaque_false(results: Any) -> jax.Array | None:
    """A condition on results that never holds, though the compiler cannot know that."""
    corners = [x[(0,) * x.ndim] for x in jax.tree.leaves(results) if x.size > 0]
    if not corners:
        return None
    return jnp.stack([jnp.isnan(x) & (x == jnp.inf) for x in corners]).any()
