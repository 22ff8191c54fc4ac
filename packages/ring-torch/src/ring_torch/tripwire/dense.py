"""Attention of some queries to some keys, densely: the formula and the mask's rule, nothing else.

All is of one batch row: ``n`` queries, ``m`` keys; scores are ``[K, G, n, m]``, ``H = K * G``. The
exact numbers are float64; the plain ones round where a framework in the call's dtype would, for the
2x rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ring_core.base.arguments import not_none
from ring_torch.kernels.eager import dropout_keep
from ring_torch.records import KernelParams

_BLOCK_BYTES = 128 << 20  # of float64 of the longer side at a time


class Precision(NamedTuple):
    """Where numbers are rounded."""

    acc_dtype: torch.dtype  # of sums
    narrow: torch.dtype | None = None  # of probabilities and of gradients of scores
    reverse: bool = False  # sums over the head dim run backwards: float64's own rounding

    def round(self, x: Tensor) -> Tensor:
        """As a kernel hands it to a matmul."""
        return x if self.narrow is None else x.to(self.narrow).to(self.acc_dtype)

    def products(self, equation: str, terms: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Multiply rounded weights and what they weigh, and after these products their squares.

        A sum of numbers that were rounded is off by about the root of the sum of their squares.
        Where no weights are rounded the squares are zeros.
        """
        sums = [torch.einsum(equation, self.round(weights), x) for weights, x in terms]
        if self.narrow is None:
            return sums + [torch.zeros_like(x) for x in sums]
        return sums + [torch.einsum(equation, weights**2, x**2) for weights, x in terms]


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
    bias: Tensor | None  # [n, H or 1, m]
    dout: Tensor | None = None  # [n, H, Dv]


class SampledKeys(NamedTuple):
    """Some keys, at ascending positions."""

    k: Tensor  # [m, K, D]
    v: Tensor  # [m, K, Dv]
    position: Tensor  # [m]
    ids: Tensor | None  # [m]


class ForwardResults(NamedTuple):
    """What a backward needs of queries' forward."""

    out: Tensor  # [n, H, Dv]
    lse: Tensor  # [n, H]
    dlse: Tensor | None  # [n, H]


def _taken[T: (SampledQueries, SampledKeys, ForwardResults)](x: T, part: slice) -> T:
    """The same for a slice of the queries, or keys."""
    return type(x)._make(None if y is None else y[part] for y in x)


class Partial(NamedTuple):
    """Means over keys, weighted by softmax over these keys alone."""

    lse: Tensor  # [n, H]
    means: Tensor  # [n, H, W]
    squares: Tensor  # [n, H, W]: sums of the squares of what was rounded and added up

    def with_sinks(self, sinks: Tensor) -> Partial:
        """Softmax mass taken by sinks ``[H]``, logits that yield no value."""
        lse = torch.logaddexp(self.lse, sinks.to(self.lse.dtype))
        weight = _weight(self.lse, lse).unsqueeze(-1)
        return Partial(lse, self.means * weight, self.squares * weight**2)


def merged(parts: Sequence[Partial]) -> Partial:
    """Means over the keys of all parts."""
    lse = torch.logsumexp(torch.stack([x.lse for x in parts]), dim=0)
    weights = [_weight(x.lse, lse).unsqueeze(-1) for x in parts]
    means = torch.stack([weight * x.means for weight, x in zip(weights, parts, strict=True)])
    squares = torch.stack([weight**2 * x.squares for weight, x in zip(weights, parts, strict=True)])
    return Partial(lse, means.sum(dim=0), squares.sum(dim=0))


