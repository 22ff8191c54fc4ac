"""The backward kernels, which compute probabilities again from the global ``lse``.

Dao et al., arXiv 2205.14135. Either two kernels visit the blocks, row by row for dQ and column by
column for dK and dV, with seven matrix products a block; or one kernel visits them column by column
for all three, with five products, and adds to dQ in main memory. The gradient of a bias has a
kernel of its own.
"""

from __future__ import annotations

from functools import partial, wraps
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ring_core.base.arguments import EMPTY, FULL, PARTIAL
from ring_jax.records import Array, BackwardInputs, Grads
from ring_jax_tpu.block_index import NONFINITE, for_every_batch, k_major, q_major
from ring_jax_tpu.dq_pipeline import DqBlock, DqPipeline
from ring_jax_tpu.forward import split
from ring_jax_tpu.grids import Grid, GridPoint, bias_grid, key_head_grid, query_head_grid
from ring_jax_tpu.operands import Launch, Operands, has_nonfinite, pad
from ring_jax_tpu.scores import Ref, Tile, add_visible, dot


def backward(launch: Launch, upstream: BackwardInputs, into: Grads, *, fused: bool) -> Grads:
    """Return ``into`` plus the gradients of the launch's items, with ``fused`` in one kernel."""
    q_len, k_len = into.dq.shape[2], into.dkv.shape[2]
    # A single test over K/V makes XLA for v5p keep a second copy of it in main memory.
    k, v = split(launch.operands.kv, launch.consts.call.head_dim)
    # Numbers of dO that are not finite show in delta. An lse of -inf is that of a query that sees
    # nothing.
    numbers = jnp.where(upstream.lse == -jnp.inf, 0.0, upstream.lse) + upstream.delta
    rows = has_nonfinite(launch.operands.q)[:, :q_len] | has_nonfinite(numbers[..., None])
    launch = launch.nan_safe_for(rows, has_nonfinite(k) | has_nonfinite(v))
    blocks, dbias = launch.blocks, into.dbias
    padded = BackwardInputs(
        pad(upstream.dout, 2, blocks.q_len),
        pad(upstream.lse, 2, blocks.q_len, -jnp.inf)[:, :, None],
        pad(upstream.delta, 2, blocks.q_len)[:, :, None],
    )
    dq, dkv = pad(into.dq, 2, blocks.q_len), pad(into.dkv, 2, blocks.k_len)
    if fused:
        dq, dkv = _fused_grads(launch, padded, dq, dkv)
    else:
        dq, dkv = _query_grads(launch, padded, dq), _key_grads(launch, padded, dkv)
    if dbias is not None:
        old = pad(pad(dbias, 2, blocks.q_len), 3, blocks.k_len)
        dbias = _bias_grads(launch, padded, old)[:, :, : dbias.shape[2], : dbias.shape[3]]
    return Grads(dq[:, :, :q_len], dkv[:, :, :k_len], dbias)


def _query_grads(launch: Launch, upstream: BackwardInputs, dq: Array) -> Array:
    """Add the gradient of the queries to ``dq``, visiting the blocks row by row."""
    grid, dim = query_head_grid(q_major(launch.kinds), dq.shape), launch.consts.call.head_dim
    return launch.run(
        _bwd_dq, grid, upstream, _upstream_specs(launch, grid), dq, launch.query_rows(grid, dim),
        scratch=(pltpu.VMEM((launch.blocks.q, dim), jnp.float32),),
    )  # fmt: skip


def _key_grads(launch: Launch, upstream: BackwardInputs, dkv: Array) -> Array:
    """Add the gradients of keys and values to ``dkv``, visiting the blocks column by column."""
    grid = key_head_grid(k_major(launch.kinds), dkv.shape, launch.consts.group)
    return launch.run(
        _bwd_dkv, grid, upstream, _upstream_specs(launch, grid), dkv, launch.key_rows(grid),
        scratch=(
            pltpu.VMEM((launch.blocks.k, launch.consts.call.head_dim), jnp.float32),
            pltpu.VMEM((launch.blocks.k, launch.consts.v_dim), jnp.float32),
        ),
    )  # fmt: skip


