"""Global arrays: where sequences lie on a mesh and how they move, and attention of them.

Functions of shards become jitted functions of global arrays, cached by their static arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import lcm
from typing import Any, NamedTuple, cast

import jax
from jax import lax
from jax.sharding import PartitionSpec

from ring_core import Layout, LayoutSpec, UnsupportedError, checks
from ring_jax import movement
from ring_jax.autodiff import attend
from ring_jax.collectives import (
    AnyMesh,
    Axes,
    axes_along,
    free,
    is_explicit,
    names_of,
    permute,
    size_of,
    split,
    spread,
    transfer,
)
from ring_jax.kernels.absent import AbsentKernel
from ring_jax.kernels.xla import XlaKernel
from ring_jax.meshes import (
    check_devices,
    check_divides,
    check_gradients,
    check_surroundings,
    devices_of,
    in_one_process,
    refuse_symbolic_dims,
)
from ring_jax.prepare import (
    ShardCounts,
    check_call,
    described_as,
    named_arrays,
    prepared,
    split_mask,
)
from ring_jax.records import Array, CallOptions, CallSpec, Inputs
from ring_jax.strategies import Way

_IN_VMAP = (
    "ContextParallel.attention cannot run under jax.vmap(spmd_axis_name=...) along an axis of its mesh, nor "
    "under a vmap over arrays that are split along the mapped dimension on explicit axes. Instead: use the "
    "batch dimension of q, k and v, with batch_axis=...; or call ring_jax.ring_attention here, inside "
    "jax.shard_map"
)
#: Parts of the errors that JAX raises under such a vmap, which differ by mesh, strategy and kernel.
_VMAP_ERRORS = (
    "should be of type `Manual`", "requires varying manual axes to match", "unbound axis name",
    "to be a subset of mesh.axis_names", "ManualAxisType(",
)  # fmt: skip


class GlobalCall(NamedTuple):
    """A checked call on global arrays.

    Attributes:
        spec: What is static of it: shapes, plan, strategy, kernels.
        inputs: Its arrays.
        way: The choice of strategy and kernels, with its reasons.
        batch, heads: Axes along which batch and heads are split.
    """

    spec: CallSpec
    inputs: Inputs
    way: Way
    batch: Axes
    heads: Axes


def check_global(
    sharding: Sharding, batch_axis: Axes, head_axis: Axes, q: Array, k: Array, v: Array,
    options: CallOptions,
) -> GlobalCall:  # fmt: skip
    """Check a call on global arrays, and choose its strategy and kernels.

    Args:
        sharding: How tokens are split.
        batch_axis, head_axis: Axes that the user named for batch and heads.
        q, k, v: Arrays ``[B, T, heads, head_dim]``.
        options: All other arguments of the user.

    Raises:
        ValueError: An argument is malformed, or a shape does not fit the mesh.
        UnsupportedError: No kernel can do the call, or none can here: see ``check_surroundings``.
    """
    mesh, axis_name = sharding.mesh, sharding.axis_name
    check_surroundings(mesh, axis_name)
    # Shapes that do not fit the mesh are refused before shard_map does it in words of its own.
    for name, x in (("q", q), ("k", k), ("v", v)):
        described_as(name, x)
        if x.ndim != 4:
            raise ValueError(
                f"{name} must have 4 dimensions [batch, sequence, heads, head_dim], got shape {x.shape}"
            )
        try:
            sharding.layout_of(x.shape[1])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        check_divides(name, x, mesh, batch_axis, head_axis)
    # Axes that are not named are those that q is known to have.
    batch = batch_axis or axes_along(q, mesh, 0, axis_name, head_axis)
    heads = head_axis or axes_along(q, mesh, 2, axis_name, batch)
    # Heads stay whole where the axis does not divide those of K/V.
    heads = None if k.shape[2] % size_of(mesh, heads) else heads
    _, dense = split_mask(options.mask)
    shape = (1, 1) if dense is None or dense.ndim != 4 else dense.shape[:2]
    mask_axes = (axis for axis, size in zip((batch, heads), shape, strict=True) if size > 1)
    shards = ShardCounts(
        mesh.abstract_mesh, size_of(mesh, batch), size_of(mesh, heads),
        size_of(mesh, names_of(axis_name, *mask_axes)), in_one_process(mesh, axis_name),
    )  # fmt: skip
    spec, inputs, way = check_call(
        None, axis_name, sharding.layout, sharding.cp_size, q, k, v, options, shards
    )
    check_devices(named_arrays(inputs), mesh)
    check_gradients(named_arrays(inputs), mesh)
    return GlobalCall(spec, inputs, way, batch, heads)


def attend_global(checked: GlobalCall, mesh: AnyMesh) -> tuple[Array, Array]:
    """Return ``(out, lse)`` of a checked call on global arrays, resharded where they lie otherwise.

    Raises:
        UnsupportedError: This is inside ``jax.vmap(spmd_axis_name=...)`` along an axis of the mesh.
    """
    call, inputs, _, batch, heads = checked
    tokens = cast("str", call.axis_name)
    specs = _specs_of(inputs, batch, tokens, heads)
    # The compiler can shard kernels in plain XLA itself, so axes that the call does not name are
    # left to it; it would replicate the arrays of any other kernel.
    manual = frozenset(mesh.axis_names)
    only_xla = all(isinstance(kernel, XlaKernel | AbsentKernel) for kernel in call.kernels)
    if only_xla and not is_explicit(mesh):
        named = names_of(batch, tokens, heads)
        manual = frozenset(name for name in manual if name in named or mesh.shape[name] == 1)

    # Axes that are not manual may shard batch and heads of 4-dimensional inputs, where their spec
    # names no axis: of q, k and v, [B, T, H, D], and of bias and mask, [B, H, T, T_kv].
    is_free = len(manual) < len(mesh.axis_names)
    free_dims = dict.fromkeys("qkv", (0, 2)) | dict.fromkeys(("bias", "mask"), (0, 1))

    def as_input(name: str, x: Any, spec: Any) -> Any:
        """Reshard an array over the mesh, unless it is ``None``."""
        if x is None:
            return None
        dims = free_dims.get(name, ())
        return spread(x, mesh, free(spec, x, dims) if is_free and dims else spec)

    run = global_attention(call, mesh, batch, heads, specs, manual)
    try:
        return run(Inputs._make(map(as_input, Inputs._fields, inputs, specs)))
    # There is no public way to ask for the axes of a vmap.
    except (ValueError, NameError, AssertionError) as error:
        if any(text in str(error) for text in _VMAP_ERRORS):
            raise UnsupportedError(_IN_VMAP) from error
        raise


def _specs_of(x: Inputs, batch: Axes, tokens: str, heads: Axes) -> Inputs:
    """Return the partition spec of each input, given the axes of batch, tokens and heads."""
    q, rows = PartitionSpec(batch, tokens, heads, None), PartitionSpec(batch, tokens)

    def by_rows(x: Array | None) -> PartitionSpec | None:
        if x is None:
            return None
        # A dimension of 1 broadcasts over batch or heads, so that each device has all of it.
        pairs = zip(x.shape[:2], (batch, heads), strict=True)
        return PartitionSpec(*(None if size == 1 else axis for size, axis in pairs), tokens, None)

    by_batch = x.slopes is not None and x.slopes.ndim == 2
    specs = (
        q, q, q, rows, rows, PartitionSpec(heads), by_rows(x.bias),
        PartitionSpec(*[batch] * by_batch, heads), PartitionSpec(), None, by_rows(x.mask), None,
    )  # fmt: skip
    return Inputs._make(
        None if array is None else spec for array, spec in zip(x, specs, strict=True)
    )


@lru_cache(maxsize=128)
def global_attention(
    call: CallSpec,
    mesh: AnyMesh,
    batch_axis: Axes,
    head_axis: Axes,
    specs: Inputs,
    manual: frozenset[str],
) -> Callable[[Inputs], tuple[Array, Array]]:
    """Return a checked call as one jitted function of global arrays.

    Args:
        call: The call.
        mesh: The mesh.
        batch_axis, head_axis: Axes along which batch and heads are sharded, or ``None``.
        specs: Partition specs of the inputs, ``None`` for those that are not given.
        manual: Axes of the mesh for ``shard_map``; the compiler shards along all others.
    """

    def local(x: Inputs) -> tuple[Array, Array]:
        batch, heads = (  # global indices of this device's first batch row and query head
            0 if axis is None else lax.axis_index(axis) * x.q.shape[dim]
            for axis, dim in ((batch_axis, 0), (head_axis, 2))
        )
        # Dropout counts batch rows and heads over the mesh, whatever devices hold them.
        return attend(call, prepared(call, x, (batch, heads)))

    rows = PartitionSpec(batch_axis, head_axis, call.axis_name)
    return jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(specs,), out_specs=(specs.q, rows), axis_names=manual
        )
    )


@dataclass(frozen=True)
class Sharding:
    """The sharding of global arrays whose tokens lie in layout order, along an axis of a mesh.

    Attributes:
        mesh: The mesh.
        axis_name: The axis along which sequences are split.
        layout: Which device along it holds which tokens.
    """

    mesh: AnyMesh
    axis_name: str
    layout: LayoutSpec

    @property
    def cp_size(self) -> int:
        """Number of devices that share a sequence."""
        return int(self.mesh.shape[self.axis_name])

    def layout_of(self, seq_len: int, *, pad: bool = False) -> Layout:
        """Return the layout of ``seq_len`` tokens, with ``pad`` padded to the least length."""
        make = Layout.padded if pad else Layout
        return make(self.layout, seq_len, self.cp_size)

    def check_dim(self, x: Array, dim: int, name: str = "x") -> int:
        """Check that a global array has dimension ``dim``, and return it, not negative.

        Raises:
            ValueError: It has none.
            UnsupportedError: This is inside ``shard_map``, where arrays are shards, or inside
                ``jax.set_mesh`` of another mesh or of other devices.
        """
        check_surroundings(self.mesh, self.axis_name)
        check_devices([(name, x)], self.mesh)
        return movement.check_dim(x, dim, name)

    def check_tokens(self, x: Array, dim: int, seq_len: int | None) -> tuple[int, Layout]:
        """Check an array in layout order.

        Returns:
            The dimension of its tokens, not negative; and their layout, padded where there is a
            ``seq_len``.

        Raises:
            ValueError: There is no such dimension, its length does not fit the layout, or the
                layout pads ``seq_len`` tokens to another length.
            UnsupportedError: This is inside ``shard_map``.
        """
        dim = self.check_dim(x, dim)
        local_len = self.layout_of(x.shape[dim]).local_len
        return dim, checks.padded_layout(seq_len, local_len, self.layout, self.cp_size)

    def split(self, x: Array, dim: int, *, whole: bool = False) -> Array:
        """Shard a dimension in layout order, or with ``whole`` gather it in natural order."""
        layout = self.layout_of(x.shape[dim])
        if layout.name != "contiguous":
            # The permutation crosses shards, so it is of the gathered dimension.
            x = split(x, self.mesh, dim, self.axis_name, whole=True)
            x = permute(x, layout, dim, inverse=whole)
        return split(x, self.mesh, dim, self.axis_name, whole=whole)

    def spec(self, x: Array, dim: int) -> PartitionSpec:
        """Return the axes of an array whose dimension ``dim`` is split along this axis.

        On explicit axes these are all; others are left to the compiler.
        """
        parts = [
            axes_along(x, self.mesh, n, self.axis_name) if is_explicit(self.mesh) else None
            for n in range(x.ndim)
        ]
        parts[dim] = self.axis_name
        return PartitionSpec(*parts)

    def row_spec(self, spec: PartitionSpec, dim: int) -> PartitionSpec:
        """Return the axes of a halo's rows, whose first dimension is split along this axis.

        With ``dim=0`` that dimension holds the runs alone. Else it is the batch times the runs: it
        is split by this axis first, then by the batch's axes.

        Args:
            spec: Axes of the array in layout order.
            dim: Its dimension of tokens.
        """
        if dim == 0:
            return PartitionSpec(self.axis_name, None, *spec[1:])
        parts = [(self.axis_name, *names_of(spec[0])), *spec[1:]]
        parts[dim] = None
        return PartitionSpec(*parts)

    def run(
        self, function: Callable[..., Any], x: Array, dim: int, options: dict[str, Any],
        spec: PartitionSpec, out: Any,
    ) -> Any:  # fmt: skip
        """Run a function of shards over the devices along the axis.

        Args:
            function: The function, called with ``options`` and the axis, layout and dimension.
            x: Its operand, a global array, which is resharded to ``spec`` first.
            dim: Dimension of the sequence.
            options: Hashable options.
            spec: Axes of the operand.
            out: Axes of the results.
        """
        refuse_symbolic_dims(x.shape)
        named = {"axis_name": self.axis_name, "layout": self.layout, "dim": dim, **options}
        explicit = is_explicit(self.mesh)
        manual = frozenset(self.mesh.axis_names if explicit else (self.axis_name,))
        x = spread(x, self.mesh, spec if explicit else free(spec, x, range(x.ndim)))
        return _global_movement(function, tuple(named.items()), self.mesh, spec, out, manual)(x)

    def relayout(self, x: Array, dim: int, source: Layout, to: Sharding, *, pad: bool) -> Array:
        """Return an array in the layout of another sharding, maybe of another axis or mesh.

        On the same axis devices exchange rows. To as many devices elsewhere, devices here exchange
        rows until each holds the piece of one device there, and the pieces move. To another number
        of devices, each here first gets consecutive tokens; these move, and devices there exchange
        rows.

        Args:
            x: The array in layout order.
            dim: Dimension of its tokens, not negative.
            source: Its layout, with any padding.
            to: The sharding that it gets.
            pad: The new layout is padded to the least length that it can divide.

        Raises:
            ValueError: Without ``pad`` the new layout cannot divide the tokens.
            UnsupportedError: The other mesh has other devices, or another order of them, and this
                is traced.
        """
        target = to.layout_of(source.seq_len, pad=pad)
        is_same_size = to.cp_size == self.cp_size
        if (to.mesh, to.axis_name) == (self.mesh, self.axis_name):
            return self._relaid(x, dim, source, target)
        is_elsewhere = devices_of(to.mesh) != devices_of(self.mesh)
        if is_elsewhere and isinstance(x, jax.core.Tracer) and x.to_concrete_value() is None:
            raise UnsupportedError(
                f"relayout from the devices {devices_of(self.mesh)} to {devices_of(to.mesh)} inside "
                f"jax.jit or jax.vmap: one program runs on one list of devices. Instead: call it "
                f"between two jitted functions; or make both meshes of the same devices in the same "
                f"order"
            )
        # Of as many devices there, pieces already are what each one gets: one exchange here, then
        # a piece a device moves. Else consecutive tokens, padded so that both numbers divide them.
        unit = lcm(self.cp_size, to.cp_size)
        pad_to = -(-source.seq_len // unit) * unit
        between = Layout("contiguous", source.seq_len, self.cp_size, pad_to)
        pieces = self._relaid(x, dim, source, target if is_same_size else between)
        move = split if to.mesh == self.mesh else transfer
        moved = move(pieces, to.mesh, dim, to.axis_name)
        if is_same_size:
            return moved
        return to._relaid(moved, dim, replace(between, cp_size=to.cp_size), target)

    def _relaid(self, x: Array, dim: int, source: Layout, target: Layout) -> Array:
        """Return an array in another layout over this axis."""
        spec, options = self.spec(x, dim), {"layout": source, "to": target}
        return cast("Array", self.run(movement.relaid, x, dim, options, spec, spec))


@lru_cache(maxsize=128)
def _global_movement(
    function: Callable[..., Any], options: tuple[tuple[str, Any], ...], mesh: AnyMesh,
    spec: PartitionSpec, out: Any, manual: frozenset[str],
) -> Callable[[Array], Any]:  # fmt: skip
    """Return a function of shards as one jitted function of a global array."""
    run = partial(function, **dict(options))
    shards = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=out, axis_names=manual)
    return jax.jit(shards, inline=True)
