"""The backward kernels: probabilities are computed again from the global ``lse``.

Dao et al., arXiv 2205.14135. Two kernels visit the blocks row by row for dQ and column by column
for dK and dV, seven products of matrices per block; or one kernel visits them column by column for
all three, five products, and adds to dQ in main memory. The gradient of a bias, where there is one,
takes a kernel of its own.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ring_core import EMPTY, FULL, PARTIAL
from ring_jax.records import Array, BackwardInputs, Grads
from ring_jax_tpu.block_index import NONFINITE, for_every_batch, k_major, q_major
from ring_jax_tpu.dq_pipeline import Block, DqPipeline
from ring_jax_tpu.forward import split
from ring_jax_tpu.operands import (
    Grid,
    GridPoint,
    Launch,
    Operands,
    bias_grid,
    has_nonfinite,
    key_head_grid,
    pad,
    query_head_grid,
)
from ring_jax_tpu.scores import LOG2E, Ref, Tile, add_seen, dot


def backward(launch: Launch, upstream: BackwardInputs, into: Grads, *, fused: bool) -> Grads:
    """Add the gradients of the launch's items."""
    q_len, k_len = into.dq.shape[2], into.dkv.shape[2]
    # One test over both at once makes XLA for v5p keep another K/V in main memory.
    k, v = split(launch.operands.kv, launch.consts.static.head_dim)
    launch = launch.nan_safe_for(
        _nonfinite_rows(launch, upstream), has_nonfinite(k) | has_nonfinite(v)
    )
    blocks, dbias = launch.blocks, into.dbias
    above = BackwardInputs(
        pad(upstream.dout, 2, blocks.q_len),
        pad(upstream.lse, 2, blocks.q_len, -jnp.inf)[:, :, None],
        pad(upstream.delta, 2, blocks.q_len)[:, :, None],
    )
    dq, dkv = pad(into.dq, 2, blocks.q_len), pad(into.dkv, 2, blocks.k_len)
    if fused:
        dq, dkv = _all_grads(launch, above, dq, dkv)
    else:
        dq, dkv = _query_grads(launch, above, dq), _key_grads(launch, above, dkv)
    if dbias is not None:
        wide = pad(pad(dbias, 2, blocks.q_len), 3, blocks.k_len)
        dbias = _bias_grads(launch, above, wide)[:, :, : dbias.shape[2], : dbias.shape[3]]
    return Grads(dq[:, :, :q_len], dkv[:, :, :k_len], dbias)


def _nonfinite_rows(launch: Launch, upstream: BackwardInputs) -> Array:
    """Rows with numbers that are not finite, bool ``[B, T]``; what dO holds shows in ``delta``.

    A row that saw nothing has an ``lse`` of ``-inf``.
    """
    numbers = jnp.where(upstream.lse == -jnp.inf, 0.0, upstream.lse) + upstream.delta
    return has_nonfinite(launch.operands.q)[:, : numbers.shape[2]] | has_nonfinite(
        numbers[..., None]
    )


def _query_grads(launch: Launch, above: BackwardInputs, dq: Array) -> Array:
    grid, dim = query_head_grid(q_major(launch.kinds), dq.shape), launch.consts.static.head_dim
    return launch.run(
        _bwd_dq, grid, above, _upstream_specs(launch, grid), dq, launch.query_rows(grid, dim),
        scratch=(pltpu.VMEM((launch.blocks.q, dim), jnp.float32),),
    )  # fmt: skip


def _key_grads(launch: Launch, above: BackwardInputs, dkv: Array) -> Array:
    grid = key_head_grid(k_major(launch.kinds), dkv.shape, launch.consts.group)
    return launch.run(
        _bwd_dkv, grid, above, _upstream_specs(launch, grid), dkv, launch.key_rows(grid),
        scratch=(
            pltpu.VMEM((launch.blocks.k, launch.consts.static.head_dim), jnp.float32),
            pltpu.VMEM((launch.blocks.k, launch.consts.v_dim), jnp.float32),
        ),
    )  # fmt: skip


def _all_grads(launch: Launch, above: BackwardInputs, dq: Array, dkv: Array) -> tuple[Array, Array]:
    grid = key_head_grid(k_major(launch.kinds), dkv.shape, launch.consts.group)
    kernel = functools.wraps(_bwd_fused)(functools.partial(_bwd_fused, grid))
    return launch.run(
        kernel, grid, above, _upstream_specs(launch, grid), (dq, dkv),
        (pl.BlockSpec(memory_space=pltpu.HBM), launch.key_rows(grid)),
        scratch=(
            pltpu.VMEM((launch.blocks.k, launch.consts.static.head_dim), jnp.float32),
            pltpu.VMEM((launch.blocks.k, launch.consts.v_dim), jnp.float32),
            DqPipeline.scratch(launch.blocks.q, launch.consts.static.head_dim),
        ),
        cost=_cost_of_all(launch, grid.walk.pieces),
    )  # fmt: skip


