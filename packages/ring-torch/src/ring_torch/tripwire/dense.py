"""Attention of some queries to some keys, densely: the formula and the mask's rule, nothing else.

All is of one batch row: ``n`` queries, ``m`` keys; scores are ``[H, n, m]``. The exact numbers are
float64; the plain ones round where a framework in the call's dtype would, for the 2x rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ring_torch.kernels.philox import dropout_keep
from ring_torch.records import KernelParams

_BLOCK = 1024  # of the longer side at a time


class Precision(NamedTuple):
    """Where numbers are rounded."""

    acc_dtype: torch.dtype  # of sums
    narrow: torch.dtype | None = None  # of probabilities and of gradients of scores
    reverse: bool = False  # sums over the head dim run backwards: float64's own rounding

    def round(self, x: Tensor) -> Tensor:
        """As a kernel hands it to a matmul."""
        return x if self.narrow is None else x.to(self.narrow).to(self.acc_dtype)


EXACT = Precision(torch.float64)


def plain_precision(dtype: torch.dtype) -> Precision:
    """Of a plain implementation in a dtype."""
    if dtype == torch.float64:
        return Precision(torch.float64, reverse=True)
    return Precision(torch.float32, None if dtype == torch.float32 else dtype)


class Rule(NamedTuple):
    """What all scores of a batch row share."""

    params: KernelParams
    batch: int  # which row
    slopes: Tensor | None  # ALiBi's, [H]


class SampledQueries(NamedTuple):
    """Some queries."""

    q: Tensor  # [n, H, D]
    indices: Tensor  # [n] global
    position: Tensor  # [n] among the keys
    ids: Tensor | None  # [n]
    bias: Tensor | None  # [H or 1, n, m]
    dout: Tensor | None = None  # [n, H, Dv]

    def take(self, part: slice) -> SampledQueries:
        """The same for a slice of the queries."""
        bias = None if self.bias is None else self.bias[:, part]
        q, indices, position, ids, _, dout = (None if x is None else x[part] for x in self)
        assert q is not None and indices is not None and position is not None
        return SampledQueries(q, indices, position, ids, bias, dout)


class SampledKeys(NamedTuple):
    """Some keys, at ascending positions."""

    k: Tensor  # [m, K, D]
    v: Tensor  # [m, K, Dv]
    position: Tensor  # [m]
    ids: Tensor | None  # [m]


class Partial(NamedTuple):
    """Means over keys, weighted by softmax over these keys alone."""

    lse: Tensor  # [n, H]
    means: Tensor  # [n, H, W]

    def with_sinks(self, sinks: Tensor) -> Partial:
        """Softmax mass taken by sinks ``[H]``, logits that yield no value."""
        lse = torch.logaddexp(self.lse, sinks.to(self.lse.dtype))
        return Partial(lse, self.means * _weight(self.lse, lse).unsqueeze(-1))


def merged(parts: Sequence[Partial]) -> Partial:
    """Means over the keys of all parts."""
    lse = torch.logsumexp(torch.stack([x.lse for x in parts]), dim=0)
    means = sum(_weight(x.lse, lse).unsqueeze(-1) * x.means for x in parts)
    assert isinstance(means, Tensor)
    return Partial(lse, means)


def query_means(
    rule: Rule, queries: SampledQueries, keys: SampledKeys, precision: Precision
) -> Partial:
    """What the results of queries are made of.

    Without ``dout`` means of ``keep * v``: ``out``. With it, side by side, of ``keep * dp`` (that
    is ``delta``), of ``keep * dp * slope * k`` and of ``slope * k``; then ``dq = scale * (second -
    (delta - dlse) * third)``, with ``dp = dout @ v`` and the soft cap's ``slope``.
    """
    parts = []
    for j in _blocks(len(keys.position)):
        block = SampledKeys(*(None if x is None else x[j] for x in keys))  # type: ignore[arg-type]
        bias = None if queries.bias is None else queries.bias[:, :, j]
        parts.append(_means_of_block(rule, queries._replace(bias=bias), block, precision))
    return merged(parts)


def key_sums(
    rule: Rule,
    queries: SampledQueries,
    keys: SampledKeys,
    lse: Tensor,
    delta: Tensor,
    precision: Precision,
) -> Tensor:
    """What queries add to keys: dK, dV and sums of weights, ``[m, K, D + Dv + 1]``.

    Args:
        rule: What scores share.
        queries: With ``dout``.
        keys: The keys.
        lse: Of the queries, over all keys, ``[n, H]``.
        delta: ``rowsum(dout * out) - dlse``, ``[n, H]``.
        precision: Where to round.
    """
    acc_dtype = precision.acc_dtype
    m, heads, dim = keys.k.shape
    total = torch.zeros(m, heads, dim + keys.v.shape[2] + 1, dtype=acc_dtype, device=keys.k.device)
    for i in _blocks(len(queries.indices)):
        some = queries.take(i)
        scores = _scores(rule, some, keys, precision)
        q, dout, _, v = _finite(scores.visible, some, keys, acc_dtype)
        safe = lse[i].to(acc_dtype).t().masked_fill(lse[i].t() == -torch.inf, torch.inf)
        p = torch.where(scores.visible, (scores.x - safe.unsqueeze(-1)).exp(), 0.0)
        dp = torch.einsum("nhd,mhd->hnm", dout, v) * scores.keep
        ds = p * (dp - delta[i].to(acc_dtype).t().unsqueeze(-1)) * scores.slope * rule.params.scale
        dk = torch.einsum("hnm,nhd->mhd", precision.round(ds), q)
        dv = torch.einsum("hnm,nhd->mhd", precision.round(p * scores.keep), dout)
        each = torch.cat([dk, dv, p.sum(dim=1).t().unsqueeze(-1)], dim=-1)
        total += each.unflatten(1, (heads, -1)).sum(dim=2)
    return total


class _Scores(NamedTuple):
    """Scores and what belongs to them, ``[H, n, m]`` or broadcast to it."""

    x: Tensor  # after cap, bias and ALiBi
    slope: Tensor  # derivative of the soft cap
    visible: Tensor
    keep: Tensor  # dropout's factor


def _scores(
    rule: Rule, queries: SampledQueries, keys: SampledKeys, precision: Precision
) -> _Scores:
    params, acc_dtype = rule.params, precision.acc_dtype
    visible = _visible(params, queries, keys)
    if queries.bias is not None:
        visible = visible & (queries.bias > -torch.inf)
    q, _, k, _ = _finite(visible, queries, keys, acc_dtype)
    if precision.reverse:
        q, k = q.flip(-1), k.flip(-1)
    x = torch.einsum("nhd,mhd->hnm", q, k) * params.scale
    one = torch.ones((), dtype=acc_dtype, device=x.device)
    slope, keep = one, one
    if params.softcap is not None:
        squashed = torch.tanh(x / params.softcap)
        x, slope = squashed * params.softcap, 1 - squashed * squashed
    if queries.bias is not None:
        x = x + queries.bias.to(acc_dtype)
    if rule.slopes is not None:
        distance = (queries.position[:, None] - keys.position).abs()
        x = x - rule.slopes.to(acc_dtype)[:, None, None] * distance.to(acc_dtype)
    if params.dropout_p > 0:
        which, heads = range(rule.batch, rule.batch + 1), x.shape[0]
        kept = dropout_keep(
            params.dropout_p, params.dropout_seed, which, heads, queries.indices, keys.position
        )
        keep = kept[0].to(acc_dtype) / (1 - params.dropout_p)
    return _Scores(x, slope, visible.expand(x.shape), keep)


def _visible(params: KernelParams, queries: SampledQueries, keys: SampledKeys) -> Tensor:
    """The mask's rule, ``[1, n, m]``."""
    q_pos, k_pos = queries.position[:, None], keys.position[None]
    shape, device = (len(queries.position), len(keys.position)), q_pos.device
    seen = torch.as_tensor(params.mask.rule(q_pos, k_pos), device=device).expand(shape)
    if params.mask.document_offsets is not None:
        offsets = torch.as_tensor(params.mask.document_offsets, device=device)
        q_doc, k_doc = (
            torch.searchsorted(offsets, x, right=True) for x in (queries.position, keys.position)
        )
        seen = seen & (q_doc[:, None] == k_doc)
    if queries.ids is not None and keys.ids is not None:
        seen = seen & (queries.ids[:, None] == keys.ids) & (queries.ids >= 0)[:, None]
    return seen.unsqueeze(0)


