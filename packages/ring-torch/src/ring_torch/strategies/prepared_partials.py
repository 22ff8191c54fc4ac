"""Launches of a gather in two stages, prepared once for calls whose tensors are alike.

As :mod:`ring_torch.strategies.prepared`, for kernels whose launches over own keys and over others'
each return a partial result of a row. The partial results are merged in one pass over memory at the
end, not launch by launch into wider sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ring_core import GatherProgram, WorkItem
from ring_core.programs.gather import column_segments
from ring_torch.buffers import KVPayload
from ring_torch.kernels.api import Kernel, mark_infinities, merge_into
from ring_torch.kernels.library import PartialBackward, PartialForward
from ring_torch.optional import has_triton
from ring_torch.records import AttentionState, KernelParams, KeyBlock, QueryBlock, Span, span_of
from ring_torch.transports.api import Put, repeated_put

_MOST_PARTIALS = 3  # as many as one launch merges

KV = tuple[Tensor, Tensor]


class ColumnPut(NamedTuple):
    """Launch that puts dK/dV of a span of an item's columns into sums of all columns.

    Attributes:
        start: First column.
        offset: The same, counted from the item's first column.
        length: Number of columns.
        put: Writes them, or adds them.
    """

    start: int
    offset: int
    length: int
    put: Put


class PartialLaunches(NamedTuple):
    """The launches of a work item, whose results are partial: of some keys of a row.

    Attributes:
        forward: The forward.
        backward: The backward.
        rows: Its rows.
        columns: Its columns of own or of gathered K/V.
        waits_for: How many fetches must have arrived.
        puts: What puts its dK/dV into the sums of all columns.
    """

    forward: PartialForward
    backward: PartialBackward
    rows: Span
    columns: Span
    waits_for: int
    puts: tuple[ColumnPut, ...]

    def differentiate(self, tensors: Sequence[Tensor], lse: Tensor, kv: KV, sums: Tensor) -> Tensor:
        """Put dK/dV into ``sums [B, columns, width]``, and return ``dq`` of the item's rows.

        ``tensors`` are all rows of ``q``, ``dout`` and ``out``, ``kv`` all columns.
        """
        q, dout, out = (x.narrow(1, *self.rows) for x in tensors)
        k, v = (x.narrow(1, *self.columns) for x in kv)
        # dk and dv may be freed once they are put into the sums: all of it is on one stream.
        dq, dk, dv = self.backward(q, k, v, dout, out, lse.narrow(2, *self.rows))
        for start, offset, length, put in self.puts:
            # Mostly one span has all columns: then nothing is sliced.
            if length < dk.shape[1]:
                span = offset, length
                put(dk.narrow(1, *span), dv.narrow(1, *span), sums.narrow(1, start, length))
            else:
                put(dk, dv, sums.narrow(1, start, length))
        return dq


class PreparedPartials(NamedTuple):
    """The launches of a rank: one over its own K/V, which has all rows, and those over others'.

    Attributes:
        own: The launch over own K/V.
        others: The launches over gathered K/V.
        merge: Merges ``(out, lse)`` of all launches, own first, into the own ones.
        sum: Adds up ``dq`` of all launches, own first, into the own one.
    """

    own: PartialLaunches
    others: tuple[PartialLaunches, ...]
    merge: Callable[[Sequence[tuple[Tensor, Tensor]]], None]
    sum: Callable[[Sequence[Tensor]], None]

    def attend(
        self, own_results: tuple[Tensor, Tensor], q: Tensor, gathered: KV,
        wait: Callable[[int], None],
    ) -> AttentionState:  # fmt: skip
        """Attend to the gathered keys, and merge the results into those over own keys.

        Args:
            own_results: ``(out, lse)`` over own keys, by ``own.forward``.
            q: All rows.
            gathered: All gathered K/V.
            wait: Called with the number of fetches that a launch needs.
        """
        results = [own_results]
        for launch in self.others:
            # Later fetches still write other columns of the buffer while this launch runs.
            wait(launch.waits_for)
            k, v = (x.narrow(1, *launch.columns) for x in gathered)
            results.append(launch.forward(q.narrow(1, *launch.rows), k, v))
        # All fetches that launches needed have arrived; own K/V are read no more.
        self.merge(results)
        return AttentionState(*results[0])

    def differentiate_others(
        self, tensors: Sequence[Tensor], lse: Tensor, gathered: KV, sums: Tensor
    ) -> list[Tensor]:
        """Write dK/dV of all gathered columns into ``sums``, and return ``dq`` of each launch.

        ``tensors`` are ``q``, ``dout`` and ``out``. What is in ``sums`` before is not read.
        """
        # In reverse, as the program counts the columns that a launch is the first to write.
        dqs = [x.differentiate(tensors, lse, gathered, sums) for x in reversed(self.others)]
        return dqs[::-1]

    def differentiate_own(
        self, tensors: Sequence[Tensor], lse: Tensor, own: KV, dqs: Sequence[Tensor], sums: Tensor
    ) -> Tensor:
        """Return the sum of all ``dq``, and write dK/dV of own keys, from own rows, into ``sums``.

        ``dqs`` are those of the other launches.
        """
        dq = self.own.differentiate(tensors, lse, own, sums)
        if dqs:
            self.sum([dq, *dqs])
        return dq


def prepare_partials(
    kernel: Kernel, rows: QueryBlock, own: tuple[KeyBlock, Sequence[WorkItem]],
    others: tuple[KeyBlock, GatherProgram], keys: KVPayload, params: KernelParams,
) -> PreparedPartials | None:  # fmt: skip
    """Return the launches of a rank, or ``None`` if they cannot be prepared.

    Args:
        kernel: The kernel of all launches, which have run on such tensors.
        rows: This rank's rows.
        own: This rank's K/V and its items over them.
        others: Gathered K/V, and the program that gathers them.
        keys: The shape of a rank's K/V.
        params: Options of all launches.
    """
    (own_columns, own_items), (columns, gather) = own, others
    num_rows, num_keys = rows.q.shape[1], own_columns.k.shape[1]
    # The joins take one result over own keys and a few others; other plans are not prepared.
    if len(own_items) != 1 or 1 + len(gather.items) > _MOST_PARTIALS:
        return None
    (own_item,) = own_items
    # The own launch has all rows, which others are joined to, and all own keys.
    if own_item.q_slice != slice(0, num_rows) or own_item.k_slice != slice(0, num_keys):
        return None
    partials: list[PartialLaunches] = []
    whole: tuple[slice, ...] = (own_item.k_slice,)
    work = [(own_columns, own_item, 0, whole)]
    work += [
        (columns, *operands)
        for operands in zip(gather.items, gather.waits_for, gather.overwritten, strict=True)
    ]
    for block, item, waits_for, overwrite in work:
        launches = kernel.prepare_partial(
            rows.take(item.q_slice), block.take(item.k_slice), item, params
        )
        if launches is None:
            return None
        puts = [
            ColumnPut(
                start, start - item.k_start, stop - start,
                repeated_put(keys, rows.q.device, add=add),
            )
            for start, stop, add in column_segments(item, overwrite)
        ]  # fmt: skip
        partials.append(
            PartialLaunches(
                *launches, span_of(item.q_slice), span_of(item.k_slice), waits_for, tuple(puts)
            )
        )
    spans = [x.rows for x in partials]
    return PreparedPartials(partials[0], tuple(partials[1:]), *_joins(rows.q, spans))


def _joins(
    like: Tensor, spans: Sequence[Span]
) -> tuple[Callable[[Sequence[tuple[Tensor, Tensor]]], None], Callable[[Sequence[Tensor]], None]]:
    """Return the merge and the sum of partial results, for tensors on the device of ``like``."""
    if like.is_cuda and has_triton():
        from ring_torch.merge_ops import JoinOnGpu

        join = JoinOnGpu(spans)
        return join.merge, join.sum

    def merge(partials: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Merge partial results, each of some rows, into the first, which has all rows."""
        (out, lse), *others = partials
        into = AttentionState(out.to(torch.promote_types(out.dtype, lse.dtype)), lse)
        mark_infinities(lse)
        # All launches have returned: their results are memory of their own, and those over own keys
        # are overwritten by the merged ones.
        for (start, n), (part_out, part_lse) in zip(spans[1:], others, strict=True):
            rows = slice(start, start + n)
            merge_into(into.take(rows), part_out, mark_infinities(part_lse))
        into.out.masked_fill_(lse.isnan().transpose(1, 2).unsqueeze(-1), torch.nan)
        out.copy_(into.out)

    def add(partials: Sequence[Tensor]) -> None:
        """Add partial dQ, each of some rows, to the first, which has all rows."""
        dq, *others = partials
        # Sums are wider than what the launches have rounded; dQ over own keys is added last.
        total = torch.zeros_like(dq, dtype=torch.promote_types(dq.dtype, torch.float32))
        for (start, n), partial_dq in zip(spans[1:], others, strict=True):
            total.narrow(1, start, n).add_(partial_dq)
        dq.copy_(total.add_(dq))

    return merge, add
