"""Translate arguments of ejkernel and EasyDeL into options of this package, or refuse them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array as Array
from jax.typing import DTypeLike

from ring_core import KernelConfig, Mask, UnsupportedError, checks
from ring_core.base.arguments import is_integer
from ring_jax.positions import searchsorted
from ring_jax.prepare import int32_counts, int32_ids, with_mask
from ring_jax.records import Window

SlidingWindow = int | tuple[int | None, int | None]

BLOCK_NAMES = {
    "block_q": ("q_blocksize", "block_q", "blocksize_q"),
    "block_k": ("kv_blocksize", "block_k", "blocksize_k"),
}
IN_SHARD_MAP = (
    "call this inside jax.shard_map, or ring_jax.ContextParallel(mesh, axis_name).attention on "
    "global arrays"
)
MASK_INFO = (
    "pass q_segment_ids and kv_segment_ids; those of an ejkernel MaskInfo made of segments are "
    "mask_info.get_or_compute_segment_ids()"
)
CONFIG = "pass its fwd_params and bwd_params"


def window_of(sliding_window: SlidingWindow | None) -> Window | None:
    """Return a sliding window as ``(left, right)``; an integer is both sides.

    Raises:
        ValueError: It is not one or two numbers of keys.
    """
    if sliding_window is None:
        return None
    sides = sliding_window if isinstance(sliding_window, tuple | list) else (sliding_window,) * 2
    if len(sides) != 2 or not all(
        side is None or (is_integer(side) and side >= 0) for side in sides
    ):
        raise ValueError(
            f"sliding_window must be a number of keys on each side, (left, right), or None, got "
            f"{sliding_window!r}; a side without a limit is None"
        )
    left, right = (None if side is None else int(side) for side in sides)
    return left, right


def rule_of(
    causal: bool, sliding_window: SlidingWindow | None, chunk_size: int | None = None
) -> Mask:
    """Return the mask options of a call as a :class:`ring_core.Mask`.

    As an explicit mask it may be causal with more queries than keys, which ejkernel allows.

    Raises:
        ValueError: An option is malformed.
    """
    return checks.check_mask(
        None,
        causal=causal,
        window=window_of(sliding_window),
        chunk_size=chunk_size,
        cu_seqlens=None,
    )


def sinks_of(softmax_aux: Array | None, heads: int) -> Array | None:
    """Return sinks as ``[H, n]``; a ``softmax_aux`` of ``[1, n]`` is repeated for all heads.

    With one head, ``[n]`` is taken as ``[1, n]``.

    Raises:
        ValueError: The shape is ``[H]`` with several heads, which may mean one sink a head or
            ``H`` sinks that all heads share.
        UnsupportedError: The shape is any other.
    """
    if softmax_aux is None:
        return None
    shape = jnp.shape(softmax_aux)
    if shape == (heads,) and heads > 1:
        raise ValueError(
            f"softmax_aux of shape [{heads}] is one sink for each of {heads} heads, or {heads} "
            f"sinks that all heads share; say which: softmax_aux[:, None] is the former, "
            f"softmax_aux[None] the latter"
        )
    shape = (1, *shape) if len(shape) == 1 and heads == 1 else shape
    if len(shape) != 2 or shape[0] not in (1, heads):
        raise UnsupportedError(
            f"softmax_aux must be [{heads}, n], a row a query head, or [1, n], which all heads "
            f"share, got {list(shape)}; those that all share are softmax_aux.reshape(1, -1)"
        )
    return jnp.broadcast_to(jnp.reshape(softmax_aux, shape), (heads, shape[1]))


def segments_of(
    q_segment_ids: Array | None, kv_segment_ids: Array | None, q: Array, k: Array
) -> tuple[Array, Array] | None:
    """Return the segment ids of queries and keys, int32; if only one is passed it is for both.

    Raises:
        ValueError: Only one is passed and the numbers of queries and keys differ, or ids are not
            integers.
    """
    if q_segment_ids is None and kv_segment_ids is None:
        return None
    pair = {"q_segment_ids": q_segment_ids, "kv_segment_ids": kv_segment_ids}
    missing = next((name for name, ids in pair.items() if ids is None), None)
    if missing is not None and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"{missing} must be given too: {q.shape[1]} queries meet {k.shape[1]} keys a device"
        )
    passed = [int32_ids(name, ids) for name, ids in pair.items() if ids is not None]
    return passed[0], passed[-1]


def documents_of(
    cum_seqlens_q: Array | None, cum_seqlens_k: Array | None, q: Array, k: Array, *, aligned: bool
) -> tuple[Array, Array] | None:
    """Convert cumulative lengths ``[n + 1]``, which may be traced, to segment ids.

    A batch of one holds ``n`` documents one after the other; a larger batch holds one document a
    row, and then padding. ``aligned`` says that the mask compares positions of queries and keys,
    which is only meaningful if both have the same lengths.

    Returns:
        int32 ids of queries ``[B, T]`` and keys ``[B, T_kv]``, -1 for padding; ``None`` without
        cumulative lengths.

    Raises:
        ValueError: One of the two is missing, or there is not one document per row.
        UnsupportedError: ``aligned`` is set, and the two differ or are not known to be equal.
    """
    if cum_seqlens_q is None and cum_seqlens_k is None:
        return None
    if cum_seqlens_q is None or cum_seqlens_k is None:
        missing = "cum_seqlens_q" if cum_seqlens_q is None else "cum_seqlens_k"
        raise ValueError(f"{missing} must be given too; for self-attention it is the same array")
    if aligned and not _are_equal(cum_seqlens_q, cum_seqlens_k):
        raise UnsupportedError(
            "cum_seqlens_k: with causal or sliding_window it must be the same array as "
            "cum_seqlens_q; otherwise pass a bias that is -inf where a query must not look"
        )
    return (
        _ids("cum_seqlens_q", cum_seqlens_q, q.shape[0], q.shape[1]),
        _ids("cum_seqlens_k", cum_seqlens_k, k.shape[0], k.shape[1]),
    )


def pad_to_one_length(
    q: Array, k: Array, v: Array, bias: Array | None, documents: tuple[Array, Array]
) -> tuple[Array, Array, Array, Array | None, tuple[Array, Array]]:
    """Pad queries and keys to one length, so that equal indices are equal positions.

    Added rows of ``q`` ``[B, T_q, H, D]`` see nothing, and added keys are not seen: their ids in
    ``documents`` are -1.

    Raises:
        ValueError: The bias is not ``[B or 1, H or 1, T_q, T_kv]``.
    """
    lengths = q.shape[1], k.shape[1]
    if lengths[0] == lengths[1]:
        return q, k, v, bias, documents
    missing = tuple(max(lengths) - length for length in lengths)
    if bias is not None:
        if jnp.ndim(bias) != 4 or jnp.shape(bias)[2:] != lengths:
            raise ValueError(
                f"bias must have shape [batch or 1, heads or 1, {lengths[0]}, {lengths[1]}], got "
                f"{list(jnp.shape(bias))}"
            )
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, missing[0]), (0, missing[1])))

    q, k, v = (
        jnp.pad(x, ((0, 0), (0, count), (0, 0), (0, 0)))
        for x, count in zip((q, k, v), (*missing, missing[1]), strict=True)
    )
    q_ids, k_ids = (
        jnp.pad(ids, ((0, 0), (0, count)), constant_values=-1)
        for ids, count in zip(documents, missing, strict=True)
    )
    return q, k, v, bias, (q_ids, k_ids)


def config_of(
    platform: str | None, fwd_params: object, bwd_params: object, *, fused_backward: bool
) -> KernelConfig:
    """Return the kernel and its settings from ``platform``, ``fwd_params`` and ``bwd_params``.

    ``fused_backward=False``, ejkernel's default, leaves the choice to the kernel.

    Raises:
        ValueError: A setting is malformed or given twice.
        UnsupportedError: A setting is not a block size, or differs for the backward.
    """
    forward, backward = _blocks("fwd_params", fwd_params), _blocks("bwd_params", bwd_params)
    for name in BLOCK_NAMES:
        if fwd_params is not None and bwd_params is not None and forward[name] != backward[name]:
            raise UnsupportedError(
                f"bwd_params: its {name} is {backward[name]} and that of fwd_params is "
                f"{forward[name]}; one size serves both here, so pass equal ones or fwd_params alone"
            )
    chosen = backward if fwd_params is None else forward
    return KernelConfig(platform or "auto", **chosen, fused_backward=fused_backward or None)


def bias_of(bias: Array | None, attention_mask: Array | None, dtype: Any) -> Array | None:
    """Return the bias with ``-inf`` where a mask ``[B or 1, H or 1, T_q, T_k]`` is false or 0.

    Raises:
        ValueError: The mask is not four-dimensional, or not boolean or integer.
    """
    if attention_mask is None:
        return bias
    mask_dtype = jnp.result_type(attention_mask)
    if jnp.ndim(attention_mask) != 4 or not (
        mask_dtype == jnp.bool_ or jnp.issubdtype(mask_dtype, jnp.integer)
    ):
        raise ValueError(
            f"attention_mask must be boolean or integer [batch or 1, heads or 1, queries, keys], "
            f"got {mask_dtype} {list(jnp.shape(attention_mask))}; padding is q_segment_ids=-1"
        )
    return with_mask(bias, jnp.asarray(attention_mask) != 0, dtype)


def logits_dtype_of(dtype: DTypeLike, query: Array) -> tuple[object, str]:
    """Return the pair that :func:`refuse` takes for the dtype of scores.

    float32 is honoured, and float64 for float64 inputs.
    """
    honoured = [jnp.dtype("float32"), *[jax.typeof(query).dtype] * (query.dtype == jnp.float64)]
    return None if jnp.dtype(dtype) in honoured else dtype, (
        "scores are float32, and float64 where the inputs are; cast the inputs for another"
    )


def _blocks(name: str, params: object) -> dict[str, int | None]:
    """Read ``block_q`` and ``block_k`` from block parameters under any of their names.

    Raises:
        ValueError: A size has two names with different values.
        UnsupportedError: There is a setting that is not a block size.
    """
    settings = {key: value for key, value in _settings(name, params).items() if value is not None}
    sizes: dict[str, int | None] = {}
    for block, names in BLOCK_NAMES.items():
        values = [settings.pop(x) for x in names if x in settings]
        if len(set(values)) > 1:
            raise ValueError(f"{name} has several sizes for {block}, {values}; pass one")
        sizes[block] = values[0] if values else None
    if settings:
        raise UnsupportedError(
            f"{name}: kernels of this package have no {', '.join(settings)}; leave them out, or pass None"
        )
    return sizes


def _settings(name: str, params: object) -> Mapping[str, Any]:
    """Return the fields of a mapping, dataclass, named tuple or other object by name."""
    if params is None or isinstance(params, Mapping):
        return params or {}
    if is_dataclass(params):
        return {field.name: getattr(params, field.name) for field in fields(params)}
    if isinstance(params, tuple) and hasattr(params, "_asdict"):
        return dict(params._asdict())
    if not hasattr(params, "__dict__"):
        raise ValueError(f"{name} must have fields such as q_blocksize, got {params!r}")
    return vars(params)


def _ids(name: str, offsets: Array, batch: int, length: int) -> Array:
    """Return the document number of each token, int32 ``[batch, length]``; -1 for padding."""
    offsets = int32_counts(offsets)
    if offsets.ndim != 1 or (batch > 1 and offsets.shape[0] != batch + 1):
        raise ValueError(
            f"{name} must have shape [{batch + 1}], one document a batch row, got "
            f"{list(offsets.shape)}; documents packed into rows need a batch of 1 or q_segment_ids"
        )
    tokens = jnp.arange(length)
    if batch > 1:
        return jnp.where(tokens[None] < jnp.diff(offsets)[:, None], 0, -1).astype(jnp.int32)
    document = searchsorted(offsets, tokens, "right") - 1
    return jnp.where(tokens < offsets[-1], document, -1).astype(jnp.int32)[None]


def _are_equal(a: Array, b: Array) -> bool:
    """Return True if two arrays are known to be equal while a call is traced."""
    traced = any(isinstance(x, jax.core.Tracer) for x in (a, b))
    return a is b or (not traced and np.array_equal(np.asarray(a), np.asarray(b)))
