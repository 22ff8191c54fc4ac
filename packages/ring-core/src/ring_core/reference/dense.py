"""The oracle: dense attention in float64, slow and obvious; and the plan run rank by rank.

Every backend is compared with these. Arrays are global: ``q [B, T_q, H, D]``, ``k [B, T_kv, K,
D]``, ``v [B, T_kv, K, Dv]`` with ``H % K == 0``; options mean what they mean everywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ring_core import checks
from ring_core.base.arguments import (
    Bools,
    Floats as Floats,
    Ints,
    as_floats,
    as_ints,
    refuse_foreign_options,
)
from ring_core.masks.mask import Mask, Window
from ring_core.philox import dropout_keep
from ring_core.reference.item_kernel import masked_matmul

SegmentIds = npt.ArrayLike | tuple[npt.ArrayLike, npt.ArrayLike]
_DEVICE = "cpu"


class Inputs(NamedTuple):
    """The arrays of a call, float64 and int64, and their sizes."""

    sizes: checks.Sizes
    q: Floats  # [B, T_q, H, D]
    k: Floats  # [B, T_kv, K, D]
    v: Floats  # [B, T_kv, K, Dv]
    q_ids: Ints | None  # [B, T_q]
    k_ids: Ints | None  # [B, T_kv]
    sinks: Floats | None  # [H] or [H, n]
    bias: Floats | None  # [B or 1, H or 1, T_q, T_kv]
    slopes: Floats | None  # [1 or B, H]

    def upstream(self, dout: Any, dlse: Any) -> tuple[Floats, Floats | None]:
        """Gradients that reach ``out [B, T_q, H, Dv]`` and ``lse [B, H, T_q]``.

        Raises:
            ValueError: They have other shapes.
        """
        n = self.sizes
        dout = as_floats("dout", dout, (n.batch, n.q_len, n.q_heads, n.v_head_dim))
        rows = (n.batch, n.q_heads, n.q_len)
        return dout, None if dlse is None else as_floats("dlse", dlse, rows)


def check_inputs(
    q: Any, k: Any, v: Any, segment_ids: Any, sinks: Any, bias: Any, alibi_slopes: Any
) -> Inputs:
    """Arrays of a call.

    Raises:
        ValueError: One is no array of numbers, or they do not fit together.
    """
    q, k, v = (as_floats(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    sizes = checks.check_qkv(*(checks.Tensor(x.shape, "float64", _DEVICE) for x in (q, k, v)))
    sinks, bias, slopes = (
        None if x is None else as_floats(name, x)
        for name, x in (("sinks", sinks), ("bias", bias), ("alibi_slopes", alibi_slopes))
    )
    checks.check_sinks(_optional(sinks), sizes, _DEVICE)
    checks.check_bias(_optional(bias), sizes, sizes.k_len, _DEVICE)
    checks.check_alibi_slopes(_optional(slopes), sizes, _DEVICE)
    q_ids = k_ids = None
    if segment_ids is not None:
        q_ids, k_ids = (
            _ids(ids, sizes, side)
            for ids, side in zip(
                checks.check_pair(segment_ids, sizes), ("queries", "keys"), strict=True
            )
        )
    return Inputs(
        sizes, q, k, v, q_ids, k_ids, sinks, bias, None if slopes is None else np.atleast_2d(slopes)
    )


def visible_pairs(given: Inputs, mask: Mask) -> Bools:
    """Return who sees whom by the mask and the segment ids, ``[B, H, T_q, T_kv]``."""
    sizes, q_ids, k_ids = given.sizes, given.q_ids, given.k_ids
    q_pos, k_pos = np.arange(sizes.q_len) + sizes.k_len - sizes.q_len, np.arange(sizes.k_len)
    shape = (sizes.batch, sizes.q_heads, sizes.q_len, sizes.k_len)
    visible = np.broadcast_to(mask.dense(q_pos, k_pos), shape).copy()
    if q_ids is not None and k_ids is not None:
        same = q_ids[:, :, None] == k_ids[:, None, :]
        visible &= (same & (q_ids >= 0)[:, :, None])[:, None]
    return visible


def bias_shift(given: Inputs, visible: Bools) -> Floats | None:
    """Return what is taken off each row of the bias, ``[B, H, T_q]``: its largest finite number.

    Only visible columns count; a row without any has 0. Softmax does not change by it, and sums of
    exponentials can be held beside numbers such as -1e10, which additive masks have for padding.
    The shift has no gradient; ``lse`` gets it back in the end. Sinks compete with the scores as
    they are, so with sinks there is no shift.
    """
    if given.bias is None or given.sinks is not None:
        return None
    numbers = np.where(visible & np.isfinite(given.bias), given.bias, -np.inf)
    top: Floats = numbers.max(axis=-1, initial=-np.inf)
    return np.where(np.isneginf(top), 0, top).astype(given.bias.dtype)


def _optional(x: Floats | None) -> checks.Tensor | None:
    return None if x is None else checks.Tensor(x.shape, "float64", _DEVICE)


def _ids(ids: Any, sizes: checks.Sizes, side: str) -> Ints:
    found = as_ints("segment_ids", ids)
    checks.check_segment_ids(checks.Tensor(found.shape, "int32", _DEVICE), sizes, side, _DEVICE)
    if found.size and not -(2**31) <= found.min() <= found.max() < 2**31:
        raise ValueError(f"segment_ids of the {side} must fit into int32")
    return found


class Grads(NamedTuple):
    """Gradients, each of its argument's shape; ``None`` for arguments that were not given."""

    dq: Floats
    dk: Floats
    dv: Floats
    dsinks: Floats | None
    dbias: Floats | None


