"""Results of several launches put together: merged, written, added, and rounded once.

Forwards: attention over some keys is ``(out, lse)``, and merges with that over others
(:func:`ring_core.merge`). Backwards: gradients add up. Sums are in the accumulators' dtype, and a
number is rounded when its sum is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ring_core import WorkItem
from ring_core.programs.gather import column_segments
from ring_core.programs.intervals import Interval, union
from ring_torch.buffers import KeyGradBuffer
from ring_torch.launches.launch import Forward, Mode
from ring_torch.optional import has_triton
from ring_torch.records import (
    AttentionState,
    KeyBlock,
    KeyGrads,
    QueryBlock,
    QueryGrads,
    Span,
    acc_dtype,
    empty_state,
    span_of,
    unseen_state,
)

_MOST_MERGED = 3  # results that one launch merges


def merge(
    state: AttentionState, low: Tensor, results: Sequence[Tensor], *, spans: tuple[Span, ...],
    marks: int = 0, first: bool = False, last: bool = True,
) -> None:  # fmt: skip
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
    if out.is_cuda and lse.dtype == torch.float32 and has_triton():
        from ring_torch.merge_ops import merge_on_gpu

        merge_on_gpu(out, low, lse, results, spans=spans, marks=marks, first=first, last=last)
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
        part_lse = mark_infinities(part_lse.clone()) if marks >> n & 1 else part_lse
        into.take(slice(start, start + rows)).merge(result, part_lse)
    if into is state:
        return
    lse.copy_(into.lse)
    if last or not is_split:
        out.copy_(into.out)
        return
    halves = into.out.view(torch.int16).unflatten(-1, (-1, 2))
    for x, half in zip((low, out), halves.unbind(-1), strict=True):
        x.view(torch.int16).copy_(half)


def mark_infinities(lse: Tensor) -> Tensor:
    """Turn infinities in ``lse`` into NaN, in place, where every row sees something.

    A score was not finite there.
    """
    return lse.nan_to_num_(nan=torch.nan, posinf=torch.nan, neginf=torch.nan)


class Joins(NamedTuple):
    """How the results of a rank's forward launches come together.

    Attributes:
        mode: The mode in which all launches run.
        dtype: The dtype of ``out``.
        rows: The rows of each launch.
        merged: For each launch how many results, the last ones, are merged when it has run: none
            if results wait, or belong where they are written.
        marks: For each launch :attr:`Forward.marks`.
        marked: Rows to mark at the end, where results are not merged.
        is_final: True if launches write results where they belong, as each row is in one launch.
        begins: True if rows begin as those that see nothing: some are in no launch, or results are
            merged into sums from the first one on.
        holds_first: True if the first result, which has all rows, may lie where the merged ones go.
    """

    mode: Mode
    dtype: torch.dtype
    rows: tuple[slice, ...]
    merged: tuple[int, ...]
    marks: tuple[bool, ...]
    marked: tuple[Span, ...]
    is_final: bool
    begins: bool
    holds_first: bool

    @property
    def splits_sums(self) -> bool:
        """True if sums wait between merges, wider than ``out``."""
        return sum(map(bool, self.merged)) > 1 and self.dtype != acc_dtype(self.dtype)


def joins_of(
    launches: Sequence[tuple[Forward, WorkItem]], dtype: torch.dtype, length: int, *,
    is_final: bool = False, wide: bool = False, resumes: bool = False, at_once: int = 2,
) -> Joins:  # fmt: skip
    """Return how the results of a rank's launches, in this order, come together.

    Args:
        launches: The launches, with their items.
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
    rows = tuple(item.q_slice for _, item in launches)
    marks = tuple(launch.marks for launch, _ in launches)
    mode = next(x for x in preferred if all(x in launch.modes for launch, _ in launches))
    covered = union(Interval(x.start, x.stop) for x in rows)
    is_covered = [tuple(x) for x in covered] == [(0, length)]
    spans = [Interval(x.start, x.stop) for x, mark in zip(rows, marks, strict=True) if mark]
    marked = tuple((x.start, x.stop - x.start) for x in union(spans))
    count, acc = len(launches), acc_dtype(dtype)
    takes, out_dtype, begins, holds_first = (0,) * count, dtype, not is_covered, False
    if mode == "merge" or resumes or not launches:
        is_final, out_dtype, begins = False, acc, True
        takes = (int(mode != "merge"),) * count
    elif not is_final and (count > 1 or wide):
        # ``out`` in the accumulators' dtype cannot hold a result of 16 bits until it is merged.
        out_dtype = acc if wide else dtype
        first = min(at_once if out_dtype == dtype else 1, count)
        takes = tuple(0 if n < first else first if n == first else 1 for n in range(1, count + 1))
        begins, holds_first = False, rows[0] == slice(0, length) and out_dtype == dtype
    else:
        is_final, holds_first = True, count == 1 and is_covered
    return Joins(
        mode, out_dtype, rows, takes, marks, marked if is_final else (), is_final, begins,
        holds_first,
    )  # fmt: skip


