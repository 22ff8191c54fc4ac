"""Rows that differ between ranks, as constants that stay small however many ranks there are.

A program is one for all ranks, so it holds the work items of all of them. Most are alike: under a
causal mask a rank that comes after another sees one rectangle of its keys, a rank that comes before
it sees another one, whatever their distance. So equal rows are stored once, and neighbouring ranks
that have the same one as a range of ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ring_jax.records import Array

Table = npt.NDArray[np.int32]


class RankTable(NamedTuple):
    """A table ``[P, ..., C]`` of rows of each of ``P`` ranks, compressed.

    Attributes:
        rows: The distinct rows, int32 ``[U, C]``.
        starts: First rank of each range of ranks with the same row, ascending, int32 ``[..., G]``;
            ``P`` where there are fewer than ``G`` ranges. ``None`` if each rank is a range.
        numbers: Number of the row of each range, int32 ``[..., G]``.
    """

    rows: Table
    starts: Table | None
    numbers: Table

    @classmethod
    def of(cls, table: Table) -> RankTable:
        """Compress a table ``[P, ..., C]``."""
        ranks, width = len(table), table.shape[-1]
        rows, numbers = _distinct(table.reshape(-1, width))
        by_rank = np.moveaxis(numbers.reshape(table.shape[:-1]), 0, -1)  # [..., P]
        begins = np.ones(by_rank.shape, dtype=bool)
        begins[..., 1:] = by_rank[..., 1:] != by_rank[..., :-1]
        ranges = int(begins.sum(axis=-1).max(initial=1))
        if 2 * ranges >= ranks:  # a first rank and a number for each range take no less
            return cls(rows, None, by_rank.astype(np.int32))
        order = np.argsort(~begins, axis=-1, kind="stable")[..., :ranges]
        starts = np.where(np.take_along_axis(begins, order, axis=-1), order, ranks)
        return cls(
            rows, starts.astype(np.int32), np.take_along_axis(by_rank, order, -1).astype(np.int32)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the constants that a program holds for it."""
        return sum(x.nbytes for x in self if x is not None)

    def numbers_of(self, rank: Array) -> Array:
        """Return the numbers of a rank's rows, int32 ``[...]``."""
        numbers = jnp.asarray(self.numbers)
        if self.starts is None:
            return numbers[..., rank]
        last = (jnp.asarray(self.starts) <= rank).sum(axis=-1, keepdims=True) - 1
        return jnp.take_along_axis(numbers, last, axis=-1)[..., 0]

    def rows_of(self, rank: Array) -> tuple[Array, Array]:
        """Return a rank's rows, int32 ``[..., C]``, and their numbers, int32 ``[...]``."""
        if self.starts is None and self.numbers.shape[-1] == 1:  # one rank: nothing to look up
            numbers = self.numbers[..., 0]
            return jnp.asarray(self.rows[numbers]), jnp.asarray(numbers)
        numbers_of_rank = self.numbers_of(rank)
        return jnp.asarray(self.rows)[numbers_of_rank], numbers_of_rank


def _distinct(rows: Table) -> tuple[Table, npt.NDArray[np.intp]]:
    """Return the distinct rows of ``[N, C]``, and the number of each row among them."""
    # Rows are compared as strings of bytes, which is faster than column by column.
    packed = np.ascontiguousarray(rows).view(
        np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))
    )
    _, first, numbers = np.unique(packed[:, 0], return_index=True, return_inverse=True)
    return rows[first], numbers
