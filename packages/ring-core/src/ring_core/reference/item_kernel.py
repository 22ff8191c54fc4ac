"""The simulator's kernel: one work item in numpy, the plainest statement of a kernel's job.

Shapes: ``q [B, n, H, D]``, ``k [B, m, K, D]``, ``v [B, m, K, Dv]`` are an item's slices; ``out [B,
n, H, Dv]``, ``lse [B, H, n]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from ring_core.base.arguments import Bools, Floats, Ints
from ring_core.masks.mask import Mask
from ring_core.philox import dropout_keep
from ring_core.plan.item import WorkItem

Precision = Literal["float64", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Params:
    """The options that all items of a call share.

    The kernel rounds softmax weights and gradients of scores to ``precision``; the simulator rounds
    inputs before it and results after it. Sums are float32 or float64.
    """

    mask: Mask
    scale: float
    softcap: float | None
    dropout_p: float
    dropout_seed: int | None
    precision: Precision


class Side(NamedTuple):
    """Indices, positions and segment ids of an item's query rows or key columns."""

    indices: Ints  # global index of each token
    position: Ints  # position in the mask's rule: of queries, index + T_kv - T_q
    segments: Ints | None  # [B, n]

    def take(self, part: slice) -> Side:
        """Return the indices, positions and ids of a slice of the tokens."""
        return Side(
            self.indices[part], self.position[part],
            None if self.segments is None else self.segments[:, part],
        )  # fmt: skip


class QueryRows(NamedTuple):
    """Data of query rows besides Q: positions, segment ids, bias and slopes. They travel with Q."""

    side: Side
    bias: Floats | None  # [B or 1, H or 1, n, T_kv]
    bias_shift: Floats | None  # [B, H, n], taken off the bias (`reference.dense.bias_shift`)
    slopes: Floats | None  # [B or 1, H]

    def take(self, part: slice) -> QueryRows:
        """Return the data of a slice of the rows; slopes are shared by all rows."""
        bias, shift = (None if x is None else x[:, :, part] for x in (self.bias, self.bias_shift))
        return QueryRows(self.side.take(part), bias, shift, self.slopes)


def round_to(x: Floats, precision: Precision) -> Floats:
    """Round to the nearest number of a precision (ties to even).

    ``float64`` returns ``x`` itself. The result is float32 otherwise, which holds the numbers of
    narrower precisions exactly.
    """
    if precision == "float64":
        return x
    single = np.ascontiguousarray(x, dtype=np.float32)
    if precision != "bfloat16":  # numpy has no bfloat16, so its rounding is done on the bits
        return single.astype(precision).astype(np.float32)
    bits = single.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(single), single, rounded.view(np.float32))


def forward(
    q: Floats,
    k: Floats,
    v: Floats,
    rows: QueryRows,
    columns: Side,
    item: WorkItem,
    params: Params,
) -> tuple[Floats, Floats]:
    """Compute ``(out, lse)`` of one item, over its own keys alone.

    With ``rows.bias_shift`` ``lse`` is of the shifted scores. A query that sees none of these keys
    has ``-inf`` and, as ``out``, NaN, which :func:`ring_core.merge` does not read.
    """
    logits, visible, _ = _logits(q, k, rows, columns, item, params)
    top = logits.max(axis=-1)
    safe = np.where(np.isneginf(top), 0, top)
    weights = np.exp(logits - safe[..., None])
    total = weights.sum(axis=-1)
    probs = weights / total[..., None]  # NaN where lse is -inf: merge does not read it
    # Rounded where kernels round: the weights enter the product in the inputs' dtype.
    weights_kept = round_to(probs * _dropout_factor(rows, columns, q, params), params.precision)
    out = masked_matmul(weights_kept, visible, _heads(v, q.shape[2]))
    return out.swapaxes(1, 2), safe + np.log(total)


def backward(
    dout: Floats, q: Floats, k: Floats, v: Floats, lse: Floats, delta: Floats, rows: QueryRows,
    columns: Side,
    item: WorkItem, params: Params,
) -> tuple[Floats, Floats, Floats, Floats]:  # fmt: skip
    """Compute the parts of the gradients that one item adds.

    Args:
        dout: Gradient of the output, ``[B, n, H, Dv]``.
        q, k, v: The item's slices.
        lse: The rows' final ``lse`` over all keys, ``[B, H, n]``.
        delta: ``rowsum(dout * out) - dlse`` of the final output, ``[B, H, n]``.
        rows, columns: Data of the query rows and key columns.
        item: The item.
        params: Options of the call.

    Returns:
        ``(dq, dk, dv, dlogits)``; the last, ``[B, H, n, m]``, is the gradient of the scores after
        the soft cap, and so of the bias.
    """
    logits, visible, slope = _logits(q, k, rows, columns, item, params)
    safe = np.where(np.isneginf(lse), 0, lse)
    dout_by_head, q_by_head = dout.swapaxes(1, 2), q.swapaxes(1, 2)
    k_by_head, v_by_head = _heads(k, q.shape[2]), _heads(v, q.shape[2])
    keep = _dropout_factor(rows, columns, q, params)
    # Probabilities over all keys of all ranks, although only this item's are here: lse is final.
    probs = np.where(visible, np.exp(logits - safe[..., None]), 0)
    dprobs = (dout_by_head @ v_by_head.swapaxes(-1, -2)) * keep
    dlogits = np.where(visible, probs * (dprobs - delta[..., None]), 0)
    dproducts = round_to(np.where(visible, dlogits * slope * params.scale, 0), params.precision)
    weights_kept, visible_t = round_to(probs * keep, params.precision), visible.swapaxes(-1, -2)
    dq = masked_matmul(dproducts, visible, k_by_head)
    dk = _grouped(masked_matmul(dproducts.swapaxes(-1, -2), visible_t, q_by_head), k.shape[2])
    dv = _grouped(masked_matmul(weights_kept.swapaxes(-1, -2), visible_t, dout_by_head), v.shape[2])
    return dq.swapaxes(1, 2), dk, dv, dlogits


