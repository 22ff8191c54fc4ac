"""Move, shard and order arrays on a mesh; nothing here knows of attention.

For global arrays: put tokens into the order of a layout, and shard dimensions along axes. Inside
``shard_map``: move arrays along an axis, mark the axes that they vary over, and tell XLA which
transfers run beside which kernels, by barriers, and by data dependencies where it may remove these.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ring_core import Layout

AnyMesh = Mesh | AbstractMesh
Axes = str | tuple[str, ...] | None


permute_p = Primitive("ring_permute")


def permute(x: Array, layout: Layout, dim: int, *, inverse: bool = False) -> Array:
    """Put the tokens along a dimension in the layout's order, or back in natural order.

    It is a primitive of its own, so that its transpose is the inverse permutation. The transpose of
    ``jnp.take`` is a scatter, which is slow and, with explicit axes, needs the mesh of the program
    around it.
    """
    return cast("Array", permute_p.bind(x, layout=layout, dim=dim % x.ndim, inverse=inverse))


def _permute(x: Array, *, layout: Layout, dim: int, inverse: bool) -> Array:
    """Concatenate the tokens of rank 0, rank 1 and so on along the dimension, or undo that."""
    before, length, after = x.shape[:dim], layout.run_length, x.shape[dim + 1 :]
    if layout.stride > 1:  # a token of each rank, and again: a matrix, transposed
        size = layout.cp_size
        matrix = x.reshape(*before, *((size, length) if inverse else (length, size)), *after)
        return matrix.swapaxes(dim, dim + 1).reshape(x.shape)
    # Runs move whole. The one at `order[n]` in the sequence comes to place n of the ranks', and
    # goes back by the inverse, its argsort.
    order = layout.run_positions(np.arange(layout.cp_size)).reshape(-1) // length
    runs = x.reshape(*before, len(order), length, *after)
    order = np.argsort(order) if inverse else order
    return jnp.take(runs, order, axis=dim).reshape(x.shape)


def _permute_batched(
    args: tuple[Array], dims: tuple[int], *, layout: Layout, dim: int, inverse: bool
) -> tuple[Array, int]:
    """Permute all of a batch at once; a batch dimension before ``dim`` shifts it by one."""
    (x,), (batch_dim,) = args, dims
    return permute(x, layout, dim + (batch_dim <= dim), inverse=inverse), batch_dim


permute_p.def_impl(_permute)
permute_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(permute_p, mlir.lower_fun(_permute, multiple_results=False))
# Gradients go back by the inverse permutation.
ad.deflinear2(
    permute_p,
    lambda gradient, _, *, inverse, **params: [
        permute_p.bind(gradient, inverse=not inverse, **params)
    ],
)
batching.primitive_batchers[permute_p] = _permute_batched


def split(x: Array, mesh: AnyMesh, dim: int, axis: str, *, whole: bool = False) -> Array:
    """Shard one dimension along an axis, or gather it if ``whole``.

    The others stay as they are, but one that was sharded along the same axis is gathered along it.
    """
    dim %= x.ndim
    others = [_without(part, (axis,)) for part in _parts(x, mesh)]
    others[dim] = None if whole else axis
    return spread(x, mesh, PartitionSpec(*others))


def transfer(x: Array, mesh: AnyMesh, dim: int, axis: str) -> Array:
    """Move an array to another mesh, one dimension sharded along an axis there.

    Others are sharded along axes of the same names, where these divide them.
    """
    others = [
        None if part is PartitionSpec.UNCONSTRAINED or size % size_of(mesh, part) else part
        for part, size in zip((_without(y, (axis,)) for y in _parts(x, mesh)), x.shape, strict=True)
    ]
    others[dim] = axis
    return cast("Array", jax.device_put(x, NamedSharding(mesh, PartitionSpec(*others))))


def spread(x: Array, mesh: AnyMesh, spec: PartitionSpec) -> Array:
    """Reshard an array over the mesh, by ``reshard`` on explicit axes, else by a constraint."""
    reshard: Any = jax.reshard if is_explicit(mesh) else lax.with_sharding_constraint
    return cast("Array", reshard(x, NamedSharding(mesh, spec)))


def is_explicit(mesh: AnyMesh) -> bool:
    """Return True if any axis of the mesh is explicit: arrays' types say how they are sharded."""
    return AxisType.Explicit in mesh.axis_types


def free(spec: PartitionSpec, x: Array, dims: Sequence[int]) -> PartitionSpec:
    """Return ``spec`` with the sharding of ``dims`` left to the compiler, unless it names axes.

    It has an entry for each dimension of ``x``. Dimensions of size 1 stay as they are.
    """
    return PartitionSpec(*(
        PartitionSpec.UNCONSTRAINED if dim in dims and part is None and x.shape[dim] > 1 else part
        for dim, part in enumerate(spec)
    ))  # fmt: skip


