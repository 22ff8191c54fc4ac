"""Sequences split along an axis of a mesh: :class:`ContextParallel`, for global arrays.

It puts tokens in order and shards them, moves rows for layers beside attention, and attends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import lcm
from typing import Any, Literal, Unpack, cast, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from ring_core import (
    Layout,
    LayoutSpec,
    UnsupportedError,
    checks,
    divisor_of,
    row_checks,
    viz,
)
from ring_core.base.arguments import (
    check_foreign_options,
    refuse_foreign_options,
    with_options_of,
)
from ring_core.layouts.layout import check_layout
from ring_jax import movement
from ring_jax.attention import RingAttention
from ring_jax.collectives import (
    Axes,
    axes_along,
    free,
    names_of,
    permute,
    size_of,
    split,
    spread,
    transfer,
)
from ring_jax.global_arrays import global_attention, global_movement, specs_of
from ring_jax.kernels.plugins import AbsentKernel
from ring_jax.kernels.xla import XlaKernel
from ring_jax.meshes import check_axes, devices_of, in_one_process, numbered, with_devices
from ring_jax.movement import Halo
from ring_jax.prepare import ShardCounts, check_call, described_as, split_mask
from ring_jax.records import Array, AttentionOptions, CallOptions, CallSpec, Inputs
from ring_jax.strategies import STRATEGIES, Way
from ring_jax.tripwire import agreement

_IN_VMAP = (
    "ContextParallel.attention cannot run under jax.vmap(spmd_axis_name=...) along an axis of its mesh. "
    "Instead: use the batch dimension of q, k and v, with batch_axis=...; or call "
    "ring_jax.ring_attention here, inside jax.shard_map"
)
#: Parts of the errors that JAX raises under such a vmap, which differ by mesh, strategy and kernel.
_VMAP_ERRORS = (
    "should be of type `Manual`", "requires varying manual axes to match", "unbound axis name",
    "to be a subset of mesh.axis_names", "ManualAxisType(",
)  # fmt: skip


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

    def __init__(
        self,
        mesh: Mesh,
        axis_name: str,
        batch_axis: Axes = None,
        head_axis: Axes = None,
        layout: LayoutSpec = "zigzag",
    ) -> None:
        check_axes(mesh, axis_name, batch_axis, head_axis)
        self.mesh, self.axis_name = mesh, axis_name
        self.batch_axis, self.head_axis = batch_axis, head_axis
        self.layout: LayoutSpec = layout
        divisor_of(layout, self.cp_size)  # refuses what these devices cannot run

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, devices by their numbers: pickles are read by other processes."""
        return vars(self) | {"mesh": numbered(self.mesh)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the fields, with the devices of these numbers here.

        Raises:
            ValueError: This process has no such device.
        """
        vars(self).update(state | {"mesh": with_devices(state["mesh"])})

    @property
    def cp_size(self) -> int:
        """Number of devices that share a sequence."""
        return int(self.mesh.shape[self.axis_name])

    def layout_of(self, seq_len: int, *, pad: bool = False) -> Layout:
        """Return the layout of ``seq_len`` tokens: which device holds which of them.

        Args:
            seq_len: Number of tokens of the sequence, ``T``.
            pad: Lay out the padding, too, that :meth:`shard` adds with ``pad=True``.

        Raises:
            ValueError: The layout cannot divide this length, and ``pad`` is false; the message
                names the length to pad to.
        """
        checks.check_flag("pad", pad)
        if pad:
            return Layout.padded(self.layout, seq_len, self.cp_size)
        return Layout(self.layout, seq_len, self.cp_size)

    def shard(self, x: Array, *, dim: int = 1, pad: bool = False, fill: float = 0) -> Array:
        """Put an array in natural order into layout order, and split it along the axis.

        Args:
            x: The array, ``[..., T, ...]``.
            dim: Dimension of the sequence.
            pad: If the layout cannot divide ``T``, pad the end of the sequence to the least length
                that it can divide. Nothing remembers that: pass ``seq_len=T`` to what takes the
                result, as :meth:`attention` and :meth:`unshard`. Padding gets no gradient.
            fill: Number in the padding, for example -100 for labels.

        Raises:
            ValueError: ``x`` has no such dimension, or one that the layout cannot divide, and
                ``pad`` is false.

        Example::

            labels = cp.shard(labels, pad=True, fill=-100)  # of any length
        """
        self._check_not_in_shard_map()
        dim = movement.check_dim(x, dim)
        movement.check_fill(x, fill)
        checks.check_padding(pad, fill)
        layout = self.layout_of(x.shape[dim], pad=pad)
        if layout.pad_to is not None:
            widths = [(0, 0)] * x.ndim
            widths[dim] = 0, layout.padded_len - layout.seq_len
            x = split(x, self.mesh, dim, self.axis_name, whole=True)
            x = jnp.pad(x, widths, constant_values=fill)
        return self._moved(x, dim, whole=False)

    def unshard(self, x: Array, *, dim: int = 1, seq_len: int | None = None) -> Array:
        """Put an array back into natural order, no longer split along the axis.

        Args:
            x: The array in layout order, ``[..., T, ...]``.
            dim: Dimension of the sequence.
            seq_len: ``T``, if there is padding behind it (:meth:`shard` with ``pad=True``), which
                is left out of the result and gets no gradient.

        Raises:
            ValueError: ``x`` has no such dimension, or one that the layout cannot divide, or not
                that of ``seq_len`` tokens.
        """
        self._check_not_in_shard_map()
        dim = movement.check_dim(x, dim)
        whole = self._moved(x, dim, whole=True)
        if seq_len is None:
            return whole
        checks.padded_layout(seq_len, x.shape[dim] // self.cp_size, self.layout, self.cp_size)
        return lax.slice_in_dim(whole, 0, seq_len, axis=dim)

    def shift(
        self, x: Array, n: int, *, dim: int = 1, fill: float = 0,
        cu_seqlens: Sequence[int] | None = None, seq_len: int | None = None,
    ) -> Array:  # fmt: skip
        """Move tokens of a global array in layout order ``n`` positions on: ``out[t] = x[t - n]``.

        Positions are those of the sequence. Arguments and errors are those of
        :func:`ring_jax.shift`; ``x`` is ``[..., T, ...]``.

        Example::

            labels = cp.shift(tokens, -1, fill=-100)  # of each token the next one
        """
        dim = self._check_move(x, dim, seq_len)
        movement.check_shift(x, n, fill)
        documents = row_checks.offsets_of(cu_seqlens)
        options = {"n": int(n), "fill": fill, "cu_seqlens": documents, "seq_len": seq_len}
        spec = self._spec(x, dim)
        return cast("Array", self._over_shards(movement.shift, x, dim, options, spec, spec))

    def halo(
        self, x: Array, left: int, right: int, *, dim: int = 1,
        cu_seqlens: Sequence[int] | None = None, seq_len: int | None = None,
    ) -> Halo:  # fmt: skip
        """Return each run of consecutive tokens with its neighbours, as a row of a batch.

        Arguments and errors are those of :func:`ring_jax.halo`; ``x`` is a global array in layout
        order, ``[B, ..., T, ...]``. Devices' rows lie one behind the other along the first
        dimension of the results, so it is ``P * B * R`` long, split along the axis.

        Example::

            rows, positions, documents = cp.halo(x, 3, 0)
            y = cp.join(convolution(rows))
        """
        dim = self._check_move(x, dim, seq_len)
        row_checks.check_halo(left, right, self.layout, self.cp_size)
        documents = row_checks.offsets_of(cu_seqlens)
        options = {
            "left": int(left), "right": int(right), "cu_seqlens": documents, "seq_len": seq_len,
        }  # fmt: skip
        spec = self._spec(x, dim)
        rows = self._row_spec(spec, dim)
        ids = PartitionSpec(rows[0], None)
        out = Halo._make((rows, ids, ids))
        return cast("Halo", self._over_shards(movement.halo, x, dim, options, spec, out))

    def join(self, y: Array, *, dim: int = 1) -> Array:
        """Bring what a layer made of each run of :meth:`halo` back to an array in layout order.

        Arguments and errors are those of :func:`ring_jax.join`; ``y`` is a global array whose rows
        lie as those that :meth:`halo` returns.
        """
        self._check_not_in_shard_map()
        dim = movement.check_dim(y, dim, "y")
        row_checks.check_rows(y.shape, dim, self.layout, self.cp_size, self.cp_size)
        parts = list(self._spec(y, 0))
        batch = axes_along(y, self.mesh, 0, self.axis_name) if self._is_explicit else None
        if dim == 0:
            y_spec, spec = PartitionSpec(*parts), PartitionSpec(parts[0], *parts[2:])
        else:
            y_spec = PartitionSpec((self.axis_name, *names_of(batch)), *parts[1:])
            parts[0], parts[dim] = batch, self.axis_name
            y_spec = PartitionSpec(*(None if n == dim else part for n, part in enumerate(y_spec)))
            spec = PartitionSpec(*parts)
        return cast("Array", self._over_shards(movement.join, y, dim, {}, y_spec, spec))

    def relayout(
        self, x: Array, *, to: LayoutSpec | ContextParallel, dim: int = 1,
        seq_len: int | None = None,
    ) -> Array:  # fmt: skip
        """Return a global array in another layout, for layers that want other tokens on a device.

        Args:
            x: A global array in layout order, ``[..., T, ...]``.
            to: The layout, or a ``ContextParallel`` that has it, over the same axis, another axis
                or another mesh, of as many devices or not.
            dim: Dimension of the sequence.
            seq_len: ``T``, if there may be padding behind it in both layouts, each with the least
                that it needs; rows of padding are zeros in the result.

        On the same axis only rows that change device are sent. To another axis or mesh pieces move:
        those of the new layout, or of consecutive tokens where the numbers of devices differ; the
        array is not gathered.

        Raises:
            ValueError: An argument is malformed, or a layout cannot divide the size of ``x``.
            UnsupportedError: ``to`` is over other devices, or over the same in another order,
                inside ``jax.vmap`` or ``jax.jit``, whose programs run on one list of devices.

        Example::

            half = ContextParallel(jax.make_mesh((2,), ("cp",), devices=jax.devices()[:2]), "cp")
            x = half.relayout(layer(cp.relayout(x, to=half)), to=cp)
        """
        dim = self._check_move(x, dim, seq_len)
        source = self.layout_of(x.shape[dim])
        if seq_len is not None:
            source = Layout.padded(self.layout, seq_len, self.cp_size)
        if not isinstance(to, ContextParallel):
            make = Layout if seq_len is None else Layout.padded
            target = make(check_layout(to), source.seq_len, self.cp_size)
            return self._relaid(x, source, target, dim)
        target = to.layout_of(source.seq_len, pad=seq_len is not None)
        if (to.mesh, to.axis_name) == (self.mesh, self.axis_name):
            return self._relaid(x, source, target, dim)
        return self._relayout_over(x, to, dim, source, target)

    def _relaid(self, x: Array, source: Layout, target: Layout, dim: int) -> Array:
        """Return an array in another layout over this axis."""
        spec, options = self._spec(x, dim), {"layout": source, "to": target}
        return cast("Array", self._over_shards(movement.relaid, x, dim, options, spec, spec))

    def _relayout_over(
        self, x: Array, to: ContextParallel, dim: int, source: Layout, target: Layout
    ) -> Array:
        """Return an array in the layout of another axis or mesh.

        Devices exchange rows until each piece is one of a device there, and the pieces move. Where
        the numbers of devices differ, pieces of consecutive tokens do, and devices there exchange
        rows.
        """
        is_elsewhere = devices_of(to.mesh) != devices_of(self.mesh)
        if is_elsewhere and isinstance(x, jax.core.Tracer) and x.to_concrete_value() is None:
            raise UnsupportedError(
                f"relayout from the devices {devices_of(self.mesh)} to {devices_of(to.mesh)} inside "
                f"jax.jit or jax.vmap: one program runs on one list of devices. Instead: call it "
                f"between two jitted functions; or make both meshes of the same devices in the same "
                f"order"
            )
        is_same_size = to.cp_size == self.cp_size
        # Padded so that both numbers of devices divide it.
        unit = lcm(self.cp_size, to.cp_size)
        pad_to = -(-source.seq_len // unit) * unit
        between = Layout("contiguous", source.seq_len, self.cp_size, pad_to)
        pieces = self._relaid(x, source, target if is_same_size else between, dim)
        if to.mesh == self.mesh:
            moved = split(pieces, to.mesh, dim, to.axis_name)
        else:
            moved = transfer(pieces, to.mesh, dim, to.axis_name)
        if is_same_size:
            return moved
        return to._relaid(moved, replace(between, cp_size=to.cp_size), target, dim)

    def positions(self, seq_len: int) -> Array:
        """Return the global position of each token in layout order, int32 ``[T]``, sharded.

        If the layout cannot divide ``seq_len``, the positions from ``seq_len`` on are those of the
        padding that :meth:`shard` adds with ``pad=True``.
        """
        padded_len = self.layout_of(seq_len, pad=True).padded_len
        return self.shard(jnp.arange(padded_len, dtype=jnp.int32), dim=0)

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
        specs = specs_of(inputs, batch, self.axis_name, heads)
        manual = self._manual(call, batch, heads)
        run = global_attention(call, self.mesh, batch, heads, specs, manual)
        try:
            out, lse = run(jax.tree.map(partial(self._as_input, manual), inputs, specs))
        # There is no public way to ask for the axes of a vmap.
        except (ValueError, NameError, AssertionError) as error:
            if any(text in str(error) for text in _VMAP_ERRORS):
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
            Lines of text: the kernel of each platform, why others were not chosen, the strategy,
            the size of the program, and the plan.
        """
        call, _, way = self._check_call(q, k, v, CallOptions(return_lse=return_lse, **options))
        return explained(call, way)

    @with_options_of(RingAttention.__call__)
    def check_agreement(
        self, q: Array, k: Array, v: Array, *, return_lse: bool = False,
        **options: Unpack[AttentionOptions],
    ) -> None:  # fmt: skip
        """Compare what :meth:`attention` would do with these arguments between all processes.

        Every process of the job has to call it, outside of ``jax.jit``, best once before the first
        step. Mesh, layout, shapes, mask, options, a seed that is a number, strategy and kernels
        have to be equal, as JAX takes the programs of all processes for one. Nothing is computed;
        tracing a call compares nothing.

        Raises:
            RankMismatchError: They differ; the message, the same in all processes, says what on
                which process.
            ValueError: An argument is malformed, or traced.

        Example::

            cp.check_agreement(q, k, v, causal=True)
        """

        def facts() -> agreement.Facts:
            check_foreign_options(options)
            call_options = CallOptions(return_lse=return_lse, **options)
            call, inputs, _ = self._check_call(q, k, v, call_options)
            axes = self.axis_name, self.batch_axis, self.head_axis
            return agreement.facts_of(self.mesh, self.layout, axes, call, inputs, call_options)

        agreement.compare(facts, (q, k, v, *options.values()))

    def _check_call(
        self, q: Array, k: Array, v: Array, options: CallOptions
    ) -> tuple[CallSpec, Inputs, Way]:
        """Check a call on global arrays, and choose its kernels."""
        self._check_not_in_shard_map()
        self._check_qkv(q, k, v)
        batch, heads = self._axes(q, k)
        shards = ShardCounts(
            self.mesh.abstract_mesh, size_of(self.mesh, batch), size_of(self.mesh, heads),
            self._mask_shards(options.mask, batch, heads), in_one_process(self.mesh, self.axis_name),
        )  # fmt: skip
        return check_call(None, self.axis_name, self.layout, self.cp_size, q, k, v, options, shards)

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
        only_xla = all(isinstance(kernel, XlaKernel | AbsentKernel) for kernel in call.kernels)
        if self._is_explicit or not only_xla:
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

    @property
    def _is_explicit(self) -> bool:
        """True if the mesh's axes are explicit: arrays' types say how they are sharded."""
        return AxisType.Explicit in self.mesh.axis_types

    def _check_move(self, x: Array, dim: int, seq_len: int | None) -> int:
        """Check an array in layout order, and return the dimension of its tokens, not negative."""
        self._check_not_in_shard_map()
        dim = movement.check_dim(x, dim)
        self.layout_of(x.shape[dim])
        if seq_len is not None:
            checks.padded_layout(seq_len, x.shape[dim] // self.cp_size, self.layout, self.cp_size)
        return dim

    def _spec(self, x: Array, dim: int) -> PartitionSpec:
        """Return the axes of an array whose dimension ``dim`` is split along this axis.

        On explicit axes these are all; others are left to the compiler.
        """
        parts = [
            axes_along(x, self.mesh, n, self.axis_name) if self._is_explicit else None
            for n in range(x.ndim)
        ]
        parts[dim] = self.axis_name
        return PartitionSpec(*parts)

    def _row_spec(self, spec: PartitionSpec, dim: int) -> PartitionSpec:
        """Return the axes of a halo's rows, which lie by device and then by sequence."""
        if dim == 0:
            return PartitionSpec(self.axis_name, None, *spec[1:])
        parts = [(self.axis_name, *names_of(spec[0])), *spec[1:]]
        parts[dim] = None
        return PartitionSpec(*parts)

    def _over_shards(
        self, function: Callable[..., Any], x: Array, dim: int, options: dict[str, Any],
        spec: PartitionSpec, out: Any,
    ) -> Any:  # fmt: skip
        """Run a function of shards over the devices along the axis.

        Args:
            function: The function, called with ``options`` and the axis, layout and dimension.
            x: Its operand, a global array.
            dim: Dimension of the sequence.
            options: Hashable options.
            spec: Axes of the operand.
            out: Axes of the results.
        """
        named = {"axis_name": self.axis_name, "layout": self.layout, "dim": dim, **options}
        if self._is_explicit:
            manual = frozenset(self.mesh.axis_names)
            x = spread(x, self.mesh, spec)
        else:
            manual = frozenset({self.axis_name})
            unsharded_dims = (n for n, part in enumerate(spec) if part is None)
            x = spread(x, self.mesh, free(spec, x, tuple(unsharded_dims)))
        return global_movement(function, tuple(named.items()), self.mesh, spec, out, manual)(x)

    def _moved(self, x: Array, dim: int, *, whole: bool) -> Array:
        """Shard a dimension in layout order, or with ``whole`` gather it in natural order."""
        layout = self.layout_of(x.shape[dim])
        if layout.name != "contiguous":
            # The permutation crosses shards, so it is of the gathered dimension.
            x = split(x, self.mesh, dim, self.axis_name, whole=True)
            x = permute(x, layout, dim, inverse=whole)
        return split(x, self.mesh, dim, self.axis_name, whole=whole)


def _advice(what: str, name: str) -> str:
    """Return advice for an axis that does not divide the batch or the heads of an array."""
    if what == "batch":
        return "pad the batch, or leave batch_axis out"
    alone = "leave head_axis out, and devices along that axis compute all heads"
    if name == "q":
        return alone
    return f"give each K/V head n times, as jnp.repeat(k, n, axis=2) and v likewise; or {alone}"


def explained(call: CallSpec, way: Way) -> str:
    """Return the text of :meth:`ContextParallel.explain`, for a call that was checked."""
    launches = STRATEGIES[call.strategy].launches(call.program)
    tables = sum(x.table.nbytes for x in launches if x.table is not None)
    return (
        f"{way.describe()}\n"
        f"program            {len(launches)} launches or loops of them, forward and backward; "
        f"{tables:,} bytes of work items of all ranks\n"
        f"{viz.describe(call.program, pictures=False)}"
    )
