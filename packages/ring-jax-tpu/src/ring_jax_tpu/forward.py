"""The forward kernel, which merges attention over some keys into an accumulated result.

It is a running softmax (Milakov and Gimelshein, arXiv 1805.02867) that starts from the accumulated
``(out, lse)``, so that merging the steps of a ring costs nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ring_core.base.arguments import FULL
from ring_jax.records import AttentionState
from ring_jax_tpu.block_index import NONFINITE, q_major
from ring_jax_tpu.grids import query_head_grid
from ring_jax_tpu.operands import Launch, Operands, has_nonfinite, pad
from ring_jax_tpu.scores import ALL, SUBLANES, Ref, Scores, Tile, add_visible, dot


def forward(launch: Launch, into: AttentionState) -> AttentionState:
    """Merge the launch's items into ``out [B, H, T, Dv]`` and ``lse [B, H, T]``."""
    blocks, consts = launch.blocks, launch.consts
    q_len = into.lse.shape[2]
    _, v = split(launch.operands.kv, consts.call.head_dim)
    launch = launch.nan_safe_for(jnp.zeros_like(into.lse[:, 0], dtype=bool), has_nonfinite(v))
    grid = query_head_grid(q_major(launch.kinds), into.lse.shape)
    padded = AttentionState(*(pad(x, 2, blocks.q_len) for x in into))
    specs: Any = (launch.query_rows(grid, consts.v_dim), launch.query_numbers(grid))
    out, lse = launch.run(
        _fwd,
        grid,
        extra=(),
        extra_specs=(),
        into=padded._replace(lse=padded.lse[:, :, None]),
        into_specs=AttentionState(*specs),
        scratch=(
            pltpu.VMEM((1, blocks.q), jnp.float32),
            pltpu.VMEM((SUBLANES, blocks.q), jnp.float32),
            pltpu.VMEM((consts.v_dim, blocks.q), jnp.float32),
        ),
    )
    return AttentionState(out[:, :, :q_len], lse[:, :, 0, :q_len])


def _fwd(
    tile: Tile,
    x: Operands,
    _: tuple[()],
    old: AttentionState,
    new: AttentionState,
    row_max: Ref,
    total: Ref,
    acc: Ref,
) -> None:
    """Visit a block: one step of the running softmax of its queries.

    Its state is ``row_max [1, q]``, the sum ``total [8, q]`` and the unnormalised output
    ``acc [Dv, q]``. The sublanes of ``total`` are summed at the end: shuffling them costs as much
    as a sum. While a visit runs, the pipeline fetches the next visit's blocks. ``old`` and ``new``
    are the same main memory: it is read at the first visit of a row of blocks and written after
    the last.
    """

    @pl.when(tile.visit.is_first)
    def _start() -> None:
        # The accumulated (out, lse) count as one more key, whose weight is spread over sublanes.
        lse = old.lse[...]
        row_max[...] = lse * tile.consts.unit
        share = jnp.where(lse != -jnp.inf, 1 / SUBLANES, 0.0)
        total[...] = jnp.broadcast_to(share, total.shape)
        acc[...] = jnp.where(lse != -jnp.inf, old.out[...].T, 0.0)

    # All of a row's visits follow one another, so that the running softmax stays on the chip
    # between them.
    tile.when_kind(partial(_online_softmax_step, tile, x, row_max, total, acc))

    @pl.when(tile.visit.is_last)
    def _finish() -> None:
        row_sum = total[...].sum(axis=0, keepdims=True)
        new.out[...] = (acc[...] * (1 / jnp.where(row_sum == 0, 1.0, row_sum))).T
        new.lse[...] = row_max[...] * (1 / tile.consts.unit) + jnp.log(row_sum)


def _online_softmax_step(
    tile: Tile, x: Operands, row_max: Ref, total: Ref, acc: Ref, kind: int
) -> None:
    """Add a block of some kind to the running softmax, part by part.

    On generations that gain from it, the scores of a part are computed before the softmax of the
    part before it, so that the matrix unit has work while the vector unit does the softmax.
    """
    masked, finite = kind != FULL, kind != NONFINITE
    parts = list(tile.parts()) if finite else [(tile, ALL, ALL)]

    def scores_of_part(n: int) -> Scores:
        part, q_slice, k_slice = parts[n]
        k, _ = split(key_views(x.kv, k_slice), tile.consts.call.head_dim)
        return part.scores(x.q[q_slice, :], k, masked=masked)

    ahead = int(tile.consts.prefetches_scores)
    scores = [scores_of_part(n) for n in range(ahead)]
    for n, (part, q_slice, k_slice) in enumerate(parts):
        # With `ahead` of 1 these are the scores of the next part, computed beside the softmax of
        # this one; with 0 they are this part's own.
        if n + ahead < len(parts):
            scores.append(scores_of_part(n + ahead))
        _, v = split(key_views(x.kv, k_slice), tile.consts.call.head_dim)
        _merge_part(part, v, scores[n], q_slice, row_max, total, acc, finite=finite)


def _merge_part(
    tile: Tile, v: Any, part_scores: Scores, q_slice: slice, row_max: Ref, total: Ref, acc: Ref, *,
    finite: bool,
) -> None:  # fmt: skip
    """Add a part of a block to the running softmax of its queries, with values ``v [k, Dv]``."""
    scores, _, visible = part_scores
    old_max = row_max[:, q_slice]
    new_max = jnp.maximum(old_max, scores.max(axis=0, keepdims=True))
    safe = new_max if visible is None else jnp.where(new_max == -jnp.inf, 0.0, new_max)
    # Rescale the accumulated sums to the new maximum, then add this part.
    exp = tile.consts.exp
    shrink, weights = exp(old_max - safe), exp(scores - safe)
    row_max[:, q_slice] = new_max
    sums = weights.reshape(-1, SUBLANES, weights.shape[1]).sum(axis=0)
    total[:, q_slice] = total[:, q_slice] * shrink + sums
    factor = tile.dropout_factor()
    weights = weights if factor is None else weights * factor
    if finite:
        acc[:, q_slice] = acc[:, q_slice] * shrink + dot("tn", v, weights.astype(v.dtype))
    else:
        acc[...] *= shrink
        add_visible(
            acc, lambda weights, v: dot("tn", v, weights), weights, visible, v,
            keep_infinities=True,
        )  # fmt: skip


def split(kv: Any, head_dim: int) -> tuple[Any, Any]:
    """Split ``[..., D + Dv]``, or references to K and V, into ``[..., D]`` and ``[..., Dv]``."""
    if isinstance(kv, tuple):
        k, v = kv
        return k[...], v[...]
    return kv[..., :head_dim], kv[..., head_dim:]


def key_views(kv: Any, k_slice: slice) -> Any:
    """Return references to some of a block's keys and values."""
    return tuple(x.at[k_slice, :] for x in kv) if isinstance(kv, tuple) else kv.at[k_slice, :]