def axes_along(x: Array, mesh: AnyMesh, dim: int, *others: Axes) -> Axes:
    """Return the axes that a dimension is known to be sharded along, except ``others``."""
    axes: Any = _without(_parts(x, mesh)[dim], names_of(*others))
    return None if axes is PartitionSpec.UNCONSTRAINED else cast("Axes", axes)


def names_of(*axes: Axes) -> tuple[str, ...]:
    """Return the names of axes, of which each argument is ``None``, one or several."""
    return tuple(
        name
        for names in axes
        for name in (names if isinstance(names, tuple) else (names,))
        if isinstance(name, str)
    )


def size_of(mesh: AnyMesh, axes: Axes) -> int:
    """Return the product of the sizes of axes; 1 for ``None``."""
    return int(np.prod([mesh.shape[name] for name in names_of(axes)], dtype=int))


def _parts(x: Array, mesh: AnyMesh) -> list[Any]:
    """Return the entry of the partition spec of each dimension.

    If the array is traced and no axis is explicit, only the compiler knows them, and all are
    returned as unconstrained.
    """
    traced = isinstance(x, jax.core.Tracer)
    if traced and not is_explicit(mesh):
        return [PartitionSpec.UNCONSTRAINED] * x.ndim
    sharding = jax.typeof(x).sharding if traced else getattr(x, "sharding", None)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
    known = [part if set(names_of(part)) <= set(mesh.axis_names) else None for part in spec]
    return [*known, *[None] * (x.ndim - len(known))]


def _without(part: Any, axes: tuple[str, ...]) -> Any:
    """Remove axes from one entry of a partition spec."""
    if part is PartitionSpec.UNCONSTRAINED:
        return part
    names = tuple(name for name in names_of(part) if name not in axes)
    return names if len(names) > 1 else (names[0] if names else None)


@dataclass(frozen=True)
class Ranks:
    """The ``size`` devices along a mesh axis, inside ``shard_map``; one device without an axis.

    A longer axis has several such groups side by side, each with every ``stride``-th device of a
    stretch; what is sent stays in a device's own group.
    """

    axis_name: Hashable | None
    size: int
    stride: int = 1

    def rank(self) -> Array:
        """Return this device's index in its group, int32."""
        if self.axis_name is None:
            return jnp.int32(0)
        return lax.axis_index(self.axis_name) // self.stride % self.size

    def _groups(self) -> list[list[int]]:
        """Return the indices along the axis of the devices of each group, in order."""
        numbers = np.arange(lax.axis_size(self.axis_name)).reshape(-1, self.size, self.stride)
        return numbers.swapaxes(1, 2).reshape(-1, self.size).tolist()

    def _index_groups(self) -> list[list[int]] | None:
        """Return the groups for a collective of JAX; ``None`` if there is one."""
        groups = self._groups()
        return groups if len(groups) > 1 else None

    def move[T](self, x: T, hop: int, receivers: Sequence[int] | None = None) -> T:
        """Send arrays to the rank ``hop`` ahead, and return those that arrive.

        Ranks that are not among ``receivers`` get zeros; ``None`` is all ranks. Without an axis
        nothing moves, and the one device gets zeros.
        """
        targets = range(self.size) if receivers is None else receivers
        # Every rank is the source and the target of at most one pair, so all move at once.
        pairs = [((target - hop) % self.size, target) for target in targets]
        if self.axis_name is None or not pairs:
            return cast("T", jax.tree.map(jnp.zeros_like, x))
        axes, number = _in_order_of_mesh(self.axis_name)
        pairs = [
            (int(number[group[source]]), int(number[group[target]]))
            for group in self._groups()
            for source, target in pairs
        ]
        return cast("T", jax.tree.map(lambda part: lax.ppermute(part, axes, pairs), x))

    def gather(self, x: Array, axis: int) -> Array:
        """Concatenate the arrays of all ranks along a dimension, in the order of the ranks."""
        if self.axis_name is None:
            return x
        groups = self._index_groups()
        return cast(
            "Array",
            lax.all_gather(x, self.axis_name, axis=axis, axis_index_groups=groups, tiled=True),
        )

    def scatter(self, x: Array, axis: int) -> Array:
        """Sum the arrays of all ranks, and return this rank's piece along a dimension."""
        if self.axis_name is None:
            return x
        return cast(
            "Array",
            lax.psum_scatter(
                x, self.axis_name, scatter_dimension=axis, axis_index_groups=self._index_groups(),
                tiled=True,
            ),
        )  # fmt: skip

    def trade(self, x: Array, split: int, concat: int) -> Array:
        """Send the ``n``-th piece along ``split`` to rank ``n``, and join what all ranks send here.

        The pieces that arrive are concatenated along ``concat``, in the order of the ranks.
        """
        if self.axis_name is None:
            return x
        groups = self._index_groups()

        def send(x: Array) -> Array:
            y = lax.all_to_all(
                x, self.axis_name, split, concat, axis_index_groups=groups, tiled=True
            )
            return cast("Array", y)

        if groups is None:
            return send(x)
        # JAX has no rule for a batch of an all-to-all in groups; it is one of longer messages.
        batched: Any = custom_vmap(send)
        batched.def_vmap(lambda _size, _is_batched, x: (self.trade(x, split + 1, concat + 1), True))
        return cast("Array", batched(x))