@refuse_foreign_options
def attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    causal: bool = False,
    window: Window | None = None,
    chunk_size: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    segment_ids: SegmentIds | None = None,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
    alibi_slopes: npt.ArrayLike | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
) -> tuple[Floats, Floats]:
    """Dense attention in float64: ``softmax(softmax_scale * q @ k.T + ...) @ v``.

    Returns:
        ``out [B, T_q, H, Dv]`` and ``lse [B, H, T_q]`` (natural log, sinks included; ``-inf`` where
        a row is fully masked, whose ``out`` is 0).

    Raises:
        ValueError: An argument is malformed, as in the backends.
    """
    rule = checks.check_mask(
        mask, causal=causal, window=window, chunk_size=chunk_size, cu_seqlens=cu_seqlens
    )
    dense = _dense(
        q, k, v, causal, rule, segment_ids, softmax_scale, softcap, sinks, bias, alibi_slopes, dropout_p,
        dropout_seed,
    )  # fmt: skip
    return dense.out, dense.lse


@refuse_foreign_options
def attention_grads(
    dout: npt.ArrayLike,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    dlse: npt.ArrayLike | None = None,
    causal: bool = False,
    window: Window | None = None,
    chunk_size: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    segment_ids: SegmentIds | None = None,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
    alibi_slopes: npt.ArrayLike | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
) -> Grads:
    """Gradients of ``sum(dout * out) + sum(dlse * lse)`` for :func:`attention`, in float64.

    Raises:
        ValueError: An argument is malformed, as in the backends.
    """
    rule = checks.check_mask(
        mask, causal=causal, window=window, chunk_size=chunk_size, cu_seqlens=cu_seqlens
    )
    dense = _dense(
        q, k, v, causal, rule, segment_ids, softmax_scale, softcap, sinks, bias, alibi_slopes, dropout_p,
        dropout_seed,
    )  # fmt: skip
    return _backward(dense, *dense.given.upstream(dout, dlse))


@dataclass(frozen=True)
class _Dense:
    """The forward pass with everything the backward needs; heads first: ``[B, H, T, D]``."""

    q: Floats
    k: Floats  # repeated to H heads
    v: Floats
    visible: Bools  # [B, H, T_q, T_kv]
    slope: Floats  # derivative of the soft cap
    probs: Floats  # softmax, sinks included in its sum
    keep: Floats  # dropout's factor: 0 or 1 / (1 - p)
    lse: Floats
    out: Floats  # [B, T_q, H, Dv]
    scale: float
    given: Inputs


