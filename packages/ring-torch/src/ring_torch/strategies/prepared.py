"""Launches of a rank's work items, prepared once for calls whose tensors are alike.

What a call decides again each time takes the host longer than a launch: which kernel, with which
window, over which slices, copied or not. A strategy keeps the launches of its items under the
strides and alignment of the tensors that differ from call to call; shapes, dtypes and options are
those for which the strategy was resolved. Launches hold sizes and compiled functions, no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from ring_core import GatherProgram, WorkItem
from ring_core.programs.gather import column_segments
from ring_torch.buffers import KeyGradBuffer
from ring_torch.kernels.api import BackwardLaunch, Columns, Kernel, OwnSpans
from ring_torch.kernels.library import ForwardLaunch, ItemBackward
from ring_torch.records import (
    AttentionState,
    BackwardInputs,
    KernelParams,
    KeyBlock,
    QueryBlock,
)
from ring_torch.transports.api import put_key_grads


class PreparedItem(NamedTuple):
    """The forward launch of a work item.

    Attributes:
        launch: The launch.
        k_start: First column.
        k_len: Number of columns.
        waits_for: How many fetches must have arrived.
    """

    launch: ForwardLaunch
    k_start: int
    k_len: int
    waits_for: int


class PreparedForward(NamedTuple):
    """The forward launches of a rank, whose items have its rows one after the other.

    Attributes:
        items: The launches.
        rows: Number of rows of each, and of the padding behind them, if there is any.
    """

    items: tuple[PreparedItem, ...]
    rows: tuple[int, ...]

    def run(
        self, q: Tensor, columns: Columns, state: AttentionState, sinks: Tensor | None,
        wait: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Write ``state``; ``wait`` is called with the fetches that a launch needs."""
        # Views of a tensor that needs no gradient take the host less time.
        rows, q = [*self.rows], q.detach()
        # One call of torch cuts all slices of a tensor; `split` would go through Python. Padding
        # has a slice, and no launch.
        slices = zip(
            self.items, q.split_with_sizes(rows, 1), state.out.split_with_sizes(rows, 1),
            state.lse.split_with_sizes(rows, 2), strict=False,
        )  # fmt: skip
        for (launch, k_start, k_len, waits_for), q_rows, out, lse in slices:
            # A launch waits for its own fetches; those of later ones go on beside it.
            wait(waits_for)
            launch(q_rows, *columns(k_start, k_len), out, lse, sinks)


class PreparedBackward(NamedTuple):
    """The backward of a rank over gathered keys.

    Attributes:
        launch: All launches, which put dK/dV into a buffer of sums.
        round: Rounds the sums of own keys in the buffer: ``round(sums, dk, dv)``.
        has_padding: True if own keys have padding behind them, whose gradients are not rounded.
    """

    launch: BackwardLaunch
    round: Callable[[Tensor, Tensor, Tensor], None]
    has_padding: bool = False


@dataclass(frozen=True)
class PreparedLaunches:
    """Launches of both passes, each by :func:`ring_torch.launches.cache.tensors_key`.

    ``None`` stands for launches that cannot be prepared.
    """

    forward: dict[object, PreparedForward | None] = field(default_factory=dict)
    backward: dict[object, PreparedBackward | None] = field(default_factory=dict)


def prepare_forward(
    kernel: Kernel, rows: QueryBlock, columns: KeyBlock, state: AttentionState,
    items: Sequence[tuple[WorkItem, int]], params: KernelParams,
) -> PreparedForward | None:  # fmt: skip
    """Return the launches of ``(item, waits_for)``, or ``None`` if they cannot be prepared.

    All of them have run on such tensors.
    """
    # Later calls cut q, out and lse by these sizes in one go, which takes items that follow each
    # other without a gap.
    sizes = _rows_in_turn([item for item, _ in items], rows.q.shape[1])
    if sizes is None:
        return None
    prepared = []
    for item, waits_for in items:
        launch = kernel.prepare_forward(
            rows.take(item.q_slice), columns.take(item.k_slice), state.take(item.q_slice), item, params
        )  # fmt: skip
        if launch is None:
            return None
        prepared.append(PreparedItem(launch, item.k_start, item.k_stop - item.k_start, waits_for))
    return PreparedForward(tuple(prepared), sizes)


def prepare_backward(
    kernel: Kernel, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, dq: Tensor,
    sums: KeyGradBuffer, gather: GatherProgram, rank: int, own_tokens: int, params: KernelParams,
) -> PreparedBackward | None:  # fmt: skip
    """Return the launches of a gather program's items, or ``None`` if they cannot be prepared.

    All of them have run on such tensors. ``own_tokens`` are the rank's own keys without padding.
    """
    spans = own_spans(gather, rank, own_tokens)
    items, split_backward = gather.items, kernel.split_backward
    sizes = _rows_in_turn(items, rows.q.shape[1])
    if not spans or sizes is None:
        return None
    has_padding = own_tokens < sums.keys.length
    if sums.head_major:
        assert split_backward is not None
        if has_padding or len(spans) > 1 or len(sizes) > len(items):
            return None  # a split backward takes whole shards
        launch = split_backward.prepare(rows, columns, upstream, items, params)
        rounding = split_backward.prepare_round(spans[0], sums.keys, params)
        return None if launch is None or rounding is None else PreparedBackward(launch, rounding)
    launches = []
    for item in items:
        launch_of_item = kernel.prepare_backward(
            rows.take(item.q_slice), columns.take(item.k_slice), upstream.take(item.q_slice),
            dq[:, item.q_slice], item, params,
        )  # fmt: skip
        if launch_of_item is None:
            return None
        launches.append(launch_of_item)
    return PreparedBackward(
        _ItemByItem(tuple(launches), sizes, gather, sums), _Rounding(spans, sums), has_padding
    )


