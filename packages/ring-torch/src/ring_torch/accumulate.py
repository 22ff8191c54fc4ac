"""Results of several launches put together: merged, written, added, and rounded once.

Forwards: attention over some keys is ``(out, lse)``, and merges with that over others
(:func:`ring_core.merge`). Backwards: gradients add up. Sums are in the accumulators' dtype, and a
number is rounded when its sum is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ring_core import WorkItem
from ring_core.programs.gather import column_segments
from ring_core.programs.intervals import Interval, union
from ring_torch.buffers import KeyGradBuffer, KVPayload
from ring_torch.launches.cache import tensors_key
from ring_torch.optional import has_triton
from ring_torch.records import (
    AttentionState,
    Backward,
    BackwardInputs,
    Forward,
    Grads,
    KernelParams,
    KeyBlock,
    KeyGrads,
    Mode,
    QueryBlock,
    QueryGrads,
    Span,
    acc_dtype,
    span_of,
    zero_bias_grad,
)

_MOST_MERGED = 3  # results that one launch merges
_MERGED_ROWS = 512  # rows that torch's operations merge at a time


def merge(
    state: AttentionState,
    low: Tensor,
    results: Sequence[Tensor],
    *,
    spans: tuple[Span, ...],
    marks: int = 0,
    first: bool = False,
    last: bool = True,
) -> None:
    """Merge launches' results ``(out, lse)``, in their order, into ``state``, in place.

    The sums are ``state.out`` itself if that has the accumulators' dtype. Otherwise ``state.out``,
    of 16 bits, holds the upper halves of float32 sums until the last merge, which rounds them, and
    ``low``, another tensor like it, the lower ones. Together they hold the exact float32 sums.

    Args:
        state: The merged results.
        low: See above; a merge that is first and last, or of wide sums, does not access it.
        results: ``out`` and ``lse`` of each, of up to three on GPUs.
        spans: The rows of each result.
        marks: A bit for each result: set if every row of it sees something, so that an infinity
            in ``lse`` comes from scores that are not finite, and NaN is merged.
        first: True if there are no sums yet: rows in no span see nothing. One result that has all
            rows may then be ``state`` itself.
        last: True if no other merge follows.
    """
    out, lse = state
    if out.is_cuda and out.numel() > 0 and lse.dtype == torch.float32 and has_triton():
        from ring_torch.merge_ops import merge_on_gpu

        merge_on_gpu(out, low, lse, *results, spans=spans, marks=marks, first=first, last=last)
        return
    is_split, into = out.dtype != lse.dtype, state
    if first:
        into = AttentionState(lse.new_zeros(out.shape), torch.full_like(lse, -torch.inf))
    elif is_split:  # halves beside each other are float32 numbers, the lower one first
        halves = torch.stack([x.view(torch.int16) for x in (low, out)], dim=-1)
        into = AttentionState(halves.view(torch.float32).squeeze(-1), lse)
    for n, ((start, rows), result, part_lse) in enumerate(
        zip(spans, results[::2], results[1::2], strict=True)
    ):
        seen = mark_infinities(part_lse.clone()) if marks >> n & 1 else part_lse
        merge_in_torch(into.take(slice(start, start + rows)), result, seen)
    if into is state:
        return
    lse.copy_(into.lse)
    if last or not is_split:
        out.copy_(into.out)
        return
    halves = into.out.view(torch.int16).unflatten(-1, (-1, 2))
    for x, half in zip((low, out), halves.unbind(-1), strict=True):
        x.view(torch.int16).copy_(half)


def merge_in_torch(state: AttentionState, out: Tensor, lse: Tensor) -> None:
    """Merge attention over other keys into ``state``, in place, by torch's operations.

    It is the formula of :func:`ring_core.merge`: both are scaled by ``exp(lse - merged)`` and
    added. Rows with ``lse = -inf`` are ignored, whatever numbers ``out`` has there, NaN included.
    Rows with ``lse = inf`` or NaN, of scores that are not finite, become NaN.
    """
    # Some rows at a time, to bound the memory of temporaries.
    for start in range(0, out.shape[1], _MERGED_ROWS):
        rows = slice(start, start + _MERGED_ROWS)
        some_out, some_lse = state.out[:, rows], state.lse[:, :, rows]
        new_lse = lse[:, :, rows].to(some_lse.dtype)
        merged = torch.logaddexp(some_lse, new_lse)
        safe = merged.masked_fill(merged == -torch.inf, 0.0)
        old = (some_lse - safe).exp_().transpose(1, 2).unsqueeze(-1)
        new = (new_lse - safe).exp_().transpose(1, 2).unsqueeze(-1)
        some_out.mul_(old)
        some_out.add_(torch.where(new == 0, 0.0, out[:, rows] * new))
        some_lse.copy_(merged)


def unseen_state(
    q: Tensor, v_dim: int, dtype: torch.dtype | None = None, *, fully_written: bool = False
) -> AttentionState:
    """Allocate results for the rows of ``q [B, n, H, D]``, with ``out`` in its dtype or ``dtype``.

    They are those of rows that see nothing; with ``fully_written``, as all will be written, they
    are uninitialised. ``lse`` is float32, or float64 beside a float64 ``out``.
    """
    batch, length, heads, _ = q.shape
    out = q.new_empty(batch, length, heads, v_dim, dtype=dtype)
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    lse = out.new_empty(batch, heads, length, dtype=wide)
    if not fully_written:
        out.zero_()
        lse.fill_(-torch.inf)
    return AttentionState(out, lse)


def mark_infinities(lse: Tensor) -> Tensor:
    """Turn infinities in ``lse`` into NaN, in place, where every row sees something.

    A score was not finite there.
    """
    return lse.nan_to_num_(nan=torch.nan, posinf=torch.nan, neginf=torch.nan)


class Joins(NamedTuple):
    """Rule by which the results of a rank's forward launches come together.

    Attributes:
        mode: The mode in which all launches run.
        is_final: True if launches write results where they belong, as each row is in one launch.
        dtype: The dtype of ``out``.
        rows: The rows of each launch.
        merged: For each launch how many results, the last ones, are merged when it has run: none
            if results wait, or belong where they are written.
        marks: For each launch :attr:`Forward.marks`.
        marked: Rows to mark at the end, where results are not merged; ``None`` stands for all.
        begins: True if rows begin as those that see nothing: some are in no launch, or results are
            merged into sums from the first one on.
        holds_first: True if the first result, which has all rows, may lie where the merged ones go.
    """

    mode: Mode
    is_final: bool
    dtype: torch.dtype
    rows: tuple[slice, ...]
    merged: tuple[int, ...]
    marks: tuple[bool, ...]
    marked: tuple[Span, ...] | None
    begins: bool
    holds_first: bool


def joins_of(
    launches: Sequence[Forward],
    dtype: torch.dtype,
    length: int,
    *,
    is_final: bool = False,
    wide: bool = False,
    resumes: bool = False,
    at_once: int = 2,
) -> Joins:
    """Return how the results of a rank's launches, in this order, come together.

    Args:
        launches: The launches.
        dtype: The inputs' dtype.
        length: The rank's rows.
        is_final: True if each row is in one launch at most.
        wide: True if results are to stay in the accumulators' dtype, as something is added later.
        resumes: True if others merge results into the sums, too, at any time.
        at_once: Results that the first merge takes; later ones take one each. So many results wait
            beside the sums.
    """
    preferred: tuple[Mode, ...] = ("write", "return", "merge")
    if not is_final:
        preferred = "merge", "write", "return"
    rows = tuple(launch.item.q_slice for launch in launches)
    marks = tuple(launch.marks for launch in launches)
    mode = next(x for x in preferred if all(x in launch.modes for launch in launches))
    covered = union(Interval(x.start, x.stop) for x in rows)
    is_covered = [tuple(x) for x in covered] == [(0, length)]
    spans = [Interval(x.start, x.stop) for x, mark in zip(rows, marks, strict=True) if mark]
    marked: tuple[Span, ...] | None = tuple((x.start, x.stop - x.start) for x in union(spans))
    if marked == ((0, length),):
        marked = None
    count, acc = len(launches), acc_dtype(dtype)
    takes, out_dtype, begins, holds_first = (0,) * count, dtype, not is_covered, False
    if mode == "merge" or resumes or not launches:
        is_final, out_dtype, begins = False, acc, True
        takes = (int(mode != "merge"),) * count
    elif not is_final and (count > 1 or wide or True in marks):
        # One result is merged, too, if infinities are left in it: then ``out`` becomes NaN as well.
        # ``out`` in the accumulators' dtype cannot hold a result of 16 bits until it is merged.
        out_dtype = acc if wide else dtype
        first = min(at_once if out_dtype == dtype else 1, count)
        takes = tuple(0 if n < first else first if n == first else 1 for n in range(1, count + 1))
        begins, holds_first = False, rows[0] == slice(0, length) and out_dtype == dtype
    else:
        is_final, holds_first = True, count == 1 and is_covered
    return Joins(
        mode,
        is_final,
        out_dtype,
        rows,
        takes,
        marks,
        marked if is_final else (),
        begins,
        holds_first,
    )


class Work(NamedTuple):
    """Forward launches over the same columns.

    Attributes:
        launches: The launches, in their order.
        sizes: How many rows each has, if they have all rows, in their order.
        widths: How many columns each has, if several have all columns, in their order.
        columns: The columns of each; ``None`` where it has all.
        waits_for: For each how many fetches must have arrived.
    """

    launches: tuple[Forward, ...]
    sizes: list[int] | None
    widths: list[int] | None
    columns: tuple[slice | None, ...]
    waits_for: tuple[int, ...]

    @classmethod
    def of(
        cls,
        launches: Sequence[Forward],
        length: int,
        keys: int,
        waits_for: Sequence[int] | None = None,
    ) -> Work:
        """Return launches over ``length`` rows and ``keys``; by default they wait for no fetch."""
        columns = [x.item.k_slice for x in launches]
        return cls(
            tuple(launches),
            sizes_of([x.item.q_slice for x in launches], length),
            sizes_of(columns, keys) if len(launches) > 1 else None,
            tuple([None if x.stop - x.start == keys else x for x in columns]),
            tuple(waits_for or [0] * len(launches)),
        )

    def cut(
        self, rows: QueryBlock, columns: KeyBlock, state: AttentionState | None
    ) -> Iterator[tuple[Forward, int, QueryBlock, KeyBlock, AttentionState | None]]:
        """Return each launch, its fetches, and its parts of rows, columns and results, as views."""
        # Few views, which cost the host most. (Torch need not know that they share memory: launches
        # write it behind its back.) Without indices and segments rows have q and sinks.
        sizes, widths = self.sizes, self.widths
        blocks: Iterable[QueryBlock] = [rows]
        states: Iterable[AttentionState | None] = repeat(state)
        if sizes is None or (len(sizes) > 1 and (rows.indices, rows.segments) != (None, None)):
            blocks = [rows.take(x.item.q_slice) for x in self.launches]
            if state is not None:
                states = [state.take(x.item.q_slice) for x in self.launches]
        elif len(sizes) > 1:
            blocks = [QueryBlock(x, rows.sinks) for x in rows.q.unsafe_split_with_sizes(sizes, 1)]
            if state is not None:
                states = map(
                    AttentionState,
                    *[x.unsafe_split_with_sizes(sizes, n) for n, x in enumerate(state, 1)],
                )
        keys = (
            [columns if x is None else columns.take(x) for x in self.columns]
            if widths is None or columns.position is not None or columns.segments is not None
            else [*map(KeyBlock, *[x.unsafe_split_with_sizes(widths, 1) for x in columns[:2]])]
        )
        return zip(self.launches, self.waits_for, blocks, keys, states, strict=False)


def sizes_of(spans: Sequence[slice], length: int) -> list[int] | None:
    """Return the sizes of spans, if they have all of a length, in their order.

    A single one of this size has all, whatever number its first row or column has in the item.
    """
    sizes = [x.stop - x.start for x in spans]
    in_order = all(x.start == sum(sizes[:n]) for n, x in enumerate(spans)) or len(spans) == 1
    return sizes if in_order and sum(sizes) == length else None


class Accumulator:
    """``(out, lse)`` of a rank's rows in one forward pass.

    Attributes:
        state: Memory of the results, which are there after :meth:`finish`.
    """

    def __init__(self, joins: Joins, q: Tensor, v_dim: int) -> None:
        """Allocate for the rows of ``q [B, T_local, H, D]``."""
        self._joins, self._v_dim = joins, v_dim
        self._launched = 0  # launches so far
        self._waiting: list[Tensor] = []  # out and lse of each launch that waits for a merge
        self.state: Any = None  # the first launch returns it
        if joins.mode != "return" or not joins.holds_first or q.shape[0] == 0:
            self.state = unseen_state(q, v_dim, joins.dtype, fully_written=not joins.begins)

    def attend(
        self,
        work: Work,
        rows: QueryBlock,
        columns: KeyBlock,
        *,
        state: AttentionState | None = None,
        wait: Callable[[int], object] | None = None,
    ) -> None:
        """Run launches, each when what it reads has arrived; an empty batch launches nothing.

        Args:
            work: The launches.
            rows: All rows, or those of the only item.
            columns: All columns.
            state: A group of heads of :attr:`state`, where each row is in one launch.
            wait: Waits until so many fetches have arrived; ``None`` where the stream does.
        """
        joins, mode, state = self._joins, self._joins.mode, state or self.state
        if rows.q.shape[0] == 0:
            return
        # A launch leaves results where they belong, or returns them.
        is_added, returns = joins.is_final or mode == "merge", mode == "return"
        # What is returned or merged is not bound to strides.
        key = tensors_key(rows.q, columns.k, columns.v, rows.sinks) if mode == "write" else None
        # Fetches of later items write other columns meanwhile, and peers copy from this rank's
        # memory and need nothing from this loop.
        for n, (launch, fetches, some_rows, keys, own) in enumerate(
            work.cut(rows, columns, state if is_added else None), self._launched
        ):
            if fetches > 0 and wait is not None:
                wait(fetches)
            into = own
            if not is_added and mode == "write":
                # Until the first merge `state` is free: it holds the first result if that has all
                # rows. The merge may read and write it, as one program does both to each number.
                is_held = n == 0 and joins.holds_first
                v_dim = self._v_dim
                into = state if is_held else unseen_state(some_rows.q, v_dim, fully_written=True)
            result = launch.run(some_rows, keys, None if returns else into, mode, key)
            if result is own:
                continue
            if n == 0 and joins.holds_first:
                self.state = result
            elif own is not None:
                own.out.copy_(result.out)
                own.lse.copy_(result.lse)
            if is_added:
                continue
            self._waiting += result
            del result, into  # once they are merged, the next launch may get their memory
            if joins.merged[n]:
                # Launches and merges run in order on one stream: memory of results that are merged
                # may be that of later ones.
                self._merge(n, joins.merged[n])
                self._waiting.clear()
        self._launched += len(work.launches)

    def _merge(self, n: int, count: int) -> None:
        """Merge the results of ``count`` launches, of which the ``n``-th is the last."""
        joins, state = self._joins, self.state
        if n + 1 == count:
            # The lower halves of sums that wait between merges, wider than `out`. Merges without
            # them get `out` as a placeholder.
            waits = sum(map(bool, joins.merged)) > 1 and joins.dtype != acc_dtype(joins.dtype)
            self._low = torch.empty_like(state.out) if waits else state.out
        numbers = range(n + 1 - count, n + 1)
        first = numbers[0] == 0 and not joins.begins
        spans = tuple([span_of(joins.rows[x]) for x in numbers])
        if joins.begins:  # wide sums: what is in no span need not be touched
            (_, rows), *_ = spans
            spans = ((0, rows),)
            state = state.take(joins.rows[n]) if state.out.shape[1] > rows else state
        marks = sum(joins.marks[x] << i for i, x in enumerate(numbers))
        last = n + 1 == len(joins.rows)
        merge(state, self._low, self._waiting, spans=spans, marks=marks, first=first, last=last)

    def finish(self) -> AttentionState:
        """Return the results, after all launches."""
        # Infinities that launches have left, where every row sees something, become NaN.
        state: AttentionState = self.state
        if (marked := self._joins.marked) is None:
            mark_infinities(state.lse)
            return state
        for span in marked:
            mark_infinities(state.lse.narrow(2, *span))
        return state


@dataclass
class Rows:
    """dQ of a rank's rows in one backward pass.

    Attributes:
        new: Allocates dQ, when it is needed first.
        how: Launches write it where each row is in one of them, or add to sums in the accumulators'
            dtype; or their parts wait and are added up at the end, the last one last.
        dbias: Sums of the bias's gradient; ``None`` if there are none, or where an only launch has
            all rows, whose own gradient it then is.
    """

    new: Callable[[], Tensor]
    how: Literal["write", "add", "wait"]
    dbias: Tensor | None = None
    _dq: Tensor | None = None
    _parts: list[tuple[slice, Tensor]] = field(default_factory=list)

    def whole(self) -> Tensor:
        """Return dQ of all rows: its memory, or the sum of the parts that wait."""
        if self._parts:
            (_, self._dq), *others = self._parts[::-1]
            if others:
                _sum_rows(self._dq, others)
            self._parts = []
        if self._dq is None:
            self._dq = self.new()
        return self._dq

    def memory(self, rows: slice) -> Tensor:
        """Return memory for dQ of some rows, where it is written."""
        whole = self.whole()
        return whole if rows.stop - rows.start == whole.shape[1] else whole[:, rows]

    def put(self, rows: slice, dq: Tensor, dbias: Tensor | None = None) -> None:
        """Take dQ of some rows, and their part of the bias's gradient."""
        if dbias is not None:
            if self.dbias is None:
                self.dbias = dbias
            else:
                self.dbias[:, :, rows].add_(dbias)
        if self.how == "wait":
            self._parts.append((rows, dq))
        elif self.how == "add":
            self.whole()[:, rows].add_(dq)
        else:
            into = self.memory(rows)
            if into.data_ptr() != dq.data_ptr():
                into.copy_(dq)

    def take(self, rows: slice) -> QueryGrads:
        """Return sums of some rows."""
        dbias = None if self.dbias is None else self.dbias[:, :, rows]
        dq = self.whole() if self._dq is None else self._dq
        return QueryGrads(dq[:, rows], dbias)

    def of_group(self, n: int, groups: int) -> Rows:
        """Return the ``n``-th of ``groups`` equal groups of heads."""

        def heads() -> Tensor:
            size = self.whole().shape[2] // groups
            return self.whole().narrow(2, n * size, size)

        return Rows(heads, self.how, self.dbias)


