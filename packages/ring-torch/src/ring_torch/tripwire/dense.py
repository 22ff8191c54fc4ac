"""Dense attention of some queries and some keys, from the formula and the mask's rule alone.

Tensors are of one batch row, with ``n`` queries and ``m`` keys. Scores are ``[K, G, n, m]``, where
``H = K * G`` query heads share ``K`` K/V heads in groups of ``G``.

Results are computed twice: exactly, in float64, and as a plain implementation in the call's dtype
would, with its roundings. The kernel's error may be at most twice that of the plain one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ring_core.base.arguments import not_none
from ring_torch.kernels.eager import dropout_keep
from ring_torch.kernels.rules import shown
from ring_torch.positions import on_device
from ring_torch.records import KernelParams

_BLOCK_BYTES = 256 << 20  # most bytes of float64 that are computed at a time, of the longer side


class Precision(NamedTuple):
    """Dtypes in which attention is computed.

    Attributes:
        acc_dtype: Dtype of sums.
        narrow: Dtype to which probabilities and gradients of scores are rounded before matmuls;
            ``None`` for no rounding.
        reverse: True to sum over the head dim backwards. In float64, where nothing is rounded to a
            narrower dtype, this shows the rounding of float64 itself.
    """

    acc_dtype: torch.dtype
    narrow: torch.dtype | None = None
    reverse: bool = False

    def round(self, x: Tensor) -> Tensor:
        """Round a tensor as a kernel does before a matmul, and return it in ``acc_dtype``."""
        return x if self.narrow is None else x.to(self.narrow).to(self.acc_dtype)

    def products(self, equation: str, terms: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return weighted sums for pairs of weights and values, then the sums of terms' squares.

        The error of a sum of rounded numbers is about the root of the sum of their squares, times
        the rounding unit. If no weights are rounded, the squares are zeros.

        Args:
            equation: Einsum equation of weights and values.
            terms: Pairs of weights and values.
        """
        sums = [torch.einsum(equation, self.round(weights), x) for weights, x in terms]
        if self.narrow is None:
            return sums + [torch.zeros_like(x) for x in sums]
        return sums + [torch.einsum(equation, weights**2, x**2) for weights, x in terms]


EXACT = Precision(torch.float64)


def plain_precision(dtype: torch.dtype) -> Precision:
    """Return the precision of a plain implementation in a dtype."""
    if dtype == torch.float64:
        return Precision(torch.float64, reverse=True)
    return Precision(torch.float32, None if dtype == torch.float32 else dtype)


class ScoreRule(NamedTuple):
    """Parameters that all scores of a batch row share.

    Attributes:
        params: Parameters of the call: scale, mask, soft cap, dropout.
        batch: Index of the batch row, on which dropout depends.
        slopes: ALiBi slopes ``[H]``, if any.
        seq_len: Number of queries, over all ranks; those behind are padding.
        kv_seq_len: Number of keys, likewise.
        seed: Seed of dropout.
    """

    params: KernelParams
    batch: int
    slopes: Tensor | None
    seq_len: int
    kv_seq_len: int
    seed: int = 0


class SampledQueries(NamedTuple):
    """Some queries of one batch row, with all that their scores depend on.

    Attributes:
        q: Queries ``[n, H, D]``.
        indices: Indices in the global sequence of queries, int64 ``[n]``, on which dropout depends.
        position: Positions among the keys, int64 ``[n]``, by which the mask decides.
        ids: Segment ids ``[n]``, if any.
        bias: Bias ``[n, H or 1, m]``, if any.
        dout: Gradient of the output ``[n, H, Dv]``, in a backward.
    """

    q: Tensor  # [n, H, D]
    indices: Tensor  # [n]
    position: Tensor  # [n]
    ids: Tensor | None  # [n]
    bias: Tensor | None  # [n, H or 1, m]
    dout: Tensor | None = None  # [n, H, Dv]


class SampledKeys(NamedTuple):
    """Some keys of one batch row, at ascending positions.

    Attributes:
        k: Keys ``[m, K, D]``.
        v: Values ``[m, K, Dv]``.
        position: Positions, int64 ``[m]``.
        ids: Segment ids ``[m]``, if any.
    """

    k: Tensor  # [m, K, D]
    v: Tensor  # [m, K, Dv]
    position: Tensor  # [m]
    ids: Tensor | None  # [m]


