"""Arrays on a mesh; nothing here knows of attention.

Global ones: the order of their tokens, and the axes they are split along. Inside ``shard_map``: how
they move along an axis, over which axes they vary, and what XLA may run beside what, by barriers
and data dependencies that it cannot undo.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ring_core import Layout

AnyMesh = Mesh | AbstractMesh
Axes = str | tuple[str, ...] | None


permute_p = Primitive("ring_permute")


def permute(x: Array, layout: Layout, dim: int, *, inverse: bool = False) -> Array:
    """Put the tokens along a dimension in the layout's order, or back in natural order.

    Linear, and its transpose is the inverse: no scatter, which is slow and, where axes are
    explicit, needs the mesh of the program around it.
    """
    return cast("Array", permute_p.bind(x, layout=layout, dim=dim % x.ndim, inverse=inverse))


def _take(x: Array, *, layout: Layout, dim: int, inverse: bool) -> Array:
    order = np.concatenate([layout.positions(rank) for rank in range(layout.cp_size)])
    return jnp.take(x, np.argsort(order) if inverse else order, axis=dim)


def _transposed(
    gradient: Array, _: Array, *, layout: Layout, dim: int, inverse: bool
) -> list[Array]:
    return [permute(gradient, layout, dim, inverse=not inverse)]


def _batched(
    args: tuple[Array], dims: tuple[int], *, layout: Layout, dim: int, inverse: bool
) -> tuple[Array, int]:
    (x,), (at,) = args, dims
    return permute(x, layout, dim + (at <= dim), inverse=inverse), at


permute_p.def_impl(_take)
permute_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(permute_p, mlir.lower_fun(_take, multiple_results=False))
ad.deflinear2(permute_p, _transposed)
batching.primitive_batchers[permute_p] = _batched


def split(x: Array, mesh: AnyMesh, dim: int, axis: str, *, whole: bool = False) -> Array:
    """Split one dimension along an axis, or leave it ``whole``; the others stay as they are."""
    dim %= x.ndim
    others = [_without(part, (axis,)) for part in _parts(x, mesh)]
    others[dim] = None if whole else axis
    return spread(x, mesh, PartitionSpec(*others))


def spread(x: Array, mesh: AnyMesh, spec: PartitionSpec) -> Array:
    """Lay an array out over the mesh."""
    explicit = AxisType.Explicit in mesh.axis_types
    lay_out: Any = jax.reshard if explicit else lax.with_sharding_constraint
    return cast("Array", lay_out(x, NamedSharding(mesh, spec)))


def free(spec: PartitionSpec, x: Array, dims: tuple[int, ...]) -> PartitionSpec:
    """A layout of ``x`` that says nothing of those of ``dims`` that it splits along no axis."""
    return PartitionSpec(*(
        PartitionSpec.UNCONSTRAINED if dim in dims and part is None and x.shape[dim] > 1 else part
        for dim, part in enumerate(spec)
    ))  # fmt: skip


def axes_along(x: Array, mesh: AnyMesh, dim: int, *others: Axes) -> Axes:
    """The axes along which a dimension is known to be split, but for ``others``."""
    axes: Any = _without(_parts(x, mesh)[dim], names_of(*others))
    return None if axes is PartitionSpec.UNCONSTRAINED else cast("Axes", axes)


def names_of(*axes: Axes) -> tuple[str, ...]:
    """All axes by name, each ``None``, one or several."""
    return tuple(
        name
        for one in axes
        for name in (one if isinstance(one, tuple) else (one,))
        if isinstance(name, str)
    )


def size_of(mesh: AnyMesh, axes: Axes) -> int:
    """Devices along axes, together."""
    return int(np.prod([mesh.shape[name] for name in names_of(axes)], dtype=int))


def _parts(x: Array, mesh: AnyMesh) -> list[Any]:
    """What splits each dimension; of auto axes only the compiler knows while it is traced."""
    traced = isinstance(x, jax.core.Tracer)
    if traced and AxisType.Explicit not in mesh.axis_types:
        return [PartitionSpec.UNCONSTRAINED] * x.ndim
    sharding = jax.typeof(x).sharding if traced else getattr(x, "sharding", None)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
    known = [part if set(names_of(part)) <= set(mesh.axis_names) else None for part in spec]
    return [*known, *[None] * (x.ndim - len(known))]


def _without(part: Any, axes: tuple[str, ...]) -> Any:
    if part is PartitionSpec.UNCONSTRAINED:
        return part
    names = tuple(name for name in names_of(part) if name not in axes)
    return names if len(names) > 1 else (names[0] if names else None)


@dataclass(frozen=True)
class Ranks:
    """The devices along a mesh axis, inside ``shard_map``; without an axis, one device alone."""

    axis_name: Hashable | None
    size: int

    def rank(self) -> Array:
        """This device's place, int32."""
        return jnp.int32(0) if self.axis_name is None else lax.axis_index(self.axis_name)

    def move[T](self, x: T, hop: int, receivers: Sequence[int] | None = None) -> T:
        """Send arrays to the rank ``hop`` ahead; what is not among ``receivers`` gets zeros."""
        to = range(self.size) if receivers is None else receivers
        pairs = [((r - hop) % self.size, r) for r in to]
        if self.axis_name is None or not pairs:
            return cast("T", jax.tree.map(jnp.zeros_like, x))

        return cast("T", jax.tree.map(lambda part: lax.ppermute(part, self.axis_name, pairs), x))

    def gather(self, x: Array, axis: int) -> Array:
        """The arrays of all ranks, one behind the other along a dimension."""
        if self.axis_name is None:
            return x
        return cast("Array", lax.all_gather(x, self.axis_name, axis=axis, tiled=True))

    def scatter(self, x: Array, axis: int) -> Array:
        """The reverse for sums: of all ranks' arrays, this rank's piece along a dimension."""
        if self.axis_name is None:
            return x
        return cast(
            "Array", lax.psum_scatter(x, self.axis_name, scatter_dimension=axis, tiled=True)
        )


def match_varying[T](arrays: T, axes: frozenset[Any]) -> T:
    """Mark arrays as varying over mesh axes.

    A replicated array that meets varying ones is copied in spirit to every device; the transpose of
    this mark sums its gradient over the devices, once.
    """

    def mark(x: Array) -> Array:
        missing = axes - _varying(x)
        return lax.pcast(x, tuple(missing), to="varying") if missing else x

    return cast("T", jax.tree.map(mark, arrays))


def varying_axes(arrays: Any) -> frozenset[Any]:
    """The mesh axes over which any of the arrays varies."""
    return frozenset().union(*(_varying(x) for x in jax.tree.leaves(arrays)))


def _varying(x: Array) -> frozenset[Any]:
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

    def order(x: Array) -> Array:
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


def _opaque_false(results: Any) -> Array | None:
    """A condition on results that never holds, though the compiler cannot know that."""
    corners = [x[(0,) * x.ndim] for x in jax.tree.leaves(results) if x.size > 0]
    if not corners:
        return None
    return jnp.stack([jnp.isnan(x) & (x == jnp.inf) for x in corners]).any()