def _fused_grads(
    launch: Launch, upstream: BackwardInputs, dq: Array, dkv: Array
) -> tuple[Array, Array]:
    """Add all gradients but the bias's in one kernel, visiting the blocks column by column."""
    grid = key_head_grid(k_major(launch.kinds), dkv.shape, launch.consts.group)
    kernel = wraps(_bwd_fused)(partial(_bwd_fused, grid))
    return launch.run(
        kernel, grid, upstream, _upstream_specs(launch, grid), (dq, dkv),
        (pl.BlockSpec(memory_space=pltpu.HBM), launch.key_rows(grid)),
        scratch=(
            pltpu.VMEM((launch.blocks.k, launch.consts.call.head_dim), jnp.float32),
            pltpu.VMEM((launch.blocks.k, launch.consts.v_dim), jnp.float32),
            DqPipeline.scratch(launch.blocks.q, launch.consts.call.head_dim),
        ),
        cost=_fused_cost(launch, grid.walk.pieces),
    )  # fmt: skip


def _fused_cost(launch: Launch, pieces: int) -> pl.CostEstimate:
    """Estimate the cost of the fused kernel, as if all pairs were visible, for one of its pieces.

    XLA seems to take a kernel without an estimate to cost nothing: told to drop barriers, it sends
    the next K/V after the kernel, together with its dK/dV, where no computation hides them.
    """
    batch, heads, q_len, head_dim = launch.operands.q.shape
    pairs = batch * heads * q_len * launch.operands.kv.shape[2] // pieces
    return pl.CostEstimate(
        flops=2 * pairs * (3 * head_dim + 2 * launch.consts.v_dim),
        bytes_accessed=0,
        transcendentals=pairs,
    )


def _bias_grads(launch: Launch, upstream: BackwardInputs, dbias: Array) -> Array:
    """Add the gradient of the bias to ``dbias``."""
    grid = bias_grid(q_major(for_every_batch(launch.kinds)), dbias.shape, launch.operands.q.shape)
    return launch.run(
        _bwd_dbias, grid, upstream, _upstream_specs(launch, grid), dbias, launch.bias_block(grid),
        scratch=(pltpu.VMEM((launch.blocks.q, launch.blocks.k), jnp.float32),),
    )  # fmt: skip


def _upstream_specs(launch: Launch, grid: Grid) -> BackwardInputs:
    """Return the block specs of the padded ``dout``, ``lse`` and ``delta``."""
    numbers: Any = launch.query_numbers(grid)
    dout: Any = launch.query_rows(grid, launch.consts.v_dim)
    return BackwardInputs(dout, numbers, numbers)


class GradRefs(NamedTuple):
    """The accumulators of a kernel; ``None`` for gradients that it does not compute."""

    dq: Ref | None  # [q, D]
    dk: Ref | None  # [k, D]
    dv: Ref | None  # [k, Dv]


class ScoreGrads(NamedTuple):
    """Probabilities and gradients of one block of scores, ``[k, q]``."""

    weights: Any  # factors of V: probabilities after dropout
    dlogits: Any  # gradient of the scores after soft cap and bias
    dproducts: Any  # gradient of q @ k.T, before it is multiplied by the softmax scale
    visible: Any | None