def _cost_of_all(launch: Launch, pieces: int) -> pl.CostEstimate:
    """The fused kernel's cost if all pairs were seen, in one of its pieces.

    XLA seems to take a kernel that names none to be over at once: told to drop barriers, it sends
    the next K/V beside the kernel's dK/dV, after it, where they are exposed.
    """
    batch, heads, q_len, head_dim = launch.operands.q.shape
    pairs = batch * heads * q_len * launch.operands.kv.shape[2] // pieces
    return pl.CostEstimate(
        flops=2 * pairs * (3 * head_dim + 2 * launch.consts.v_dim),
        bytes_accessed=0,
        transcendentals=pairs,
    )


def _bias_grads(launch: Launch, above: BackwardInputs, dbias: Array) -> Array:
    grid = bias_grid(q_major(for_every_batch(launch.kinds)), dbias.shape, launch.operands.q.shape)
    return launch.run(
        _bwd_dbias, grid, above, _upstream_specs(launch, grid), dbias, launch.bias_block(grid),
        scratch=(pltpu.VMEM((launch.blocks.q, launch.blocks.k), jnp.float32),),
    )  # fmt: skip


def _upstream_specs(launch: Launch, grid: Grid) -> BackwardInputs:
    numbers: Any = launch.query_numbers(grid)
    dout: Any = launch.query_rows(grid, launch.consts.v_dim)
    return BackwardInputs(dout, numbers, numbers)


class Sums(NamedTuple):
    """Where gradients are added; ``None`` what this kernel leaves to another."""

    dq: Ref | None  # [q, D]
    dk: Ref | None  # [k, D]
    dv: Ref | None  # [k, Dv]


class Slopes(NamedTuple):
    """Of the loss, at one block; ``[k, q]``."""

    weights: Any  # what multiplied V: probabilities, less what dropout took
    dlogits: Any  # at the scores after soft cap and bias
    dproducts: Any  # at q @ k.T, times the softmax scale
    visible: Any | None


def _slopes(
    tile: Tile, x: Operands, above: BackwardInputs, *, masked: bool, finite: bool
) -> Slopes:
    """Probabilities and the gradients of scores; the softmax scale is left to what is summed.

    Where all numbers are finite masked probabilities are 0, and so is what they multiply.
    """
    k, v = split(x.kv, tile.consts.static.head_dim)
    scores, slope, visible = tile.scores(x.q[...], k, masked=masked)
    visible = None if finite else visible
    lse = above.lse[...]
    weights = jnp.exp2(scores - jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E))
    weights = weights if visible is None else jnp.where(visible, weights, 0.0)
    dweights = dot("nt", v, above.dout[...])
    keep = tile.dropout_keep()
    dweights = dweights if keep is None else dweights * keep
    dlogits = weights * (dweights - above.delta[...])
    dlogits = dlogits if visible is None else jnp.where(visible, dlogits, 0.0)
    dproducts = dlogits if slope is None else dlogits * slope
    if slope is not None and visible is not None:  # where nothing is seen it may be NaN
        dproducts = jnp.where(visible, dproducts, 0.0)
    return Slopes(weights if keep is None else weights * keep, dlogits, dproducts, visible)


def _bwd_dq(tile: Tile, x: Operands, above: BackwardInputs, old: Ref, new: Ref, acc: Ref) -> None:
    """One visit of a row of blocks; ``acc [q, D]``."""

    @pl.when(tile.visit.is_first)
    def _start() -> None:
        acc[...] = old[...]

    for kind in (FULL, PARTIAL, NONFINITE):

        @pl.when(tile.visit.kind == kind)
        def _add(kind: int = kind) -> None:
            _add_block(tile, x, above, Sums(acc, None, None), kind)

    @pl.when(tile.visit.is_last)
    def _finish() -> None:
        new[...] = acc[...]


def _bwd_dkv(
    tile: Tile, x: Operands, above: BackwardInputs, old: Ref, new: Ref, dk: Ref, dv: Ref
) -> None:
    """One visit of a column of blocks for one head; ``dk [k, D]``, ``dv [k, Dv]``."""

    @pl.when(tile.visit.is_first)
    def _start() -> None:
        dk[...], dv[...] = split(old, tile.consts.static.head_dim)

    for kind in (FULL, PARTIAL, NONFINITE):

        @pl.when(tile.visit.kind == kind)
        def _add(kind: int = kind) -> None:
            _add_block(tile, x, above, Sums(None, dk, dv), kind)

    @pl.when(tile.visit.is_last)
    def _finish() -> None:
        new[...] = jnp.concatenate([dk[...], dv[...]], axis=1)


