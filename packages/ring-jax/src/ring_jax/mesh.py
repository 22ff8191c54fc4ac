"""Global arrays: the order of their tokens, and the axes of a mesh they are split along."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

Array = jax.Array
AnyMesh = Mesh | AbstractMesh
Axes = str | tuple[str, ...] | None
Order = np.ndarray[tuple[int], np.dtype[np.int64]]


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def in_order(x: Array, order: Order, dim: int) -> Array:
    """The slices of a dimension in another order, a permutation.

    Its gradient is the reverse permutation: no scatter, which is slow and, where axes are explicit,
    needs the mesh of the program around it.
    """
    return jnp.take(x, order, axis=dim)


def _forward(x: Array, order: Order, dim: int) -> tuple[Array, None]:
    return in_order(x, order, dim), None


def _backward(order: Order, dim: int, _: None, gradient: Array) -> tuple[Array]:
    return (in_order(gradient, np.argsort(order), dim),)


in_order.defvjp(_forward, _backward)


def split(x: Array, mesh: AnyMesh, dim: int, axis: str, *, whole: bool = False) -> Array:
    """Split one dimension along an axis, or leave it ``whole``; the others stay as they are."""
    dim %= x.ndim
    others = [_without(part, (axis,)) for part in _parts(x, mesh)]
    others[dim] = None if whole else axis
    return spread(x, mesh, PartitionSpec(*others))


def spread(x: Array, mesh: AnyMesh, spec: PartitionSpec) -> Array:
    """Lay an array out over the mesh."""
    sharding = NamedSharding(mesh, spec)
    if AxisType.Explicit in mesh.axis_types:
        return cast("Array", jax.reshard(x, sharding))
    return cast("Array", lax.with_sharding_constraint(x, sharding))


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
