"""Launches of strategy ``gather``, over the gathered K/V of one group of heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ring_core import GatherProgram, WorkItem
from ring_torch.buffers import HeadGroups, KeyGradBuffer
from ring_torch.call import Call, Saved
from ring_torch.records import (
    AttentionState,
    BackwardInputs,
    Inputs,
    KeyBlock,
    QueryBlock,
    QueryGrads,
    head_group,
)
from ring_torch.strategies.prepared import put_columns
from ring_torch.transports.api import GatherSession, PendingKV


def attend_group(
    call: Call, rows: QueryBlock, columns: KeyBlock, in_place: Sequence[tuple[KeyBlock, WorkItem]],
    gather: GatherProgram, arriving: PendingKV, state: AttentionState,
) -> AttentionState:  # fmt: skip
    """Run the forward launches of a group of heads; nothing is merged.

    Returns ``state``, filled, or a wider copy of it if the kernel's results are wider; those are
    rounded at the end.
    """
    # Rows that see own keys only go first: they run while the fetches are in flight.
    work = [(*item_and_count, 0) for item_and_count in in_place]
    work += [
        (columns, *item_and_count)
        for item_and_count in zip(gather.items, gather.waits_for, strict=True)
    ]
    for keys, item, waits_for in work:
        # Let the launch wait for its own fetches. Those of later items write other columns of the
        # buffer meanwhile; peers copy from this rank's memory and need nothing from this loop.
        if waits_for > 0:
            arriving.wait(waits_for)
        # An empty batch launches nothing; the caller waits for the fetches all the same.
        if rows.q.shape[0] == 0:
            break
        state = _attend(call, rows, keys, item, state)
    return state


def attend_parts(
    call: Call, rows: QueryBlock, columns: KeyBlock, gather: GatherProgram, arriving: PendingKV,
    state: AttentionState,
) -> AttentionState:  # fmt: skip
    """Run the forward launches of each part of the heads on its streams, and return ``state``.

    Only for kernels whose results are no wider than ``state``, and options of no single head.
    """
    count = len(arriving.parts)
    # All keys of a part are there, so the order is free. The longest launch goes first, and the
    # others, and those of the next part, fill the multiprocessors that it leaves.
    items = sorted(gather.items, key=_size, reverse=True)
    for n, contexts in enumerate(arriving.parts):
        part, part_state = head_group(rows, n, count), head_group(state, n, count)
        keys = head_group(columns, n, count)
        for item, launching in zip(items, contexts, strict=True):
            with launching():
                filled = _attend(call, part, keys, item, part_state)
            assert filled is part_state
    return state


def _size(item: WorkItem) -> int:
    """Return how many pairs of queries and keys an item is about, masked ones among them."""
    rows, columns = item.q_slice, item.k_slice
    size: int = (rows.stop - rows.start) * (columns.stop - columns.start)
    return size


def _attend(
    call: Call, rows: QueryBlock, keys: KeyBlock, item: WorkItem, state: AttentionState
) -> AttentionState:
    """Launch an item into ``state``; return it, or a wider copy if the kernel's result is wider."""
    operands = rows.take(item.q_slice), keys.take(item.k_slice)
    dst = state.take(item.q_slice)
    result = call.kernel.attend(*operands, item, call.params, dst)
    if result.out.dtype != state.out.dtype:
        state = AttentionState(state.out.to(result.out.dtype), state.lse.to(result.lse.dtype))
        dst = state.take(item.q_slice)
    # Kernels that cannot write into a given place return new tensors.
    if result.out.data_ptr() != dst.out.data_ptr():
        dst.out.copy_(result.out)
        dst.lse.copy_(result.lse)
    return state


def launch_parts(
    items: range, groups: HeadGroups, *, last: bool
) -> list[tuple[range, bool | None, bool]]:
    """Return the parts of a group's launches, after each of which gradients are sent home.

    A part is ``(items, before_last_item, overlapped)``: the indices of its items; which gradients
    are sent after it (``True``: those that ``items[0]``, the last launch, does not touch;
    ``False``: the others; ``None``: all); and whether more launches follow that can hide the
    transfer.
    """
    if last and groups.before_last_item:
        return [(items[1:], True, True), (items[:1], False, False)]
    return [(items, None, not last)]


