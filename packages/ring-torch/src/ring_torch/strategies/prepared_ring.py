"""Launches of a ring's forward, prepared once for calls whose tensors are alike.

As :mod:`ring_torch.strategies.prepared`, for results that are merged step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from ring_core import WorkItem
from ring_torch.kernels.api import Kernel, merge_of_seen
from ring_torch.kernels.library import ForwardLaunch
from ring_torch.records import (
    AttentionState,
    KernelParams,
    KeyBlock,
    QueryBlock,
    Span,
    empty_state,
    span_of,
    unseen_state,
)


class MergedLaunch(NamedTuple):
    """A forward launch of a work item, and the merge of its results.

    Attributes:
        launch: The launch.
        rows: The item's rows.
        columns: Its columns of the K/V that are held.
        merge: The merge, called as ``(into, results)``.
    """

    launch: ForwardLaunch
    rows: Span
    columns: Span
    merge: Callable[[AttentionState, AttentionState], None]


class PreparedRing(NamedTuple):
    """The forward launches of a ring.

    Attributes:
        steps: The launches of each step.
        starts_everywhere: True if those of the first step have all rows, each once. Their merges
            read no accumulated state, which needs no initial values then.
    """

    steps: tuple[tuple[MergedLaunch, ...], ...]
    starts_everywhere: bool

    def work(self, q: Tensor, v_dim: int) -> RingWork:
        """Allocate the state of one call."""
        if not self.starts_everywhere:
            return RingWork(self, q, empty_state(q, v_dim))
        return RingWork(
            self,
            q,
            unseen_state(q, v_dim, empty_state(q[:, :0], v_dim).out.dtype, fully_written=True),
        )


class RingWork:
    """The forward of one call.

    Attributes:
        into: The merged results of the steps that have run; all results after the last.
    """

    def __init__(self, prepared: PreparedRing, q: Tensor, into: AttentionState) -> None:
        self.into = into
        self._prepared, self._q = prepared, q
        self._rows: dict[Span, tuple[Tensor, AttentionState]] = {}
        self._results: dict[int, AttentionState] = {}

    def run(self, step: int, k: Tensor, v: Tensor) -> None:
        """Run the launches of a step over the K/V that are held, and merge their results."""
        for launch, rows, columns, merge in self._prepared.steps[step]:
            # Launches only read the held K/V, which may be in flight to the next rank meanwhile.
            # They and the merges run in order on one stream: `results` are merged before the next
            # launch of as many rows overwrites them.
            q, into, results = self._slices(rows, v.shape[3])
            launch(q, k.narrow(1, *columns), v.narrow(1, *columns), *results, None)
            merge(into, results)

    def _slices(self, rows: Span, v_dim: int) -> tuple[Tensor, AttentionState, AttentionState]:
        """Return queries and state of some rows, and memory for the results of a launch.

        That memory serves all launches of as many rows: each is merged before the next runs.
        """
        if (slices := self._rows.get(rows)) is None:
            q, (out, lse) = self._q, self.into
            state = AttentionState(out.narrow(1, *rows), lse.narrow(2, *rows))
            slices = self._rows[rows] = q.narrow(1, *rows), state
        # Kernels write every row of it, so it needs no initial values.
        if (results := self._results.get(rows[1])) is None:
            results = self._results[rows[1]] = unseen_state(slices[0], v_dim, fully_written=True)
        return *slices, results


def prepare_ring(
    kernel: Kernel, rows: QueryBlock, steps: Sequence[tuple[KeyBlock, Sequence[WorkItem]]],
    params: KernelParams,
) -> PreparedRing | None:  # fmt: skip
    """Return the launches of a ring, or ``None`` if they cannot be prepared.

    Args:
        kernel: The kernel of all launches, which have run on such tensors.
        rows: This rank's rows.
        steps: For each step K/V like those that are held in it, and its items.
        params: Options of all launches.
    """
    q, params = rows.q, replace(params, needs_lse=True)
    first_items = steps[0][1]
    # No row is left out if the first item begins at row 0, and each where the one before ends.
    edges = [0, *(item.q_stop for item in first_items)]
    starts_everywhere = edges[-1] == q.shape[1] and all(
        item.q_start == start for item, start in zip(first_items, edges, strict=False)
    )
    # Later calls have other tensors of these shapes: what is kept of each launch is no memory, but
    # slices, and how its results are merged.
    prepared: list[tuple[MergedLaunch, ...]] = []
    for n, (columns, items) in enumerate(steps):
        launches: list[MergedLaunch] = []
        for item in items:
            item_rows, item_columns = rows.take(item.q_slice), columns.take(item.k_slice)
            results = unseen_state(item_rows.q, columns.v.shape[3], fully_written=True)
            launch = kernel.prepare_forward(item_rows, item_columns, results, item, params)
            if launch is None:
                return None
            # Where the first step has all rows, its merge is a copy with the rounding of a merge:
            # there is nothing before it.
            merge = merge_of_seen(q, first=starts_everywhere and n == 0)
            launches.append(
                MergedLaunch(launch, span_of(item.q_slice), span_of(item.k_slice), merge)
            )
        prepared.append(tuple(launches))
    return PreparedRing(tuple(prepared), starts_everywhere)
