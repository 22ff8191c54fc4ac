"""Sequences split along an axis of a mesh: :class:`ContextParallel`, for global arrays.

It puts tokens in order and shards them, moves rows for layers beside attention, and attends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Unpack, cast, overload

import jax.numpy as jnp
from jax import ShapeDtypeStruct, lax
from jax.sharding import Mesh, PartitionSpec

from ring_core import Layout, LayoutSpec, checks, divisor_of, row_checks
from ring_core.base.arguments import (
    numbers_as_python,
    refuse_foreign_options,
    with_options_of,
)
from ring_core.layouts.layout import check_layout
from ring_jax import movement
from ring_jax.attention import RingAttention
from ring_jax.collectives import Axes, split
from ring_jax.global_arrays import GlobalCall, Sharding, attend_global, check_global
from ring_jax.meshes import check_axes, check_devices, check_surroundings, numbered, with_devices
from ring_jax.movement import Halo
from ring_jax.prepare import call_with_traced_structs, structs_in
from ring_jax.records import Array, AttentionOptions, CallOptions
from ring_jax.strategies.explanation import explained
from ring_jax.tripwire import agreement


class ContextParallel:
    """Context parallelism for global arrays: sequences are split along an axis of a mesh.

    The layout says which device holds which tokens. One object owns it and the mesh, so that
    :meth:`shard`, :meth:`attention` and :meth:`unshard` cannot disagree.

    Args:
        mesh: A mesh whose axes are all explicit or all auto; it may have further axes.
        axis_name: The axis along which sequences are split.
        batch_axis: The axis, or axes, along which batches are split. Name all: along auto axes that
            neither this nor ``head_axis`` names, q, k, v, biases and masks are gathered, and each
            device computes all their rows and heads. Explicit axes need no name, and the kernel
            ``xla`` leaves unnamed axes to the compiler, which keeps the split.
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
            ValueError: There is no such device.
        """
        vars(self).update(state | {"mesh": with_devices(state["mesh"])})

    @property
    def cp_size(self) -> int:
        """Number of devices that share a sequence."""
        return self._sharding.cp_size

    @property
    def _sharding(self) -> Sharding:
        """Sharding of arrays in layout order."""
        return Sharding(self.mesh, self.axis_name, self.layout)

    @numbers_as_python
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
        return self._sharding.layout_of(seq_len, pad=pad)

    @numbers_as_python
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
        dim = self._sharding.check_dim(x, dim)
        movement.check_fill(x, fill)
        checks.check_padding(pad, fill)
        layout = self.layout_of(x.shape[dim], pad=pad)
        if layout.pad_to is not None:
            # Padded in natural order: behind the last token, wherever the layout puts it then.
            missing = [0] * dim + [layout.padded_len - layout.seq_len] + [0] * (x.ndim - dim - 1)
            x = split(x, self.mesh, dim, self.axis_name, whole=True)
            x = jnp.pad(x, [(0, n) for n in missing], constant_values=fill)
        return self._sharding.split(x, dim)

    @numbers_as_python
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
        dim, _ = self._sharding.check_tokens(x, dim, seq_len)
        whole = self._sharding.split(x, dim, whole=True)
        return whole if seq_len is None else lax.slice_in_dim(whole, 0, seq_len, axis=dim)

    @numbers_as_python
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
        dim, _ = self._sharding.check_tokens(x, dim, seq_len)
        movement.check_shift(x, n, fill)
        documents = row_checks.offsets_of(cu_seqlens)
        options = {"n": int(n), "fill": fill, "cu_seqlens": documents, "seq_len": seq_len}
        spec = self._sharding.spec(x, dim)
        return cast("Array", self._sharding.run(movement.shift, x, dim, options, spec, spec))

    @numbers_as_python
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
        dim, _ = self._sharding.check_tokens(x, dim, seq_len)
        row_checks.check_halo(left, right, self.layout, self.cp_size)
        documents = row_checks.offsets_of(cu_seqlens)
        sides = {"left": int(left), "right": int(right)}
        options = {**sides, "cu_seqlens": documents, "seq_len": seq_len}
        spec = self._sharding.spec(x, dim)
        rows = self._sharding.row_spec(spec, dim)
        ids = PartitionSpec(rows[0], None)
        out = Halo._make((rows, ids, ids))
        return cast("Halo", self._sharding.run(movement.halo, x, dim, options, spec, out))

    @numbers_as_python
    def join(self, y: Array, *, dim: int = 1) -> Array:
        """Bring what a layer made of each run of :meth:`halo` back to an array in layout order.

        Arguments and errors are those of :func:`ring_jax.join`; ``y`` is a global array whose rows
        lie as those that :meth:`halo` returns.
        """
        dim = self._sharding.check_dim(y, dim, "y")
        row_checks.check_rows(y.shape, dim, self.layout, self.cp_size, self.cp_size)
        spec = self._sharding.spec(y, dim)
        if dim == 0:
            spec = PartitionSpec(spec[0], *spec[2:])
        rows = self._sharding.row_spec(spec, dim)
        return cast("Array", self._sharding.run(movement.join, y, dim, {}, rows, spec))

    @numbers_as_python
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
        dim, source = self._sharding.check_tokens(x, dim, seq_len)
        if isinstance(to, ContextParallel):
            # Of as many devices, pieces only come to lie there: no program runs on that mesh.
            check_surroundings(to.mesh, to.axis_name, compiles_here=to.cp_size != self.cp_size)
        target = (
            Sharding(to.mesh, to.axis_name, to.layout) if isinstance(to, ContextParallel)
            else replace(self._sharding, layout=check_layout(to))
        )  # fmt: skip
        return self._sharding.relayout(x, dim, source, target, pad=seq_len is not None)

    @numbers_as_python
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
        ``mask`` that is an array. Arrays that lie otherwise on the mesh are resharded first.
        """
        call = self._check_call(q, k, v, CallOptions(return_lse=return_lse, **options))
        out, lse = attend_global(call, self.mesh)
        return (out, lse) if return_lse else out

    @refuse_foreign_options
    @with_options_of(RingAttention.__call__)
    def explain(
        self, q: Array | ShapeDtypeStruct, k: Array | ShapeDtypeStruct, v: Array | ShapeDtypeStruct, *,
        return_lse: bool = False, **options: Unpack[AttentionOptions],
    ) -> str:  # fmt: skip
        """Say what :meth:`attention` would do with these arguments, computing nothing.

        A ``jax.ShapeDtypeStruct`` may be in the place of q, k and v, at run time also of options
        that are arrays: it counts as one that is traced, as in ``jax.jit(...).lower``.

        Returns:
            Lines of text: the kernel of each platform, why others were not chosen, the strategy,
            the size of the program, and the plan.
        """

        def explain(q: Array, k: Array, v: Array, options: AttentionOptions) -> str:
            call_options = CallOptions(return_lse=return_lse, **options)
            call = self._check_call(q, k, v, call_options)
            return explained(call.spec, call.way)

        text = call_with_traced_structs(explain, q, k, v, options)
        # As traced arrays they had lost their shardings.
        check_devices(structs_in({"q": q, "k": k, "v": v, **options}), self.mesh)
        return text

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

        # Under this name for its errors, which all processes have to hear of.
        @refuse_foreign_options
        @with_options_of(RingAttention.__call__)
        def check_agreement(
            *, return_lse: bool = False, **options: Unpack[AttentionOptions]
        ) -> agreement.Signature:
            call_options = CallOptions(return_lse=return_lse, **options)
            spec, inputs, *_ = self._check_call(q, k, v, call_options)
            axes = self.axis_name, self.batch_axis, self.head_axis
            return agreement.signature_of(self.mesh, self.layout, axes, spec, inputs, call_options)

        own = partial(check_agreement, return_lse=return_lse, **options)
        agreement.compare(own, (q, k, v, *options.values()))

    def _check_call(self, q: Array, k: Array, v: Array, options: CallOptions) -> GlobalCall:
        """Check a call on global arrays, and choose its kernels."""
        return check_global(self._sharding, self.batch_axis, self.head_axis, q, k, v, options)