def _score_grads(
    tile: Tile, x: Operands, upstream: BackwardInputs, *, masked: bool, finite: bool
) -> ScoreGrads:
    """Compute the probabilities of a block and the gradients of its scores.

    If all numbers are ``finite``, masked probabilities are 0 and products with them need no mask.
    The softmax scale is applied to the smaller products later.
    """
    k, v = split(x.kv, tile.consts.call.head_dim)
    scores, slope, visible = tile.scores(x.q[...], k, masked=masked)
    visible = None if finite else visible
    lse, consts = upstream.lse[...], tile.consts
    weights = consts.exp(scores - jnp.where(lse == -jnp.inf, jnp.inf, lse * consts.unit))
    weights = weights if visible is None else jnp.where(visible, weights, 0.0)
    dweights = dot("nt", v, upstream.dout[...])
    factor = tile.dropout_factor()
    dweights = dweights if factor is None else dweights * factor
    dlogits = weights * (dweights - upstream.delta[...])
    dlogits = dlogits if visible is None else jnp.where(visible, dlogits, 0.0)
    dproducts = dlogits if slope is None else dlogits * slope
    if slope is not None and visible is not None:  # a masked score's slope may be NaN
        dproducts = jnp.where(visible, dproducts, 0.0)
    return ScoreGrads(weights if factor is None else weights * factor, dlogits, dproducts, visible)


def _bwd_dq(
    tile: Tile, x: Operands, upstream: BackwardInputs, old: Ref, new: Ref, acc: Ref
) -> None:
    """Visit a block of a row of blocks, and add its dQ to the accumulator ``acc [q, D]``.

    While it runs, the pipeline fetches the next visit's blocks. ``old`` and ``new`` are the same
    main memory: it is read at the first visit of a row and written after the last.
    """

    @pl.when(tile.visit.is_first)
    def _start() -> None:
        acc[...] = old[...]

    # All of a row's visits follow one another, so that `acc` stays on the chip between them.
    tile.when_kind(partial(_add_block, tile, x, upstream, GradRefs(acc, None, None)))

    @pl.when(tile.visit.is_last)
    def _finish() -> None:
        new[...] = acc[...]


def _bwd_dkv(
    tile: Tile, x: Operands, upstream: BackwardInputs, old: Ref, new: Ref, dk: Ref, dv: Ref
) -> None:
    """Visit a block of a column of blocks, for one of the query heads that share its keys.

    Accumulators are ``dk [k, D]`` and ``dv [k, Dv]``, read at the first visit of a column and
    written after the last, that of the last query head.
    """

    @pl.when(tile.visit.is_first)
    def _start() -> None:
        dk[...], dv[...] = split(old, tile.consts.call.head_dim)

    # All of a column's visits follow one another: `dk` and `dv` stay on the chip, over all query
    # heads of the group.
    tile.when_kind(partial(_add_block, tile, x, upstream, GradRefs(None, dk, dv)))

    @pl.when(tile.visit.is_last)
    def _finish() -> None:
        new[...] = jnp.concatenate([dk[...], dv[...]], axis=1)


def _bwd_fused(
    grid: Grid, tile: Tile, x: Operands, upstream: BackwardInputs, old: Any, new: Any,
    dk: Ref, dv: Ref, pipeline: DqPipeline,
) -> None:  # fmt: skip
    """Visit a block like :func:`_bwd_dkv`, and add its dQ to main memory by a ``DqPipeline``."""
    batch, kv_head, step, member = (pl.program_id(axis) for axis in range(4))
    # The point after this one: the next query head of the group, then the next visit.
    is_last_member = member == tile.consts.group - 1
    is_last = is_last_member & (step == pl.num_programs(2) - 1)
    next_step = jnp.where(is_last_member & ~is_last, step + 1, step)
    next_member = jnp.where(is_last_member, 0, member + 1)
    next_point = grid.point(tile.scalars, batch, kv_head, next_step, next_member)
    # Empty visits only pad the end of a list: nothing follows that adds to dQ.
    ends = is_last | (next_point.visit.kind == EMPTY)
    size = tile.consts.block_q

    # The name is that of rows and head alone: the pipeline starts anew for each batch row and K/V
    # head, whose blocks no other visits meet.
    def dq_block(point: GridPoint | Tile) -> DqBlock:
        rows = new[0].at[point.batch, point.head, pl.ds(point.visit.q_block * size, size)]
        return DqBlock(point.visit.q_block * tile.consts.heads + point.head, rows)

    @pl.when(tile.visit.is_first)
    def _start() -> None:
        dk[...], dv[...] = split(old[1], tile.consts.call.head_dim)
        pl.when((step == 0) & (member == 0))(pipeline.begin)

    @tile.when_kind
    def _add(kind: int) -> None:
        # dQ of this block has been read; that of the next one is being read, and that of the one
        # before written, while this one is added to.
        dq = pipeline.take(dq_block(tile), dq_block(next_point), is_last=ends)
        _add_block(tile, x, upstream, GradRefs(dq, dk, dv), kind)
        pipeline.write_back(dq_block(tile))

    @pl.when(tile.visit.is_last)
    def _finish() -> None:
        new[1][...] = jnp.concatenate([dk[...], dv[...]], axis=1)
        pl.when(ends)(lambda: pipeline.finish_writes(dq_block(tile)))