def query_means(
    rule: Rule, queries: SampledQueries, keys: SampledKeys, precisions: Sequence[Precision]
) -> list[Partial]:
    """What the results of queries are made of, in each precision.

    Without ``dout`` means of ``keep * v``: ``out``. With it, side by side, of ``keep * dp * slope *
    k`` and of ``slope * k``; then ``dq = scale * (first - (delta - dlse) * second)``, with ``dp =
    dout @ v``, the soft cap's ``slope`` and ``delta = rowsum(dout * out)``.
    """
    parts = []
    for j in _blocks(len(keys.position), keys.k, keys.v):
        bias = None if queries.bias is None else queries.bias[:, :, j]
        some, block = queries._replace(bias=bias), _taken(keys, j)
        visible = _visible(rule.params, some, block)
        parts.append([_means_of_block(rule, some, block, visible, each) for each in precisions])
    return [merged(each) for each in zip(*parts, strict=True)]


def key_sums(
    rule: Rule,
    queries: SampledQueries,
    keys: SampledKeys,
    results: ForwardResults,
    precisions: Sequence[Precision],
) -> list[Tensor]:
    """What queries add to keys, in each precision: dK, dV and sums of weights.

    Args:
        rule: What scores share.
        queries: With ``dout``.
        keys: The keys.
        results: The queries', over all keys.
        precisions: Where to round.

    Returns:
        Side by side, ``[m, K, 2 * (D + Dv) + 1]`` each: dK, dV, the sums of squares of what was
        rounded and added up to them, and the weights.
    """
    m, heads, dim = keys.k.shape
    sums = [
        torch.zeros(
            m, heads, 2 * (dim + keys.v.shape[2]) + 1, dtype=x.acc_dtype, device=keys.k.device
        )
        for x in precisions
    ]
    assert queries.dout is not None
    for i in _blocks(len(queries.indices), queries.q, queries.dout):
        some, part = _taken(queries, i), _taken(results, i)
        visible = _visible(rule.params, some, keys)
        for total, precision in zip(sums, precisions, strict=True):
            total.add_(_sums_of_block(rule, some, keys, part, visible, precision))
    return sums


def _scores(
    rule: Rule,
    queries: SampledQueries,
    keys: SampledKeys,
    q: Tensor,
    k: Tensor,
    precision: Precision,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores ``[K, G, n, m]`` of ``q [n, K, G, D]`` and ``k [m, K, D]``, after cap, bias and ALiBi.

    Beside them, so or broadcast to it, the derivative of the soft cap and dropout's factor.
    """
    params, acc_dtype = rule.params, precision.acc_dtype
    if precision.reverse:
        q, k = q.flip(-1), k.flip(-1)
    x = torch.einsum("nkgd,mkd->kgnm", q, k) * params.scale
    by_group = x.shape[:2]
    slope = keep = torch.ones((), dtype=acc_dtype, device=x.device)
    if params.softcap is not None:
        squashed = torch.tanh(x / params.softcap)
        x, slope = squashed * params.softcap, 1 - squashed * squashed
    if queries.bias is not None:
        x = x + _by_group(queries.bias.transpose(0, 1).to(acc_dtype), by_group)
    if rule.slopes is not None:
        distance = (queries.position[:, None] - keys.position).abs()
        x = x - rule.slopes.to(acc_dtype).reshape(*by_group, 1, 1) * distance.to(acc_dtype)
    if params.dropout_p > 0:
        kept = dropout_keep(
            params.dropout_p, params.dropout_seed, range(rule.batch, rule.batch + 1),
            math.prod(by_group), queries.indices, keys.position,
        )  # fmt: skip
        keep = _by_group(kept[0].to(acc_dtype) / (1 - params.dropout_p), by_group)
    return x, slope, keep


def _by_group(x: Tensor, by_group: tuple[int, ...]) -> Tensor:
    """``[H or 1, n, m]`` as ``[K or 1, G or 1, n, m]``."""
    return x.unsqueeze(0) if len(x) == 1 else x.unflatten(0, by_group)


def _visible(params: KernelParams, queries: SampledQueries, keys: SampledKeys) -> Tensor:
    """Who sees whom by the mask's rule and the bias, ``[1 or H, n, m]``."""
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
    seen = seen.unsqueeze(0)
    return seen if queries.bias is None else seen & (queries.bias.transpose(0, 1) > -torch.inf)


def _means_of_block(
    rule: Rule,
    queries: SampledQueries,
    keys: SampledKeys,
    visible: Tensor,
    precision: Precision,
) -> Partial:
    q, dout, k, v = _operands(visible, queries, keys, precision.acc_dtype)
    x, slope, keep = _scores(rule, queries, keys, q, k, precision)
    x = x.masked_fill(~_by_group(visible, x.shape[:2]), -torch.inf)
    lse = x.logsumexp(dim=-1)
    p = x.softmax(dim=-1).masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0)
    lse = lse.flatten(0, 1).t()

    if dout is None:
        terms = [(p * keep, v)]
    else:
        dp = torch.einsum("nkgd,mkd->kgnm", dout, v) * keep
        terms = [(p * dp * slope, k), (p * slope, k)]
    found = torch.cat(precision.products("kgnm,mkd->nkgd", terms), dim=-1).flatten(1, 2)
    return Partial(lse, *found.chunk(2, dim=-1))


