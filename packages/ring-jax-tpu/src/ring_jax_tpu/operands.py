"""Translate a step's operands into a Pallas call: padded arrays and their block specs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import jaxpr_as_fun

from ring_jax.collectives import match_varying, varying_axes
from ring_jax.kernels.absent import only_on
from ring_jax.kernels.block_index import item_bounds
from ring_jax.records import Array, CallSpec, Direction, ItemTable, KeyBlock, QueryBlock
from ring_jax_tpu.block_index import BlockIndex, block_kinds, with_nonfinite
from ring_jax_tpu.block_sizes import (
    LANES,
    WINDOWED_SPAN,
    Blocks,
    Generation,
    Shape,
    choose_blocks,
    generation_of,
    span_of,
)
from ring_jax_tpu.grids import Grid, GridPoint
from ring_jax_tpu.scores import Constants, ScalarOperands, Tile, TokenOperands

_NO_ROW, _NO_COLUMN = -1, -2  # ids of padding: equal to nothing on the other side


class Operands(NamedTuple):
    """The operands that every kernel reads; inside a kernel, references to one visit's blocks."""

    q: Any  # [B, H, T, D]
    kv: Any  # [B, K, S, D + Dv]; inside a kernel a pair of K and V if they are fetched separately
    rows: TokenOperands
    columns: TokenOperands
    bias: Any  # [B or 1, H or 1, T, S], or None
    bias_shift: Any  # float32 [B or 1, H or 1, 1, T], or None


