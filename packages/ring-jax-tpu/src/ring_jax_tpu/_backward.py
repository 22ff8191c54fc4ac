"""The backward kernels: probabilities are computed again from the global ``lse``.

Dao et al., arXiv 2205.14135. Two kernels visit the blocks row by row for dQ and column by column
for dK and dV, seven products of matrices a block; or one kernel visits them column by column for
all three, five products, and adds to dQ in main memory. The gradient of a bias, where there is one,
takes a kernel of its own.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ring_jax._types import Array, Grads, Upstream
from ring_jax_tpu._forward import split
from ring_jax_tpu._launch import (
    Grid,
    Launch,
    Operands,
    bias_grid,
    key_head_grid,
    pad,
    query_head_grid,
)
from ring_jax_tpu._scores import LOG2E, Ref, Tile, add_seen, dot, is_odd
from ring_jax_tpu._visits import FULL, PARTIAL, by_columns, by_rows, for_every_batch


def backward(launch: Launch, upstream: Upstream, into: Grads, *, fused: bool) -> Grads:
    """Add the gradients of the launch's items."""
    q_len, k_len = into.dq.shape[2], into.dkv.shape[2]
    blocks = launch.blocks
    above = Upstream(
        pad(upstream.dout, 2, blocks.q_len),
        pad(upstream.lse, 2, blocks.q_len, -jnp.inf)[:, :, None],
        pad(upstream.delta, 2, blocks.q_len)[:, :, None],
    )
    dq, dkv = pad(into.dq, 2, blocks.q_len), pad(into.dkv, 2, blocks.k_len)
    if fused:
        dq, dkv = _all_grads(launch, above, dq, dkv)
    else:
        dq, dkv = _query_grads(launch, above, dq), _key_grads(launch, above, dkv)
    dbias = into.dbias
    if dbias is not None:
        shape = dbias.shape
        wide = pad(pad(dbias, 2, blocks.q_len), 3, blocks.k_len)
        dbias = _bias_grads(launch, above, wide)[:, :, : shape[2], : shape[3]]
    return Grads(dq[:, :, :q_len], dkv[:, :, :k_len], dbias)


def _query_grads(launch: Launch, above: Upstream, dq: Array) -> Array:
    blocks, facts = launch.blocks, launch.facts
    grid = query_head_grid(by_rows(launch.kinds), dq.shape)
    return launch.run(
        _add_to_queries, grid, above, _upstream_specs(launch, grid), dq,
        launch.query_rows(grid, facts.head_dim),
        scratch=(pltpu.VMEM((facts.head_dim, blocks.q), jnp.float32),),
    )  # fmt: skip


def _key_grads(launch: Launch, above: Upstream, dkv: Array) -> Array:
    blocks, facts = launch.blocks, launch.facts
    grid = key_head_grid(by_columns(launch.kinds), dkv.shape, facts.group)
    return launch.run(
        _add_to_keys, grid, above, _upstream_specs(launch, grid), dkv, launch.key_rows(grid),
        scratch=(
            pltpu.VMEM((blocks.k, facts.head_dim), jnp.float32),
            pltpu.VMEM((blocks.k, facts.v_dim), jnp.float32),
        ),
    )  # fmt: skip


def _all_grads(launch: Launch, above: Upstream, dq: Array, dkv: Array) -> tuple[Array, Array]:
    blocks, facts = launch.blocks, launch.facts
    grid = key_head_grid(by_columns(launch.kinds), dkv.shape, facts.group)
    return launch.run(
        _add_to_all, grid, above, _upstream_specs(launch, grid), (dq, dkv),
        (pl.BlockSpec(memory_space=pltpu.HBM), launch.key_rows(grid)),
        scratch=(
            pltpu.VMEM((blocks.k, facts.head_dim), jnp.float32),
            pltpu.VMEM((blocks.k, facts.v_dim), jnp.float32),
            pltpu.VMEM((blocks.q, facts.head_dim), jnp.float32),
            pltpu.VMEM((facts.head_dim, blocks.q), jnp.float32),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SMEM((1,), jnp.int32),
        ),
    )  # fmt: skip


