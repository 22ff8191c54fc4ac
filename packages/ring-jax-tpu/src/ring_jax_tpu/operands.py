"""From what the loop hands over to what a Pallas call takes: whole blocks, and where each lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ring_core import EMPTY, KernelConfig, Mask
from ring_jax.collectives import match_varying, varying_axes
from ring_jax.kernels.block_index import item_bounds, shown_in_blocks
from ring_jax.records import Array, ItemTable, KeyBlock, Pass, QueryBlock, Static
from ring_jax_tpu.block_index import (
    BlockIndex,
    Visit,
    Walk,
    block_kinds,
    check_number,
    unpack,
    with_nonfinite,
)
from ring_jax_tpu.block_sizes import (
    LANES,
    Blocks,
    Generation,
    Shape,
    choose_blocks,
    generation_of,
    part_sizes,
    span_of,
)
from ring_jax_tpu.scores import Constants, ScalarOperands, Tile, TokenOperands

_NO_ROW, _NO_COLUMN = -1, -2  # ids of padding: equal to nothing on the other side


class Operands(NamedTuple):
    """What every kernel reads; inside a kernel, references to the blocks of one visit."""

    q: Any  # [B, H, T, D]
    kv: Any  # [B, K, S, D + Dv]; inside a kernel also a pair, K and V
    rows: TokenOperands
    columns: TokenOperands
    bias: Any  # [B or 1, H or 1, T, S], or None
    bias_shift: Any  # float32 [B or 1, H or 1, 1, T], or None


class GridPoint(NamedTuple):
    """Where a step of a grid is: batch row, query head, block."""

    batch: Any
    head: Any
    visit: Visit


def fitting_blocks(
    direction: Pass, config: KernelConfig, mask: Mask, shape: Shape, lengths: tuple[int, int],
    lists: int, generation: Generation,
) -> Blocks:  # fmt: skip
    """The blocks of a launch over so many queries and keys, with so many lists of blocks.

    Raises:
        UnsupportedError: They do not fit on chip, or are too many.
    """
    blocks = choose_blocks(config, direction, shape, *lengths, span_of(mask), generation)
    check_number(lists, blocks)
    return blocks


@dataclass(frozen=True)
class Launch:
    """A call of one of the kernels, its lengths padded to whole blocks.

    Padding is only ever needed for lengths that are no multiple of a block; no item shows it.
    """

    generation: Generation
    consts: Constants
    shape: Shape
    blocks: Blocks
    kinds: Array  # [1 or B, I, J]
    scalars: ScalarOperands  # without ``block_index``
    operands: Operands

    @classmethod
    def of(
        cls, direction: Pass, static: Static, rows: QueryBlock, columns: KeyBlock, work: ItemTable
    ) -> Launch:
        """Choose blocks and pad to them.

        Raises:
            UnsupportedError: They do not fit on chip, or are too many.
        """
        (batch, heads, q_len, head_dim), (_, kv_heads, k_len, dims) = rows.q.shape, columns.kv.shape
        shape = Shape(
            head_dim, dims - head_dim, rows.q.dtype.itemsize, rows.bias is not None,
            rows.seed is not None,
        )  # fmt: skip
        mask, generation = static.plan.mask, generation_of(rows.q)
        masks = static.bias_masks and rows.bias is not None and rows.bias.shape[0] > 1
        lists = batch if rows.ids is not None or masks else 1
        blocks = fitting_blocks(
            direction, static.config, mask, shape, (q_len, k_len), lists, generation
        )
        kinds = block_kinds(rows, columns, work, blocks)
        if static.bias_masks and rows.bias is not None:
            kinds = jnp.where(shown_in_blocks(rows.bias, blocks.q, blocks.k), kinds, EMPTY)
        bounds = item_bounds(work)
        by_batch = rows.slopes is not None and rows.slopes.shape[0] == batch
        consts = Constants(
            static, heads, heads // kv_heads, dims - head_dim, blocks.q, blocks.k,
            bounds.shape[0], heads if by_batch else 0, part_sizes(span_of(mask), generation),
            generation.prefetches_scores,
        )  # fmt: skip
        slopes = None if rows.slopes is None else rows.slopes.astype(jnp.float32).reshape(-1)
        scalars = ScalarOperands(None, bounds.reshape(-1), slopes, _dropout_words(rows))
        needs_positions = slopes is not None or static.plan.mask.predicate is not None
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
        """The same, told which tokens hold numbers that are not finite, bool ``[B, T]``."""
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

        ``old`` and ``new`` are references to ``into`` and to the results, in the same memory:
        blocks that are not visited keep their values. ``cost`` is for XLA's schedule.
        """
        for_dropout = pltpu.VMEM((self.blocks.k, self.blocks.q), jnp.int32)
        room: tuple[Any, ...] = () if self.scalars.dropout is None else (for_dropout,)

        def body(scalars: ScalarOperands, operands: Operands, *refs: Any) -> None:
            ids = [pl.program_id(axis) for axis in range(len(grid.sizes))]
            dropout_scratch, refs = (refs[-1], refs[:-1]) if room else (None, refs)
            tile = Tile(
                self.consts,
                scalars,
                operands.rows,
                operands.columns,
                operands.bias,
                operands.bias_shift,
                *grid.place(scalars, *ids),
                dropout_scratch,
            )
            kernel(tile, operands, *refs)

        walk, kv = grid.walk, self.operands.kv
        operands = self.operands._replace(kv=(kv, kv) if self._separate_kv_fetch else kv)
        index = walk.whole() if walk.pieces == 1 else BlockIndex(walk.kinds, 1)
        steps = None if isinstance(index.steps, int) else index.steps
        arrays = (index.words, self.scalars, operands, extra, into)
        lists, scalars, operands, extra, into = match_varying(arrays, varying_axes(arrays))
        before = 1 + len(jax.tree.leaves((scalars, operands, extra)))

        def launch(
            words: Array, steps: Array | int | None, scalars: ScalarOperands, operands: Operands,
            extra: Any, into: Any,
        ) -> Any:  # fmt: skip
            scalars = scalars._replace(block_index=words.reshape(-1))
            number = 1 if steps is None else steps
            results: tuple[Any] = pl.pallas_call(
                body,
                out_shape=(jax.tree.map(_result_type, into, into_specs),),
                grid_spec=pltpu.PrefetchScalarGridSpec(
                    num_scalar_prefetch=1,
                    grid=tuple(number if size is None else size for size in grid.sizes),
                    in_specs=(self._specs(grid), extra_specs, into_specs),
                    out_specs=(into_specs,),
                    scratch_shapes=(*scratch, *room),
                ),
                input_output_aliases={before + n: n for n in range(len(jax.tree.leaves(into)))},
                compiler_params=pltpu.CompilerParams(
                    dimension_semantics=[
                        pltpu.PARALLEL if n < 2 else pltpu.ARBITRARY for n in range(len(grid.sizes))
                    ],
                    vmem_limit_bytes=int(self.generation.vmem_mib * 2**20),
                ),
                cost_estimate=cost,
                name=f"ring_{kernel.__name__.strip('_')}",
            )(scalars, operands, extra, into)
            return results[0]

        # Pallas's own vmap knows neither memory that a kernel copies from itself nor, where lists
        # differ, a traced number of steps; a vmapped axis is run through one by one instead.
        def call(lists: Array, steps: Array | None, *arrays: Any) -> Any:
            if walk.pieces == 1:
                return launch(lists, steps, *arrays)
            scalars, operands, extra, into = arrays

            def piece(n: Array, into: Any) -> Any:
                words, steps = replace(walk, kinds=lists).piece(n)
                return launch(words, steps, scalars, operands, extra, into)

            return lax.fori_loop(0, walk.pieces, piece, into)

        return cast("T", sequential_vmap(call)(lists, steps, scalars, operands, extra, into))

    def query_rows(self, grid: Grid, width: int) -> pl.BlockSpec:
        """The block of ``[B, H, T, width]``."""
        return grid.spec(
            (None, None, self.blocks.q, width), lambda at: (at.batch, at.head, at.visit.q_block, 0)
        )

    def query_numbers(self, grid: Grid, shape: tuple[int, ...] | None = None) -> pl.BlockSpec:
        """The block of ``[B, H, 1, T]``, or of an array whose ``shape`` may have 1 for B or H."""
        many_batch, many_heads = (True, True) if shape is None else (n > 1 for n in shape[:2])
        return grid.spec(
            (None, None, 1, self.blocks.q),
            lambda at: (
                at.batch if many_batch else 0, at.head if many_heads else 0, 0, at.visit.q_block
            ),
        )  # fmt: skip

    def key_rows(self, grid: Grid) -> pl.BlockSpec:
        """The block of ``[B, K, S, D + Dv]``."""
        return self._key_columns(grid, self.operands.kv.shape[3], 0)

    def bias_block(self, grid: Grid) -> pl.BlockSpec:
        """The block of ``[B or 1, H or 1, T, S]``."""
        many_batch, many_heads = (size > 1 for size in self.operands.bias.shape[:2])
        return grid.spec(
            (None, None, self.blocks.q, self.blocks.k),
            lambda at: (
                at.batch if many_batch else 0,
                at.head if many_heads else 0,
                at.visit.q_block,
                at.visit.k_block,
            ),
        )

    def _key_columns(self, grid: Grid, width: int, column: int) -> pl.BlockSpec:
        return grid.spec(
            (None, None, self.blocks.k, width),
            lambda at: (at.batch, lax.div(at.head, self.consts.group), at.visit.k_block, column),
        )

    @property
    def _separate_kv_fetch(self) -> bool:
        """Whether K and V are fetched one by one: both have to be whole registers wide."""
        k_dim, v_dim = self.consts.static.head_dim, self.consts.v_dim
        return self.generation.separate_kv_fetch and v_dim % LANES == 0 and k_dim % v_dim == 0

    def _specs(self, grid: Grid) -> Operands:
        x = self.operands
        kv: Any = self.key_rows(grid)
        if self._separate_kv_fetch:
            k_dim, v_dim = self.consts.static.head_dim, self.consts.v_dim
            kv = (self._key_columns(grid, k_dim, 0), self._key_columns(grid, v_dim, k_dim // v_dim))

        def numbers(x: Array, size: int, block: Callable[[GridPoint], Any]) -> pl.BlockSpec:
            return grid.spec(
                (None, 1, size), lambda at: (at.batch if x.shape[0] > 1 else 0, 0, block(at))
            )

        return Operands(
            self.query_rows(grid, self.consts.static.head_dim),
            kv,
            jax.tree.map(lambda x: numbers(x, self.blocks.q, lambda at: at.visit.q_block), x.rows),
            jax.tree.map(
                lambda x: numbers(x, self.blocks.k, lambda at: at.visit.k_block), x.columns
            ),
            None if x.bias is None else self.bias_block(grid),
            None if x.bias_shift is None else self.query_numbers(grid, x.bias_shift.shape),
        )


@dataclass(frozen=True, eq=False)
class Grid:
    """The steps of a kernel.

    Attributes:
        walk: The blocks it visits.
        sizes: Of the axes; ``None`` is the one along the visits. A chip's cores may share the first
            two, over batch rows and heads.
        place: From scalars and the step along each axis to where that is.
    """

    walk: Walk
    sizes: tuple[int | None, ...]
    place: Callable[..., GridPoint]

    def spec(
        self, shape: tuple[int | None, ...], index: Callable[[GridPoint], tuple[Any, ...]]
    ) -> pl.BlockSpec:
        """A block whose index depends on the place."""
        return pl.BlockSpec(shape, lambda *ids: index(self.place(ids[-1], *ids[:-1])))


def query_head_grid(walk: Walk, q: tuple[int, ...]) -> Grid:
    """All visits for each query head of ``[B, H, ...]``."""

    def place(scalars: ScalarOperands, batch: Any, head: Any, step: Any) -> GridPoint:
        return GridPoint(batch, head, unpack(scalars.block_index[batch * walk.stride + step]))

    return Grid(walk, (*q[:2], None), place)


def key_head_grid(walk: Walk, kv: tuple[int, ...], group: int) -> Grid:
    """All visits for each key/value head of ``[B, K, ...]``, each for all heads of its group."""

    def place(
        scalars: ScalarOperands, batch: Any, kv_head: Any, step: Any, member: Any
    ) -> GridPoint:
        visit = unpack(scalars.block_index[batch * walk.stride + step])
        visit = visit._replace(
            is_first=visit.is_first & (member == 0), is_last=visit.is_last & (member == group - 1)
        )
        return GridPoint(batch, kv_head * group + member, visit)

    return Grid(walk, (*kv[:2], None, group), place)


def bias_grid(walk: Walk, bias: tuple[int, ...], q: tuple[int, ...]) -> Grid:
    """Each visit for each bias, for all batch rows and query heads that share it."""
    shared = q[0] // bias[0], q[1] // bias[1]

    def place(
        scalars: ScalarOperands, batch: Any, head: Any, step: Any, inner_batch: Any, inner_head: Any
    ) -> GridPoint:
        visit = unpack(scalars.block_index[step])._replace(
            is_first=(inner_batch == 0) & (inner_head == 0),
            is_last=(inner_batch == shared[0] - 1) & (inner_head == shared[1] - 1),
        )
        return GridPoint(batch * shared[0] + inner_batch, head * shared[1] + inner_head, visit)

    return Grid(walk, (*bias[:2], None, *shared), place)


def _result_type(x: Array, spec: pl.BlockSpec) -> Any:
    """What a kernel copies from itself has to lie in main memory, where XLA may not move it."""
    return pltpu.HBM.like(x) if spec.memory_space == pltpu.HBM else jax.typeof(x)


def _dropout_words(rows: QueryBlock) -> Array | None:
    if rows.seed is None or rows.offsets is None:
        return None
    return jnp.concatenate([lax.bitcast_convert_type(rows.seed, jnp.int32), rows.offsets])


def _token_operands(
    positions: Array | None, indices: Array | None, cells: Array | None, ids: Array | None,
    length: int, padding: int,
) -> TokenOperands:  # fmt: skip
    """Numbers of tokens as Pallas takes them; negative ids become one that equals no other's."""
    ids = None if ids is None else jnp.where(ids < 0, padding, ids)
    every = (positions, indices, cells, ids)
    return TokenOperands(
        *(None if x is None else pad(jnp.atleast_2d(x), 1, length)[:, None] for x in every)
    )


def has_nonfinite(x: Array) -> Array:
    """Which tokens of ``[B, H, T, D]`` hold a number that is not finite, bool ``[B, T]``."""
    return ~jnp.isfinite(x).all(axis=(1, 3))


def pad(x: Array, axis: int, length: int, fill: float = 0) -> Array:
    """Lengthen one axis."""
    missing = length - x.shape[axis]
    if missing == 0:
        return x
    edges = [(0, missing if n == axis else 0) for n in range(x.ndim)]
    return jnp.pad(x, edges, constant_values=fill)
