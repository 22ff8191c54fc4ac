"""The oracle: dense attention and its gradients in float64, slow and obvious.

Every backend is compared with it. Arrays are global: ``q [B, T_q, H, D]``, ``k [B, T_kv, K,
D]``, ``v [B, T_kv, K, Dv]`` with ``H % K == 0``; options mean what they mean everywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ring_core import checks
from ring_core.base.arguments import (
    Bools,
    Floats as Floats,
    refuse_foreign_options,
)
from ring_core.base.merge import UNSHIFTED_BIAS
from ring_core.masks.mask import Mask, Window
from ring_core.philox import dropout_keep
from ring_core.reference.inputs import Inputs, SegmentIds, check_inputs
from ring_core.reference.item_kernel import masked_matmul


def visible_pairs(inputs: Inputs, mask: Mask) -> Bools:
    """Return which query sees which key by mask and segment ids, bool ``[B, H, T_q, T_kv]``."""
    sizes, q_ids, k_ids = inputs.sizes, inputs.q_ids, inputs.k_ids
    q_pos, k_pos = np.arange(sizes.q_len) + sizes.k_len - sizes.q_len, np.arange(sizes.k_len)
    shape = (sizes.batch, sizes.q_heads, sizes.q_len, sizes.k_len)
    visible = np.broadcast_to(mask.dense(q_pos, k_pos), shape).copy()
    if q_ids is not None and k_ids is not None:
        same = q_ids[:, :, None] == k_ids[:, None, :]
        visible &= (same & (q_ids >= 0)[:, :, None])[:, None]
    return visible


def bias_shift(inputs: Inputs, visible: Bools) -> Floats | None:
    """Return the number to subtract from each row of the bias, ``[B, H, T_q]``, or ``None``.

    It is the largest finite number of the row among visible keys, or 0 if there are none or it is
    within ``UNSHIFTED_BIAS`` of 0. Softmax stays the same, and scores keep their digits beside
    numbers such as -1e10, which additive masks have for padding. The shift has no gradient; ``lse``
    gets it back in the end. Sinks compete with the scores as they are, so with sinks, as without a
    bias, there is no shift.
    """
    if inputs.bias is None or inputs.sinks is not None:
        return None
    numbers = np.where(visible & np.isfinite(inputs.bias), inputs.bias, -np.inf)
    top: Floats = numbers.max(axis=-1, initial=-np.inf)
    is_needed = np.isfinite(top) & (np.abs(top) > UNSHIFTED_BIAS)
    return np.where(is_needed, top, 0).astype(inputs.bias.dtype)


class Grads(NamedTuple):
    """Gradients of a call, each of its argument's shape; ``None`` for arguments not given."""

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
    seq_len: int | tuple[int, int] | None = None,
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
    """Compute dense attention in float64: ``softmax(softmax_scale * q @ k.T + ...) @ v``.

    >>> import numpy as np
    >>> from ring_core.reference import attention
    >>> q = k = np.zeros((1, 4, 1, 8))  # [B, T, H, D]: equal scores, so rows are means of values
    >>> v = np.arange(4.0).reshape(1, 4, 1, 1)
    >>> out, lse = attention(q, k, v, causal=True)
    >>> out.reshape(-1)
    array([0. , 0.5, 1. , 1.5])

    Args:
        q: ``[B, T_q, H, D]``.
        k, v: ``[B, T_kv, K, D]`` and ``[B, T_kv, K, Dv]``, with ``H % K == 0``.
        seq_len: ``T``, or a pair ``(T_q, T_kv)``: tokens behind are padding, which sees nothing and
            is not seen. A bias has no columns for it.
        causal, window, chunk_size, cu_seqlens: As in :class:`ring_core.Mask`.
        segment_ids: int32 ``[B, T]``, or a pair for queries and keys: equal ids see each other,
            negative ones are padding.
        mask: A :class:`ring_core.Mask`, instead of the four options before.
        softmax_scale: Scale of the scores; ``D ** -0.5`` by default.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
        sinks: ``[H]`` or ``[H, n]``, logits that take a share of the softmax and have no value.
        bias: ``[B or 1, H or 1, T_q, T_kv]``, added to the scores.
        alibi_slopes: ``[H]`` or ``[B, H]``: ``-slope * abs(i - j)`` is added to the scores.
        dropout_p: Probability to drop a softmax weight.
        dropout_seed: Seed of dropout, an integer in ``[0, 2**64)``.

    Returns:
        ``out [B, T_q, H, Dv]`` and ``lse [B, H, T_q]`` (natural log, sinks included; ``-inf`` where
        a row is fully masked, whose ``out`` is 0).

    Raises:
        ValueError: An argument is malformed, as in the backends.
    """
    rule = checks.check_mask(
        mask, causal=causal, window=window, chunk_size=chunk_size, cu_seqlens=cu_seqlens
    )
    dense = dense_forward(
        q, k, v, seq_len, causal, rule, segment_ids, softmax_scale, softcap, sinks, bias, alibi_slopes,
        dropout_p, dropout_seed,
    )  # fmt: skip
    rows = dense.inputs.padding[0]
    return with_padding(dense.out, 1, rows), with_padding(dense.lse, 2, rows, fill=-np.inf)