def _bias_grads(launch: Launch, above: Upstream, dbias: Array) -> Array:
    blocks = launch.blocks
    visits = by_rows(for_every_batch(launch.kinds))
    grid = bias_grid(visits, dbias.shape, launch.operands.q.shape)
    return launch.run(
        _add_to_bias, grid, above, _upstream_specs(launch, grid), dbias, launch.bias_block(grid),
        scratch=(pltpu.VMEM((blocks.q, blocks.k), jnp.float32),),
    )  # fmt: skip


def _upstream_specs(launch: Launch, grid: Grid) -> Upstream:
    numbers: Any = launch.query_numbers(grid)
    dout: Any = launch.query_rows(grid, launch.facts.v_dim)
    return Upstream(dout, numbers, numbers)


class Sums(NamedTuple):
    """Where gradients are added; ``None`` what this kernel leaves to another."""

    dq: Ref | None  # [D, q]
    dk: Ref | None  # [k, D]
    dv: Ref | None  # [k, Dv]


class Slopes(NamedTuple):
    """Of the loss, at one block; ``[k, q]``."""

    weights: Any  # what multiplied V: probabilities, less what dropout took
    dlogits: Any  # at the scores after soft cap and bias
    dproducts: Any  # at q @ k.T
    visible: Any | None


def _slopes(tile: Tile, x: Operands, above: Upstream, *, masked: bool, finite: bool) -> Slopes:
    """Probabilities and the gradients of scores.

    Where all numbers are finite masked probabilities are 0, and so is what they multiply.
    """
    static = tile.facts.static
    k, v = split(x.kv, tile.facts.head_dim)
    scores, slope, visible = tile.scores(x.q[...], k, masked=masked)
    visible = None if finite else visible
    lse = above.lse[...]
    weights = jnp.exp2(scores - jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E))
    weights = weights if visible is None else jnp.where(visible, weights, 0.0)
    dweights = dot("nt", v, above.dout[...])
    keep = tile.kept()
    dweights = dweights if keep is None else dweights * keep
    dlogits = weights * (dweights - above.delta[...])
    dlogits = dlogits if visible is None else jnp.where(visible, dlogits, 0.0)
    dproducts = dlogits * static.scale
    if slope is not None:  # where nothing is seen it may be NaN
        dproducts = dproducts * slope
        dproducts = dproducts if visible is None else jnp.where(visible, dproducts, 0.0)
    kept = weights if keep is None else weights * keep
    return Slopes(kept, dlogits, dproducts, visible)


def _add_to_queries(tile: Tile, x: Operands, above: Upstream, old: Ref, new: Ref, acc: Ref) -> None:
    """One visit of a row of blocks; ``acc [D, q]``."""

    @pl.when(tile.visit.is_first)
    def _start() -> None:
        acc[...] = old[...].T

    for kind in (FULL, PARTIAL):

        @pl.when(tile.visit.kind == kind)
        def _add(kind: int = kind) -> None:
            _add_block(tile, x, above, Sums(acc, None, None), masked=kind == PARTIAL)

    @pl.when(tile.visit.is_last)
    def _finish() -> None:
        new[...] = acc[...].T


def _add_to_keys(
    tile: Tile, x: Operands, above: Upstream, old: Ref, new: Ref, dk: Ref, dv: Ref
) -> None:
    """One visit of a column of blocks for one head; ``dk [k, D]``, ``dv [k, Dv]``."""
    _start_keys(tile, old, dk, dv)
    for kind in (FULL, PARTIAL):

        @pl.when(tile.visit.kind == kind)
        def _add(kind: int = kind) -> None:
            _add_block(tile, x, above, Sums(None, dk, dv), masked=kind == PARTIAL)

    _finish_keys(tile, new, dk, dv)


