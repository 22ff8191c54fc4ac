"""Grids of the kernels: their axes, and the block of scores that each step visits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.experimental import pallas as pl

from ring_jax_tpu.block_index import Visit, Walk, unpack
from ring_jax_tpu.scores import ScalarOperands


class GridPoint(NamedTuple):
    """The batch row, query head and block that a step of a grid computes."""

    batch: Any
    head: Any
    visit: Visit


@dataclass(frozen=True, eq=False)
class Grid:
    """The grid of a kernel: its axes, and the block that each step visits.

    Attributes:
        walk: The blocks that it visits.
        sizes: Sizes of the axes; ``None`` is the axis along the visits. A chip's cores may share
            the first two axes, over batch rows and heads.
        point: A function of the scalar operands and the index along each axis to the grid point.
    """

    walk: Walk
    sizes: tuple[int | None, ...]
    point: Callable[..., GridPoint]

    def spec(
        self, shape: tuple[int | None, ...], index: Callable[[GridPoint], tuple[Any, ...]]
    ) -> pl.BlockSpec:
        """Return a block spec whose index is a function of the grid point."""
        return pl.BlockSpec(shape, lambda *ids: index(self.point(ids[-1], *ids[:-1])))


def query_head_grid(walk: Walk, q: tuple[int, ...]) -> Grid:
    """Return the grid of all visits for each query head of ``[B, H, ...]``."""

    def point(scalars: ScalarOperands, batch: Any, head: Any, step: Any) -> GridPoint:
        return GridPoint(batch, head, unpack(scalars.block_index[batch * walk.stride + step]))

    return Grid(walk, (*q[:2], None), point)


def key_head_grid(walk: Walk, kv: tuple[int, ...], group: int) -> Grid:
    """Return the grid of all visits for each K/V head of ``[B, K, ...]``.

    Each visit is repeated for all query heads of the group, so that their dK and dV are added up
    on chip. For a block of keys the sums begin with the first head of its first visit, and are
    written after the last head of its last.
    """

    def point(
        scalars: ScalarOperands, batch: Any, kv_head: Any, step: Any, member: Any
    ) -> GridPoint:
        visit = unpack(scalars.block_index[batch * walk.stride + step])
        visit = visit._replace(
            is_first=visit.is_first & (member == 0), is_last=visit.is_last & (member == group - 1)
        )
        return GridPoint(batch, kv_head * group + member, visit)

    return Grid(walk, (*kv[:2], None, group), point)


def bias_grid(walk: Walk, bias: tuple[int, ...], q: tuple[int, ...]) -> Grid:
    """Return the grid of all visits for each bias ``[B or 1, H or 1, ...]``.

    Each visit is repeated for all batch rows and query heads that share the bias, so that the
    gradient is added up on chip. The walk has one list of blocks, for all batch rows.
    """
    shared = q[0] // bias[0], q[1] // bias[1]

    def point(
        scalars: ScalarOperands, batch: Any, head: Any, step: Any, inner_batch: Any, inner_head: Any
    ) -> GridPoint:
        visit = unpack(scalars.block_index[step])._replace(
            is_first=(inner_batch == 0) & (inner_head == 0),
            is_last=(inner_batch == shared[0] - 1) & (inner_head == shared[1] - 1),
        )
        return GridPoint(batch * shared[0] + inner_batch, head * shared[1] + inner_head, visit)

    return Grid(walk, (*bias[:2], None, *shared), point)
