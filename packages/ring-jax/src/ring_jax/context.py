"""Attention of global arrays: :class:`ContextParallel`, which owns their mesh and layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from ring_core import (
    Layout,
    LayoutSpec,
    UnsupportedError,
    checks,
    divisor_of,
    viz,
)
from ring_core.base.arguments import refuse_foreign_options, with_options_of
from ring_jax.attention import RingAttention
from ring_jax.autodiff import attend
from ring_jax.collectives import (
    AnyMesh,
    Axes,
    axes_along,
    free,
    names_of,
    permute,
    size_of,
    split,
    spread,
)
from ring_jax.kernels import Selection, xla
from ring_jax.prepare import ShardCounts, check_call, described_as, prepared, split_mask
from ring_jax.records import Array, AttentionOptions, CallOptions, CallSpec, Inputs, Kernel

_IN_VMAP = (
    "ContextParallel.attention cannot run under jax.vmap(spmd_axis_name=...) along an axis of its mesh. "
    "Instead: use the batch dimension of q, k and v, with batch_axis=...; or call "
    "ring_jax.ring_attention here, inside jax.shard_map"
)


class ContextParallel:
    """Context parallelism for global arrays: sequences are split along an axis of a mesh.

    The layout says which device holds which tokens. One object owns it and the mesh, so that
    :meth:`shard`, :meth:`attention` and :meth:`unshard` cannot disagree.

    Args:
        mesh: A mesh whose axes are all explicit or all auto; it may have further axes.
        axis_name: The axis along which sequences are split.
        batch_axis: The axis, or axes, along which batches are split. Batches that are split along
            an axis that is not named stay so on explicit axes and with the kernel ``xla``; other
            kernels need its name, or auto axes make a copy for each device.
        head_axis: The axis, or axes, along which heads are split; it must divide the K/V heads.
        layout: ``zigzag`` (default), ``striped``, ``contiguous`` or the result of
            :func:`ring_core.balanced_layout`.

    Raises:
        ValueError: No such axis or layout, chunks for another number of devices, or a
            mesh that mixes explicit axes with others.

    Example::

        cp = ContextParallel(mesh, axis_name="cp")
        q, k, v = (cp.shard(x, dim=1) for x in (q, k, v))
        out = cp.unshard(cp.attention(q, k, v, causal=True), dim=1)
    """

    kernels: ClassVar[tuple[Kernel, ...]] = (xla.XlaKernel(),)

    def __init__(
        self,
        mesh: Mesh,
        axis_name: str,
        batch_axis: Axes = None,
        head_axis: Axes = None,
        layout: LayoutSpec = "zigzag",
    ) -> None:
        _check_axes(mesh, axis_name, batch_axis, head_axis)
        self.mesh, self.axis_name = mesh, axis_name
        self.batch_axis, self.head_axis = batch_axis, head_axis
        self.layout: LayoutSpec = layout
        divisor_of(layout, self.cp_size)  # refuses what these devices cannot run

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, devices by their numbers: pickles are read by other processes."""
        return vars(self) | {"mesh": _numbered(self.mesh)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the fields, with the devices of these numbers here.

        Raises:
            ValueError: This process has no such device.
        """
        vars(self).update(state | {"mesh": _with_devices(state["mesh"])})

    @property
    def cp_size(self) -> int:
        """Number of devices that share a sequence."""
        return int(self.mesh.shape[self.axis_name])

    def layout_of(self, seq_len: int) -> Layout:
        """Return the layout of ``seq_len`` tokens: which device holds which of them.

        Raises:
            ValueError: The layout cannot divide this length; the message names the length to pad
                to.
        """
        return Layout(self.layout, seq_len, self.cp_size)

    def shard(self, x: Array, *, dim: int = 1) -> Array:
        """Put an array in natural order into layout order, and split it along the axis.

        Raises:
            ValueError: ``x`` has no such dimension, or one that the layout cannot divide.
        """
        return self._moved(x, dim, whole=False)

    def unshard(self, x: Array, *, dim: int = 1) -> Array:
        """Put an array back into natural order, no longer split along the axis.

        Raises:
            ValueError: ``x`` has no such dimension, or one that the layout cannot divide.
        """
        return self._moved(x, dim, whole=True)

    def positions(self, seq_len: int) -> Array:
        """Return the global position of each token in layout order, int32 ``[T]``, sharded."""
        self.layout_of(seq_len)
        return self.shard(jnp.arange(seq_len, dtype=jnp.int32), dim=0)

    @overload
    def attention(
        self, q: Array, k: Array, v: Array, *, return_lse: Literal[False] = ...,
        **options: Unpack[AttentionOptions],
    ) -> Array: ...  # fmt: skip
    @overload
    def attention(
        self, q: Array, k: Array, v: Array, *, return_lse: Literal[True],
        **options: Unpack[AttentionOptions],
    ) -> tuple[Array, Array]: ...  # fmt: skip
    @overload
    def attention(
        self, q: Array, k: Array, v: Array, *, return_lse: bool,
        **options: Unpack[AttentionOptions],
    ) -> Array | tuple[Array, Array]: ...  # fmt: skip
    @refuse_foreign_options
    @with_options_of(RingAttention.__call__)
    def attention(
        self, q: Array, k: Array, v: Array, *, return_lse: bool = False,
        **options: Unpack[AttentionOptions],
    ) -> Array | tuple[Array, Array]:  # fmt: skip
        """Compute attention of global arrays in layout order, like :func:`ring_attention`.

        Shapes are global: ``q [B, T, H, D]``, ``bias [B or 1, H or 1, T, T_kv]``, and so is a
        ``mask`` that is an array. Arrays that lie otherwise are resharded first.
        """
        call, inputs, _ = self._check_call(q, k, v, CallOptions(return_lse=return_lse, **options))
        batch, heads = self._axes(q, k)
        specs = _specs(inputs, batch, self.axis_name, heads)
        manual = self._manual(call, batch, heads)
        run = _global_attention(call, self.mesh, batch, heads, specs, manual)
        try:
            out, lse = run(jax.tree.map(partial(self._as_input, manual), inputs, specs))
        except ValueError as error:  # there is no public way to ask for the axes of a vmap
            if "should be of type `Manual`" in str(error):
                raise UnsupportedError(_IN_VMAP) from error
            raise
        return (out, lse) if return_lse else out

    @refuse_foreign_options
    @with_options_of(RingAttention.__call__)
    def explain(
        self, q: Array, k: Array, v: Array, *, return_lse: bool = False,
        **options: Unpack[AttentionOptions],
    ) -> str:  # fmt: skip
        """Say what :meth:`attention` would do with these arguments, computing nothing.

        Returns:
            Lines of text: the kernel of each platform, why others were not chosen, the strategy
            and the plan.
        """
        call, _, choice = self._check_call(q, k, v, CallOptions(return_lse=return_lse, **options))
        return f"{choice.describe()}\nstrategy {call.strategy}, transport xla\n{viz.describe(call.program, pictures=False)}"

    def _check_call(
        self, q: Array, k: Array, v: Array, options: CallOptions
    ) -> tuple[CallSpec, Inputs, Selection]:
        self._check_not_in_shard_map()
        self._check_qkv(q, k, v)
        batch, heads = self._axes(q, k)
        shards = ShardCounts(
            self.mesh.abstract_mesh, size_of(self.mesh, batch), size_of(self.mesh, heads),
            self._mask_shards(options.mask, batch, heads),
        )  # fmt: skip
        return check_call(
            self.kernels, self.axis_name, self.layout, self.cp_size, q, k, v, options, shards
        )

    def _axes(self, q: Array, k: Array) -> tuple[Axes, Axes]:
        """Return the axes of batch and heads: those named, else those that q is known to have."""
        batch = self.batch_axis or axes_along(q, self.mesh, 0, self.axis_name, self.head_axis)
        heads = self.head_axis or axes_along(q, self.mesh, 2, self.axis_name, batch)
        return batch, None if k.shape[2] % size_of(self.mesh, heads) else heads

    def _mask_shards(self, mask: object, batch: Axes, heads: Axes) -> int:
        """Return the number of shards of a mask that is an array, over all its dimensions."""
        _, dense = split_mask(mask)
        shape = (1, 1) if dense is None or dense.ndim != 4 else dense.shape[:2]
        axes = (axis for axis, size in zip((batch, heads), shape, strict=True) if size > 1)
        return size_of(self.mesh, names_of(self.axis_name, *axes))

    def _manual(self, call: CallSpec, batch: Axes, heads: Axes) -> frozenset[str]:
        """Return the mesh axes that ``shard_map`` makes manual; the compiler handles the others.

        The compiler can shard kernels in plain XLA itself, but would replicate the arrays of any
        other kernel.
        """
        axes = frozenset(self.mesh.axis_names)
        only_xla = all(isinstance(kernel, xla.XlaKernel) for kernel in call.kernels)
        if AxisType.Explicit in self.mesh.axis_types or not only_xla:
            return axes
        named = {*names_of(self.axis_name, batch, heads)}
        return frozenset(name for name in axes if name in named or self.mesh.shape[name] == 1)

    def _as_input(self, manual: frozenset[str], x: Array, spec: PartitionSpec) -> Array:
        """Reshard an array for ``shard_map``, leaving batch and heads to auto axes."""
        auto = len(manual) < len(self.mesh.axis_names)
        return spread(x, self.mesh, free(spec, x, (0, 2)) if auto and x.ndim == 4 else spec)

    def _check_not_in_shard_map(self) -> None:
        """Refuse calls inside ``shard_map``, where arrays are shards along some axes.

        JAX cannot differentiate a ``shard_map`` over further axes in there.
        """
        mesh = jax.sharding.get_abstract_mesh()
        manual = [
            name
            for name, axis_type in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if axis_type is AxisType.Manual
        ]
        if manual:
            raise UnsupportedError(
                f"ContextParallel takes global arrays, and this is inside a jax.shard_map over "
                f"{', '.join(manual)}. Instead: let that one split {self.axis_name!r} too, and call "
                f"ring_jax.ring_attention(axis_name={self.axis_name!r}) here; or call ContextParallel "
                f"outside of it, with batch_axis or head_axis for the other axes"
            )

    def _check_qkv(self, q: Array, k: Array, v: Array) -> None:
        """Refuse shapes that do not fit the mesh, before ``shard_map`` does in words of its own."""
        for name, x in (("q", q), ("k", k), ("v", v)):
            described_as(name, x)
            if x.ndim != 4:
                raise ValueError(
                    f"{name} must have 4 dimensions [batch, sequence, heads, head_dim], got shape "
                    f"{x.shape}"
                )
            try:
                self.layout_of(x.shape[1])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            for axis, dim, what in ((self.batch_axis, 0, "batch"), (self.head_axis, 2, "heads")):
                size = size_of(self.mesh, axis)
                if x.shape[dim] % size:
                    raise ValueError(
                        f"the {what} of {name}, {x.shape[dim]}, must be a multiple of the {size} "
                        f"devices along {axis!r}. Instead: {_advice(what, name)}"
                    )

    def _moved(self, x: Array, dim: int, *, whole: bool) -> Array:
        """Shard a dimension in layout order, or with ``whole`` gather it in natural order."""
        self._check_not_in_shard_map()
        described_as("x", x)
        if not isinstance(dim, int) or isinstance(dim, bool) or not -x.ndim <= dim < x.ndim:
            raise ValueError(
                f"dim must be a dimension of x, an integer in [{-x.ndim}, {x.ndim}), got {dim!r}"
            )
        layout = self.layout_of(x.shape[dim])
        if layout.name != "contiguous":
            # The permutation crosses shards, so it is of the gathered dimension.
            x = split(x, self.mesh, dim, self.axis_name, whole=True)
            x = permute(x, layout, dim, inverse=whole)
        return split(x, self.mesh, dim, self.axis_name, whole=whole)


class _NumberedMesh(NamedTuple):
    """A :class:`jax.sharding.Mesh` with devices as numbers, which can be pickled."""

    platform: str
    ids: npt.NDArray[np.int64]
    axis_names: tuple[str, ...]
    axis_types: tuple[AxisType, ...]


def _numbered(mesh: AnyMesh) -> AbstractMesh | _NumberedMesh:
    """Replace the devices of a mesh by their numbers; an abstract mesh has none."""
    if isinstance(mesh, AbstractMesh):
        return mesh
    platform = mesh.devices.flat[0].platform
    return _NumberedMesh(platform, mesh.device_ids, mesh.axis_names, mesh.axis_types)


def _with_devices(mesh: AbstractMesh | _NumberedMesh) -> AnyMesh:
    """Make a mesh of this process's devices with the given numbers.

    Raises:
        ValueError: This process has no such device.
    """
    if isinstance(mesh, AbstractMesh):
        return mesh
    devices = {device.id: device for device in jax.devices(mesh.platform)}
    missing = sorted(set(mesh.ids.flatten().tolist()) - devices.keys())
    if missing:
        raise ValueError(
            f"this ContextParallel is of a mesh with the {mesh.platform} devices {missing}, and there are "
            f"{sorted(devices)} here; make one of a mesh of these"
        )
    array = np.empty(mesh.ids.shape, dtype=object)
    array.flat = [devices[number] for number in mesh.ids.flat]
    return Mesh(array, mesh.axis_names, axis_types=mesh.axis_types)


def _advice(what: str, name: str) -> str:
    """Return advice for an axis that does not divide the batch or the heads of an array."""
    if what == "batch":
        return "pad the batch, or leave batch_axis out"
    alone = "leave head_axis out, and devices along that axis compute all heads"
    if name == "q":
        return alone
    return f"give each K/V head n times, as jnp.repeat(k, n, axis=2) and v likewise; or {alone}"


def _specs(x: Inputs, batch: Axes, tokens: str, heads: Axes) -> Inputs:
    """Return the partition spec of each input, given the axes of batch, tokens and heads."""
    q, rows = PartitionSpec(batch, tokens, heads, None), PartitionSpec(batch, tokens)

    def by_rows(x: Array | None) -> PartitionSpec | None:
        if x is None:
            return None
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
def _global_attention(
    call: CallSpec,
    mesh: AnyMesh,
    batch_axis: Axes,
    head_axis: Axes,
    specs: Inputs,
    manual: frozenset[str],
) -> Callable[[Inputs], tuple[Array, Array]]:
    """Return a checked call as one jitted function of global arrays."""

    def local(x: Inputs) -> tuple[Array, Array]:
        batch, heads = (  # global indices of this device's first batch row and query head
            0 if axis is None else lax.axis_index(axis) * x.q.shape[dim]
            for axis, dim in ((batch_axis, 0), (head_axis, 2))
        )
        return attend(call, prepared(call, x, (batch, heads)))

    rows = PartitionSpec(batch_axis, head_axis, call.axis_name)
    return jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(specs,), out_specs=(specs.q, rows), axis_names=manual
        ),
        inline=True,
    )


def _check_axes(mesh: object, axis_name: object, batch_axis: object, head_axis: object) -> None:
    """Check that the axes are distinct axes of the mesh, all explicit or all auto."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    checks.check_choice("axis_name", axis_name, mesh.axis_names)
    arguments = {"axis_name": axis_name, "batch_axis": batch_axis, "head_axis": head_axis}
    axes_of_all: list[object] = [axis_name]
    for name, axes in (("batch_axis", batch_axis), ("head_axis", head_axis)):
        if axes is not None:
            names = axes if isinstance(axes, tuple) and axes else (axes,)
            for axis in names:
                checks.check_choice(name, axis, mesh.axis_names)
            axes_of_all += names
    if len(set(axes_of_all)) < len(axes_of_all):
        raise ValueError(f"axis_name, batch_axis and head_axis must be three axes, got {arguments}")
    types = {str(axis_type): axis_type for axis_type in mesh.axis_types}
    if AxisType.Explicit in types.values() and len(types) > 1:
        raise ValueError(
            f"the axes of the mesh must be all explicit or all auto, got "
            f"{dict(zip(mesh.axis_names, map(str, mesh.axis_types), strict=True))}; make it with "
            f"jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)})"
        )