class Accumulator:
    """``(out, lse)`` of a rank's rows in one forward pass.

    Attributes:
        state: Memory of the results, which are there after :meth:`finish`.
    """

    def __init__(self, joins: Joins, q: Tensor, v_dim: int) -> None:
        """Allocate for the rows of ``q [B, T_local, H, D]``."""
        self._joins, self._v_dim = joins, v_dim
        self._waiting: list[Tensor] = []  # out and lse of each launch that waits for a merge
        if joins.begins and not joins.is_final:
            self.state = empty_state(q, v_dim)
        elif joins.mode != "return" or not joins.holds_first or q.shape[0] == 0:
            self.state = unseen_state(q, v_dim, joins.dtype, fully_written=not joins.begins)

    def attend(
        self, n: int, launch: Forward, rows: QueryBlock, columns: KeyBlock,
        state: AttentionState | None = None,
    ) -> None:  # fmt: skip
        """Run the ``n``-th launch on its rows and columns; an empty batch launches nothing.

        ``state`` is a group of heads of :attr:`state`, where each row is in one launch.
        """
        joins = self._joins
        mode = joins.mode
        if rows.q.shape[0] == 0:
            return
        if joins.is_final and joins.holds_first and mode == "return":
            self.state = launch.run(rows, columns, None, mode)
            return
        if joins.is_final or mode == "merge":
            into = (state or self.state).take(joins.rows[n])
            result = launch.run(rows, columns, None if mode == "return" else into, mode)
            if result is not into:
                into.out.copy_(result.out)
                into.lse.copy_(result.lse)
            return
        # Until the first merge `state` is free: it holds the first result if that has all rows.
        # The merge may read and write it, as one program does both to each number.
        is_held, into = n == 0 and joins.holds_first, None
        if mode == "write":
            into = self.state if is_held else unseen_state(rows.q, self._v_dim, fully_written=True)
        result = launch.run(rows, columns, into, mode)
        if is_held:
            self.state = result
        self._waiting += result
        del result, into  # once they are merged, the next launch may get their memory
        if joins.merged[n]:
            # Launches and merges run in order on one stream: memory of results that are merged may
            # be that of later ones.
            self._merge(n, joins.merged[n])
            self._waiting.clear()

    def _merge(self, n: int, count: int) -> None:
        """Merge the results of ``count`` launches, of which the ``n``-th is the last."""
        joins, state = self._joins, self.state
        if n + 1 == count:
            # The lower halves of the sums. Merges without them get `out` as a placeholder.
            self._low = torch.empty_like(state.out) if joins.splits_sums else state.out
        numbers = range(n + 1 - count, n + 1)
        first = numbers[0] == 0 and not joins.begins
        spans = tuple([span_of(joins.rows[x]) for x in numbers])
        if joins.begins:  # wide sums: what is in no span need not be touched
            state, spans = state.take(joins.rows[n]), ((0, spans[0][1]),)
        marks = sum(joins.marks[x] << i for i, x in enumerate(numbers))
        last = n + 1 == len(joins.rows)
        merge(state, self._low, self._waiting, spans=spans, marks=marks, first=first, last=last)

    def finish(self) -> AttentionState:
        """Return the results, after all launches."""
        # Infinities that launches have left, where every row sees something, become NaN.
        for span in self._joins.marked:
            mark_infinities(self.state.lse.narrow(2, *span))
        return self.state