def _means_of_block(
    rule: Rule, queries: SampledQueries, keys: SampledKeys, precision: Precision
) -> Partial:
    scores = _scores(rule, queries, keys, precision)
    _, dout, k, v = _finite(scores.visible, queries, keys, precision.acc_dtype)
    x = scores.x.masked_fill(~scores.visible, -torch.inf)
    top = x.amax(dim=-1, keepdim=True)
    weights = (x - top.masked_fill(top == -torch.inf, 0.0)).exp()
    total = weights.sum(dim=-1, keepdim=True)
    lse = (top + total.log()).squeeze(-1).t()
    p = weights / total.masked_fill(total == 0, 1.0)
    if queries.dout is None:
        return Partial(lse, torch.einsum("hnm,mhd->nhd", precision.round(p * scores.keep), v))
    dp = torch.einsum("nhd,mhd->hnm", dout, v) * scores.keep
    delta = (p * dp).sum(dim=-1).t().unsqueeze(-1)
    second, third = (
        torch.einsum("hnm,mhd->nhd", precision.round(x), k)
        for x in (p * dp * scores.slope, p * scores.slope)
    )
    return Partial(lse, torch.cat([delta, second, third], dim=-1))


def _finite(
    visible: Tensor, queries: SampledQueries, keys: SampledKeys, acc_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``q, dout, k, v`` of ``H`` heads, zero where nobody here sees them or they see nobody."""
    q = queries.q
    dout = q.new_zeros(*q.shape[:2], keys.v.shape[2]) if queries.dout is None else queries.dout
    group = q.shape[1] // max(keys.k.shape[1], 1)
    sees, seen = visible.any(dim=0).any(dim=1), visible.any(dim=0).any(dim=0)
    q, dout = (torch.where(sees[:, None, None], x, 0).to(acc_dtype) for x in (q, dout))
    k, v = (torch.where(seen[:, None, None], x, 0).to(acc_dtype) for x in (keys.k, keys.v))
    return q, dout, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def _weight(part: Tensor, total: Tensor) -> Tensor:
    """The share of a part's softmax mass; 0 where there is none."""
    return (part - total.masked_fill(total == -torch.inf, 0.0)).exp()


def _blocks(length: int) -> Iterator[slice]:
    return (slice(at, min(at + _BLOCK, length)) for at in range(0, length, _BLOCK))