@dataclass(frozen=True)
class _ItemByItem(BackwardLaunch):
    """Backward launches that return dK/dV of each item, which are put into the sums by torch."""

    launches: tuple[ItemBackward, ...]
    rows: tuple[int, ...]  # of each launch, and of the padding behind them, if there is any
    gather: GatherProgram
    sums: KeyGradBuffer

    def __call__(
        self, q: Tensor, columns: Columns, dout: Tensor, out: Tensor, lse: Tensor, sums: Tensor,
        new_dq: Callable[[], Tensor], drop_keys: Callable[[], None],
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Return dQ, and put dK/dV into the sums."""
        rows, dq = [*self.rows], new_dq()
        slices = [x.split_with_sizes(rows, 1) for x in (q, dout, out, dq)]
        work = zip(
            self.launches, self.gather.items, self.gather.overwritten, *slices,
            lse.split_with_sizes(rows, 2),
            strict=False,
        )  # fmt: skip
        # In reverse, as columns to overwrite are those that no launch before has written. Nothing
        # is in flight: the sums travel home when all launches are queued.
        for launch, item, overwrite, q_n, dout_n, out_n, dq_n, lse_n in reversed([*work]):
            k, v = columns(item.k_start, item.k_stop - item.k_start)
            grads = launch(q_n, k, v, dout_n, out_n, lse_n, dq_n)
            put_columns(grads, self.sums, sums, self.gather.length, item, overwrite)
        del k, v
        drop_keys()
        return dq, None


@dataclass(frozen=True)
class _Rounding:
    """Rounds the sums of own keys by token, spans of one length at once, in torch's operations."""

    spans: tuple[OwnSpans, ...]
    sums: KeyGradBuffer

    def __call__(self, sums: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Round the sums of own keys in a buffer into ``dk`` and ``dv``."""
        # The peers' sums have been added by now, and nobody else has these columns.
        for spans in self.spans:
            for x, grad in zip(self.sums.views(sums, spans.length), (dk, dv), strict=True):
                _spans_of(grad, spans.source, spans.source_step, spans).copy_(
                    _spans_of(x, spans.target, spans.target_step, spans)
                )


def _spans_of(x: Tensor, start: int, step: int, spans: OwnSpans) -> Tensor:
    """Return a view ``[B, spans, keys, K, D]`` of spans of ``x [B, n, K, D]``."""
    batch, token, head, number = x.stride()
    return x.as_strided(
        (x.shape[0], spans.number, spans.keys, *x.shape[2:]),
        (batch, step * token, token, head, number), x.storage_offset() + start * token,
    )  # fmt: skip


def put_columns(
    grads: tuple[Tensor, Tensor], sums: KeyGradBuffer, flat: Tensor, length: int, item: WorkItem,
    overwrite: Sequence[slice],
) -> None:  # fmt: skip
    """Put an item's dK/dV into flat sums of all columns: replace ``overwrite``, add to others."""
    # The buffer holds nothing valid in columns that this backward has not written yet: the first to
    # come overwrites, the others add.
    for start, stop, add in column_segments(item, overwrite):
        dk, dv = (x.narrow(1, start - item.k_start, stop - start) for x in grads)
        put_key_grads(sums, flat, length, slice(start, stop), dk, dv, add=add)


def own_spans(gather: GatherProgram, rank: int, tokens: int) -> tuple[OwnSpans, ...]:
    """Return where a rank's own keys, ``tokens`` in number, lie in its buffer.

    It is one set of spans if these are of one size and equally far apart, else a set for each span;
    and none if not all of the keys are in the buffer.
    """
    own_fetches = sorted(
        (fetch.source.start, fetch.source.stop, fetch.target.start)
        for fetch in gather.fetches
        if fetch.rank == rank
    )
    sizes = [stop - start for start, stop, _ in own_fetches]
    if sum(sizes) != tokens:
        return ()
    steps = {(b[0] - a[0], b[2] - a[2]) for a, b in pairwise(own_fetches)}
    if len({*sizes}) == 1 and len(steps) < 2:
        source_step, target_step = next(iter(steps), (0, 0))
        start, _, target = own_fetches[0]
        spans = (len(sizes), sizes[0], start, source_step, target, target_step, gather.length)
        return (OwnSpans(*spans),)
    return tuple(
        OwnSpans(1, stop - start, start, 0, target, 0, gather.length)
        for start, stop, target in own_fetches
    )


def _rows_in_turn(items: Sequence[WorkItem], rows: int) -> tuple[int, ...] | None:
    """Return how many rows each item has, and how many are behind them, if any are.

    It is ``None`` if items do not have the first rows, one item after the other.
    """
    edges = [0, *(item.q_stop for item in items)]
    if any(item.q_start != start for item, start in zip(items, edges, strict=False)):
        return None
    if edges[-1] < rows:
        edges.append(rows)
    return tuple(stop - start for start, stop in pairwise(edges))