class Rows:
    """dQ of a rank's rows in one backward pass: a :class:`ring_torch.launches.launch.RowSums`.

    Launches write it where each row is in one of them, or add to sums in the accumulators' dtype;
    or their parts wait and are added up at the end, the last one last.
    """

    def __init__(
        self, new: Callable[[], Tensor], how: Literal["write", "add", "wait"],
        dbias: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Take a function that allocates dQ, which is called when it is needed first."""
        self._new, self._how, self.dbias = new, how, dbias
        self._dq: Tensor | None = None
        self._parts: list[tuple[slice, Tensor]] = []

    def whole(self) -> Tensor:
        """Return dQ of all rows: its memory, or the sum of the parts that wait."""
        if self._parts:
            (tokens, self._dq), *others = self._parts[::-1]
            assert tokens == slice(0, self._dq.shape[1])
            if others:
                _sum_rows(self._dq, others)
            self._parts = []
        if self._dq is None:
            self._dq = self._new()
        return self._dq

    def memory(self, rows: slice) -> Tensor | None:
        """Return memory for dQ of some rows; ``None`` if it is added, or waits."""
        return self.whole()[:, rows] if self._how == "write" else None

    def put(self, rows: slice, dq: Tensor) -> None:
        """Take dQ of some rows."""
        if self._how == "wait":
            self._parts.append((rows, dq))
        elif self._how == "add":
            self.whole()[:, rows].add_(dq)
        else:
            into = self.whole()[:, rows]
            if into.data_ptr() != dq.data_ptr():
                into.copy_(dq)

    def take(self, rows: slice) -> QueryGrads:
        """Return sums of some rows."""
        return QueryGrads(self.whole(), self.dbias).take(rows)

    def of_group(self, n: int, groups: int) -> Rows:
        """Return the ``n``-th of ``groups`` equal groups of heads."""
        if groups == 1:
            return self

        def heads() -> Tensor:
            size = self.whole().shape[2] // groups
            return self.whole().narrow(2, n * size, size)

        return Rows(heads, self._how, self.dbias)


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


class OneItem:
    """Gradients of the keys of a single item, which are final: a ``ColumnSums`` of launches.

    Attributes:
        grads: dK and dV of all keys.
    """

    grads: KeyGrads

    def __init__(self, keys: KeyBlock) -> None:
        """Take all keys."""
        self._keys = keys

    def put(self, item: WorkItem, dk: Tensor, dv: Tensor) -> None:
        """Take the item's dK/dV; keys that it has not get zeros."""
        if item.k_slice != slice(0, self._keys.k.shape[1]):
            pairs = zip((self._keys.k, self._keys.v), (dk, dv), strict=True)
            whole = [x.new_zeros(x.shape, dtype=grad.dtype) for x, grad in pairs]
            for x, grad in zip(whole, (dk, dv), strict=True):
                x[:, item.k_slice] = grad
            dk, dv = whole
        self.grads = KeyGrads(dk, dv)

    def take(self, columns: slice) -> KeyGrads:
        """Refuse: nothing is added."""
        raise AssertionError(columns)


#: For each item its columns in spans ``(start, stop, add)``, added to or overwritten.
Segments = Mapping[WorkItem, Sequence[tuple[int, int, bool]]]


def segments_of(items: Sequence[WorkItem], overwritten: Sequence[Sequence[slice]]) -> Segments:
    """Return where items add to sums, and where they overwrite them."""
    spans = zip(items, overwritten, strict=True)
    return {item: [*column_segments(item, overwrite)] for item, overwrite in spans}


class Columns:
    """dK/dV of columns, flat in the accumulators' dtype: a ``ColumnSums`` of launches.

    Attributes:
        flat: The buffer, in the order of :class:`ring_torch.buffers.KeyGradBuffer`.
    """

    def __init__(
        self, layout: KeyGradBuffer, flat: Tensor, length: int, segments: Segments
    ) -> None:
        """Take sums of ``length`` tokens, and what items overwrite."""
        self.flat, self._layout, self._length, self._segments = flat, layout, length, segments

    @cached_property
    def _grads(self) -> KeyGrads:
        return KeyGrads(*self._layout.views(self.flat, self._length))

    def take(self, columns: slice) -> KeyGrads:
        """Return sums of some columns."""
        return self._grads.take(columns)

    def put(self, item: WorkItem, dk: Tensor, dv: Tensor) -> None:
        """Put an item's dK/dV into the sums."""
        # The buffer holds nothing valid in columns that this backward has not written yet: the
        # first to come overwrites, the others add.
        keys = self._layout.keys
        for start, stop, add in self._segments[item]:
            k, v = dk, dv
            if stop - start < dk.shape[1]:
                k, v = (x.narrow(1, start - item.k_start, stop - start) for x in (dk, dv))
            if dk.is_cuda and has_triton():
                from ring_torch.memory_ops import pack_kv_on_gpu

                packed = self.flat.view(keys.batch, self._length, keys.width)
                pack_kv_on_gpu(k, v, packed.narrow(1, start, stop - start), add=add)
                continue
            for total, grad in zip(self.take(slice(start, stop)), (k, v), strict=True):
                total.add_(grad) if add else total.copy_(grad)