def _in_order_of_mesh(axis_name: Hashable) -> tuple[Hashable, npt.NDArray[np.int64]]:
    """Return axes in the mesh's order, in which JAX sends, and the number of each rank in it.

    Ranks are numbered by the axes as they are named, of which the last one runs fastest.
    """
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    numbers = np.arange(lax.axis_size(axis_name))
    mesh = jax.sharding.get_abstract_mesh().axis_names
    order = sorted(range(len(names)), key=lambda n: mesh.index(names[n]) if names[n] in mesh else n)
    if order == [*range(len(names))]:
        return axis_name, numbers
    grid = numbers.reshape([lax.axis_size(name) for name in names]).transpose(order)
    return tuple(names[n] for n in order), np.argsort(grid.reshape(-1))


def match_varying[T](arrays: T, axes: frozenset[Any]) -> T:
    """Mark arrays as varying over mesh axes.

    A replicated array then counts as one copy a device; the transpose of this mark sums its
    gradient over the devices, once.
    """

    def mark(x: Array) -> Array:
        missing = axes - _varying(x)
        return lax.pcast(x, tuple(missing), to="varying") if missing else x

    return cast("T", jax.tree.map(mark, arrays))


def varying_axes(arrays: Any) -> frozenset[Any]:
    """Return the mesh axes over which any of the arrays varies."""
    return frozenset().union(*(_varying(x) for x in jax.tree.leaves(arrays)))


def _varying(x: Array) -> frozenset[Any]:
    """Return the mesh axes over which an array varies, by the name that this JAX has for them."""
    kind: Any = jax.typeof(x)
    return cast(
        "frozenset[Any]", kind.mat.varying if hasattr(kind, "mat") else kind.vma
    )  # jax < 0.12


def overlap[*Ts](*values: *Ts) -> tuple[*Ts]:
    """Tie arrays that arrive while a kernel runs to that kernel's results.

    The compiler can then neither hoist all transfers above the first kernel nor sink them below the
    last, as XLA otherwise does on some TPUs.
    """
    return cast("tuple[*Ts]", lax.optimization_barrier(values))


def order_after[M](moved: M, results: Any) -> M:
    """Return ``moved``, and on TPUs make one element of each seem to depend on a kernel's results.

    XLA can be told to remove barriers there (``xla_tpu_aggressive_opt_barrier_removal``); this
    dependency stays. For GPUs barriers last until everything is scheduled, and a dependency would
    only copy the arrays.
    """
    return cast(
        "M",
        lax.platform_dependent(moved, results, tpu=_order_after, default=lambda moved, _: moved),
    )


def _order_after[M](moved: M, results: Any) -> M:
    """Make the first element of each array depend on a condition that is never true."""
    never = _opaque_false(results)
    if never is None:
        return moved

    def order(x: Array) -> Array:
        if x.size == 0:
            return x
        start = (0,) * x.ndim
        # One element is enough for a dependency, and can be updated in place, where a select over
        # the whole array would write it anew.
        first = lax.slice(x, start, (1,) * x.ndim)
        return lax.dynamic_update_slice(x, jnp.where(never, jnp.zeros_like(first), first), start)

    return cast("M", jax.tree.map(order, moved))


def reload_after[A](arrays: A, results: Any) -> A:
    """Return the arrays, and make all elements seem to depend on a kernel's results.

    It is for arrays that are read once, later: what is made of them cannot be computed early and
    kept in memory, and the arrays themselves are not copied.
    """
    never = _opaque_false(results)
    if never is None:
        return arrays
    return cast("A", jax.tree.map(lambda x: jnp.where(never, jnp.zeros_like(x), x), arrays))


def _opaque_false(results: Any) -> Array | None:
    """Return a condition on results that never holds, though the compiler cannot know that."""
    # An element of each result is there no earlier than the kernel that writes it has ended. No
    # number is NaN and infinite at once.
    corners = [x[(0,) * x.ndim] for x in jax.tree.leaves(results) if x.size > 0]
    if not corners:
        return None
    return jnp.stack([jnp.isnan(x) & (x == jnp.inf) for x in corners]).any()