class ForwardResults(NamedTuple):
    """Results of a forward that the backward of the same queries needs.

    Attributes:
        out: Output ``[n, H, Dv]``.
        lse: Log-sum-exp of the scores ``[n, H]``.
        dlse: Gradient of ``lse``, ``[n, H]``, if any.
    """

    out: Tensor  # [n, H, Dv]
    lse: Tensor  # [n, H]
    dlse: Tensor | None  # [n, H]


def _sliced[T: (SampledQueries, SampledKeys, ForwardResults)](x: T, rows: slice) -> T:
    """Return a slice of the queries, keys or results."""
    return type(x)._make(None if y is None else y[rows] for y in x)


class Partial(NamedTuple):
    """Weighted means over some keys, with the softmax over these keys alone as weights.

    Attributes:
        lse: Log-sum-exp of these keys' scores, ``[n, H]``.
        means: Weighted means ``[n, H, W]``.
        squares: Sums of the squares of the rounded terms in ``means``, ``[n, H, W]``.
    """

    lse: Tensor  # [n, H]
    means: Tensor  # [n, H, W]
    squares: Tensor  # [n, H, W]

    def with_sinks(self, sinks: Tensor) -> Partial:
        """Return the means with attention sinks ``[H]`` in the softmax: logits without a value."""
        lse = torch.logaddexp(self.lse, sinks.to(self.lse.dtype))
        weight = _weight(self.lse, lse).unsqueeze(-1)
        return Partial(lse, self.means * weight, self.squares * weight**2)


def merged(partials: Sequence[Partial]) -> Partial:
    """Return the means over the keys of all parts together."""
    # A part's weight is its share of the softmax mass of all keys.
    # Blocks of keys are merged all at once, not one by one as the ring does: a wrong merge there is
    # not repeated here.
    lse = torch.logsumexp(torch.stack([x.lse for x in partials]), dim=0)
    weights = [_weight(x.lse, lse).unsqueeze(-1) for x in partials]
    means = torch.stack([weight * x.means for weight, x in zip(weights, partials, strict=True)])
    squares = torch.stack(
        [weight**2 * x.squares for weight, x in zip(weights, partials, strict=True)]
    )
    return Partial(lse, means.sum(dim=0), squares.sum(dim=0))


def query_means(
    rule: ScoreRule, queries: SampledQueries, keys: SampledKeys, precisions: Sequence[Precision]
) -> list[Partial]:
    """Return the means over keys from which results of queries are computed, in each precision.

    Without ``dout`` they are means of ``keep * v``, that is ``out``, where ``keep`` is dropout's
    factor. With ``dout`` they are, side by side, means of ``keep * dp * slope * k`` and of ``slope
    * k``, where ``dp = dout @ v`` and ``slope`` is the soft cap's derivative. Then ``dq = scale *
    (first - (delta - dlse) * second)`` with ``delta = rowsum(dout * out)``.
    """
    by_block = []
    # One block of keys at a time, as scores of all keys would not fit into memory.
    for j in _slices_of_rows(len(keys.position), keys.k, keys.v):
        bias = None if queries.bias is None else queries.bias[:, :, j]
        block_queries, block_keys = queries._replace(bias=bias), _sliced(keys, j)
        visible = _visible_pairs(rule, block_queries, block_keys)
        by_block.append(
            [
                _means_of_block(rule, block_queries, block_keys, visible, precision)
                for precision in precisions
            ]
        )
    return [merged(precision) for precision in zip(*by_block, strict=True)]


