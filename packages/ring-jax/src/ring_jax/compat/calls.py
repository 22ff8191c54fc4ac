"""Calls with other libraries' signatures: two functions of ejkernel, and an operation of EasyDeL.

``ring_attention`` and ``flash_attention`` have ejkernel's arguments, ``RingAttn`` has EasyDeL's.
Each translates its arguments to those of ``ring_jax``, which computes the attention.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ring_core import KernelConfig, LayoutSpec, StrategyConfig
from ring_jax.adapt import precision_of, refuse
from ring_jax.attention import ring_attention as attend
from ring_jax.compat.translate import (
    CONFIG,
    IN_SHARD_MAP,
    MASK_INFO,
    Array,
    SlidingWindow,
    bias_of,
    config_of,
    documents_of,
    logits_dtype_of,
    pad_to_one_length,
    rule_of,
    segments_of,
    sinks_of,
)
from ring_jax.context import ContextParallel


def ring_attention(
    query: Array,
    key: Array,
    value: Array,
    q_segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    softmax_aux: Array | None = None,
    bias: Array | None = None,
    mask_builder: Callable[..., Any] | None = None,
    sliding_window: SlidingWindow | None = None,
    chunk_size: int | None = None,
    causal: bool = False,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    axis_name: Hashable | None = None,
    fwd_params: object = None,
    bwd_params: object = None,
    fused_backward: bool = False,
    *,
    q_position_ids: Array | None = None,
    kv_position_ids: Array | None = None,
    mask_info: object = None,
    platform: str | None = None,
    cfg: object = None,
    mesh: object = None,
    in_specs: object = None,
    out_specs: object = None,
) -> Array:
    """Compute exact attention over a sequence whose shards lie, in order, along a mesh axis.

    Args:
        query: ``[B, T_local, H, D]``.
        key: ``[B, T_kv_local, K, D]`` with ``H % K == 0``.
        value: ``[B, T_kv_local, K, Dv]``.
        q_segment_ids: Integers ``[B, T_local]``; equal ids see each other, negative ones are
            padding. Without ``kv_segment_ids`` they are the keys' too.
        kv_segment_ids: Integers ``[B, T_kv_local]``.
        softmax_aux: Sinks, ``[H, n]``, a row per head, or ``[1, n]``, which all heads share; the
            same on every device. ``[H]`` could be either and is refused.
        bias: ``[B or 1, H or 1, T_local, T_kv]``: columns for all keys, not for this device's.
        mask_builder: Refused; a rule of one's own is a :class:`ring_core.Mask`.
        sliding_window: ``(left, right)``, the keys a query sees on each side besides its own
            position, ``None`` being no limit; an integer is both sides.
        chunk_size: A query sees keys of its own chunk of this many positions only.
        causal: A query sees keys at its own position and before.
        logits_soft_cap: Scores become ``cap * tanh(scores / cap)``.
        softmax_scale: Default ``D ** -0.5``.
        axis_name: The mesh axis the sequence is split along; ``None`` is one device.
        fwd_params: A mapping or object whose ``q_blocksize`` and ``kv_blocksize`` (or ``block_q``
            and ``block_k``) set the kernel's blocks; its other fields must be ``None``.
        bwd_params: The blocks of the backward; sizes must be those of ``fwd_params`` if both are
            given.
        fused_backward: True requires a kernel that computes dQ, dK and dV in one pass; false
            leaves it to the kernel.
        q_position_ids: Refused: positions follow from the axis and the layout.
        kv_position_ids: Refused, likewise.
        mask_info: Refused; pass its segment ids.
        platform: The kernel, as in :func:`ring_jax.ring_attention`; ``None`` is ``auto``.
        cfg: Refused; pass its ``fwd_params`` and ``bwd_params``.
        mesh: Refused; shard outside the call.
        in_specs: Refused, likewise.
        out_specs: Refused, likewise.

    Returns:
        ``[B, T_local, H, Dv]`` in the dtype of the inputs.

    Raises:
        ValueError: An argument is malformed.
        UnsupportedError: An argument cannot be honoured; the message says what to do instead.
    """
    positions = (
        "positions follow from axis_name; for tokens in another order use "
        "ring_jax.ContextParallel(mesh, axis_name, layout='zigzag' or 'striped')"
    )
    refuse(
        mask_builder=(
            mask_builder, "use ring_jax.ring_attention(mask=ring_core.Mask(predicate=...))"
        ),
        q_position_ids=(q_position_ids, positions), kv_position_ids=(kv_position_ids, positions),
        mask_info=(mask_info, MASK_INFO), cfg=(cfg, CONFIG), mesh=(mesh, IN_SHARD_MAP),
        in_specs=(in_specs, IN_SHARD_MAP), out_specs=(out_specs, IN_SHARD_MAP),
    )  # fmt: skip
    return attend(
        query, key, value, axis_name=axis_name, mask=rule_of(causal, sliding_window, chunk_size),
        segment_ids=segments_of(q_segment_ids, kv_segment_ids, query, key),
        softmax_scale=softmax_scale, softcap=logits_soft_cap,
        sinks=sinks_of(softmax_aux, query.shape[2]), bias=bias,
        kernel=config_of(platform, fwd_params, bwd_params, fused_backward=fused_backward),
    )  # fmt: skip


def flash_attention(
    query: Array,
    key: Array,
    value: Array,
    attention_mask: Array | None = None,
    bias: Array | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    dropout_seed: int | Array | None = None,
    cum_seqlens_q: Array | None = None,
    cum_seqlens_k: Array | None = None,
    sliding_window: SlidingWindow | None = None,
    fwd_params: object = None,
    bwd_params: object = None,
    logits_soft_cap: float | None = None,
    softmax_aux: Array | None = None,
    normalize_output: bool = True,
    precision: lax.PrecisionLike = lax.Precision.DEFAULT,
    logits_dtype: DTypeLike = jnp.float32,
    *,
    q_segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    block_tables: Array | None = None,
    mask_info: object = None,
    platform: str | None = None,
    cfg: object = None,
    mesh: object = None,
    in_specs: object = None,
    out_specs: object = None,
) -> Array:
    """Compute exact attention on one device.

    Args:
        query: ``[B, T, H, D]``.
        key: ``[B, T_kv, K, D]`` with ``H % K == 0``.
        value: ``[B, T_kv, K, Dv]``.
        attention_mask: Boolean or integer ``[B or 1, H or 1, T, T_kv]``; false and 0 are hidden.
        bias: ``[B or 1, H or 1, T, T_kv]``, added to the scores; has a gradient.
        softmax_scale: Default ``D ** -0.5``.
        dropout_prob: Probability to drop a softmax weight.
        causal: A query sees keys at its own position and before.
        dropout_seed: An integer below ``2**64`` or a traced one; needed where something drops.
        cum_seqlens_q: Offsets of documents, ``[n + 1]``, with a batch of one; with a larger batch
            ``[B + 1]``, differences being the lengths of its rows. Tokens behind them are padding.
        cum_seqlens_k: Offsets of the keys' documents; one side's offsets need the other's.
            ``causal`` and ``sliding_window`` need the same offsets on both sides, so that each
            document starts at the same index, whatever padding follows.
        sliding_window: See :func:`ring_attention`.
        fwd_params: See :func:`ring_attention`.
        bwd_params: See :func:`ring_attention`.
        logits_soft_cap: Scores become ``cap * tanh(scores / cap)``.
        softmax_aux: See :func:`ring_attention`.
        normalize_output: False is refused.
        precision: The default, or the highest for float32, which is what runs; others are refused.
        logits_dtype: float32, which float64 inputs surpass; float64 with these; else refused.
        q_segment_ids: See :func:`ring_attention`; not together with ``cum_seqlens_q``.
        kv_segment_ids: See :func:`ring_attention`.
        block_tables: Refused: there is no paged cache.
        mask_info: Refused; pass its segment ids or its mask.
        platform: The kernel, as in :func:`ring_jax.ring_attention`; ``None`` is ``auto``.
        cfg: Refused; pass its ``fwd_params`` and ``bwd_params``.
        mesh: Refused; shard outside the call.
        in_specs: Refused, likewise.
        out_specs: Refused, likewise.

    Returns:
        ``[B, T, H, Dv]`` in the dtype of the inputs.

    Raises:
        ValueError: An argument is malformed.
        UnsupportedError: An argument cannot be honoured; the message says what to do instead.
    """
    refuse(
        normalize_output=(
            None if normalize_output else False,
            "use ring_jax.ring_attention(return_lse=True): out * exp(lse) is not normalised",
        ),
        precision=precision_of(precision, query.dtype),
        logits_dtype=logits_dtype_of(logits_dtype, query),
        block_tables=(block_tables, "there is no paged cache; gather keys and values first"),
        mask_info=(mask_info, f"{MASK_INFO}; or pass its attention_mask"), cfg=(cfg, CONFIG),
        mesh=(mesh, IN_SHARD_MAP), in_specs=(in_specs, IN_SHARD_MAP),
        out_specs=(out_specs, IN_SHARD_MAP),
    )  # fmt: skip
    aligned = causal or sliding_window is not None
    documents = documents_of(cum_seqlens_q, cum_seqlens_k, query, key, aligned=aligned)
    segments = segments_of(q_segment_ids, kv_segment_ids, query, key)
    if documents is not None and segments is not None:
        raise ValueError(
            "q_segment_ids and cum_seqlens_q both say where documents lie; pass one of them"
        )
    tokens, bias = query.shape[1], bias_of(bias, attention_mask, query.dtype)
    if documents is not None and aligned:
        query, key, value, bias, documents = pad_to_one_length(query, key, value, bias, documents)
    out = attend(
        query, key, value, axis_name=None, mask=rule_of(causal, sliding_window),
        segment_ids=segments if documents is None else documents, softmax_scale=softmax_scale,
        softcap=logits_soft_cap, sinks=sinks_of(softmax_aux, query.shape[2]), bias=bias,
        dropout_p=dropout_prob, dropout_seed=dropout_seed,
        kernel=config_of(platform, fwd_params, bwd_params, fused_backward=False),
    )  # fmt: skip
    return out if query.shape[1] == tokens else out[:, :tokens]


@dataclass(frozen=True)
class OperationMetadata:
    """The settings that all calls of an operation share.

    Attributes:
        runtime_dtype: The dtype that queries, keys and values are cast to; ``None`` leaves them.
        runtime_softmax_dtype: ``float32`` or ``None``; the softmax is never narrower.
        sequence_axis_name: The mesh axis the sequence is split along; ``None`` is one device.
        mesh: With a mesh calls take global arrays; without one, shards inside ``jax.shard_map``.
        batch_axis_name, head_axis_name: The axes of ``mesh`` that batch and heads are split along.
        layout: The order of tokens over devices; for all but ``contiguous``, arrays must be in the
            order of ``ring_jax.ContextParallel(...).shard``.
        strategy: See :func:`ring_jax.ring_attention`.
        softmax_scale: The default for calls that pass none; ``None`` is ``D ** -0.5``.
        blocksize_q, blocksize_k: The kernel's block sizes; ``None`` leaves them to the kernel.
        operation_configs: A mapping with an object or mapping under ``ring``, which may have
            ``fwd_params``, ``bwd_params`` and ``platform``; not together with block sizes.
    """

    runtime_dtype: DTypeLike | None = None
    runtime_softmax_dtype: DTypeLike | None = None
    sequence_axis_name: str | None = None
    mesh: Mesh | None = None
    batch_axis_name: str | tuple[str, ...] | None = None
    head_axis_name: str | tuple[str, ...] | None = None
    layout: LayoutSpec = "contiguous"
    strategy: str | StrategyConfig = "auto"
    softmax_scale: float | None = None
    blocksize_q: int | None = None
    blocksize_k: int | None = None
    operation_configs: Mapping[str, Any] | None = None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["attention_outputs", "attention_weights", "cache_view"],
    meta_fields=[],
)
@dataclass(frozen=True)
class AttentionOutput:
    """The result of an operation; a pytree.

    Attributes:
        attention_outputs: ``[B, T, H, Dv]``.
        attention_weights: ``None``: they are never formed.
        cache_view: ``None``: there is no cache.
    """

    attention_outputs: Array
    attention_weights: None = None
    cache_view: None = None


class RingAttn:
    """Ring attention as an operation with EasyDeL's signature.

    Args:
        metadata: The settings that all calls share.

    Raises:
        ValueError: ``metadata`` is of another type, or has settings that contradict each other or
            need another one beside them.
        UnsupportedError: A setting cannot be honoured.

    Example::

        ring = RingAttn(OperationMetadata(mesh=mesh, sequence_axis_name="sp"))
        out = ring(query, key, value).attention_outputs
    """

    def __init__(self, metadata: OperationMetadata) -> None:
        if not isinstance(metadata, OperationMetadata):
            raise ValueError(
                f"metadata must be a ring_jax.compat.OperationMetadata, got "
                f"{type(metadata).__name__}"
            )
        axes = (metadata.batch_axis_name, metadata.head_axis_name)
        if metadata.mesh is not None and metadata.sequence_axis_name is None:
            raise ValueError("mesh needs sequence_axis_name, the axis that splits the sequence")
        if metadata.mesh is None and axes != (None, None):
            raise ValueError("batch_axis_name and head_axis_name are axes of a mesh; give mesh too")
        softmax = metadata.runtime_softmax_dtype
        refuse(
            runtime_softmax_dtype=(
                None if softmax is None or jnp.dtype(softmax) == "float32" else softmax,
                "the softmax runs in float32, and in float64 where the inputs are; leave it None",
            )
        )
        self.metadata = metadata
        self._kernel = _kernel_config(metadata)

    @staticmethod
    def get_impl_name() -> str:
        """Return the operation's name in a registry."""
        return "ring"

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        softmax_aux: Array | None = None,
        mask_info: object = None,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        sliding_window: SlidingWindow | None = None,
        causal: bool = True,
        fused_backward: bool = False,
        *,
        q_segment_ids: Array | None = None,
        kv_segment_ids: Array | None = None,
        bias: Array | None = None,
        chunk_size: int | None = None,
    ) -> AttentionOutput:
        """Attend; arguments are those of :func:`ring_attention`, but ``causal`` defaults to true.

        With ``metadata.mesh`` arrays are global, ``query [B, T, H, D]``, else this device's shards.

        Raises:
            ValueError: An argument is malformed.
            UnsupportedError: An argument cannot be honoured; the message says what to do instead.
        """
        refuse(mask_info=(mask_info, MASK_INFO))
        metadata = self.metadata
        if metadata.runtime_dtype is not None:
            query, key, value = (x.astype(metadata.runtime_dtype) for x in (query, key, value))
        ring: Any = partial(attend, axis_name=metadata.sequence_axis_name, layout=metadata.layout)
        if metadata.mesh is not None:
            assert metadata.sequence_axis_name is not None  # checked when this was made
            ring = ContextParallel(
                metadata.mesh, metadata.sequence_axis_name, metadata.batch_axis_name, metadata.head_axis_name,
                layout=metadata.layout,
            ).attention  # fmt: skip
        out = ring(
            query, key, value, mask=rule_of(causal, sliding_window, chunk_size),
            strategy=metadata.strategy,
            segment_ids=segments_of(q_segment_ids, kv_segment_ids, query, key),
            softmax_scale=metadata.softmax_scale if softmax_scale is None else softmax_scale,
            softcap=logits_soft_cap, sinks=sinks_of(softmax_aux, query.shape[2]), bias=bias,
            kernel=replace(self._kernel, fused_backward=fused_backward or None),
        )  # fmt: skip
        return AttentionOutput(out)


def _kernel_config(metadata: OperationMetadata) -> KernelConfig:
    """Return the kernel's settings from block sizes or ``operation_configs["ring"]``."""
    sizes = {"block_q": metadata.blocksize_q, "block_k": metadata.blocksize_k}
    config = (metadata.operation_configs or {}).get("ring")
    if config is None:
        return config_of(None, sizes, None, fused_backward=False)
    if sizes != {"block_q": None, "block_k": None}:
        raise ValueError(
            "blocksize_q and blocksize_k, and operation_configs['ring'], both say how large blocks "
            "are; pass one of them"
        )
    read = config.get if isinstance(config, Mapping) else partial(getattr, config)
    settings = (read(name, None) for name in ("platform", "fwd_params", "bwd_params"))
    return config_of(*settings, fused_backward=False)
