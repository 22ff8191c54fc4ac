"""Check a call's arguments, with the same words in every framework.

Backends describe their tensors as :class:`Tensor` records; everything here runs before any
communication and raises ``ValueError``: what was asked, what is possible, what to do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ring_core.base.arguments import (
    check_choice as check_choice,
    check_dropout as check_dropout,
    check_flag as check_flag,
    check_scale as check_scale,
    check_seed as check_seed,
    check_size,
    check_softcap as check_softcap,
    describe_value,
)
from ring_core.layouts.layout import WHOLE_LAYOUT, Layout, LayoutSpec
from ring_core.masks.mask import Mask, Window, mask_of

FLOATS = ("float16", "bfloat16", "float32", "float64")


MOST_DENSE = 64 << 20  # largest array of a mask, bytes per rank


@dataclass(frozen=True)
class Tensor:
    """A tensor's shape, dtype and device, by names that all frameworks share."""

    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call.

    Q is ``[batch, q_len, q_heads, head_dim]``, K ``[batch, k_len, kv_heads, head_dim]`` and V
    ``[batch, k_len, kv_heads, v_head_dim]``.
    """

    batch: int
    q_len: int
    k_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> Sizes:
    """Check that Q, K and V fit together, and return their sizes.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(x.shape) != 4:
            raise ValueError(
                f"{name} must have 4 dimensions [batch, sequence, heads, head_dim], got shape {tuple(x.shape)}"
            )
        if x.dtype not in FLOATS:
            raise ValueError(
                f"{name} must be {', '.join(FLOATS[:-1])} or {FLOATS[-1]}, got {x.dtype}"
            )
    for name, x in (("k", k), ("v", v)):
        for demand, of_q, of_x in (
            ("share a dtype", q.dtype, x.dtype), ("be on one device", q.device, x.device),
            ("share a batch size", q.shape[0], x.shape[0]),
        ):  # fmt: skip
            if of_q != of_x:
                raise ValueError(
                    f"q, k and v must {demand}, got {of_q} for q and {of_x} for {name}"
                )
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(
            f"k and v must have the same sequence length and heads, got {k.shape[1:3]} and {v.shape[1:3]}"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same head dim, got {q.shape[3]} and {k.shape[3]}")
    if not q.shape[1] or not k.shape[1]:
        raise ValueError(
            f"q, k and v must hold a token at least, got sequence length {q.shape[1]} of q and "
            f"{k.shape[1]} of k"
        )
    heads, kv_heads = q.shape[2], k.shape[2]
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(
            f"the {heads} heads of q must be a multiple of the {kv_heads} heads of k and v (each K/V head "
            f"serves an equal group of query heads)"
        )
    if q.shape[3] < 1 or v.shape[3] < 1:
        raise ValueError(
            f"head dims must be at least 1, got {q.shape[3]} for q and {v.shape[3]} for v"
        )
    return Sizes(q.shape[0], q.shape[1], k.shape[1], heads, kv_heads, q.shape[3], v.shape[3])


def check_mask(
    mask: Mask | None,
    *,
    causal: bool,
    window: Window | None,
    chunk_size: int | None,
    cu_seqlens: Sequence[int] | None,
) -> Mask:
    """Return the mask of a call: ``mask``, or one made of the other options.

    Raises:
        ValueError: ``mask`` is no :class:`Mask`, both are given, or an option is malformed.
    """
    if mask is None:
        return mask_of(causal=causal, window=window, chunk_size=chunk_size, cu_seqlens=cu_seqlens)
    if not isinstance(mask, Mask):
        raise ValueError(
            f"mask must be a ring_core.Mask or an array of booleans, got {type(mask).__name__}"
        )
    clashing = [
        name
        for name, value in (
            ("causal", causal or None), ("window", window), ("chunk_size", chunk_size),
            ("cu_seqlens", cu_seqlens),
        )
        if value is not None
    ]  # fmt: skip
    if clashing:
        raise ValueError(
            f"mask was given together with {', '.join(clashing)}; put them into the Mask instead"
        )
    return mask


def check_seq_len(
    seq_len: Any, q_len: int, k_len: int, layout: LayoutSpec, cp_size: int
) -> tuple[int, int]:
    """Return the numbers of queries and keys of the whole sequence, without padding.

    Args:
        seq_len: The option: ``T``, or a pair ``(T_q, T_kv)``; ``None`` is no padding.
        q_len, k_len: Queries and keys of a rank, with padding.
        layout: The layout.
        cp_size: Number of ranks.

    Raises:
        ValueError: It is malformed, or the layout pads so many tokens to another length.
    """
    if seq_len is None:
        return cp_size * q_len, cp_size * k_len
    # One number is for queries and keys; a pair says that they differ.
    q_tokens, k_tokens = seq_len, seq_len
    if isinstance(seq_len, tuple | list):
        if len(seq_len) != 2:
            raise ValueError(
                f"seq_len must be the number of tokens of the whole sequence or a pair (queries', "
                f"keys'), got {seq_len!r}"
            )
        q_tokens, k_tokens = seq_len
    elif q_len != k_len:
        raise ValueError(
            f"seq_len must be a pair (queries', keys') where {q_len} queries meet {k_len} keys a rank, "
            f"got {describe_value(seq_len)}"
        )
    q_layout = padded_layout(q_tokens, q_len, layout, cp_size, "q")
    return q_layout.seq_len, padded_layout(k_tokens, k_len, layout, cp_size, "k").seq_len


def padded_layout(
    seq_len: Any, local_len: int, layout: LayoutSpec, cp_size: int, name: str = "x"
) -> Layout:
    """Return the padded layout of ``seq_len`` tokens that gives each rank ``local_len`` rows.

    Args:
        seq_len: Number of tokens of the whole sequence, without padding; ``None`` if there is none.
        local_len: Tokens and padding of a rank.
        layout: The layout's name, or its chunks.
        cp_size: Number of ranks.
        name: The argument that is a slice.

    Raises:
        ValueError: It is no positive integer, or the layout pads so many tokens to another length.
    """
    if seq_len is None:
        return Layout(layout, local_len * cp_size, cp_size)
    padded = Layout.padded(layout, check_size("seq_len", seq_len), cp_size)
    if layout == WHOLE_LAYOUT and local_len > padded.padded_len:
        return Layout(layout, seq_len, cp_size, local_len)
    if padded.local_len != local_len:
        raise ValueError(
            f"seq_len={seq_len} is the length of the whole sequence, without padding: the {layout} "
            f"layout over {cp_size} ranks pads it to {padded.padded_len}, {padded.local_len} a rank, "
            f"and {name} has {local_len} a rank"
        )
    return padded


def check_padding(pad: object, fill: float) -> None:
    """Check ``pad`` of ``shard``, and that it is true beside a ``fill`` other than 0.

    Raises:
        ValueError: It is no bool, or false beside such a ``fill``.
    """
    check_flag("pad", pad)
    if not pad and fill != 0:
        raise ValueError(
            f"fill={fill} is the number in the padding, and pad=False adds none; pass pad=True"
        )


def keys_without_padding(seq_len: Any, keys: int) -> Any:
    """Return the number of all keys without padding, by a ``seq_len`` that is not checked yet.

    Args:
        seq_len: The option, as given.
        keys: Number of keys with padding, over all ranks.
    """
    if isinstance(seq_len, tuple | list):
        return seq_len[-1] if seq_len else keys
    return keys if seq_len is None else seq_len


def check_causal(causal: bool, q_len: int, k_len: int) -> None:
    """Refuse ``causal=True`` with fewer keys than queries, whose first ones would be fully masked.

    Nearly always such tensors are ``[B, H, T, D]``, and heads were taken for tokens.

    Args:
        causal: The option alone; a causal :class:`Mask` may have fewer keys.
        q_len, k_len: Numbers of queries and keys, of a rank or of all.

    Raises:
        ValueError: There are fewer keys.
    """
    if k_len < q_len and causal:
        raise ValueError(
            f"causal=True, and q has {q_len} tokens but k {k_len}: the first queries would be fully "
            f"masked. q, k and v are [batch, sequence, heads, head_dim]; from [batch, heads, "
            f"sequence, head_dim], as SDPA has them, take x.transpose(1, 2). If fewer keys are "
            f"meant, pass mask=Mask(causal=True): the last query then stands at the last key"
        )


def check_sinks(sinks: Tensor | None, sizes: Sizes, device: str) -> None:
    """Check that sinks are floats ``[H]`` or ``[H, n]``, one or several logits per query head.

    Raises:
        ValueError: They have another shape, dtype or device.
    """
    if sinks is not None:
        shape, heads = sinks.shape, sizes.q_heads
        fits = len(shape) in (1, 2) and shape[0] == heads and 0 not in shape
        _check_option(
            "sinks", sinks, device, fits, f"[{heads}] or [{heads}, n], one row a query head"
        )


def check_bias(bias: Tensor | None, sizes: Sizes, kv_seq_len: int, device: str) -> None:
    """Check that a bias has rows for the local queries, and columns for all keys in natural order.

    Raises:
        ValueError: It is not ``[B or 1, H or 1, T_local, T_kv]``, or has another dtype or device.
    """
    if bias is not None:
        batch, heads, rows = sizes.batch, sizes.q_heads, sizes.q_len
        expected = (
            f"[{batch} or 1, {heads} or 1, {rows}, {kv_seq_len}] (rows: this rank's queries in layout "
            f"order; columns: all keys in natural order)"
        )
        expected += _key_mask_advice(bias.shape, batch)
        fits = _is_score_shape(bias.shape, batch, heads, rows, kv_seq_len)
        _check_option("bias", bias, device, fits, expected)


def check_dense_mask(
    mask: Tensor, q_shape: tuple[int, ...], kv_seq_len: int, device: str, *, parts: int = 1
) -> None:
    """Check that an array of a mask has rows for the local queries, and columns for all keys.

    Args:
        mask: Booleans, ``[T_local, T_kv]`` or ``[B or 1, H or 1, T_local, T_kv]``.
        q_shape: ``[B, T_local, H, D]``.
        kv_seq_len: Number of keys, over all ranks.
        device: The device of the queries.
        parts: Number of devices that share the mask, where it is a global array.

    Raises:
        ValueError: It has another type, shape or device, or more than ``MOST_DENSE`` bytes.
    """
    batch, length, heads, _ = q_shape
    shape = mask.shape if len(mask.shape) == 4 else (1, 1, *mask.shape)
    if mask.dtype != "bool":
        raise ValueError(
            f"mask must be a ring_core.Mask or an array of booleans, got one of {mask.dtype}; numbers "
            f"to be added to the scores are a bias"
        )
    if not _is_score_shape(shape, batch, heads, length, kv_seq_len):
        raise ValueError(
            f"mask must have shape [{length}, {kv_seq_len}] or [{batch} or 1, {heads} or 1, {length}, "
            f"{kv_seq_len}] (rows: this rank's queries in layout order; columns: all keys in natural "
            f"order), got {tuple(mask.shape)}{_key_mask_advice(mask.shape, batch)}"
        )
    if mask.device != device:
        raise ValueError(f"mask is on {mask.device} and q on {device}; move it there")
    size = -(-math.prod(mask.shape) // parts)
    if size > MOST_DENSE:
        raise ValueError(
            f"mask takes {-(-size >> 20)} MiB a rank, and at most {MOST_DENSE >> 20} MiB are affordable: "
            f"say it with causal, window, chunk_size, cu_seqlens or segment_ids, or as a function "
            f"of positions, mask=Mask(predicate=...)"
        )


def check_alibi_slopes(slopes: Tensor | None, sizes: Sizes, device: str) -> None:
    """Check that ALiBi slopes are floats ``[H]`` or ``[B, H]``.

    Raises:
        ValueError: They have another shape, dtype or device.
    """
    if slopes is not None:
        batch, heads = sizes.batch, sizes.q_heads
        fits = slopes.shape in ((heads,), (batch, heads))
        _check_option("alibi_slopes", slopes, device, fits, f"[{heads}] or [{batch}, {heads}]")


def check_segment_ids(ids: Tensor, sizes: Sizes, side: str, device: str) -> None:
    """Check that segment ids are int32 ``[B, T]``, one per token of the ``queries`` or ``keys``.

    Raises:
        ValueError: They have another shape, dtype or device.
    """
    length = sizes.q_len if side == "queries" else sizes.k_len
    if ids.dtype != "int32":
        raise ValueError(f"segment_ids must be int32, got {ids.dtype} for the {side}")
    if ids.shape != (sizes.batch, length):
        raise ValueError(
            f"segment_ids of the {side} must have shape [{sizes.batch}, {length}], got {tuple(ids.shape)}"
        )
    if ids.device != device:
        raise ValueError(f"segment_ids must be on {device} like q, got {ids.device}")


def check_pair(segment_ids: Any, sizes: Sizes) -> tuple[Any, Any]:
    """Return segment ids as a pair (queries', keys'), both the same array if one was given.

    Raises:
        ValueError: One array for other keys than queries, or not two arrays.
    """
    if isinstance(segment_ids, tuple | list):
        if len(segment_ids) != 2:
            raise ValueError(
                f"segment_ids must be one array or a pair (queries', keys'), got {len(segment_ids)} arrays"
            )
        return segment_ids[0], segment_ids[1]
    if sizes.q_len != sizes.k_len:
        raise ValueError(
            f"segment_ids must be a pair (queries', keys') where {sizes.q_len} queries meet {sizes.k_len} keys a rank"
        )
    return segment_ids, segment_ids


def _is_score_shape(
    shape: tuple[int, ...], batch: int, heads: int, rows: int, columns: int
) -> bool:
    """Return True if a shape is ``[batch or 1, heads or 1, rows, columns]``."""
    return len(shape) == 4 and (
        shape[0] in (1, batch) and shape[1] in (1, heads) and shape[2:] == (rows, columns)
    )


def _key_mask_advice(shape: tuple[int, ...], batch: int) -> str:
    """Return a hint to use ``segment_ids`` if a shape looks like a padding mask's, else nothing."""
    # A mask of keys has no rows of queries: all dimensions between batch and keys are 1.
    if shape[:1] not in ((1,), (batch,)) or any(size != 1 for size in shape[1:-1]):
        return ""
    return (
        "; a mask of keys that hides padding is segment_ids, int32 [B, T_local] in layout order, 0 for "
        "tokens and -1 for padding"
    )


def _check_option(name: str, x: Tensor, device: str, fits: bool, shape: str) -> None:
    """Check that a tensor of an option is of floats, on the device, and of a shape that fits."""
    if x.dtype not in FLOATS:
        raise ValueError(f"{name} must be floating point, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device} like q, got {x.device}")
    if not fits:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")