def _sum_rows(dq: Tensor, parts: Sequence[tuple[slice, Tensor]]) -> None:
    """Add parts of dQ, each of some rows, to the one that has all rows, in place.

    Sums are wider than what launches have rounded; ``dq`` itself is added last.
    """
    if dq.is_cuda and len(parts) < _MOST_MERGED and has_triton():
        from ring_torch.merge_ops import sum_on_gpu

        sum_on_gpu(dq, [x for _, x in parts], tuple(span_of(rows) for rows, _ in parts))
        return
    total = torch.zeros_like(dq, dtype=torch.promote_types(dq.dtype, torch.float32))
    for rows, part in parts:
        total[:, rows].add_(part)
    dq.copy_(total.add_(dq))


@dataclass
class OneItem:
    """Gradients of the keys of a single item, which are final.

    Attributes:
        keys: All keys.
        grads: dK and dV of all keys; those that the item has not get zeros.
    """

    keys: KeyBlock
    grads: tuple[Tensor, ...] = ()

    def put(self, item: WorkItem, dk: Tensor, dv: Tensor) -> None:
        """Take the item's dK/dV."""
        self.grads = dk, dv
        if dk.shape[1] < self.keys.k.shape[1]:
            self.grads = tuple(
                [
                    x.new_zeros(x.shape, dtype=grad.dtype)
                    for x, grad in zip((self.keys.k, self.keys.v), (dk, dv), strict=True)
                ]
            )
            for x, grad in zip(self.grads, (dk, dv), strict=True):
                x[:, item.k_slice] = grad

    def take(self, columns: slice) -> KeyGrads:
        """Refuse: nothing is added."""
        raise AssertionError(columns)


