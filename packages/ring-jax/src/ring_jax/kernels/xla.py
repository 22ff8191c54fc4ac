"""``xla``: blockwise attention in plain JAX, for any platform and dtype and with every option.

One block of scores lives at a time. The forward keeps a running softmax (Milakov and Gimelshein,
arXiv 1805.02867) that starts from what was accumulated, so that merging costs nothing; the backward
recomputes probabilities from the global ``lse`` (Dao et al., arXiv 2205.14135). Loops run over the
blocks that an item's bounds leave, which are known on the device only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
from jax import lax

from ring_core import KernelConfig, RingProgram
from ring_core.base.config import EVERYTHING
from ring_jax.kernels.rules import predicate_refusal
from ring_jax.kernels.scores import Bounds, ScoreBlocks, dot, loop
from ring_jax.records import (
    Array,
    AttentionState,
    BackwardInputs,
    Direction,
    Grads,
    ItemTable,
    Kernel,
    KeyBlock,
    LaunchSpec,
    LocalShape,
    QueryBlock,
)

Softmax = tuple[Array, Array, Array]  # running maximum and sum, and weighted values


@dataclass(frozen=True)
class XlaKernel(Kernel):
    """Blockwise attention in plain JAX; see the module's docstring."""

    capabilities = replace(
        EVERYTHING, name="xla", dtypes=("float64", "float32", "bfloat16", "float16"),
        fused_backward=False,
    )  # fmt: skip

    def refusals(
        self, _direction: Direction, _local: LocalShape, _config: KernelConfig, program: RingProgram, /
    ) -> tuple[str, ...]:  # fmt: skip
        """Refuse predicates without an expression that have too many tiles, too."""
        refusal = predicate_refusal(program.plan, evaluates=True, reads_tiles=True)
        return () if refusal is None else (refusal,)

    def constant_bytes(self, program: RingProgram, /) -> int:
        """Return the bytes of the tiles of a predicate that has no expression."""
        plan = program.plan
        if plan.blocks is None or plan.rule.expression is not None or plan.blocks.lookup is None:
            return 0
        return sum(x.nbytes for x in plan.blocks.lookup)

    def attend_into(
        self, spec: LaunchSpec, rows: QueryBlock, columns: KeyBlock, work: ItemTable,
        into: AttentionState,
    ) -> AttentionState:  # fmt: skip
        """Return ``into`` merged with the attention of the work items."""
        return ScoreBlocks.of(spec.call, rows, columns, work).for_row_blocks(
            _attend_row_block, into
        )

    def grads_into(
        self, spec: LaunchSpec, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, work: ItemTable,
        into: Grads,
    ) -> Grads:  # fmt: skip
        """Return ``into`` plus the gradients of the work items."""
        return ScoreBlocks.of(spec.call, rows, columns, work).for_row_blocks(
            partial(_differentiate_row_block, upstream), into
        )


def _attend_row_block(
    blocks: ScoreBlocks, bounds: Bounds, i_number: Array, into: AttentionState
) -> AttentionState:
    """Merge one item's attention for one block of rows into ``into``, by a running softmax."""
    i = blocks.row_block(i_number)
    q = blocks.take_rows(blocks.rows.q, i)
    # The running softmax starts from the accumulated (out, lse) as if that were one more key:
    # its maximum is lse, its sum 1. Rows without any keys so far start from sum 0.
    out, lse = blocks.take_rows(into.out, i), blocks.take_rows(into.lse, i)
    has_keys = (lse > -jnp.inf).astype(lse.dtype)

    def merge_column_block(j_number: Array, state: Softmax) -> Softmax:
        row_max, total, acc = state
        j = blocks.column_block(j_number)
        k, v = blocks.take_columns(j)
        scores, _, visible = blocks.scores(q, k, bounds, i, j)
        # A row that has seen nothing yet keeps -inf as its maximum; `safe` keeps -inf - -inf, a
        # NaN, out of the exponents.
        new_max = jnp.maximum(row_max, scores.max(axis=-1))
        safe = jnp.where(new_max == -jnp.inf, 0.0, new_max)
        # Rescale the accumulated sums to the new maximum, then add this block.
        shrink, weights = jnp.exp(row_max - safe), jnp.exp(scores - safe[..., None])
        total = total * shrink + weights.sum(axis=-1)
        factor = blocks.dropout_factor(i, j)
        weights = weights if factor is None else weights * factor
        values = _visible_dot(weights, visible, v[:, :, None], acc.dtype)
        return new_max, total, acc * shrink[..., None] + values

    # Rows of other blocks, and `into` itself, are not touched until the loop has ended.
    start = (lse, has_keys, jnp.where(has_keys[..., None] > 0, out, 0.0))
    row_max, total, acc = blocks.for_column_blocks(bounds, i_number, merge_column_block, start)
    # Normalise, and overwrite the rows that the loop started from.
    out, lse = acc / jnp.where(total == 0, 1.0, total)[..., None], row_max + jnp.log(total)
    return AttentionState(blocks.put_rows(into.out, out, i), blocks.put_rows(into.lse, lse, i))