def differentiate_in_place(
    call: Call, in_place: Sequence[tuple[KeyBlock, WorkItem]], rows: QueryBlock, upstream: BackwardInputs,
    row_grads: QueryGrads, sums: KeyGradBuffer,
) -> Tensor | None:  # fmt: skip
    """Run the backward launches over the rank's own K/V in place.

    Returns the flat sums of dK/dV of all own keys, or ``None`` if there are no such launches.
    """
    if not in_place:
        return None
    length = sums.keys.length
    # Launches in place all add, and may leave keys out, so these sums begin with zeros.
    own_sums = torch.zeros(sums.numel(length), dtype=call.acc_dtype, device=call.device)
    if rows.q.shape[0] > 0:
        work = [(*keys_and_item, ()) for keys_and_item in reversed(in_place)]
        differentiate(call, work, rows, upstream, row_grads, sums, own_sums, length)
    return own_sums


def differentiate(
    call: Call, work: Sequence[tuple[KeyBlock, WorkItem, Sequence[slice]]], rows: QueryBlock,
    upstream: BackwardInputs, row_grads: QueryGrads, sums: KeyGradBuffer, grads: Tensor, length: int,
) -> None:  # fmt: skip
    """Run backward launches: write dQ into ``row_grads``, and put dK/dV into the sums ``grads``.

    ``work`` is ``(columns, item, overwrite)`` of each launch; ``overwrite`` are the columns that no
    launch before has written; they are overwritten, others added to. A split backward adds to all
    columns, so ``grads`` has to begin with zeros. It is flat and holds the sums of ``length``
    tokens.
    """
    # Launches on a stream run one after the other, so each may add to what the one before wrote.
    for columns, item, overwrite in work:
        operands = rows.take(item.q_slice), columns.take(item.k_slice), upstream.take(item.q_slice)
        query_grads = row_grads.take(item.q_slice)
        if sums.head_major and call.kernel.split_backward is not None:
            # The kernel adds to the sums itself, in float32 and unrounded.
            totals = sums.span_views(grads, length, item.k_slice)
            call.kernel.split_backward.accumulate(
                *operands, item, call.params, query_grads.dq, totals
            )
        else:
            result = call.kernel.grads(*operands, item, call.params, query_grads.dq)
            if result.dq.data_ptr() != query_grads.dq.data_ptr():
                # A row is in one launch only, so this is its whole dQ.
                query_grads.dq.copy_(result.dq)
            if query_grads.dbias is not None and result.dbias is not None:
                query_grads.dbias.add_(result.dbias)
            put_columns((result.dk, result.dv), sums, grads, length, item, overwrite)


def keys_by_group(
    call: Call, gather: GatherProgram, inputs: Inputs, session: GatherSession, saved: Saved,
    groups: HeadGroups,
) -> Iterator[KeyBlock]:  # fmt: skip
    """Yield the gathered K/V of each of the backward's groups of heads, saved or fetched again.

    Those that are fetched are waited for before they are yielded. What was saved is taken out of
    ``saved``. A group that was yielded is held by the caller alone.
    """
    keys = session.spec.keys
    if not saved:
        for arriving in session.fetch(gather, inputs):
            arriving.wait(None)
            parts = [call.gathered_columns(gather, keys, arriving.tensors)]
            arriving.tensors.clear()  # sessions hold this list to their end
            yield parts.pop()
        return
    forward_groups, per_group = groups.forward, len(saved) // groups.forward
    cuts = groups.backward // forward_groups  # the forward's groups are cut once more
    # Saved tensors have the heads of a group of the forward; views cut them for the backward's.
    keys = replace(keys, heads=cuts * keys.heads)
    for _ in range(forward_groups):
        columns = call.gathered_columns(gather, keys, saved[:per_group])
        del saved[:per_group]
        parts = [head_group(columns, n, cuts) for n in reversed(range(cuts))]
        del columns
        while parts:
            yield parts.pop()


def items_in_place(
    call: Call, gather: GatherProgram, inputs: Inputs, n: int, groups: int
) -> list[tuple[KeyBlock, WorkItem]]:
    """Return the launches over own K/V in place, each with the K/V of the group of heads."""
    if not gather.in_place:
        return []
    own = call.columns(call.ranks.rank, head_group(inputs, n, groups).key_tensors())
    return [(own, item) for item in gather.in_place]