def _sums_of_block(
    rule: Rule,
    queries: SampledQueries,
    keys: SampledKeys,
    results: ForwardResults,
    visible: Tensor,
    precision: Precision,
) -> Tensor:
    acc_dtype = precision.acc_dtype
    q, dout, k, v = _operands(visible, queries, keys, acc_dtype)
    assert dout is not None and queries.dout is not None
    x, slope, keep = _scores(rule, queries, keys, q, k, precision)
    by_group = x.shape[:2]

    def column(rows: Tensor) -> Tensor:
        """``[n, H]`` as ``[K, G, n, 1]``."""
        return rows.to(acc_dtype).t().reshape(*by_group, -1, 1)

    delta = (queries.dout.double() * results.out.double()).sum(dim=-1)
    delta = delta if results.dlse is None else delta - results.dlse.double()
    lse = results.lse.masked_fill(results.lse == -torch.inf, torch.inf)
    p = torch.where(_by_group(visible, by_group), (x - column(lse)).exp(), 0.0)
    dp = torch.einsum("nkgd,mkd->kgnm", dout, v) * keep
    ds = p * (dp - column(delta)) * slope * rule.params.scale
    found = precision.products("kgnm,nkgd->mkd", [(ds, q), (p * keep, dout)])
    return torch.cat([*found, p.sum(dim=(1, 2)).t().unsqueeze(-1)], dim=-1)


def _operands(
    visible: Tensor, queries: SampledQueries, keys: SampledKeys, acc_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """As they are multiplied, in groups: zero where nobody here sees them or they see nobody.

    ``q [n, K, G, D]``, ``dout [n, K, G, Dv]``, ``k [m, K, D]``, ``v [m, K, Dv]``.
    """
    by_group = (keys.k.shape[1], queries.q.shape[1] // max(keys.k.shape[1], 1))
    shown = visible.any(dim=0)
    q_seen, k_seen = (shown.any(dim=x)[:, None, None] for x in (1, 0))
    q, dout = (
        None if x is None else torch.where(q_seen, x, 0).to(acc_dtype).unflatten(1, by_group)
        for x in (queries.q, queries.dout)
    )
    k, v = (torch.where(k_seen, x, 0).to(acc_dtype) for x in (keys.k, keys.v))
    return not_none(q), dout, k, v


def _weight(part: Tensor, total: Tensor) -> Tensor:
    """The share of a part's softmax mass; 0 where there is none."""
    return (part - total.masked_fill(total == -torch.inf, 0.0)).exp()


def _blocks(length: int, *sides: Tensor) -> Iterator[slice]:
    """Slices of a length, whose rows ``[length, heads, dim]`` take so many bytes as float64."""
    row = sum(x[:1].numel() for x in sides)
    size = max(_BLOCK_BYTES // max(8 * row, 1), 1)
    return (slice(at, min(at + size, length)) for at in range(0, length, size))