def _differentiate_row_block(
    upstream: BackwardInputs, blocks: ScoreBlocks, bounds: Bounds, i_number: Array, into: Grads
) -> Grads:
    """Add the gradients of one item for one block of rows to ``into``.

    Probabilities are computed again from the global ``lse``; dQ of the rows is carried through the
    loop, dK/dV are added in place to the columns of each block.
    """
    i, wide = blocks.row_block(i_number), blocks.call.wide
    q, dout = blocks.take_rows(blocks.rows.q, i), blocks.take_rows(upstream.dout, i)
    lse, delta = blocks.take_rows(upstream.lse, i), blocks.take_rows(upstream.delta, i)[..., None]
    # A row that sees nothing gets probabilities of 0.
    safe = jnp.where(lse == -jnp.inf, jnp.inf, lse)[..., None]

    def add_column_block(j_number: Array, state: tuple[Array, Grads]) -> tuple[Array, Grads]:
        dq, grads = state
        j = blocks.column_block(j_number)
        k, v = blocks.take_columns(j)
        scores, slope, visible = blocks.scores(q, k, bounds, i, j)
        # lse is that of the keys of all ranks: probabilities are final, gradients only add up.
        probs = jnp.where(visible, jnp.exp(scores - safe), 0.0)
        factor = blocks.dropout_factor(i, j)
        dprobs = dot("bkgnd,bkmd->bkgnm", dout, v, wide)
        dprobs = dprobs if factor is None else dprobs * factor
        dscores = jnp.where(visible, probs * (dprobs - delta), 0.0)
        dbias = None if grads.dbias is None else blocks.add_bias_grad(grads.dbias, dscores, i, j)
        dscores = dscores * blocks.call.scale
        if slope is not None:  # a masked score's slope may be NaN
            dscores = jnp.where(visible, dscores * slope, 0.0)
        weights = probs if factor is None else probs * factor
        dq += _visible_dot(dscores, visible, k[:, :, None], wide)
        visible_t = jnp.swapaxes(visible, -1, -2)
        dk = _visible_dot(jnp.swapaxes(dscores, -1, -2), visible_t, q, wide).sum(axis=2)
        dv = _visible_dot(jnp.swapaxes(weights, -1, -2), visible_t, dout, wide).sum(axis=2)
        # Read, add and write back: earlier blocks of rows have added to these columns as well.
        part = lax.dynamic_slice_in_dim(grads.dkv, j.start, blocks.block_k, axis=2)
        part += jnp.concatenate([dk, dv], axis=-1)
        dkv = lax.dynamic_update_slice_in_dim(grads.dkv, part, j.start, axis=2)
        return dq, Grads(grads.dq, dkv, dbias)

    # The whole of dK/dV is carried through the loop, so that XLA can update it in place.
    start = (blocks.take_rows(into.dq, i), into)
    dq, grads = blocks.for_column_blocks(bounds, i_number, add_column_block, start)
    return grads._replace(dq=blocks.put_rows(grads.dq, dq, i))


def _visible_dot(weights: Array, visible: Array, x: Array, wide: jnp.dtype) -> Array:
    """Compute ``weights @ x``, reading rows of ``x`` only where visible: ``0 * nan`` is ``nan``.

    ``weights [B, K, G, n, m]``, ``x [B, K, G or 1, m, D]``. Rows of ``x`` that are not finite are
    left out of the product and added, where visible, one by one. If there are none that loop runs
    zero times, also under ``vmap``, where both sides of a branch would run.
    """
    nonfinite = ~jnp.isfinite(x).all(axis=-1, keepdims=True)
    spec = "bkgnm,bkgmd->bkgnd" if x.shape[2] > 1 else "bkgnm,bkmd->bkgnd"
    clean = jnp.where(nonfinite, 0, x)
    product = dot(spec, weights.astype(x.dtype), clean if x.shape[2] > 1 else clean[:, :, 0], wide)

    def add_row(j: Array, product: Array) -> Array:
        # Column j's row of x, if it is not finite: its NaN reach the queries that see it alone.
        weight, is_visible = (lax.dynamic_slice_in_dim(y, j, 1, axis=4) for y in (weights, visible))
        value, is_nonfinite = (lax.dynamic_slice_in_dim(y, j, 1, axis=3) for y in (x, nonfinite))
        return product + jnp.where(is_visible & is_nonfinite, weight * value.astype(wide), 0.0)

    return loop(0, jnp.where(nonfinite.any(), x.shape[3], 0), add_row, product)