def _bwd_dbias(
    tile: Tile, x: Operands, upstream: BackwardInputs, old: Ref, new: Ref, acc: Ref
) -> None:
    """Visit a block for one of the batch rows and heads that share a bias.

    The accumulator ``acc [q, k]`` is read at the first and written after the last of them.
    """

    @pl.when(tile.visit.is_first)
    def _start() -> None:
        acc[...] = old[...]

    # `for_every_batch` leaves these kinds, and EMPTY.
    for kind in (FULL, PARTIAL):

        @pl.when(tile.visit.kind == kind)
        def _add(kind: int = kind) -> None:
            masked = kind == PARTIAL
            acc[...] += _score_grads(tile, x, upstream, masked=masked, finite=False).dlogits.T

    @pl.when(tile.visit.is_last)
    def _finish() -> None:
        new[...] = acc[...]


def _add_block(
    tile: Tile, x: Operands, upstream: BackwardInputs, into: GradRefs, kind: int
) -> None:
    """Add the gradients of a block of some kind to the accumulators."""
    if kind == NONFINITE:
        _add_nonfinite(tile, x, upstream, into)
    else:
        _add_finite(tile, x, upstream, into, masked=kind == PARTIAL)


def _add_finite(
    tile: Tile, x: Operands, upstream: BackwardInputs, into: GradRefs, *, masked: bool
) -> None:
    """Add the gradients of a block without numbers that are not finite.

    The order of the three sums matters to the compiler: see benchmarks/NOTES.md.
    """
    grads = _score_grads(tile, x, upstream, masked=masked, finite=True)
    q, dout, scale = x.q[...], upstream.dout[...], tile.consts.call.scale
    dproducts = grads.dproducts.astype(q.dtype)
    if into.dv is not None:
        into.dv[...] += dot("nn", grads.weights.astype(dout.dtype), dout)
    if into.dq is not None:
        k, _ = split(x.kv, tile.consts.call.head_dim)
        into.dq[...] += dot("tn", k, dproducts).T * scale
    if into.dk is not None:
        into.dk[...] += dot("nn", dproducts, q) * scale


def _add_nonfinite(tile: Tile, x: Operands, upstream: BackwardInputs, into: GradRefs) -> None:
    """Add the gradients of a block whose NaN and infinities must not leak through masked scores."""
    grads = _score_grads(tile, x, upstream, masked=True, finite=False)
    dproducts = grads.dproducts * tile.consts.call.scale
    by_key, by_query = partial(dot, "nn"), partial(dot, "tn")
    if into.dv is not None:
        add_visible(into.dv, by_key, grads.weights, grads.visible, upstream.dout[...])
    if into.dk is not None:
        add_visible(into.dk, by_key, dproducts, grads.visible, x.q[...])
    if into.dq is not None:
        k, _ = split(x.kv, tile.consts.call.head_dim)
        add_visible(into.dq, by_query, dproducts, grads.visible, k)
