"""Dense attention of some queries over some keys, from the formula and the mask's rule alone.

Everything is of one batch row, with ``n`` queries and ``m`` keys; heads are ``[K, G]``, the K/V
heads and the query heads of each. Results come twice. The exact ones are float64, also where JAX
has 64 bits switched off: call this under ``jax.enable_x64(True)``. The plain ones round where a
plain implementation in the call's dtype would; a call's error may be twice theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ring_jax.collectives import match_varying, varying_axes
from ring_jax.dropout import dropout_keep
from ring_jax.kernels.rules import shown
from ring_jax.positions import searchsorted
from ring_jax.records import Array, CallSpec

_BLOCK = 1024  # keys, or queries, that are processed at a time


class Precision(NamedTuple):
    """The rounding of an implementation: dtypes of sums and of the weights in matmuls."""

    wide: Any  # dtype of sums
    narrow: Any = None  # dtype of probabilities and of gradients of scores; None does not round
    reverse: bool = False  # sum over the head dim backwards, to show float64's own rounding

    def round(self, x: Array) -> Array:
        """Round an array to ``narrow`` and back, as a kernel does before a matmul."""
        return x if self.narrow is None else x.astype(self.narrow).astype(self.wide)

    def products(
        self, product: Callable[[Array, Array], Array], terms: Sequence[tuple[Array, Array]]
    ) -> list[Array]:
        """Multiply pairs of weights and values, and then the squares of both.

        The error of a sum of rounded numbers is about the root of the sum of their squares.

        Returns:
            The products of rounded weights and values, and after these the products of squares,
            which are zeros if nothing is rounded.
        """
        sums = [product(self.round(weights), x) for weights, x in terms]
        if self.narrow is None:
            return sums + [jnp.zeros_like(x) for x in sums]
        return sums + [product(weights * weights, x * x) for weights, x in terms]


EXACT = Precision(np.float64)


def plain_precision(dtype: str) -> Precision:
    """Return the rounding of a plain implementation in a dtype."""
    if dtype == "float64":
        return Precision(np.float64, reverse=True)
    return Precision(np.float32, None if dtype == "float32" else jnp.dtype(dtype))


class Rule(NamedTuple):
    """The options that all scores of a batch row share."""

    call: CallSpec
    slopes: Array | None  # ALiBi's, [H]
    seed: Array | None  # uint32 [2]
    batch: Array  # global index of the batch row
    heads: Array | None  # int32 [H], their global indices, for dropout


class SampledQueries(NamedTuple):
    """Queries of one batch row, with the options that belong to them."""

    q: Array  # [n, H, D]
    indices: Array  # int32 [n], global, among the queries
    position: Array  # int32 [n], global, among the keys
    ids: Array | None  # [n]
    bias: Array | None  # [n, H or 1, m]
    bias_shift: Array | None = None  # [n, H or 1], subtracted from the bias
    dout: Array | None = None  # [n, H, Dv]


class SampledKeys(NamedTuple):
    """Keys and values of one batch row."""

    k: Array  # [m, K, D]
    v: Array  # [m, K, Dv]
    position: Array  # int32 [m]
    ids: Array | None  # [m]


class Partial(NamedTuple):
    """Means over some keys, weighted by softmax over these keys alone."""

    lse: Array  # [n, H]
    means: Array  # [n, H, W]
    squares: Array  # [n, H, W], sums of squares of the rounded terms of the means

    def with_sinks(self, sinks: Array) -> Partial:
        """Add sinks ``[H]`` or ``[H, s]`` to the softmax: logits that yield no value."""
        folded = jax.nn.logsumexp(sinks.astype(self.lse.dtype).reshape(len(sinks), -1), axis=1)
        lse = jnp.logaddexp(self.lse, folded)
        weight = _weight(self.lse, lse)[..., None]
        return Partial(lse, self.means * weight, self.squares * weight * weight)


def merged(parts: Partial) -> Partial:
    """Merge parts over disjoint keys, stacked along the first dimension of each array."""
    lse = jax.nn.logsumexp(parts.lse, axis=0)
    # A part's terms shrink by its weight, and their squares by the square of it.
    weights = _weight(parts.lse, lse)[..., None]
    means, squares = (weights * parts.means, weights * weights * parts.squares)
    return Partial(lse, means.sum(axis=0), squares.sum(axis=0))


def query_means(
    rule: Rule, queries: SampledQueries, keys: SampledKeys, precision: Precision
) -> Partial:
    """Compute the means over keys that results of queries are made of.

    Without ``dout`` they are means of ``keep * v``, which are ``out``. With it they are means of
    ``keep * dp * slope * k`` and, side by side, of ``slope * k``, with ``dp = dout @ v``, dropout's
    factor ``keep`` and the soft cap's derivative ``slope``. Then ``dq = scale * (first - (delta -
    dlse) * second)``, where ``delta = rowsum(dout * out)``.
    """

    def block_means(block: tuple[SampledKeys, Array | None]) -> Partial:
        block_keys, columns = block
        bias = None if columns is None else jnp.moveaxis(columns, 0, -1)
        return _means_of_block(rule, queries._replace(bias=bias), block_keys, precision)

    columns = None if queries.bias is None else jnp.moveaxis(queries.bias, -1, 0)
    return merged(_map_blocks(block_means, (keys, columns)))


def key_sums(
    rule: Rule,
    queries: SampledQueries,
    keys: SampledKeys,
    lse: Array,
    delta: Array,
    precision: Precision,
) -> Array:
    """Compute the gradients that queries add to keys, side by side, ``[m, K, 2 * (D + Dv) + 1]``.

    They are dK, dV, the sums of squares of the rounded terms of both, and the sums of the softmax
    weights.

    Args:
        rule: Options that all scores share.
        queries: The queries, with ``dout``.
        keys: The keys.
        lse: ``lse`` of the queries over all keys, ``[n, H]``.
        delta: ``rowsum(dout * out) - dlse``, ``[n, H]``.
        precision: The rounding.
    """
    wide, (_, kv_heads, _) = precision.wide, keys.k.shape

    def block_sums(block: tuple[SampledQueries, Array, Array]) -> Array:
        """Return what a block of queries contributes: dK, dV, their squares and sums of weights."""
        block_queries, block_lse, block_delta = block
        scores = _scores(rule, block_queries, keys, precision)
        q, dout, _, v = _zero_hidden(scores.visible, block_queries, keys, wide)
        rows_lse, rows_delta = (
            x.astype(wide).T.reshape(kv_heads, -1, len(x), 1)  # [K, G, n, 1]
            for x in (block_lse, block_delta)
        )
        safe = jnp.where(rows_lse == -jnp.inf, jnp.inf, rows_lse)
        p = jnp.where(scores.visible, jnp.exp(scores.x - safe), 0.0)
        dp = _by_pair(dout, v) * scores.keep
        ds = p * (dp - rows_delta) * scores.slope * rule.call.scale
        sums = precision.products(_by_key, [(ds, q), (p * scores.keep, dout)])
        return jnp.concatenate([*sums, p.sum(axis=(1, 2)).T[..., None]], axis=-1)

    return cast("Array", _map_blocks(block_sums, (queries, lse, delta)).sum(axis=0))


class _DenseScores(NamedTuple):
    """Scores of queries and keys, ``[K, G, n, m]`` or broadcastable to that."""

    x: Array  # after soft cap, bias and ALiBi, before the mask
    slope: Array | float  # derivative of the soft cap
    visible: Array  # bool
    keep: Array | float  # dropout's factor, 0 or 1 / (1 - p)


def _scores(
    rule: Rule, queries: SampledQueries, keys: SampledKeys, precision: Precision
) -> _DenseScores:
    """Compute the scores of all pairs of queries and keys."""
    wide, heads, kv_heads = precision.wide, queries.q.shape[1], keys.k.shape[1]
    visible = _visible_pairs(rule, queries, keys)[None, None]
    bias = None
    if queries.bias is not None:
        bias = jnp.moveaxis(queries.bias, 1, 0).astype(wide)
        shape = (1, 1) if bias.shape[0] == 1 else (kv_heads, heads // kv_heads)
        bias = bias.reshape(*shape, *bias.shape[1:])
        visible = visible & (bias != -jnp.inf)
        if queries.bias_shift is not None:
            bias = bias - queries.bias_shift.astype(wide).T.reshape(*bias.shape[:3], 1)
    q, _, k, _ = _zero_hidden(visible, queries, keys, wide)
    # Summed in the other order, where the dtype cannot be narrower: another rounding of the same.
    if precision.reverse:
        q, k = q[..., ::-1], k[..., ::-1]
    x = _by_pair(q, k) * rule.call.scale
    slope: Array | float = 1.0
    keep: Array | float = 1.0
    if rule.call.softcap is not None:
        squashed = jnp.tanh(x / rule.call.softcap)
        x, slope = squashed * rule.call.softcap, 1 - squashed * squashed
    x = x if bias is None else x + bias
    if rule.slopes is not None:
        distance = jnp.abs(queries.position[:, None] - keys.position).astype(wide)
        x = x - rule.slopes.astype(wide).reshape(kv_heads, -1, 1, 1) * distance
    if rule.call.dropout_p > 0:
        assert rule.seed is not None and rule.heads is not None
        head = rule.heads.reshape(kv_heads, -1, 1, 1)
        is_kept = dropout_keep(
            rule.call.dropout_p,
            rule.seed,
            rule.batch,
            head,
            queries.indices[:, None],
            keys.position,
        )
        keep = is_kept.astype(wide) / (1 - rule.call.dropout_p)
    return _DenseScores(x, slope, jnp.broadcast_to(visible, x.shape), keep)


def _visible_pairs(rule: Rule, queries: SampledQueries, keys: SampledKeys) -> Array:
    """Return which keys queries see by the mask's rule, documents and segments, bool ``[n, m]``."""
    q_pos, k_pos, mask = queries.position[:, None], keys.position[None], rule.call.plan.mask
    plan = rule.call.plan
    visible = shown(plan, q_pos, k_pos)
    # Padding, which stands behind all tokens, neither sees nor is seen.
    visible = visible & (queries.indices < plan.seq_len)[:, None] & (k_pos < plan.kv_seq_len)
    if mask.document_offsets is not None:
        offsets = jnp.asarray(mask.document_offsets.astype(np.int32))
        q_doc, k_doc = (
            searchsorted(offsets, x, "right") for x in (queries.position, keys.position)
        )
        visible = visible & (q_doc[:, None] == k_doc)
    if queries.ids is not None and keys.ids is not None:
        visible = visible & (queries.ids[:, None] == keys.ids) & (queries.ids >= 0)[:, None]
    return visible


