"""The forward kernel: merge what queries see into what they had seen before.

A running softmax (Milakov and Gimelshein, arXiv 1805.02867) that starts from the accumulated
``(out, lse)``: merging the steps of a ring costs nothing.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ring_core import FULL, PARTIAL
from ring_jax.records import AttentionState
from ring_jax_tpu.block_index import NONFINITE, q_major
from ring_jax_tpu.operands import Launch, Operands, has_nonfinite, pad, query_head_grid
from ring_jax_tpu.scores import EVERY, LOG2E, SUBLANES, Ref, Scores, Tile, add_seen, dot


def forward(launch: Launch, into: AttentionState) -> AttentionState:
    """Merge the launch's items into a result, ``out [B, H, T, Dv]`` and ``lse [B, H, T]``."""
    blocks, consts = launch.blocks, launch.consts
    q_len = into.lse.shape[2]
    _, v = split(launch.operands.kv, consts.static.head_dim)
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
    top: Ref,
    total: Ref,
    acc: Ref,
) -> None:
    """One visit; ``top [1, q]`` and ``total [8, q]`` are of the softmax, ``acc [Dv, q]`` of out.

    The sublanes of ``total`` are summed at the end: shuffling them costs as much as a sum.
    """

    @pl.when(tile.visit.is_first)
    def _start() -> None:
        lse = old.lse[...]
        top[...] = lse * LOG2E
        share = jnp.where(lse != -jnp.inf, 1 / SUBLANES, 0.0)
        total[...] = jnp.broadcast_to(share, total.shape)
        acc[...] = jnp.where(lse != -jnp.inf, old.out[...].T, 0.0)

    for kind in (FULL, PARTIAL, NONFINITE):

        @pl.when(tile.visit.kind == kind)
        def _merge(kind: int = kind) -> None:
            _online_softmax_step(tile, x, top, total, acc, kind)

    @pl.when(tile.visit.is_last)
    def _finish() -> None:
        row_sum = total[...].sum(axis=0, keepdims=True)
        new.out[...] = (acc[...] * (1 / jnp.where(row_sum == 0, 1.0, row_sum))).T
        new.lse[...] = top[...] * (1 / LOG2E) + jnp.log(row_sum)


def _online_softmax_step(
    tile: Tile, x: Operands, top: Ref, total: Ref, acc: Ref, kind: int
) -> None:
    """The step of the running softmax.

    Where the generation gains from it the scores of a part are asked for before the softmax of the
    part before it, so that the matrix unit has work while that runs.
    """
    masked, finite = kind != FULL, kind != NONFINITE
    parts = list(tile.parts()) if finite else [(tile, EVERY, EVERY)]

    def scores(n: int) -> Scores:
        part, q_at, k_at = parts[n]
        k, _ = split(some(x.kv, k_at), tile.consts.static.head_dim)
        return part.scores(x.q[q_at, :], k, masked=masked)

    ahead = int(tile.consts.prefetches_scores)
    found = [scores(n) for n in range(ahead)]
    for n, (part, q_at, k_at) in enumerate(parts):
        if n + ahead < len(parts):
            found.append(scores(n + ahead))
        _, v = split(some(x.kv, k_at), tile.consts.static.head_dim)
        _merge_part(part, v, found[n], q_at, top, total, acc, finite=finite)


def _merge_part(
    tile: Tile, v: Any, found: Scores, q_at: slice, top: Ref, total: Ref, acc: Ref, *, finite: bool
) -> None:
    """The step for some of a block's queries and keys, ``v [k, Dv]``."""
    scores, _, visible = found
    old_top = top[:, q_at]
    new_top = jnp.maximum(old_top, scores.max(axis=0, keepdims=True))
    safe = new_top if visible is None else jnp.where(new_top == -jnp.inf, 0.0, new_top)
    shrink, weights = jnp.exp2(old_top - safe), jnp.exp2(scores - safe)
    top[:, q_at] = new_top
    sums = weights.reshape(-1, SUBLANES, weights.shape[1]).sum(axis=0)
    total[:, q_at] = total[:, q_at] * shrink + sums
    keep = tile.dropout_keep()
    weights = weights if keep is None else weights * keep
    if finite:
        acc[:, q_at] = acc[:, q_at] * shrink + dot("tn", v, weights.astype(v.dtype))
    else:
        acc[...] *= shrink
        add_seen(
            acc, lambda weights, v: dot("tn", v, weights), weights, visible, v,
            tell_infinities=True,
        )  # fmt: skip


def split(kv: Any, head_dim: int) -> tuple[Any, Any]:
    """Keys ``[..., D]`` and values ``[..., Dv]``."""
    if isinstance(kv, tuple):
        k, v = kv
        return k[...], v[...]
    return kv[..., :head_dim], kv[..., head_dim:]


def some(kv: Any, at: slice) -> Any:
    """References to some of a block's keys."""
    return tuple(x.at[at, :] for x in kv) if isinstance(kv, tuple) else kv.at[at, :]