#: For each item its columns in spans ``(start, stop, add)``, added to or overwritten.
Segments = Mapping[WorkItem, Sequence[tuple[int, int, bool]]]


def segments_of(items: Sequence[WorkItem], overwritten: Sequence[Sequence[slice]]) -> Segments:
    """Return where items add to sums, and where they overwrite them."""
    spans = zip(items, overwritten, strict=True)
    return {item: [*column_segments(item, overwrite)] for item, overwrite in spans}


@dataclass
class Columns:
    """dK/dV of columns, flat in the accumulators' dtype.

    Attributes:
        layout: The order of the numbers.
        flat: The buffer.
        length: Columns of the buffer.
        segments: What items overwrite.
    """

    layout: KeyGradBuffer
    flat: Tensor
    length: int
    segments: Segments
    _views: tuple[Tensor, Tensor] | None = None

    def take(self, columns: slice) -> KeyGrads:
        """Return sums of some columns."""
        if self._views is None:
            self._views = self.layout.views(self.flat, self.length)
        dk, dv = self._views
        return KeyGrads(dk[:, columns], dv[:, columns])

    def put(self, item: WorkItem, dk: Tensor, dv: Tensor) -> None:
        """Put an item's dK/dV into the sums."""
        # The buffer holds nothing valid in columns that this backward has not written yet: the
        # first to come overwrites, the others add.
        keys = self.layout.keys
        for start, stop, add in self.segments[item]:
            k, v = dk, dv
            if stop - start < dk.shape[1]:
                k, v = (x.narrow(1, start - item.k_start, stop - start) for x in (dk, dv))
            whole = self.flat.view(keys.batch, self.length, keys.width)
            packed = whole.narrow(1, start, stop - start)
            write_keys(keys, k, v, packed, add=add)