def _add_to_all(
    tile: Tile, x: Operands, above: Upstream, old: Any, new: Any,
    dk: Ref, dv: Ref, dq: Ref, part: Ref, done: Ref, writing: Ref,
) -> None:  # fmt: skip
    """Like :func:`_add_to_keys`, and dQ is read, added to and written back.

    ``dq [q, D]`` is what was read, ``part [D, q]`` what is added.
    A column's rows come again in the next column, so a visit's write is waited for before the next
    visit reads. The read hides behind the visit's products.
    """
    dq_hbm = new[0].at[tile.batch, tile.head, pl.ds(tile.visit.q_block * dq.shape[0], dq.shape[0])]
    read = pltpu.make_async_copy(dq_hbm, dq, done.at[0])
    write = pltpu.make_async_copy(dq, dq_hbm, done.at[1])
    step, member = pl.program_id(2), pl.program_id(3)

    @pl.when((step == 0) & (member == 0))
    def _no_write_yet() -> None:
        writing[0] = 0

    _start_keys(tile, old[1], dk, dv)
    for kind in (FULL, PARTIAL):

        @pl.when(tile.visit.kind == kind)
        def _add(kind: int = kind) -> None:
            pl.when(writing[0] == 1)(write.wait)
            read.start()
            part[...] = jnp.zeros_like(part)
            _add_block(tile, x, above, Sums(part, dk, dv), masked=kind == PARTIAL)
            read.wait()
            dq[...] += part[...].T
            write.start()
            writing[0] = 1

    _finish_keys(tile, new[1], dk, dv)
    is_last_step = (step == pl.num_programs(2) - 1) & (member == tile.facts.group - 1)
    pl.when(is_last_step & (writing[0] == 1))(write.wait)


def _add_to_bias(tile: Tile, x: Operands, above: Upstream, old: Ref, new: Ref, acc: Ref) -> None:
    """One visit for one of the batch rows and heads that share a bias; ``acc [q, k]``."""

    @pl.when(tile.visit.is_first)
    def _start() -> None:
        acc[...] = old[...]

    for kind in (FULL, PARTIAL):

        @pl.when(tile.visit.kind == kind)
        def _add(kind: int = kind) -> None:
            masked = kind == PARTIAL
            acc[...] += _slopes(tile, x, above, masked=masked, finite=False).dlogits.T

    @pl.when(tile.visit.is_last)
    def _finish() -> None:
        new[...] = acc[...]


def _start_keys(tile: Tile, old: Ref, dk: Ref, dv: Ref) -> None:
    @pl.when(tile.visit.is_first)
    def _start() -> None:
        dk[...], dv[...] = split(old, tile.facts.head_dim)


def _add_block(tile: Tile, x: Operands, above: Upstream, into: Sums, *, masked: bool) -> None:
    """Add a block's gradients; where numbers are not finite, with care."""
    if not masked:
        _add_finite(tile, x, above, into, masked=False)
        return
    odd = functools.reduce(jnp.logical_or, map(is_odd, (x.kv[...], x.q[...], above.dout[...])))
    # A row that saw nothing has an lse of -inf; one that saw NaN has NaN in both.
    odd |= is_odd(above.delta[...]) | is_odd(
        jnp.where(above.lse[...] == -jnp.inf, 0.0, above.lse[...])
    )
    pl.when(jnp.logical_not(odd))(lambda: _add_finite(tile, x, above, into, masked=True))
    pl.when(odd)(lambda: _add_odd(tile, x, above, into))


def _add_finite(tile: Tile, x: Operands, above: Upstream, into: Sums, *, masked: bool) -> None:
    slopes = _slopes(tile, x, above, masked=masked, finite=True)
    q, dout = x.q[...], above.dout[...]
    dproducts = slopes.dproducts.astype(q.dtype)
    if into.dv is not None:
        into.dv[...] += dot("nn", slopes.weights.astype(dout.dtype), dout)
    if into.dk is not None:
        into.dk[...] += dot("nn", dproducts, q)
    if into.dq is not None:
        k, _ = split(x.kv, tile.facts.head_dim)
        into.dq[...] += dot("tn", k, dproducts)


def _add_odd(tile: Tile, x: Operands, above: Upstream, into: Sums) -> None:
    slopes = _slopes(tile, x, above, masked=True, finite=False)
    if into.dv is not None:
        add_seen(into.dv, "nn", slopes.weights, slopes.visible, above.dout[...])
    if into.dk is not None:
        add_seen(into.dk, "nn", slopes.dproducts, slopes.visible, x.q[...])
    if into.dq is not None:
        k, _ = split(x.kv, tile.facts.head_dim)
        add_seen(into.dq, "tn", slopes.dproducts, slopes.visible, k)


def _finish_keys(tile: Tile, new: Ref, dk: Ref, dv: Ref) -> None:
    @pl.when(tile.visit.is_last)
    def _finish() -> None:
        head_dim = tile.facts.head_dim
        new[:, :head_dim], new[:, head_dim:] = dk[...], dv[...]