@refuse_foreign_options
def attention_grads(
    dout: npt.ArrayLike,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    dlse: npt.ArrayLike | None = None,
    seq_len: int | tuple[int, int] | None = None,
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
    """Compute the gradients of ``sum(dout * out) + sum(dlse * lse)`` in float64.

    >>> import numpy as np
    >>> from ring_core.reference import attention_grads
    >>> q = k = np.zeros((1, 4, 1, 8))
    >>> v, dout = np.zeros((1, 4, 1, 1)), np.ones((1, 4, 1, 1))
    >>> grads = attention_grads(dout, q, k, v, causal=True)
    >>> grads.dv.reshape(-1).round(2)  # the last value is seen by the last query alone
    array([2.08, 1.08, 0.58, 0.25])

    Args:
        dout: ``[B, T_q, H, Dv]``.
        q, k, v: As in :func:`attention`, whose other options this takes, too.
        dlse: ``[B, H, T_q]``; ``None`` is zero.

    Returns:
        Gradients of Q, K and V, and of sinks and bias where these are given.

    Raises:
        ValueError: An argument is malformed, as in the backends.
    """
    rule = checks.check_mask(
        mask, causal=causal, window=window, chunk_size=chunk_size, cu_seqlens=cu_seqlens
    )
    dense = dense_forward(
        q, k, v, seq_len, causal, rule, segment_ids, softmax_scale, softcap, sinks, bias, alibi_slopes,
        dropout_p, dropout_seed,
    )  # fmt: skip
    grads = dense_backward(dense, *dense.inputs.upstream(dout, dlse))
    rows, columns = dense.inputs.padding
    return Grads(
        with_padding(grads.dq, 1, rows),
        with_padding(grads.dk, 1, columns),
        with_padding(grads.dv, 1, columns),
        grads.dsinks,
        None if grads.dbias is None else with_padding(grads.dbias, 2, rows),
    )


def with_padding[T: npt.NDArray[Any]](x: T, axis: int, padding: int, fill: float = 0.0) -> T:
    """Return an array with ``padding`` tokens behind those along ``axis``, which are ``fill``."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = 0, padding
    return cast("T", np.pad(x, widths, constant_values=fill)) if padding else x


@dataclass(frozen=True)
class Dense:
    """A forward pass with everything its backward needs; heads come first: ``[B, H, T, D]``."""

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
    inputs: Inputs


def dense_forward(
    q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike,
    seq_len: int | tuple[int, int] | None, causal: bool, mask: Mask,
    segment_ids: SegmentIds | None,
    softmax_scale: float | None, softcap: float | None, sinks: npt.ArrayLike | None,
    bias: npt.ArrayLike | None,
    alibi_slopes: npt.ArrayLike | None, dropout_p: float, dropout_seed: int | None,
    heads: npt.NDArray[np.int32] | None = None,
) -> Dense:  # fmt: skip
    """Check a call's arguments, and run the forward pass.

    ``heads`` are the global indices of the query heads, for dropout; by default they count from 0.
    """
    inputs = check_inputs(q, k, v, segment_ids, sinks, bias, alibi_slopes, seq_len)
    sizes = inputs.sizes
    checks.check_causal(causal, sizes.q_len, sizes.k_len)
    if mask.cu_seqlens is not None and mask.cu_seqlens[-1] != sizes.k_len:
        raise ValueError(
            f"cu_seqlens must end at the sequence length {sizes.k_len}, got {mask.cu_seqlens[-1]}"
        )
    checks.check_dropout(dropout_p, dropout_seed)
    checks.check_seed(dropout_seed)
    scale = checks.check_scale(softmax_scale, sizes.head_dim)
    softcap = checks.check_softcap(softcap)
    q_by_head = inputs.q.transpose(0, 2, 1, 3)
    k_by_head, v_by_head = (
        x.transpose(0, 2, 1, 3).repeat(sizes.q_heads // sizes.kv_heads, axis=1)
        for x in (inputs.k, inputs.v)
    )

    q_pos, k_pos = np.arange(sizes.q_len) + sizes.k_len - sizes.q_len, np.arange(sizes.k_len)
    # The whole matrix at once: this is what all others are compared with, not how they compute.
    visible = visible_pairs(inputs, mask)
    shift = bias_shift(inputs, visible)

    with np.errstate(invalid="ignore", over="ignore"):
        x = scale * (q_by_head @ k_by_head.swapaxes(-1, -2))
        slope = np.ones_like(x)
        if softcap is not None:
            squashed = np.tanh(x / softcap)
            x, slope = softcap * squashed, 1 - squashed**2
        if inputs.bias is not None:
            # Shifted as in every backend, so that a large bias costs the oracle no more digits than
            # them.
            x = x + (inputs.bias if shift is None else inputs.bias - shift[..., None])
            visible &= ~np.isneginf(inputs.bias)
        if inputs.slopes is not None:
            x = x - inputs.slopes[:, :, None, None] * np.abs(q_pos[:, None] - k_pos)
    sink_rows = np.empty((sizes.q_heads, 0)) if inputs.sinks is None else inputs.sinks
    lse, probs = _softmax(np.where(visible, x, -np.inf), sink_rows.reshape(sizes.q_heads, -1))
    # What was taken off the scores is put back where they leave.
    lse = lse if shift is None else lse + shift
    probs = np.where(visible, probs, 0)  # not so yet in rows that hold NaN
    keep = np.ones_like(probs)
    if dropout_p > 0 and dropout_seed is not None:
        kept = dropout_keep(
            dropout_p, dropout_seed, batch=np.arange(sizes.batch),
            heads=np.arange(sizes.q_heads) if heads is None else heads,
            queries=np.arange(sizes.q_len), keys=k_pos,
        )  # fmt: skip
        keep = kept / (1 - dropout_p)
    out = masked_matmul(probs * keep, visible, v_by_head).transpose(0, 2, 1, 3)
    return Dense(
        q_by_head, k_by_head, v_by_head, visible, slope, probs, keep, lse, out, scale, inputs
    )


def _softmax(logits: Floats, sinks: Floats) -> tuple[Floats, Floats]:
    """Return ``(lse, softmax)`` over the last axis; sinks ``[H, n]`` take their share."""
    top = logits.max(axis=-1, initial=-np.inf)
    # Sinks are in the softmax: the largest logit may be one of them.
    top = np.maximum(top, sinks.max(axis=-1, initial=-np.inf)[:, None])
    safe = np.where(np.isneginf(top), 0, top)
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.exp(logits - safe[..., None])
        of_sinks = np.exp(sinks[None, :, None, :] - safe[..., None])
        total = weights.sum(axis=-1) + of_sinks.sum(axis=-1)
        probs = np.where(total[..., None] == 0, 0, weights / total[..., None])
        return safe + np.log(total), probs


@np.errstate(invalid="ignore", over="ignore")
def dense_backward(dense: Dense, dout: Floats, dlse: Floats | None) -> Grads:
    """Return the gradients of a forward pass."""
    do = dout.transpose(0, 2, 1, 3)
    dprobs = (do @ dense.v.swapaxes(-1, -2)) * dense.keep
    # delta = rowsum(P * dP) - dlse; it equals rowsum(dout * out) - dlse without reading out.
    weighted = np.where(dense.visible, dense.probs * dprobs, 0)
    delta = weighted.sum(axis=-1, keepdims=True) - (0 if dlse is None else dlse[..., None])
    dlogits = np.where(dense.visible, dense.probs * (dprobs - delta), 0)
    dproducts = np.where(dense.visible, dlogits * dense.slope * dense.scale, 0)
    seen_by = dense.visible.swapaxes(-1, -2)
    dq = masked_matmul(dproducts, dense.visible, dense.k)
    dk = masked_matmul(dproducts.swapaxes(-1, -2), seen_by, dense.q)
    dv = masked_matmul((dense.probs * dense.keep).swapaxes(-1, -2), seen_by, do)
    sinks, bias, sizes = dense.inputs.sinks, dense.inputs.bias, dense.inputs.sizes
    groups = sizes.kv_heads, sizes.q_heads // sizes.kv_heads
    # K/V were repeated for their query heads, so their gradients are summed over these.
    dk, dv = (x.reshape(len(x), *groups, *x.shape[2:]).sum(axis=2) for x in (dk, dv))
    dsinks = None
    if sinks is not None:
        safe = np.where(np.isneginf(dense.lse), 0, dense.lse)  # only where a sink is -inf itself
        share = np.exp(sinks.reshape(len(sinks), -1)[None, :, None, :] - safe[..., None])
        dsinks = (share * -delta).sum(axis=(0, 2)).reshape(sinks.shape)
    dbias = None
    if bias is not None:  # summed over the axes along which the bias was broadcast
        axes = tuple(n for n, size in enumerate(bias.shape) if size == 1)
        dbias = dlogits.sum(axis=axes, keepdims=True)
    dq, dk, dv = (x.transpose(0, 2, 1, 3) for x in (dq, dk, dv))
    return Grads(dq, dk, dv, dsinks, dbias)