@dataclass(frozen=True)
class Launch:
    """The operands and static parameters of a kernel launch, padded to whole blocks.

    Only lengths that are not a multiple of the block size are padded; no item shows padding.
    """

    generation: Generation
    consts: Constants
    shape: Shape
    blocks: Blocks
    kinds: Array  # of blocks of scores, empty, full or to be masked, [1 or B, I, J]
    scalars: ScalarOperands  # without ``block_index``
    operands: Operands

    @classmethod
    def of(
        cls,
        direction: Direction,
        call: CallSpec,
        rows: QueryBlock,
        columns: KeyBlock,
        work: ItemTable,
    ) -> Launch:
        """Choose the blocks of a launch, classify them, and pad the operands to whole blocks.

        Raises:
            UnsupportedError: The blocks do not fit on chip, or are too many.
        """
        (batch, heads, q_len, head_dim), (_, kv_heads, k_len, dims) = rows.q.shape, columns.kv.shape
        shape = Shape(
            head_dim, dims - head_dim, rows.q.dtype.itemsize, rows.bias is not None,
            rows.seed is not None,
        )  # fmt: skip
        generation = generation_of(rows.q)
        mask_by_row = call.bias_masks and rows.bias is not None and rows.bias.shape[0] > 1
        lists = batch if rows.ids is not None or mask_by_row else 1
        span = span_of(call.plan.mask)
        part = generation.windowed_part if span < WINDOWED_SPAN else generation.part
        blocks = choose_blocks(call.config, direction, shape, q_len, k_len, span, generation, lists)
        kinds = block_kinds(rows, columns, work, blocks, bias_masks=call.bias_masks)
        bounds = item_bounds(work)
        by_batch = rows.slopes is not None and rows.slopes.shape[0] == batch
        consts = Constants(
            call, heads, heads // kv_heads, dims - head_dim, blocks.q, blocks.k,
            bounds.shape[0], heads if by_batch else 0, part,
            generation.prefetches_scores,
        )  # fmt: skip
        slopes = None if rows.slopes is None else rows.slopes.astype(jnp.float32).reshape(-1)
        scalars = ScalarOperands(None, bounds.reshape(-1), slopes, _dropout_words(rows))
        needs_positions = slopes is not None or call.plan.mask.predicate is not None
        operands = Operands(
            pad(rows.q, 2, blocks.q_len),
            pad(columns.kv, 2, blocks.k_len),
            _token_operands(
                rows.positions if needs_positions else None,
                rows.indices if scalars.dropout is not None else None,
                rows.cells, rows.ids, blocks.q_len, _NO_ROW,
            ),
            _token_operands(
                columns.positions if needs_positions or scalars.dropout is not None else None,
                None, columns.cells, columns.ids, blocks.k_len, _NO_COLUMN,
            ),
            None if rows.bias is None else pad(pad(rows.bias, 2, blocks.q_len), 3, blocks.k_len),
            None if rows.bias_shift is None else pad(rows.bias_shift, 2, blocks.q_len)[:, :, None],
        )  # fmt: skip
        return cls(generation, consts, shape, blocks, kinds, scalars, operands)

    def nan_safe_for(self, rows: Array, columns: Array) -> Launch:
        """Return the launch with the blocks marked whose NaN and infinities are to be kept apart.

        There kernels keep such numbers from tokens that do not see them. ``rows`` and ``columns``
        are the queries and keys that have some, bool ``[B, T]``.
        """
        kinds = with_nonfinite(
            self.kinds, rows, columns, self.blocks, has_bias=self.operands.bias is not None
        )
        return replace(self, kinds=kinds)

    def run[T](
        self,
        kernel: Callable[..., None],
        grid: Grid,
        extra: Any,
        extra_specs: Any,
        into: T,
        into_specs: Any,
        scratch: tuple[Any, ...],
        cost: pl.CostEstimate | None = None,
    ) -> T:
        """Run ``kernel(tile, operands, extra, old, new, *scratch)`` at every step of a grid.

        Args:
            kernel: The kernel.
            grid: The steps, and the block that each visits.
            extra: Further arrays that the kernel reads.
            extra_specs: Their block specs.
            into: Arrays that it updates. ``old`` and ``new`` are references to them and to the
                results, in the same memory: blocks that are not visited keep their values.
            into_specs: Their block specs.
            scratch: Shapes of scratch memory.
            cost: An estimate for XLA's scheduler.

        Returns:
            The updated arrays.
        """
        flags = pltpu.VMEM((self.blocks.k, self.blocks.q), jnp.int32)
        dropout_shapes: tuple[Any, ...] = () if self.scalars.dropout is None else (flags,)

        def body(scalars: ScalarOperands, operands: Operands, *refs: Any) -> None:
            """Run the kernel at one step of the grid, on the blocks that Pallas has fetched."""
            ids = [pl.program_id(axis) for axis in range(len(grid.sizes))]
            dropout_scratch, refs = (refs[-1], refs[:-1]) if dropout_shapes else (None, refs)
            tile = Tile(
                self.consts,
                scalars,
                operands.rows,
                operands.columns,
                operands.bias,
                operands.bias_shift,
                *grid.point(scalars, *ids),
                dropout_scratch,
            )
            kernel(tile, operands, *refs)

        walk, kv = grid.walk, self.operands.kv
        operands = self.operands._replace(kv=(kv, kv) if self._separate_kv_fetch else kv)
        # The list of all of a walk; or the kinds, of which each piece makes its own list later.
        index = walk.whole() if walk.pieces == 1 else BlockIndex(walk.kinds, 1)
        steps = None if isinstance(index.steps, int) else index.steps
        arrays = (index.words, self.scalars, operands, extra, into)
        lists, scalars, operands, extra, into = match_varying(arrays, varying_axes(arrays))
        num_read = 1 + len(jax.tree.leaves((scalars, operands, extra)))

        def launch(
            words: Array, steps: Array | int | None, scalars: ScalarOperands, operands: Operands,
            extra: Any, into: Any,
        ) -> Any:  # fmt: skip
            """Launch the kernel over the visits listed in ``words``; update ``into`` in place."""
            scalars = scalars._replace(block_index=words.reshape(-1))
            num_steps = 1 if steps is None else steps
            results: tuple[Any] = pl.pallas_call(
                body,
                out_shape=(jax.tree.map(_result_type, into, into_specs),),
                grid_spec=pltpu.PrefetchScalarGridSpec(
                    num_scalar_prefetch=1,
                    grid=tuple(num_steps if size is None else size for size in grid.sizes),
                    in_specs=(self._specs(grid), extra_specs, into_specs),
                    out_specs=(into_specs,),
                    scratch_shapes=(*scratch, *dropout_shapes),
                ),
                # Results lie where accumulators lay: blocks without a visit keep their numbers.
                input_output_aliases={num_read + n: n for n in range(len(jax.tree.leaves(into)))},
                compiler_params=pltpu.CompilerParams(
                    # Batch rows and heads touch different blocks and may be shared among a chip's
                    # cores. Visits of a row follow one another: its sums stay on chip between them.
                    dimension_semantics=[
                        pltpu.PARALLEL if n < 2 else pltpu.ARBITRARY for n in range(len(grid.sizes))
                    ],
                    vmem_limit_bytes=int(self.generation.vmem_mib * 2**20),
                ),
                cost_estimate=cost,
                name=f"ring_{kernel.__name__.strip('_')}",
            )(scalars, operands, extra, into)
            return results[0]

        def launch_pieces(lists: Array, steps: Array | None, *arrays: Any) -> Any:
            """Launch the kernel once, or once for each piece of a walk with too long a list."""
            if walk.pieces == 1:
                return launch(lists, steps, *arrays)
            scalars, operands, extra, into = arrays

            # Pieces update disjoint rows (or columns) of the same arrays, one after another; a
            # fused kernel's pieces all add to dQ.
            def launch_piece(n: Array, into: Any) -> Any:
                words, steps = replace(walk, kinds=lists).piece(n)
                return launch(words, steps, scalars, operands, extra, into)

            return lax.fori_loop(0, walk.pieces, launch_piece, into)

        if not _is_interpreted():
            lists = only_on("tpu", "pallas", lists)
        # Pallas's own vmap supports neither memory that a kernel copies from itself nor, if lists
        # differ, a traced number of steps; so under vmap the launches run in sequence. The program
        # around this keeps that function: traced first, it holds none of the arrays.
        args = lists, steps, scalars, operands, extra, into
        run = sequential_vmap(jaxpr_as_fun(jax.make_jaxpr(launch_pieces)(*args)))
        return cast("T", jax.tree.unflatten(jax.tree.structure(into), run(*jax.tree.leaves(args))))

    def query_rows(self, grid: Grid, width: int) -> pl.BlockSpec:
        """Return the spec of a visit's block of ``[B, H, T, width]``."""
        return grid.spec(
            (None, None, self.blocks.q, width),
            lambda point: (point.batch, point.head, point.visit.q_block, 0),
        )

    def query_numbers(self, grid: Grid, shape: tuple[int, ...] | None = None) -> pl.BlockSpec:
        """Return the spec of a visit's block of ``[B, H, 1, T]``; B or H may be 1 in ``shape``."""
        has_batch, has_heads = (True, True) if shape is None else (n > 1 for n in shape[:2])
        return grid.spec(
            (None, None, 1, self.blocks.q),
            lambda point: (
                point.batch if has_batch else 0,
                point.head if has_heads else 0,
                0,
                point.visit.q_block,
            ),
        )

    def key_rows(self, grid: Grid) -> pl.BlockSpec:
        """Return the spec of a visit's block of ``[B, K, S, D + Dv]``."""
        return self._key_columns(grid, self.operands.kv.shape[3], 0)

    def bias_block(self, grid: Grid) -> pl.BlockSpec:
        """Return the spec of a visit's block of the bias, ``[B or 1, H or 1, T, S]``."""
        has_batch, has_heads = (size > 1 for size in self.operands.bias.shape[:2])
        return grid.spec(
            (None, None, self.blocks.q, self.blocks.k),
            lambda point: (
                point.batch if has_batch else 0,
                point.head if has_heads else 0,
                point.visit.q_block,
                point.visit.k_block,
            ),
        )

    def _key_columns(self, grid: Grid, width: int, column: int) -> pl.BlockSpec:
        """Return the spec of block ``column`` of ``width`` columns of a visit's keys and values."""
        return grid.spec(
            (None, None, self.blocks.k, width),
            lambda point: (
                point.batch,
                lax.div(point.head, np.int32(self.consts.group)),
                point.visit.k_block,
                column,
            ),
        )

    @property
    def _separate_kv_fetch(self) -> bool:
        """Return True if K and V are fetched separately, which needs whole registers of both."""
        k_dim, v_dim = self.consts.call.head_dim, self.consts.v_dim
        return self.generation.separate_kv_fetch and v_dim % LANES == 0 and k_dim % v_dim == 0

    def _specs(self, grid: Grid) -> Operands:
        """Return the block specs of the operands."""
        x = self.operands
        kv: Any = self.key_rows(grid)
        if self._separate_kv_fetch:
            k_dim, v_dim = self.consts.call.head_dim, self.consts.v_dim
            kv = (self._key_columns(grid, k_dim, 0), self._key_columns(grid, v_dim, k_dim // v_dim))

        def numbers(x: Array, size: int, block: Callable[[GridPoint], Any]) -> pl.BlockSpec:
            return grid.spec(
                (None, 1, size),
                lambda point: (point.batch if x.shape[0] > 1 else 0, 0, block(point)),
            )

        return Operands(
            self.query_rows(grid, self.consts.call.head_dim),
            kv,
            jax.tree.map(
                lambda x: numbers(x, self.blocks.q, lambda point: point.visit.q_block), x.rows
            ),
            jax.tree.map(
                lambda x: numbers(x, self.blocks.k, lambda point: point.visit.k_block), x.columns
            ),
            None if x.bias is None else self.bias_block(grid),
            None if x.bias_shift is None else self.query_numbers(grid, x.bias_shift.shape),
        )


def _result_type(x: Array, spec: pl.BlockSpec) -> Any:
    """Return the type of a result; one that a kernel copies itself is pinned to main memory."""
    return pltpu.HBM.like(x) if spec.memory_space == pltpu.HBM else jax.typeof(x)


def _is_interpreted() -> bool:
    """Return True inside ``pltpu.force_tpu_interpret_mode``, where kernels run anywhere."""
    from jax._src import config  # JAX has no public way

    mode = getattr(config, "pallas_tpu_interpret_mode_context_manager", None)
    return mode is not None and mode.value is not None


def _dropout_words(rows: QueryBlock) -> Array | None:
    """Return seed and numbers of dropout, int32 ``[3 + H]``; ``None`` without dropout."""
    if rows.seed is None or rows.numbers is None:
        return None
    return jnp.concatenate([lax.bitcast_convert_type(rows.seed, jnp.int32), rows.numbers])


def _token_operands(
    positions: Array | None, indices: Array | None, cells: Array | None, ids: Array | None,
    length: int, padding: int,
) -> TokenOperands:  # fmt: skip
    """Pad per-token integers to ``length``, ``[1 or B, 1, length]`` each.

    Negative ids, which see nothing, become ``padding``, which differs for queries and keys.
    """
    ids = None if ids is None else jnp.where(ids < 0, padding, ids)
    numbers = (positions, indices, cells, ids)
    return TokenOperands(
        *(None if x is None else pad(jnp.atleast_2d(x), 1, length)[:, None] for x in numbers)
    )


def has_nonfinite(x: Array) -> Array:
    """Return which tokens of ``[B, H, T, D]`` have NaN or infinite numbers, bool ``[B, T]``."""
    return ~jnp.isfinite(x).all(axis=(1, 3))


def pad(x: Array, axis: int, length: int, fill: float = 0) -> Array:
    """Pad one axis at its end to ``length``."""
    missing = length - x.shape[axis]
    if missing == 0:
        return x
    edges = [(0, missing if n == axis else 0) for n in range(x.ndim)]
    return jnp.pad(x, edges, constant_values=fill)
