"""Moving arrays along a mesh axis. Nothing here knows of attention."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType


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


def together[*Ts](*values: *Ts) -> tuple[*Ts]:
    """Tie arrays that arrive during a kernel to that kernel's results.

    The compiler can then neither hoist all transfers above the first kernel nor sink them below the
    last, as XLA otherwise does on some TPUs.
    """
    return cast("tuple[*Ts]", lax.optimization_barrier(values))


def after[M](moved: M, results: Any) -> M:
    """On TPUs the same arrays, one element of which seems to depend on the results of a kernel.

    XLA can be told to remove barriers there (``xla_tpu_aggressive_opt_barrier_removal``); this tie
    stays. For GPUs barriers last until all is scheduled, and a tie would only copy the arrays.
    """
    found: M = lax.platform_dependent(moved, results, tpu=_tied, default=lambda moved, _: moved)
    return found


def _tied[M](moved: M, results: Any) -> M:
    never = _never(results)
    if never is None:
        return moved

    def tie(x: jax.Array) -> jax.Array:
        if x.size == 0:
            return x
        at = (0,) * x.ndim
        corner = lax.slice(x, at, (1,) * x.ndim)
        tied: jax.Array = lax.dynamic_update_slice(
            x, jnp.where(never, jnp.zeros_like(corner), corner), at
        )
        return tied

    return cast("M", jax.tree.map(tie, moved))


def read_after[A](arrays: A, results: Any) -> A:
    """The same arrays, all elements of which seem to depend on the results of a kernel.

    For what is read once, later: nothing is written, and no copy of the arrays is kept until then.
    """
    never = _never(results)
    if never is None:
        return arrays
    return cast("A", jax.tree.map(lambda x: jnp.where(never, jnp.zeros_like(x), x), arrays))


def _never(results: Any) -> jax.Array | None:
    """A condition on results that never holds, though the compiler cannot know that."""
    corners = [x[(0,) * x.ndim] for x in jax.tree.leaves(results) if x.size > 0]
    if not corners:
        return None
    never: jax.Array = jnp.stack([jnp.isnan(x) & (x == jnp.inf) for x in corners]).any()
    return never


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


def explicit_mesh(arrays: Any) -> AbstractMesh | None:
    """The mesh with explicit axes of which every device holds all of the arrays, if there is one.

    Raises:
        ValueError: They are split over such axes: then there is no one device that could run alone.
    """
    found = None
    for x in jax.tree.leaves(arrays):
        sharding = jax.typeof(x).sharding
        if AxisType.Explicit not in sharding.mesh.axis_types:
            continue
        found = sharding.mesh
        split = [axis for axis in sharding.spec if axis is not None]
        if split:
            raise ValueError(
                f"axis_name=None runs on one device, and an array of shape {x.shape} is split over "
                f"mesh axes {split}; name the axis inside jax.shard_map, use ContextParallel, or "
                f"gather it with jax.reshard(x, jax.P())"
            )
    return found
