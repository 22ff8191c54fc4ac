"""Launches: passes of a kernel over work items, made when a call is resolved, run by every call.

A launch holds options and slices, no tensors. What its first run for tensors of some strides and
alignment has found out (:func:`ring_torch.launches.cache.tensors_key`) it may remember, and do less
in the runs that follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from ring_core import WorkItem
from ring_torch.records import (
    AttentionState,
    BackwardInputs,
    KeyBlock,
    KeyGrads,
    QueryBlock,
    QueryGrads,
)

#: How a forward hands over ``(out, lse)``: merged into sums in the accumulators' dtype, written
#: into memory that it is given, or returned in memory of its own.
Mode = Literal["merge", "write", "return"]


class Forward(NamedTuple):
    """The forward of a kernel over a work item.

    Attributes:
        run: Called as ``run(rows, columns, into, mode)`` with the item's rows and columns. It
            returns ``into`` or, in mode ``"return"``, where that is ``None``, its own tensors, in
            the inputs' dtype. In a row that sees nothing ``lse`` is ``-inf``, and ``out``, unless
            it is merged, may be anything.
        modes: The modes that it has.
        marks: True if it leaves infinities in ``lse`` where scores are not finite, while every row
            sees something: whoever finishes the pass makes them NaN.
    """

    run: Callable[[QueryBlock, KeyBlock, AttentionState | None, Mode], AttentionState]
    modes: tuple[Mode, ...]
    marks: bool = False


class RowSums(Protocol):
    """Sums, or memory, for dQ and the bias's gradient of the rows of a backward's launches."""

    @property
    def dbias(self) -> Tensor | None:
        """Sums of the bias's gradient, in the accumulators' dtype."""

    def memory(self, rows: slice) -> Tensor | None:
        """Return memory that a launch may write dQ of its rows to, if there is any."""

    def put(self, rows: slice, dq: Tensor) -> None:
        """Take dQ of some rows; it may be in :meth:`memory`."""

    def take(self, rows: slice) -> QueryGrads:
        """Return sums of some rows, for a launch that adds to them."""

    def whole(self) -> Tensor:
        """Return memory for dQ of all rows, allocated now if it is not there yet."""


class ColumnSums(Protocol):
    """Sums of dK and dV of the columns of a backward's launches."""

    def put(self, item: WorkItem, dk: Tensor, dv: Tensor) -> None:
        """Take an item's dK/dV: add them, or overwrite what no launch before has written."""

    def take(self, columns: slice) -> KeyGrads:
        """Return sums of some columns, for a launch that adds to them."""


class Backward(NamedTuple):
    """The backward of a kernel over work items that read the same columns.

    Attributes:
        run: Called as ``run(rows, held, upstream, row_sums, column_sums)`` with all rows, or those
            of the only item, and all columns. ``held`` holds the columns and is emptied when all
            launches that read them are queued, so that results may take their memory. It returns
            :attr:`ring_torch.records.Grads.row_stats`, or ``None`` if ``delta`` was not computed.
        adds: True if it adds to the sums itself, in the accumulators' dtype.
    """

    run: Callable[
        [QueryBlock, list[KeyBlock], BackwardInputs, RowSums, ColumnSums],
        tuple[Tensor, Tensor] | None,
    ]
    adds: bool