def key_sums(
    rule: ScoreRule,
    queries: SampledQueries,
    keys: SampledKeys,
    results: ForwardResults,
    precisions: Sequence[Precision],
) -> list[Tensor]:
    """Return, in each precision, the contributions of queries to keys: dK, dV and sums of weights.

    Args:
        rule: Parameters that all scores share.
        queries: The queries, with ``dout``.
        keys: The keys.
        results: Results of the queries' forward, over all keys.
        precisions: Precisions to compute in.

    Returns:
        A tensor ``[m, K, 2 * (D + Dv) + 1]`` for each precision, with side by side: dK, dV, the
        sums of squares of the rounded terms in both, and the sums of weights.
    """
    m, heads, dim = keys.k.shape
    sums = [
        torch.zeros(
            m, heads, 2 * (dim + keys.v.shape[2]) + 1, dtype=x.acc_dtype, device=keys.k.device
        )
        for x in precisions
    ]
    # One block of queries at a time, each added to the sums of all keys.
    for i in _slices_of_rows(len(queries.indices), queries.q, not_none(queries.dout)):
        block_queries, block_results = _sliced(queries, i), _sliced(results, i)
        visible = _visible_pairs(rule, block_queries, keys)
        for total, precision in zip(sums, precisions, strict=True):
            total.add_(_sums_of_block(rule, block_queries, keys, block_results, visible, precision))
    return sums


def _scores(
    rule: ScoreRule,
    queries: SampledQueries,
    keys: SampledKeys,
    q: Tensor,
    k: Tensor,
    precision: Precision,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores ``[K, G, n, m]`` after soft cap, bias and ALiBi, their derivative, and dropout.

    Args:
        rule: Parameters that all scores share.
        queries: The queries.
        keys: The keys.
        q: Queries by group, ``[n, K, G, D]``, in the accumulation dtype.
        k: Keys ``[m, K, D]``, in the accumulation dtype.
        precision: Precision to compute in.

    Returns:
        The scores, the derivative of the soft cap, and dropout's factor (0, or ``1 / (1 - p)``);
        the last two have the scores' shape or can be broadcast to it.
    """
    params, acc_dtype = rule.params, precision.acc_dtype
    if precision.reverse:
        # Another order of additions, by which the noise of rounding is told.
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
        keep_mask = dropout_keep(
            params.dropout_p,
            rule.seed,
            range(rule.batch, rule.batch + 1),
            math.prod(by_group),
            queries.indices,
            keys.position,
        )
        keep = _by_group(keep_mask[0].to(acc_dtype) / (1 - params.dropout_p), by_group)
    return x, slope, keep


def _by_group(x: Tensor, by_group: tuple[int, ...]) -> Tensor:
    """Reshape ``[H or 1, n, m]`` to ``[K or 1, G or 1, n, m]``."""
    return x.unsqueeze(0) if len(x) == 1 else x.unflatten(0, by_group)


def _visible_pairs(rule: ScoreRule, queries: SampledQueries, keys: SampledKeys) -> Tensor:
    """Return True where a query sees a key by the mask's rule and the bias, ``[1 or H, n, m]``."""
    q_pos, k_pos, mask = queries.position[:, None], keys.position[None], rule.params.mask
    shape, device = (len(queries.position), len(keys.position)), q_pos.device
    if (blocks := rule.params.blocks) is not None:
        visible = shown(blocks, queries.position, keys.position)
    else:
        visible = torch.as_tensor(mask.rule(q_pos, k_pos), device=device).expand(shape)
    # Padding sees nothing and is not seen.
    visible = visible & (queries.indices < rule.seq_len)[:, None] & (k_pos < rule.kv_seq_len)
    if mask.document_offsets is not None:
        offsets = on_device(mask.document_offsets, device)
        q_doc, k_doc = (
            torch.searchsorted(offsets, x, right=True) for x in (queries.position, keys.position)
        )
        visible = visible & (q_doc[:, None] == k_doc)
    if queries.ids is not None and keys.ids is not None:
        visible = visible & (queries.ids[:, None] == keys.ids) & (queries.ids >= 0)[:, None]
    visible = visible.unsqueeze(0)
    return (
        visible if queries.bias is None else visible & (queries.bias.transpose(0, 1) != -torch.inf)
    )


def _means_of_block(
    rule: ScoreRule,
    queries: SampledQueries,
    keys: SampledKeys,
    visible: Tensor,
    precision: Precision,
) -> Partial:
    """Return the means over one block of keys; see :func:`query_means`."""
    q, dout, k, v = _operands(visible, queries, keys, precision.acc_dtype)
    x, slope, keep = _scores(rule, queries, keys, q, k, precision)
    x = x.masked_fill(~_by_group(visible, x.shape[:2]), -torch.inf)
    lse = x.logsumexp(dim=-1)
    # Softmax over this block alone; `lse` says how much of the whole row it is.
    p = x.softmax(dim=-1).masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0)
    lse = lse.flatten(0, 1).t()

    if dout is None:
        terms = [(p * keep, v)]
    else:
        dp = torch.einsum("nkgd,mkd->kgnm", dout, v) * keep
        terms = [(p * dp * slope, k), (p * slope, k)]
    sums = torch.cat(precision.products("kgnm,mkd->nkgd", terms), dim=-1).flatten(1, 2)
    return Partial(lse, *sums.chunk(2, dim=-1))


