"""Attention on this device's shards: :func:`ring_attention`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Unpack, overload

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from ring_core import KernelConfig, LayoutSpec, Mask, StrategyConfig
from ring_core.base.arguments import refuse_foreign_options
from ring_jax.autodiff import attend
from ring_jax.prepare import axis_size, check_call, prepared
from ring_jax.records import Array, AttentionOptions, CallOptions, Kernel, Window


@dataclass(frozen=True)
class RingAttention:
    """The function :func:`ring_attention`, over the kernels of installed packages or given ones.

    Attributes:
        kernels: The kernels to choose from, the fastest first; ``None`` takes those of the
            installed packages.
    """

    kernels: tuple[Kernel, ...] | None = None

    @overload
    def __call__(
        self, q: Array, k: Array, v: Array, *, axis_name: Hashable | None, layout: LayoutSpec = ...,
        return_lse: Literal[False] = ..., **options: Unpack[AttentionOptions],
    ) -> Array: ...  # fmt: skip
    @overload
    def __call__(
        self, q: Array, k: Array, v: Array, *, axis_name: Hashable | None, layout: LayoutSpec = ...,
        return_lse: Literal[True], **options: Unpack[AttentionOptions],
    ) -> tuple[Array, Array]: ...  # fmt: skip
    @overload
    def __call__(
        self, q: Array, k: Array, v: Array, *, axis_name: Hashable | None, layout: LayoutSpec = ...,
        return_lse: bool, **options: Unpack[AttentionOptions],
    ) -> Array | tuple[Array, Array]: ...  # fmt: skip
    @refuse_foreign_options
    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        axis_name: Hashable | None,
        layout: LayoutSpec = "contiguous",
        seq_len: int | tuple[int, int] | None = None,
        causal: bool = False,
        window: Window | None = None,
        chunk_size: int | None = None,
        cu_seqlens: Sequence[int] | None = None,
        segment_ids: Array | tuple[Array, Array] | None = None,
        mask: Mask | Array | None = None,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
        bias: Array | None = None,
        alibi_slopes: Array | None = None,
        dropout_p: float = 0.0,
        dropout_seed: int | Array | None = None,
        deterministic: bool = False,
        return_lse: bool = False,
        kernel: str | KernelConfig = "auto",
        strategy: str | StrategyConfig = "auto",
        transport: str = "auto",
    ) -> Array | tuple[Array, Array]:
        """Compute exact attention over a sequence whose shards lie along a mesh axis.

        Called inside ``jax.shard_map`` with this device's shards, whose tokens are those of the
        ``layout``; returns this device's slice of the answer of dense attention,
        ``softmax(softmax_scale * q @ k.T + ...) @ v``. Works under ``jit``, ``grad``, ``vmap``,
        ``scan`` and ``checkpoint``; arrays may be traced, all else is static.

        Args:
            q: ``[B, T_local, H, D]``, float16, bfloat16, float32 or float64.
            k: ``[B, T_kv_local, K, D]`` with ``H % K == 0``; query head ``h`` uses K/V head ``h //
                (H // K)``.
            v: ``[B, T_kv_local, K, Dv]``.
            axis_name: The mesh axis along which the sequence is sharded, or a tuple of axes in any
                order; ``None`` is one device.
            layout: Which device holds which tokens: ``contiguous``; ``zigzag`` or ``striped``, in
                which causal work is even; or what :func:`ring_core.balanced_layout` returns, in
                which the work of a mask is even.
            seq_len: ``T``, the number of tokens of the sequence, where it is padded at the end to a
                length that the layout can divide, as :meth:`ContextParallel.shard` does with
                ``pad=True``; or a pair ``(T_q, T_kv)``. Positions from ``T`` on are padding: they
                see nothing and are not seen, ``out`` is 0 there and ``lse`` ``-inf``, and gradients
                are 0.
            causal: The query at position ``i`` sees keys ``j <= i``. With more keys than queries,
                positions are ``i + T_kv - T_q``; fewer keys need ``mask=Mask(causal=True)``.
            window: ``(left, right)``: sees ``i - left <= j <= i + right``; ``None`` leaves a side
                unbounded.
            chunk_size: Sees keys of its own chunk of this many positions only.
            cu_seqlens: ``(0, ..., T)``, global offsets of packed documents; they see themselves
                only.
            segment_ids: int32 ``[B, T_local]``, or of a type that int32 holds, or a pair (queries',
                keys'), in layout order: equal ids see each other, negative ones see nothing and are
                not seen.
            mask: A :class:`ring_core.Mask` in place of the four options above; the way to a
                predicate.
                Or booleans ``[T_local, T_kv]`` or ``[B or 1, H or 1, T_local, T_kv]``, true where a
                query may see a key: rows in layout order, columns for all keys in natural order, at
                most 64 MiB per device; beside the other options, and without a gradient. Blocks
                that all heads hide are skipped.
            softmax_scale: Default ``D ** -0.5``.
            softcap: Scores become ``softcap * tanh(scores / softcap)``, before bias and mask.
            sinks: ``[H]`` or ``[H, n]``: logits that take softmax mass and yield no value.
                Replicated along the axis; their gradient is the whole sum on every mesh;
                taken inside ``shard_map(check_vma=False)`` it is this device's part.
            bias: ``[B or 1, H or 1, T_local, T_kv]``, added to the scores: rows in layout order,
                columns for all keys in natural order; has a gradient; ``-inf`` masks.
            alibi_slopes: ``[H]`` or ``[B, H]``: adds ``-slope * abs(i - j)``; no gradient.
            dropout_p: Probability to drop a softmax weight; which ones depends on ``dropout_seed``
                and global indices alone, not on ring size, layout or kernel. Batch rows and heads
                count from 0 on this device; ``ContextParallel`` counts them over the mesh,
                and inside ``shard_map`` a data-parallel rank goes into the seed.
            dropout_seed: An integer in ``[0, 2**64)``, numpy's too, an integer scalar, or uint32
                ``[2]`` (low word first); equal on all devices, may be traced: then a negative one
                counts by its bits.
            deterministic: Only use kernels whose backward repeats bit for bit.
            return_lse: Return ``lse`` too.
            kernel: ``auto``, a name or a :class:`KernelConfig`. ``xla`` runs everywhere; ``triton``
                and ``cudnn`` of ``ring-jax-gpu`` on NVIDIA GPUs, ``pallas`` of ``ring-jax-tpu`` on
                TPUs. ``auto`` takes the fastest of those installed, for the platform that the
                program is lowered for. A kernel that is named never falls back.
            strategy: ``ring``: K/V shards go from device to device, a step at a time. ``balanced``:
                a ring over contiguous shards whose idle devices compute for busy ones, so that
                causal work is even. ``gather``: all K/V shards go to each device, beside the own
                block, then one kernel over all of them: fewer merges, more memory. ``ulysses``:
                devices trade tokens for heads, and each attends to all tokens with a part of the
                heads. ``StrategyConfig("hybrid", ulysses_size=U, outer="ring")``, or ``"gather"``:
                groups of ``U`` consecutive devices trade, and K/V travel between groups. ``auto``
                is, between GPUs of one process, ``ulysses`` where that moves at most 55 % of the
                bytes of a gather; else between three or more of them ``gather`` where that takes at
                most three times the memory of a ring and fetches no more shards; else ``ring``;
                :meth:`ContextParallel.explain` says why.
            transport: How bytes move: ``xla``, by XLA's collectives. ``auto`` is ``xla``.

        Returns:
            ``out [B, T_local, H, Dv]`` in the inputs' dtype; with ``return_lse`` also ``lse [B, H,
            T_local]``, natural log, float32 (float64 for float64 inputs), differentiable, ``-inf``
            where a row is fully masked (its ``out`` is 0).

        Raises:
            ValueError: An argument is malformed, or a jax array where it must be static.
            UnsupportedError: No kernel, or not the one named, can do this; or the program is
                lowered for a platform whose installed kernels cannot be used.

        Reference: Liu, Zaharia, Abbeel, "Ring attention with blockwise transformers for
        near-infinite context", arXiv 2310.01889.
        """
        call, inputs, _ = check_call(
            self.kernels, axis_name, layout, axis_size(axis_name), q, k, v,
            CallOptions(
                seq_len, causal, window, chunk_size, cu_seqlens, segment_ids, mask, softmax_scale,
                softcap, sinks, bias, alibi_slopes, dropout_p, dropout_seed, deterministic,
                return_lse, kernel, strategy, transport,
            ),
        )  # fmt: skip
        inputs, run = prepared(call, inputs), partial(attend, call)
        mesh = mesh_of(inputs) if axis_name is None else None
        if mesh is not None:  # kernels make arrays of their own, which lie on no mesh
            run = jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
        out, lse = run(inputs)
        return (out, lse) if return_lse else out


ring_attention = RingAttention()


def mesh_of(arrays: Any) -> AbstractMesh | None:
    """Return the mesh with explicit axes that replicates the arrays; ``None`` if they are on none.

    Raises:
        ValueError: They are split over such axes, so that no device could compute alone.
    """
    mesh = None
    for x in jax.tree.leaves(arrays):
        sharding = jax.typeof(x).sharding
        if AxisType.Explicit in sharding.mesh.axis_types:
            mesh = sharding.mesh
            split = [axis for axis in sharding.spec if axis is not None]
            if split:
                raise ValueError(
                    f"axis_name=None runs on one device, and an array of shape {x.shape} is split "
                    f"over mesh axes {split}; name the axis inside jax.shard_map, use "
                    f"ContextParallel, or gather it with jax.reshard(x, jax.P())"
                )
    return mesh
