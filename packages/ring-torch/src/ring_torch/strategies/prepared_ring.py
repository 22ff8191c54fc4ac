"""Launches of a ring's forward, prepared once for calls whose tensors are alike.

As :mod:`ring_torch.strategies.prepared`, for results that are merged as they come. The first merge
takes those of two launches, one of which may lie in ``out``, later ones one each, so that no more
than one result waits beside ``out``. Between merges ``out`` itself holds the float32 sums, or half
of their bits if it has 16, and another tensor like it the other half. The peak is three tensors of
a result's size: these sums, and one result that waits for its merge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ring_core import WorkItem
from ring_torch.kernels.api import Kernel, merge_of_spans
from ring_torch.kernels.library import ForwardLaunch
from ring_torch.records import (
    AttentionState,
    KernelParams,
    KeyBlock,
    QueryBlock,
    Span,
    acc_dtype,
    span_of,
    unseen_state,
)


class RingLaunch(NamedTuple):
    """A forward launch of a work item, and the merge of results that follows it.

    Attributes:
        launch: The launch.
        rows: The item's rows; ``None`` stands for all.
        columns: Its columns of the K/V that are held; ``None`` stands for all.
        out_shape: Shape of its ``out``; ``None`` if the call's ``out`` holds it until it is merged.
        lse_shape: Shape of its ``lse``.
        merge: The merge of its results and of those that wait for it; ``None`` if they wait, too.
    """

    launch: ForwardLaunch
    rows: Span | None
    columns: Span | None
    out_shape: tuple[int, ...] | None
    lse_shape: tuple[int, ...]
    merge: Callable[..., None] | None


class PreparedRing(NamedTuple):
    """The forward launches of a ring.

    Attributes:
        steps: The launches of each step.
        dtype: The dtype of ``out``.
        splits_sums: True if there are sums between merges, wider than ``out``, whose lower bits
            are in a tensor of their own.
    """

    steps: tuple[tuple[RingLaunch, ...], ...]
    dtype: torch.dtype
    splits_sums: bool


class RingWork:
    """The forward of one call.

    Attributes:
        into: Memory of the merged results, which are there after the last step.
    """

    def __init__(self, prepared: PreparedRing, q: Tensor, v_dim: int) -> None:
        self._prepared = prepared
        # All rows are written: it needs no initial values, nor do the sums.
        self.into = out, _ = unseen_state(q, v_dim, prepared.dtype, fully_written=True)
        # The lower halves of the sums. Merges without them get `out` as a placeholder.
        self._low = torch.empty_like(out) if prepared.splits_sums else out
        # Views of a tensor that needs no gradient take the host less time.
        self._rows: dict[Span | None, Tensor] = {None: q.detach()}
        self._results: list[Tensor] = []  # out and lse of each launch that waits for a merge

    def run(self, step: int, k: Tensor, v: Tensor) -> None:
        """Run the launches of a step over the K/V that are held, and the merges after them."""
        out, lse = self.into
        for item in self._prepared.steps[step]:
            launch, rows, columns, out_shape, lse_shape, merge = item
            q = self._rows.get(rows)
            if q is None:
                assert rows is not None
                q = self._rows[rows] = self._rows[None].narrow(1, *rows)
            # Launches only read the held K/V, which may be in flight to the next rank meanwhile.
            kv = (k, v) if columns is None else (k.narrow(1, *columns), v.narrow(1, *columns))
            results = out if out_shape is None else q.new_empty(out_shape), lse.new_empty(lse_shape)
            launch(q, *kv, *results, None)
            self._results += results
            del results  # once they are merged, the next launch may get their memory
            if merge is not None:
                # Launches and merges run in order on one stream: memory of results that are merged
                # may be that of later ones.
                merge(out, self._low, lse, *self._results)
                self._results.clear()


def prepare_ring(
    kernel: Kernel, rows: QueryBlock, steps: Sequence[tuple[KeyBlock, Sequence[WorkItem]]],
    params: KernelParams, dtype: torch.dtype,
) -> PreparedRing | None:  # fmt: skip
    """Return the launches of a ring, or ``None`` if they cannot be prepared.

    Args:
        kernel: The kernel of all launches, which have run on such tensors.
        rows: This rank's rows.
        steps: For each step K/V like those that are held in it, and its items.
        params: Options of all launches.
        dtype: The dtype of the results: the inputs', or the accumulators'.
    """
    q, params = rows.q, replace(params, needs_lse=True)
    spans = [span_of(item.q_slice) for _, items in steps for item in items]
    if not spans:
        return None
    # Later calls have other tensors of these shapes: what is kept of each launch is no memory, but
    # slices, and how its results are merged.
    num_launches = len(spans)
    # Launches whose results the first merge takes. With sinks ``out`` is float32 and cannot hold a
    # result of 16 bits, so the first merge takes one result, not two.
    at_once = 2 if dtype == q.dtype else 1
    splits_sums = num_launches > at_once and dtype != acc_dtype(q.dtype)
    trial = unseen_state(q, steps[0][0].v.shape[3], dtype, fully_written=True)
    waiting: list[Tensor] = []  # results inside of `trial` that no merge has taken
    # Merges of the same rows are one, with tensors to try it on.
    merges: dict[object, tuple[Callable[..., None], list[Tensor]]] = {}
    prepared: list[tuple[RingLaunch, ...]] = []
    number = 0  # launches so far
    for columns, items in steps:
        launches: list[RingLaunch] = []
        for item in items:
            item_rows, item_columns = rows.take(item.q_slice), columns.take(item.k_slice)
            results = _results_inside(trial, item_rows.q)
            launch = kernel.prepare_forward(item_rows, item_columns, results, item, params)
            if launch is None:
                return None
            # Until the first merge ``out`` is free: it holds the first result if that has all rows.
            # The merge may read and write it, as one program does both to each number.
            is_in_place = number == 0 and item_rows is rows and dtype == q.dtype
            number += 1
            merge, is_last = None, number == num_launches
            waiting += results
            if is_last or number >= at_once:
                is_first = number <= at_once
                merged = spans[0 if is_first else number - 1 : number]
                kind = tuple(merged), is_first, is_last
                if kind not in merges:
                    new = merge_of_spans(q, merged, first=is_first, last=is_last)
                    merges[kind] = new, waiting
                merge, waiting = merges[kind][0], []
            launches.append(
                RingLaunch(
                    launch,
                    None if item_rows is rows else span_of(item.q_slice),
                    None if item_columns is columns else span_of(item.k_slice),
                    None if is_in_place else tuple(results.out.shape), tuple(results.lse.shape),
                    merge,
                )
            )  # fmt: skip
        prepared.append(tuple(launches))
    # Each merge runs once on uninitialised memory, so that it is compiled: the next call may be
    # captured into a CUDA graph. All of its tensors may lie in the same memory.
    for merge, results_of_merge in merges.values():
        merge(trial.out, trial.out, trial.lse, *results_of_merge)
    return PreparedRing(tuple(prepared), dtype, splits_sums)


def _results_inside(results: AttentionState, q: Tensor) -> AttentionState:
    """Return uninitialised results for the rows ``q``: views of the first bytes of ``results``."""
    batch, length, heads, _ = q.shape
    flat, rows = results.out.view(-1).view(q.dtype), batch * length * heads
    dim = results.out.shape[3]
    return AttentionState(
        flat[: rows * dim].view(batch, length, heads, dim),
        results.lse.view(-1)[:rows].view(batch, heads, length),
    )