def _logits(
    q: Floats, k: Floats, rows: QueryRows, columns: Side, item: WorkItem, params: Params
) -> tuple[Floats, Bools, Floats | float]:
    """Return ``(logits, visible, slope)``, each ``[B, H, n, m]``; hidden logits are ``-inf``.

    ``slope`` is the derivative of the soft cap, 1.0 without one.
    """
    visible = _visible(rows.side, columns, item, params.mask)
    x: Floats = params.scale * (q.swapaxes(1, 2) @ _heads(k, q.shape[2]).swapaxes(-1, -2))
    slope: Floats | float = 1.0
    if params.softcap is not None:
        squashed = np.tanh(x / params.softcap)
        x, slope = params.softcap * squashed, 1 - squashed**2
    if rows.bias is not None:
        # A bias has all keys in natural order; those of the item may lie anywhere in it.
        bias = rows.bias[..., columns.indices]
        visible = visible & ~np.isneginf(bias)
        x = x + (bias if rows.bias_shift is None else bias - rows.bias_shift[..., None])
    if rows.slopes is not None:
        distance = np.abs(rows.side.position[:, None] - columns.position)
        x = x - rows.slopes[:, :, None, None] * distance.astype(q.dtype)
    visible = np.broadcast_to(visible, x.shape)
    return np.where(visible, x, -np.inf), visible, slope


def _visible(rows: Side, columns: Side, item: WorkItem, mask: Mask) -> Bools:
    """Return which of the item's queries see which of its keys, bool ``[B or 1, 1, n, m]``."""
    n, m = rows.indices.size, columns.indices.size
    distance = np.arange(n)[:, None] - np.arange(m)
    visible = np.ones((n, m), dtype=bool)
    if item.lo is not None:
        visible &= distance >= item.lo
    if item.hi is not None:
        visible &= distance <= item.hi
    if item.cu_q is not None and item.cu_k is not None:
        q_doc, k_doc = (
            np.searchsorted(cuts, np.arange(size), side="right")
            for cuts, size in ((item.cu_q, n), (item.cu_k, m))
        )
        visible &= q_doc[:, None] == k_doc
    if item.tiles is not None:  # items of a predicate mask have no band and no documents
        visible = mask.dense(rows.position, columns.position)
    if rows.segments is None or columns.segments is None:
        return visible[None, None]
    same: Bools = rows.segments[:, :, None] == columns.segments[:, None, :]
    return (visible & same & (rows.segments >= 0)[:, :, None])[:, None]


def _dropout_factor(rows: QueryRows, columns: Side, q: Floats, params: Params) -> Floats | float:
    """Return dropout's factor for each softmax weight, 0 or ``1 / (1 - p)``, or 1.0 without it."""
    if params.dropout_seed is None:
        return 1.0
    kept = dropout_keep(
        params.dropout_p, params.dropout_seed, batch=np.arange(q.shape[0]),
        heads=np.arange(q.shape[2]),
        queries=rows.side.indices, keys=columns.indices,
    )  # fmt: skip
    return kept.astype(q.dtype) / (1 - params.dropout_p)


def _heads(x: Floats, heads: int) -> Floats:
    """Repeat K/V heads for query heads: ``[B, m, K, D]`` to ``[B, H, m, D]``."""
    return x.swapaxes(1, 2).repeat(heads // x.shape[2], axis=1)


def _grouped(x: Floats, kv_heads: int) -> Floats:
    """Sum over the query heads of each K/V head: ``[B, H, m, D]`` to ``[B, m, K, D]``."""
    # Neighbouring query heads share a K/V head.
    groups = x.reshape(len(x), kv_heads, x.shape[1] // kv_heads, *x.shape[2:])
    return groups.sum(axis=2).swapaxes(1, 2)


def masked_matmul(weights: Floats, visible: Bools, x: Floats) -> Floats:
    """Compute ``weights @ x`` without reading rows of ``x`` that are not visible.

    ``weights`` are zero there, but ``0 * nan`` is ``nan``: so rows of ``x`` that are not finite are
    left out of the product, and added only where they are visible.

    Args:
        weights: ``[..., n, m]``.
        visible: bool ``[..., n, m]``.
        x: ``[..., m, D]``.
    """
    odd = ~np.isfinite(x).all(axis=-1)
    with np.errstate(invalid="ignore"):  # weights may be infinite themselves
        result = weights @ np.where(odd[..., None], 0, x)
    for j in np.flatnonzero(odd.any(axis=tuple(range(odd.ndim - 1)))):
        with np.errstate(invalid="ignore"):
            term = weights[..., :, j, None] * x[..., j, None, :]
        result = result + np.where(visible[..., :, j, None] & odd[..., j, None, None], term, 0)
    return result