def _bwd_fused(
    grid: Grid, tile: Tile, x: Operands, above: BackwardInputs, old: Any, new: Any,
    dk: Ref, dv: Ref, pipeline: DqPipeline,
) -> None:  # fmt: skip
    """Like :func:`_bwd_dkv`, and dQ is read, added to and written back."""
    batch, kv_head, step, member = (pl.program_id(axis) for axis in range(4))
    wraps = member == tile.consts.group - 1
    is_last = wraps & (step == pl.num_programs(2) - 1)
    next_step = jnp.where(wraps & ~is_last, step + 1, step)
    after = grid.place(tile.scalars, batch, kv_head, next_step, jnp.where(wraps, 0, member + 1))
    ends = is_last | (after.visit.kind == EMPTY)
    size = tile.consts.block_q

    def block(at: GridPoint | Tile) -> Block:
        rows = new[0].at[at.batch, at.head, pl.ds(at.visit.q_block * size, size)]
        return Block(at.visit.q_block * tile.consts.heads + at.head, rows)

    @pl.when(tile.visit.is_first)
    def _start() -> None:
        dk[...], dv[...] = split(old[1], tile.consts.static.head_dim)
        pl.when((step == 0) & (member == 0))(pipeline.begin)

    for kind in (FULL, PARTIAL, NONFINITE):

        @pl.when(tile.visit.kind == kind)
        def _add(kind: int = kind) -> None:
            dq = pipeline.take(block(tile), block(after), is_last=ends)
            _add_block(tile, x, above, Sums(dq, dk, dv), kind)
            pipeline.write_back(block(tile))

    @pl.when(tile.visit.is_last)
    def _finish() -> None:
        new[1][...] = jnp.concatenate([dk[...], dv[...]], axis=1)
        pl.when(ends)(lambda: pipeline.end(block(tile)))


def _bwd_dbias(
    tile: Tile, x: Operands, above: BackwardInputs, old: Ref, new: Ref, acc: Ref
) -> None:
    """One visit for one of the batch rows and heads that share a bias; ``acc [q, k]``."""

    @pl.when(tile.visit.is_first)
    def _start() -> None:
        acc[...] = old[...]

    for kind in (FULL, PARTIAL):

        @pl.when(tile.visit.kind == kind)
        def _add(kind: int = kind) -> None:
            acc[...] += _slopes(tile, x, above, masked=kind == PARTIAL, finite=False).dlogits.T

    @pl.when(tile.visit.is_last)
    def _finish() -> None:
        new[...] = acc[...]


def _add_block(tile: Tile, x: Operands, above: BackwardInputs, into: Sums, kind: int) -> None:
    if kind == NONFINITE:
        _add_nonfinite(tile, x, above, into)
    else:
        _add_finite(tile, x, above, into, masked=kind == PARTIAL)


def _add_finite(
    tile: Tile, x: Operands, above: BackwardInputs, into: Sums, *, masked: bool
) -> None:
    """The order of the three sums matters to the compiler: see docs/tried.md."""
    slopes = _slopes(tile, x, above, masked=masked, finite=True)
    q, dout, scale = x.q[...], above.dout[...], tile.consts.static.scale
    dproducts = slopes.dproducts.astype(q.dtype)
    if into.dv is not None:
        into.dv[...] += dot("nn", slopes.weights.astype(dout.dtype), dout)
    if into.dq is not None:
        k, _ = split(x.kv, tile.consts.static.head_dim)
        into.dq[...] += dot("tn", k, dproducts).T * scale
    if into.dk is not None:
        into.dk[...] += dot("nn", dproducts, q) * scale


def _add_nonfinite(tile: Tile, x: Operands, above: BackwardInputs, into: Sums) -> None:
    slopes = _slopes(tile, x, above, masked=True, finite=False)
    dproducts = slopes.dproducts * tile.consts.static.scale
    by_key, by_query = functools.partial(dot, "nn"), functools.partial(dot, "tn")
    if into.dv is not None:
        add_seen(into.dv, by_key, slopes.weights, slopes.visible, above.dout[...])
    if into.dk is not None:
        add_seen(into.dk, by_key, dproducts, slopes.visible, x.q[...])
    if into.dq is not None:
        k, _ = split(x.kv, tile.consts.static.head_dim)
        add_seen(into.dq, by_query, dproducts, slopes.visible, k)
