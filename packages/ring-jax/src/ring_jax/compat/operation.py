"""The operation class of EasyDeL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ring_core import KernelConfig, LayoutSpec, StrategyConfig
from ring_jax.adapt import refuse
from ring_jax.attention import ring_attention as attend
from ring_jax.compat.functions import MASK_INFO
from ring_jax.compat.translate import (
    Array,
    SlidingWindow,
    config_of,
    platform_of,
    segments_of,
    sinks_of,
    window_of,
)
from ring_jax.context import ContextParallel


@dataclass(frozen=True)
class OperationMetadata:
    """What all calls of an operation share.

    Attributes:
        runtime_dtype: What queries, keys and values are cast to; ``None`` leaves them.
        runtime_softmax_dtype: ``float32`` or ``None``; the softmax is never narrower.
        sequence_axis_name: The mesh axis the sequence is split along; ``None`` is one device.
        mesh: With a mesh calls take global arrays; without one, shards inside ``jax.shard_map``.
        batch_axis_name, head_axis_name: The axes of ``mesh`` that batch and heads are split along.
        layout: Which device holds which tokens; all but ``contiguous`` take them in the order of
            ``ring_jax.ContextParallel(...).shard``.
        strategy: As in :func:`ring_jax.ring_attention`.
        softmax_scale: For calls that give none; ``None`` is ``D ** -0.5``.
        blocksize_q, blocksize_k: The kernel's blocks; ``None`` leaves them to the kernel.
        operation_configs: Under ``ring``, an object or mapping with ``fwd_params``,
            ``bwd_params`` and ``platform``.
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
    """What an operation returns; a pytree.

    Attributes:
        attention_outputs: ``[B, T, H, Dv]``.
        attention_weights: ``None``: they are never formed.
        cache_view: ``None``: there is no cache.
    """

    attention_outputs: Array
    attention_weights: None = None
    cache_view: None = None


class RingAttn:
    """Ring attention as an operation.

    Args:
        metadata: What all calls share.

    Raises:
        ValueError: ``metadata`` is none of ours, or says a thing twice or half.
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
                None if softmax is None or jax.numpy.dtype(softmax) == "float32" else softmax,
                "the softmax runs in float32, and in float64 where the inputs are; leave it None",
            )
        )
        self.metadata = metadata
        self._kernel = _kernel(metadata)

    @staticmethod
    def get_impl_name() -> str:
        """The operation's name in a registry."""
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
        """Attend; all arguments are those of :func:`ring_attention`, but ``causal`` is true.

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
            query, key, value, causal=causal, window=window_of(sliding_window),
            chunk_size=chunk_size, strategy=metadata.strategy,
            segment_ids=segments_of(q_segment_ids, kv_segment_ids, query, key),
            softmax_scale=metadata.softmax_scale if softmax_scale is None else softmax_scale,
            softcap=logits_soft_cap, sinks=sinks_of(softmax_aux, query.shape[2]), bias=bias,
            kernel=replace(self._kernel, fused_backward=fused_backward or None),
        )  # fmt: skip
        return AttentionOutput(out)


def _kernel(metadata: OperationMetadata) -> KernelConfig:
    own = {"block_q": metadata.blocksize_q, "block_k": metadata.blocksize_k}
    config = (metadata.operation_configs or {}).get("ring")
    if config is None:
        return config_of(own, None, fused_backward=False)
    if own != {"block_q": None, "block_k": None}:
        raise ValueError(
            "blocksize_q, blocksize_k and operation_configs['ring'] say the same thing"
        )
    read = config.get if isinstance(config, Mapping) else partial(getattr, config)
    refuse(platform=platform_of(read("platform", None)))
    return config_of(read("fwd_params", None), read("bwd_params", None), fused_backward=False)