def write_keys(keys: KVPayload, k: Tensor, v: Tensor, packed: Tensor, *, add: bool = False) -> None:
    """Copy or add ``k [B, n, K, D]`` and ``v [B, n, K, Dv]`` into ``packed [B, n, width]``.

    On GPUs one kernel does it.
    """
    if packed.is_cuda and packed.numel() > 0 and has_triton():
        from ring_torch.memory_ops import pack_kv_on_gpu

        pack_kv_on_gpu(k, v, packed, add=add)
        return
    for part, x in zip(keys.split(packed), (k, v), strict=True):
        part.add_(x) if add else part.copy_(x)


#: Where launches of a backward leave dK and dV: ``put(item, dk, dv)`` takes those of an item,
#: ``take(columns)`` returns sums of some columns.
ColumnSums = Columns | KeyGrads | OneItem
#: The backward of one item: ``(rows, columns, upstream, dst, key)`` to its gradients alone; ``dst``
#: is memory that dQ may be written to, ``key`` as in :class:`ring_torch.records.Forward`.
ItemGrads = Callable[[QueryBlock, KeyBlock, BackwardInputs, Tensor | None, object], Grads]
#: One that adds to sums: ``(rows, columns, upstream, row_grads, column_grads)``.
ItemSums = Callable[[QueryBlock, KeyBlock, BackwardInputs, QueryGrads, KeyGrads], None]