def _sums_of_block(
    rule: ScoreRule,
    queries: SampledQueries,
    keys: SampledKeys,
    results: ForwardResults,
    visible: Tensor,
    precision: Precision,
) -> Tensor:
    """Return the contributions of one block of queries; see :func:`key_sums`."""
    acc_dtype = precision.acc_dtype
    q, dout, k, v = _operands(visible, queries, keys, acc_dtype)
    assert dout is not None and queries.dout is not None
    x, slope, keep = _scores(rule, queries, keys, q, k, precision)
    by_group = x.shape[:2]

    def column(rows: Tensor) -> Tensor:
        """Reshape ``[n, H]`` to ``[K, G, n, 1]``."""
        return rows.to(acc_dtype).t().reshape(*by_group, -1, 1)

    # As the backward had it: of the output that the forward returned.
    delta = (queries.dout.double() * results.out.double()).sum(dim=-1)
    delta = delta if results.dlse is None else delta - results.dlse.double()
    # Probabilities of a row that saw nothing become 0.
    lse = results.lse.masked_fill(results.lse == -torch.inf, torch.inf)
    p = torch.where(_by_group(visible, by_group), (x - column(lse)).exp(), 0.0)
    dp = torch.einsum("nkgd,mkd->kgnm", dout, v) * keep
    ds = p * (dp - column(delta)) * slope * rule.params.scale
    sums = precision.products("kgnm,nkgd->mkd", [(ds, q), (p * keep, dout)])
    return torch.cat([*sums, p.sum(dim=(1, 2)).t().unsqueeze(-1)], dim=-1)


def _operands(
    visible: Tensor, queries: SampledQueries, keys: SampledKeys, acc_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return queries, ``dout``, keys and values by group, in the accumulation dtype.

    Queries that see no key here, and keys that no query sees, become zeros: they may hold NaN.

    Returns:
        ``q [n, K, G, D]``, ``dout [n, K, G, Dv]`` or ``None``, ``k [m, K, D]``, ``v [m, K, Dv]``.
    """
    # Grouped heads are an axis of their own, so K/V are not repeated.
    by_group = (keys.k.shape[1], queries.q.shape[1] // max(keys.k.shape[1], 1))
    seen = visible.any(dim=0)
    q_seen, k_seen = (seen.any(dim=x)[:, None, None] for x in (1, 0))
    q, dout = (
        None if x is None else torch.where(q_seen, x, 0).to(acc_dtype).unflatten(1, by_group)
        for x in (queries.q, queries.dout)
    )
    k, v = (torch.where(k_seen, x, 0).to(acc_dtype) for x in (keys.k, keys.v))
    return not_none(q), dout, k, v


def _weight(lse: Tensor, total_lse: Tensor) -> Tensor:
    """Return a part's share of the softmax mass, ``exp(part - total)``; 0 where there is none."""
    return (lse - total_lse.masked_fill(total_lse == -torch.inf, 0.0)).exp()


def _slices_of_rows(length: int, *sides: Tensor) -> Iterator[slice]:
    """Return slices of ``length`` rows whose numbers in ``sides`` take at most ``_BLOCK_BYTES``."""
    size = max(_BLOCK_BYTES // max(8 * sum(x[:1].numel() for x in sides), 1), 1)
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