def _dense(
    q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike, causal: bool, mask: Mask,
    segment_ids: SegmentIds | None,
    softmax_scale: float | None, softcap: float | None, sinks: npt.ArrayLike | None,
    bias: npt.ArrayLike | None,
    alibi_slopes: npt.ArrayLike | None, dropout_p: float, dropout_seed: int | None,
) -> _Dense:  # fmt: skip
    given = check_inputs(q, k, v, segment_ids, sinks, bias, alibi_slopes)
    sizes = given.sizes
    checks.check_causal(causal, sizes.q_len, sizes.k_len)
    if mask.cu_seqlens is not None and mask.cu_seqlens[-1] != sizes.k_len:
        raise ValueError(
            f"cu_seqlens must end at the sequence length {sizes.k_len}, got {mask.cu_seqlens[-1]}"
        )
    checks.check_dropout(dropout_p, dropout_seed)
    checks.check_seed(dropout_seed)
    scale = checks.check_scale(softmax_scale, sizes.head_dim)
    softcap = checks.check_softcap(softcap)
    q_by_head = given.q.transpose(0, 2, 1, 3)
    k_by_head, v_by_head = (
        x.transpose(0, 2, 1, 3).repeat(sizes.q_heads // sizes.kv_heads, axis=1)
        for x in (given.k, given.v)
    )

    q_pos, k_pos = np.arange(sizes.q_len) + sizes.k_len - sizes.q_len, np.arange(sizes.k_len)
    visible = visible_pairs(given, mask)
    shift = bias_shift(given, visible)

    with np.errstate(invalid="ignore", over="ignore"):
        x = scale * (q_by_head @ k_by_head.swapaxes(-1, -2))
        slope = np.ones_like(x)
        if softcap is not None:
            squashed = np.tanh(x / softcap)
            x, slope = softcap * squashed, 1 - squashed**2
        if given.bias is not None:
            x = x + (given.bias if shift is None else given.bias - shift[..., None])
            visible &= ~np.isneginf(given.bias)
        if given.slopes is not None:
            x = x - given.slopes[:, :, None, None] * np.abs(q_pos[:, None] - k_pos)
    sink_rows = np.empty((sizes.q_heads, 0)) if given.sinks is None else given.sinks
    lse, probs = _softmax(np.where(visible, x, -np.inf), sink_rows.reshape(sizes.q_heads, -1))
    lse = lse if shift is None else lse + shift
    probs = np.where(visible, probs, 0)  # not so yet in rows that hold NaN
    keep = np.ones_like(probs)
    if dropout_p > 0 and dropout_seed is not None:
        kept = dropout_keep(
            dropout_p, dropout_seed, batch=np.arange(sizes.batch), heads=np.arange(sizes.q_heads),
            queries=np.arange(sizes.q_len), keys=k_pos,
        )  # fmt: skip
        keep = kept / (1 - dropout_p)
    out = masked_matmul(probs * keep, visible, v_by_head).transpose(0, 2, 1, 3)
    return _Dense(
        q_by_head, k_by_head, v_by_head, visible, slope, probs, keep, lse, out, scale, given
    )


def _softmax(logits: Floats, sinks: Floats) -> tuple[Floats, Floats]:
    """``(lse, softmax)`` over the last axis, sinks ``[H, n]`` taking their share."""
    top = logits.max(axis=-1, initial=-np.inf)
    top = np.maximum(top, sinks.max(axis=-1, initial=-np.inf)[:, None])
    safe = np.where(np.isneginf(top), 0, top)
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.exp(logits - safe[..., None])
        of_sinks = np.exp(sinks[None, :, None, :] - safe[..., None])
        total = weights.sum(axis=-1) + of_sinks.sum(axis=-1)
        probs = np.where(total[..., None] == 0, 0, weights / total[..., None])
        return safe + np.log(total), probs


@np.errstate(invalid="ignore", over="ignore")
def _backward(dense: _Dense, dout: Floats, dlse: Floats | None) -> Grads:
    do = dout.transpose(0, 2, 1, 3)
    dprobs = (do @ dense.v.swapaxes(-1, -2)) * dense.keep
    weighted = np.where(dense.visible, dense.probs * dprobs, 0)
    delta = weighted.sum(axis=-1, keepdims=True) - (0 if dlse is None else dlse[..., None])
    dlogits = np.where(dense.visible, dense.probs * (dprobs - delta), 0)
    dproducts = np.where(dense.visible, dlogits * dense.slope * dense.scale, 0)
    seen_by = dense.visible.swapaxes(-1, -2)
    dq = masked_matmul(dproducts, dense.visible, dense.k)
    dk = masked_matmul(dproducts.swapaxes(-1, -2), seen_by, dense.q)
    dv = masked_matmul((dense.probs * dense.keep).swapaxes(-1, -2), seen_by, do)
    sinks, bias, sizes = dense.given.sinks, dense.given.bias, dense.given.sizes
    groups = sizes.kv_heads, sizes.q_heads // sizes.kv_heads
    dk, dv = (x.reshape(len(x), *groups, *x.shape[2:]).sum(axis=2) for x in (dk, dv))
    dsinks = None
    if sinks is not None:
        safe = np.where(np.isneginf(dense.lse), 0, dense.lse)  # only where a sink is -inf itself
        share = np.exp(sinks.reshape(len(sinks), -1)[None, :, None, :] - safe[..., None])
        dsinks = (share * -delta).sum(axis=(0, 2)).reshape(sinks.shape)
    dbias = None if bias is None else _add_to(dlogits, bias.shape)
    dq, dk, dv = (x.transpose(0, 2, 1, 3) for x in (dq, dk, dv))
    return Grads(dq, dk, dv, dsinks, dbias)


def _add_to(x: Floats, shape: tuple[int, ...]) -> Floats:
    return x.sum(axis=tuple(n for n, size in enumerate(shape) if size == 1), keepdims=True)