def one_by_one(
    items: Sequence[WorkItem], launches: Sequence[ItemGrads | ItemSums], *, adds: bool = False
) -> Backward:
    """Return the backward of items that are launched one by one, in reverse.

    With ``adds`` launches are :data:`ItemSums`, otherwise :data:`ItemGrads`.
    """
    # In reverse, as sums know which columns no launch before has written in that order.
    work: list[tuple[WorkItem, Any]] = [*zip(items, launches, strict=True)][::-1]

    def run(
        rows: QueryBlock,
        held: list[KeyBlock],
        upstream: BackwardInputs,
        row_sums: Rows,
        column_sums: ColumnSums,
    ) -> None:
        (columns,) = held
        key = None if adds else tensors_key(rows.q, columns.k, columns.v, *upstream)
        # Launches run one after the other on a stream: each may add to what those before wrote.
        for item, launch in work:
            count, tokens = item.q_stop - item.q_start, item.q_slice
            is_part = columns.k.shape[1] > item.k_stop - item.k_start
            keys = columns.take(item.k_slice) if is_part else columns
            if rows.q.shape[1] > count:
                operands = rows.take(tokens), keys, upstream.take(tokens)
            else:
                tokens, operands = slice(0, count), (rows, keys, upstream)
            if adds:
                launch(*operands, row_sums.take(tokens), column_sums.take(item.k_slice))
                continue
            grads = launch(
                *operands, row_sums.memory(tokens) if row_sums.how == "write" else None, key
            )
            row_sums.put(tokens, grads.dq, grads.dbias)
            column_sums.put(item, grads.dk, grads.dv)
            del grads  # the next launch may get the memory of what has been added
        held.clear()

    return Backward(run, adds)


def sums_one_by_one(
    items: Sequence[WorkItem], launches: Sequence[ItemSums], params: KernelParams, *, adds: bool
) -> Backward:
    """Return the backward of items that add to sums, launched one by one, in reverse.

    Without ``adds`` an item's gradients are sums that begin with zeros, in the accumulators' dtype.
    """
    if adds:
        return one_by_one(items, launches, adds=True)
    return one_by_one(items, [partial(item_grads, launch, params) for launch in launches])


def item_grads(
    launch: ItemSums,
    params: KernelParams,
    rows: QueryBlock,
    columns: KeyBlock,
    upstream: BackwardInputs,
    _dst: Tensor | None,
    _key: object,
) -> Grads:
    """Run a launch that adds to sums on sums of its own, which begin with zeros."""
    dtype = acc_dtype(rows.q.dtype)
    dq, dk, dv = (
        torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (rows.q, columns.k, columns.v)
    )
    dbias = zero_bias_grad(rows, params, dtype)
    launch(rows, columns, upstream, QueryGrads(dq, dbias), KeyGrads(dk, dv))
    return Grads(dq, dk, dv, dbias)