def _means_of_block(
    rule: Rule, queries: SampledQueries, keys: SampledKeys, precision: Precision
) -> Partial:
    """Compute :func:`query_means` over one block of keys."""
    scores = _scores(rule, queries, keys, precision)
    _, dout, k, v = _zero_hidden(scores.visible, queries, keys, precision.wide)
    x = jnp.where(scores.visible, scores.x, -jnp.inf)
    # A softmax over this block alone; `merged` weights it by its share of the whole one.
    top = x.max(axis=-1, keepdims=True)
    weights = jnp.exp(x - jnp.where(top == -jnp.inf, 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    lse, p = _by_row((top + jnp.log(total))[..., 0]), weights / jnp.where(total == 0, 1.0, total)

    if queries.dout is None:
        terms = [(p * scores.keep, v)]
    else:
        dp = _by_pair(dout, v) * scores.keep
        terms = [(p * dp * scores.slope, k), (p * scores.slope, k)]
    sums = jnp.concatenate(precision.products(_by_query, terms), axis=-1)
    return Partial(lse, *jnp.split(sums, 2, axis=-1))


def _zero_hidden(
    visible: Array, queries: SampledQueries, keys: SampledKeys, wide: Any
) -> tuple[Array, Array, Array, Array]:
    """Set queries that see no key, and keys that no query sees, to zero: they may be NaN.

    Returns:
        Wide ``q`` and ``dout`` ``[n, K, G, D]``, and ``k`` and ``v`` ``[m, K, D]``.
    """
    (n, heads, _), kv_heads = queries.q.shape, keys.k.shape[1]
    dout = jnp.zeros((n, heads, keys.v.shape[2]), wide) if queries.dout is None else queries.dout
    # Selected away, not multiplied by 0: NaN in tokens that nothing sees must not reach the sums.
    by_pair = visible.any(axis=(0, 1))
    sees, is_seen = by_pair.any(axis=1)[:, None, None], by_pair.any(axis=0)[:, None, None]
    q, dout = (
        jnp.where(sees, x.astype(wide), 0).reshape(n, kv_heads, heads // kv_heads, -1)
        for x in (queries.q, dout)
    )
    k, v = (jnp.where(is_seen, x.astype(wide), 0) for x in (keys.k, keys.v))
    return q, dout, k, v


def _map_blocks(function: Callable[[Any], Any], arrays: Any) -> Any:
    """Apply a function to blocks of arrays along their first dimension, and stack the results."""
    length = len(jax.tree.leaves(arrays)[0])
    # Blocks of equal size, for a loop; a length that nothing from 64 on divides is one block.
    size = next((n for n in range(min(_BLOCK, length), 63, -1) if length % n == 0), length)
    blocks = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), arrays)
    return match_varying(lax.map(function, blocks), varying_axes(arrays))


def _by_pair(x: Array, y: Array) -> Array:
    """Multiply ``[n, K, G, d]`` and ``[m, K, d]`` to ``[K, G, n, m]``, a product for each pair."""
    return _multiply_by_head(x, y, ((3,), (2,)), (1, 1)).transpose(0, 2, 1, 3)


def _by_key(weights: Array, x: Array) -> Array:
    """Sum over queries: multiply ``[K, G, n, m]`` and ``[n, K, G, d]`` to ``[m, K, d]``."""
    return _multiply_by_head(weights, x, ((1, 2), (2, 0)), (0, 1)).transpose(1, 0, 2)


def _by_query(weights: Array, y: Array) -> Array:
    """Sum over keys: multiply ``[K, G, n, m]`` and ``[m, K, d]`` to ``[n, H, d]``."""
    return lax.collapse(
        _multiply_by_head(weights, y, ((3,), (0,)), (0, 1)).transpose(2, 0, 1, 3), 1, 3
    )


def _multiply_by_head(
    x: Array, y: Array, over: tuple[tuple[int, ...], tuple[int, ...]], heads: tuple[int, int]
) -> Array:
    """Multiply matrices for each K/V head.

    Unlike ``einsum`` it names no dtype of the result: ``vmap`` evaluates it outside of
    ``enable_x64``, where a named float64 becomes a float32.
    """
    return lax.dot_general(x, y, (over, (heads[:1], heads[1:])), precision=lax.Precision.HIGHEST)


def _weight(part: Array, total: Array) -> Array:
    """Return a part's share of the softmax mass, from the ``lse`` of both; 0 if there is none."""
    return jnp.exp(part - jnp.where(total == -jnp.inf, 0.0, total))


def _by_row(x: Array) -> Array:
    """Reshape ``[K, G, n]`` to ``[n, H]``."""
    return x.reshape(-1, x.shape[-1]).T
