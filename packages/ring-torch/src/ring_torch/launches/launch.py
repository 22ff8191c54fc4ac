"""Launches: passes of a kernel over work items, made when a call is resolved, run by every call.

A launch holds options and slices, no tensors. What its first run for tensors of some strides and
alignment has found out (:func:`ring_torch.launches.cache.tensors_key`) it may remember, and do less
in the runs that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ring_core import WorkItem
from ring_torch.records import (
    AttentionState,
    BackwardInputs,
    Grads,
    KernelParams,
    KeyBlock,
    KeyGrads,
    QueryBlock,
    QueryGrads,
    acc_dtype,
    zero_bias_grad,
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
    """Where launches of a backward leave dQ, and the bias's gradient, of their rows."""

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
    """Where launches of a backward leave dK and dV of their columns."""

    def put(self, item: WorkItem, dk: Tensor, dv: Tensor) -> None:
        """Take an item's dK/dV: add them, or overwrite what no launch before has written."""

    def take(self, columns: slice) -> KeyGrads:
        """Return sums of some columns, for a launch that adds to them."""


class Backward(NamedTuple):
    """The backward of a kernel over work items that read the same columns.

    Attributes:
        run: Called as ``run(rows, held, upstream, row_sums, column_sums)`` with all rows, or those
            of the only item, and all columns. ``held`` holds the columns and is emptied when all launches that
            read them are queued, so that results may take their memory. It returns
            :attr:`ring_torch.records.Grads.row_stats`, or ``None`` if ``delta`` was not computed.
        adds: True if it adds to the sums itself, in the accumulators' dtype.
    """

    run: Callable[
        [QueryBlock, list[KeyBlock], BackwardInputs, RowSums, ColumnSums],
        tuple[Tensor, Tensor] | None,
    ]
    adds: bool


#: The backward of one item: ``(rows, columns, upstream, dst)`` to its gradients alone; ``dst`` is
#: memory that dQ may be written to.
ItemGrads = Callable[[QueryBlock, KeyBlock, BackwardInputs, Tensor | None], Grads]
#: One that adds to sums: ``(rows, columns, upstream, row_grads, column_grads)``.
ItemSums = Callable[[QueryBlock, KeyBlock, BackwardInputs, QueryGrads, KeyGrads], None]


def one_by_one(items: Sequence[WorkItem], launches: Sequence[ItemGrads]) -> Backward:
    """Return the backward of items that are launched one by one, in reverse."""
    # In reverse, as sums know which columns no launch before has written in that order.
    work = [*zip(items, launches, strict=True)][::-1]

    def run(
        rows: QueryBlock, held: list[KeyBlock], upstream: BackwardInputs, row_sums: RowSums,
        column_sums: ColumnSums,
    ) -> None:  # fmt: skip
        (columns,) = held
        # Launches run one after the other on a stream: each may add to what those before wrote.
        for item, launch in work:
            q_slice = _rows_of(item, rows)
            grads = launch(
                rows.take(q_slice), columns.take(item.k_slice), upstream.take(q_slice),
                row_sums.memory(q_slice),
            )  # fmt: skip
            row_sums.put(q_slice, grads.dq)
            if grads.dbias is not None and row_sums.dbias is not None:
                row_sums.dbias[:, :, q_slice].add_(grads.dbias)
            column_sums.put(item, grads.dk, grads.dv)
        held.clear()

    return Backward(run, adds=False)


def summed(
    items: Sequence[WorkItem], launches: Sequence[ItemSums], params: KernelParams, *, adds: bool
) -> Backward:
    """Return the backward of items whose launches add to sums, one by one, in reverse.

    Without ``adds`` each launch adds to zeros of its own: its gradients are of the item alone.
    """
    if not adds:
        return one_by_one(items, [partial(_alone, launch, params) for launch in launches])
    work = [*zip(items, launches, strict=True)][::-1]

    def run(
        rows: QueryBlock, held: list[KeyBlock], upstream: BackwardInputs, row_sums: RowSums,
        column_sums: ColumnSums,
    ) -> None:  # fmt: skip
        (columns,) = held
        # dQ of a row and dK/dV of a column are added to by several items, one after the other.
        for item, launch in work:
            q_slice, k_slice = _rows_of(item, rows), item.k_slice
            launch(
                rows.take(q_slice), columns.take(k_slice), upstream.take(q_slice),
                row_sums.take(q_slice), column_sums.take(k_slice),
            )  # fmt: skip
        held.clear()

    return Backward(run, adds=True)


def _alone(
    launch: ItemSums, params: KernelParams, rows: QueryBlock, columns: KeyBlock,
    upstream: BackwardInputs, _dst: Tensor | None,
) -> Grads:  # fmt: skip
    """Return the gradients of an item alone, in the accumulators' dtype."""
    dtype = acc_dtype(rows.q.dtype)
    dq, dk, dv = (
        torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (rows.q, columns.k, columns.v)
    )
    dbias = zero_bias_grad(rows, params, dtype)
    launch(rows, columns, upstream, QueryGrads(dq, dbias), KeyGrads(dk, dv))
    return Grads(dq, dk, dv, dbias)


def _rows_of(item: WorkItem, rows: QueryBlock) -> slice:
    """Return an item's rows among those given: these may be its own alone."""
    count = item.q_stop - item.q_start
    return item.q_slice if rows.q.shape[1] > count else slice(0, count)


def merging(attend: Callable[[QueryBlock, KeyBlock, AttentionState], None]) -> Forward:
    """Return a forward that merges its results into sums."""

    def run(
        rows: QueryBlock, columns: KeyBlock, into: AttentionState | None, _: Mode
    ) -> AttentionState:
        assert into is not None
        attend(rows, columns, into)
        return into

    return Forward(run, ("merge",))
