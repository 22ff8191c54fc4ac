"""Adapter that makes a kernel of a library of fused CUDA kernels, such as FlashAttention.

A library gives its two calls (:class:`ring_torch.kernels.library.FlashLibrary`), and
:class:`FlashKernel` makes work items fit them. Libraries multiply masked weights, zeros, with all
values of a tile, so a NaN reaches rows that do not see it too (``Capabilities.exact_nan``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ring_core import Capabilities, KernelConfig, Request, RingProgram, WorkItem
from ring_core.base.arguments import not_none
from ring_torch.accumulate import ItemGrads, mark_infinities, one_by_one, unseen_state
from ring_torch.capture import capture_safe_cache, is_capturing
from ring_torch.kernels.api import Kernel, SplitBackward
from ring_torch.kernels.library import (
    BackwardLaunch,
    Direction,
    Documents,
    FlashLibrary,
    ForwardLaunch,
    HeadDims,
    LaunchOptions,
    as_given,
    capability,
)
from ring_torch.launches.cache import keep
from ring_torch.optional import has_triton
from ring_torch.options import Window
from ring_torch.records import (
    AttentionState,
    Backward,
    BackwardInputs,
    Forward,
    Grads,
    KernelParams,
    KeyBlock,
    Mode,
    QueryBlock,
    is_aligned,
    narrowed,
    padded,
    with_own_rows,
)


def old_gpu_reason() -> str | None:
    """Return a refusal if the current CUDA device is older than Ampere, else ``None``."""
    if capability()[0] >= 8:
        return None
    return f"needs a GPU of compute capability 8.0 or newer, this is {capability()}"


def gpu_reason(*majors: int) -> str | None:
    """Return a refusal if a library has no kernels for the current device's generation."""
    if capability()[0] in majors:
        return None
    known = f"{majors[0]}.x to {majors[-1]}.x"
    return f"has kernels for compute capability {known}, this is {capability()}"


@dataclass(frozen=True)
class FlashKernel(Kernel):
    """A kernel made of the calls of a library.

    Attributes:
        flash: The calls of the library.
        capabilities, needs_delta, split_backward, adds_sinks: See :class:`Kernel`.
        head_dims: Returns the head dims at which a pass of a call is computed: those of the call,
            or larger ones at which the library is right or faster, reached by padding with zeros;
            ``None`` if there are none.
        limits: Returns reasons against a call: combinations of options that it cannot do, or not
            on this GPU.
        unavailable: Returns why the library cannot be called on this machine, or ``None``.
        wrong_gpu: Returns why an installed library cannot run on the current GPU, or ``None``. It
            is another function where the answer of the first is kept, as machines have unlike GPUs.
        clips_right_window: True if the library is wrong about the right side of a window where
            there are more queries than keys. FlashAttention-2 takes a right side that is at least
            the number of keys, or an open one beside a left side, for the number of keys, or
            ignores it; then rows see fewer keys, or more. Such items are launched in pieces.
    """

    flash: FlashLibrary
    capabilities: Capabilities
    needs_delta: bool = False
    split_backward: SplitBackward | None = None
    head_dims: Callable[[Direction, int, int], HeadDims | None] = as_given
    limits: Callable[[Request, RingProgram], tuple[str, ...]] | None = None
    unavailable: Callable[[], str | None] = old_gpu_reason
    wrong_gpu: Callable[[], str | None] = lambda: None
    clips_right_window: bool = False
    adds_sinks: bool = False

    def unavailable_reason(self) -> str | None:
        """Return why it cannot run on this machine, or ``None``."""
        return self.unavailable() or self.wrong_gpu()

    def config_refusals(
        self, _config: KernelConfig, request: Request, program: RingProgram, /
    ) -> tuple[str, ...]:
        """Return why it cannot run a call on this machine: its head dims, or its options."""
        dims = request.head_dim, request.v_head_dim
        if self.head_dims("backward" if request.grad else "forward", *dims) is None:
            return (f"has no kernel for head dims {dims[0]} and {dims[1]} on this GPU",)
        return () if self.limits is None else self.limits(request, program)

    def forward(self, item: WorkItem, params: KernelParams) -> Forward:
        """Return the launch of an item's forward, which repeats what the library does at first.

        A band without options of single heads or keys is repeated for tensors of equal strides and
        alignment, where nothing has to be padded, copied or cut.
        """
        is_band = item.cu_q is None and item.tiles is None and not params.segment_ids
        repeated: dict[object, ForwardLaunch | None] = {}

        def run(
            rows: QueryBlock, columns: KeyBlock, into: AttentionState | None, _: Mode, key: object
        ) -> AttentionState:
            q, k, v, sinks = rows.q, columns.k, columns.v, rows.sinks
            if into is None:
                return self._attend(rows, columns, item, params)
            if (launch := repeated.get(key)) is not None:
                launch(q, k, v, *into, sinks)
                return into
            result = self._attend(rows, columns, item, params, into)
            if result.out.data_ptr() != into.out.data_ptr():  # not even as a view
                return result
            if is_band and key not in repeated and not is_capturing():
                launch = None
                if self._takes_as_is("forward", rows, columns, item, into.out):
                    options = _options(item, params, rows, columns)
                    launch = self.flash.repeated_forward(q, k, v, into, options)
                keep(repeated, key, launch)
            return into

        modes: tuple[Mode, ...] = ("write",) if self.flash.writes else ("return",)
        return Forward(item, run, modes, marks=is_band and params.needs_lse)

    def backward(self, items: Sequence[WorkItem], params: KernelParams, **_: bool) -> Backward:
        """Return the launch of the backward of items, each of which is repeated likewise.

        It never adds: libraries round the gradients of each launch.
        """
        return one_by_one(items, [self._backward_of(item, params) for item in items])

    def _backward_of(self, item: WorkItem, params: KernelParams) -> ItemGrads:
        """Return the launch of an item's backward."""
        is_band = item.cu_q is None and item.tiles is None and not params.segment_ids
        repeated: dict[object, BackwardLaunch | None] = {}

        def run(
            rows: QueryBlock,
            columns: KeyBlock,
            upstream: BackwardInputs,
            dst: Tensor | None,
            key: object,
        ) -> Grads:
            q, k, v, (dout, out, lse, _) = rows.q, columns.k, columns.v, upstream
            if not is_band or not self.flash.writes:
                return self._grads(rows, columns, upstream, item, params, dst)
            dst = q.new_empty(q.shape) if dst is None else dst
            lse = lse.contiguous()
            if (launch := repeated.get(key)) is not None:
                return Grads(*launch(dout, q, k, v, out, lse, dst), None)
            grads = self._grads(rows, columns, upstream, item, params, dst)
            if key not in repeated and not is_capturing():
                launch = None
                if self._takes_as_is("backward", rows, columns, item, dout, out):
                    options = _options(item, params, rows, columns)
                    launch = self.flash.repeated_backward(dout, q, k, v, out, lse, options, dst)
                keep(repeated, key, launch)
            return grads

        return run

    def _attend(
        self,
        rows: QueryBlock,
        columns: KeyBlock,
        item: WorkItem,
        params: KernelParams,
        out: AttentionState | None = None,
    ) -> AttentionState:
        """Return attention over the item's keys, in one launch or in one for each of its pieces."""
        q, k, v = rows.q, columns.k, columns.v
        if pieces := self._pieces(item):
            # Rows that no piece has keep this state. No two pieces share a row: nothing is merged.
            state = unseen_state(q, v.shape[3])
            for piece in pieces:
                some_rows, keys = rows.take(piece.q_slice), columns.take(piece.k_slice)
                some_out, some_lse = self._attend(some_rows, keys, piece, params)
                state.out[:, piece.q_slice].copy_(some_out)
                # Every row of a piece sees something; rows of no piece see nothing.
                state.lse[:, :, piece.q_slice].copy_(mark_infinities(some_lse))
            return state
        options = _options(item, params, rows, columns)
        if item.cu_q is None:
            result, lse = self._forward(q, k, v, options, out)
            # Every row of a band sees something: plans cut others off. Other masks leave them in.
            if options.masked is not None and options.needs_lse:
                lse = _mark_nonfinite_where_seen(result, lse)
            return AttentionState(result, lse)
        # With documents libraries take packed rows: the batch's sequences one after the other.
        batch, unseen, packed_dst = q.shape[0], _unseen(item, q.device), None
        if out is not None and batch == 1 and unseen is None:
            packed_dst = AttentionState(out.out[0], out.lse[0])
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        result, lse = self._forward(q, k, v, options, packed_dst)
        lse = mark_infinities(lse).unflatten(1, (batch, -1)).transpose(0, 1)
        result = result.unflatten(0, (batch, -1))
        if unseen is not None:
            # Libraries write inf or -inf into lse of such rows, and anything into out.
            lse = lse.masked_fill(unseen, -torch.inf)
            result = result.masked_fill(unseen[:, None, None], 0.0)
        return AttentionState(result, lse)

    def _takes_as_is(
        self,
        direction: Direction,
        rows: QueryBlock,
        columns: KeyBlock,
        item: WorkItem,
        *others: Tensor,
    ) -> bool:
        """Return True if an item is a band without ALiBi, not to be padded, copied or cut."""
        q, k, v = rows.q, columns.k, columns.v
        is_band = item.cu_q is None and item.tiles is None and rows.segments is None
        fits = self._dims(direction, q, v) == (q.shape[-1], v.shape[-1]) and 0 not in q.stride()
        are_ready = all(map(is_aligned, (q, k, v, *others)))
        return is_band and fits and rows.slopes is None and are_ready and not self._pieces(item)

    def _grads(
        self,
        rows: QueryBlock,
        columns: KeyBlock,
        upstream: BackwardInputs,
        item: WorkItem,
        params: KernelParams,
        out: Tensor | None = None,
    ) -> Grads:
        """Return the item's gradients, in one launch or in one for each of its pieces."""
        if pieces := self._pieces(item):
            dq = rows.q.new_zeros(rows.q.shape)
            dk, dv = (x.new_zeros(x.shape, dtype=torch.float32) for x in (columns.k, columns.v))
            # Each row is of one piece, so its dQ is final. Pieces may share keys: a key's dK and dV
            # are added up, and complete after the last piece.
            for piece in pieces:
                q_slice, k_slice = piece.q_slice, piece.k_slice
                of_rows = rows.take(q_slice), columns.take(k_slice), upstream.take(q_slice)
                part = self._grads(*of_rows, piece, params)
                dq[:, q_slice].copy_(part.dq)
                dk[:, k_slice].add_(part.dk)
                dv[:, k_slice].add_(part.dv)
            return Grads(dq, dk, dv, None)
        options = _options(item, params, rows, columns)
        tensors = upstream.dout, rows.q, columns.k, columns.v, upstream.out
        if item.cu_q is None:
            lse = upstream.lse.contiguous()  # libraries misread other strides, without an error
            return Grads(*self._backward(*tensors, lse, options, out), None)
        batch = rows.q.shape[0]
        dout, q, k, v, result = (x.flatten(0, 1) for x in tensors)
        lse = upstream.lse.transpose(0, 1).flatten(1, 2).contiguous()
        packed_dst = out[0] if out is not None and batch == 1 else None
        grads = self._backward(dout, q, k, v, result, lse, options, packed_dst)
        dq, dk, dv = (x.unflatten(0, (batch, -1)) for x in grads)
        return Grads(dq, dk, dv, None)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: LaunchOptions, dst: AttentionState | None
    ) -> tuple[Tensor, Tensor]:
        """Call the library's forward at head dims that it has, and cut the padding off again.

        Results are in ``dst`` if the library writes there and no padding is cut off.
        """
        dims, v_dim = self._dims("forward", q, v), v.shape[-1]
        if dims.v != v_dim:
            dst = None
        q = padded(with_own_rows(q), dims.qk)
        k, v = padded(k, dims.qk), padded(v, dims.v)
        out, lse = self.flash.forward(q, k, v, options, dst)
        return narrowed(out, v_dim), lse

    def _backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        options: LaunchOptions,
        dst: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Call the library's backward at head dims that it has, and cut the padding off again."""
        dims, qk_dim, v_dim = self._dims("backward", q, v), q.shape[-1], v.shape[-1]
        if dims.qk != qk_dim:
            dst = None
        q, k = padded(with_own_rows(q), dims.qk), padded(k, dims.qk)
        dout, v, out = (padded(x, dims.v) for x in (dout, v, out))
        dq, dk, dv = self.flash.backward(dout, q, k, v, out, lse, options, dst)
        return narrowed(dq, qk_dim), narrowed(dk, qk_dim), narrowed(dv, v_dim)

    def _dims(self, direction: Direction, q: Tensor, v: Tensor) -> HeadDims:
        """Return the head dims at which a pass is computed; calls without any were refused."""
        dims = self.head_dims(direction, q.shape[-1], v.shape[-1])
        assert dims is not None, "the kernel was not chosen for these"
        return dims

    def _pieces(self, item: WorkItem) -> list[WorkItem]:
        """Return the pieces of an item that the library cannot do in one launch; none if it can.

        A piece is a document or, without documents, as many rows as the item has keys. Its rows
        and columns count from the item's first row and column.
        """
        if item.cu_q is not None and item.cu_k is not None:
            window = item.documents_window
            longest = (int(np.diff(cu).max()) for cu in (item.cu_q, item.cu_k))
            split = window is None or self._clips(window, *longest)
            return list(item.each_document()) if split else []
        keys = item.k_stop - item.k_start
        if not self._clips(item.window, item.q_stop - item.q_start, keys):
            return []
        item_from_0 = replace(
            item, q_start=0, k_start=0, q_stop=item.q_stop - item.q_start, k_stop=keys
        )
        cuts = [item_from_0.rows(n, n + keys) for n in range(0, item_from_0.q_stop, keys)]
        return [piece for piece in cuts if piece is not None]

    def _clips(self, window: Window, queries: int, keys: int) -> bool:
        """Return True if the library would change the right side of a window over these sizes."""
        left, right = window
        beyond = left is not None if right is None else right >= keys
        return self.clips_right_window and beyond and queries > keys


def _mark_nonfinite_where_seen(out: Tensor, lse: Tensor) -> Tensor:
    """Turn infinities in ``lse`` into NaN, in place, but for rows that see nothing.

    For these the library writes ``lse = -inf`` and ``out = 0``. For rows whose scores are NaN it
    may write ``-inf``, too; their ``out`` is NaN, which tells them apart.
    """
    if out.is_cuda and has_triton():
        from ring_torch.memory_ops import mark_on_gpu

        mark_on_gpu(out, lse)
        return lse
    odd = (lse == torch.inf) | ((lse == -torch.inf) & out[..., 0].isnan().transpose(1, 2))
    return lse.masked_fill_(odd, torch.nan)


@capture_safe_cache(maxsize=256)
def _unseen(item: WorkItem, device: torch.device) -> Tensor | None:
    """Return a boolean ``[n]`` of the rows that see nothing, or ``None`` if there are none."""
    first, stop = item.seen
    hidden = stop <= first
    return torch.as_tensor(hidden, device=device) if hidden.any() else None


def _options(
    item: WorkItem, params: KernelParams, rows: QueryBlock, columns: KeyBlock
) -> LaunchOptions:
    """Return the options of a launch over a band, or over documents of a batch.

    If the item is masked by block lists and a mask function, these include the band, and no window
    is given beside them.
    """
    options = LaunchOptions(
        params.scale,
        params.softcap,
        item.window,
        None,
        params.deterministic,
        params.needs_lse,
        sinks=rows.sinks,
    )
    if item.cu_q is not None:
        documents = _documents_of_batch(item, rows.q.shape[0], rows.q.device)
        return options._replace(window=item.documents_window or item.window, documents=documents)
    if rows.segments is not None or item.tiles is not None:
        segments = None if rows.segments is None else (rows.segments, not_none(columns.segments))
        geometry = None if item.tiles is None else params.blocks
        options = options._replace(
            window=(None, None), masked=item, segments=segments, geometry=geometry
        )
    if rows.slopes is not None:
        q_k_offset = None
        if len(rows.runs) == len(columns.runs) == 1:
            q_k_offset = rows.runs[0].position - columns.runs[0].position
        options = options._replace(
            slopes=rows.slopes,
            positions=(not_none(rows.position), not_none(columns.position)),
            q_k_offset=q_k_offset,
            is_causal=q_k_offset is not None and item.lo is not None and item.lo + q_k_offset >= 0,
        )
    return options


@capture_safe_cache(maxsize=256)
def _documents_of_batch(item: WorkItem, batch: int, device: torch.device) -> Documents:
    """Return an item's documents, repeated for each sequence of a batch, one after the other."""
    sides = not_none(item.cu_q), not_none(item.cu_k)
    offsets = (
        np.concatenate([[0], *(cu[1:] + n * int(cu[-1]) for n in range(batch))]) for cu in sides
    )
    cu_q, cu_k = (torch.as_tensor(cu, dtype=torch.int32, device=device) for cu in offsets)
    max_q, max_k = (int(np.diff(cu).max()) for cu in sides)
    # Where it is told of one query, FlashAttention-2 takes each document to have one, and fails.
    return Documents(cu_q, cu_k, max(2, max_q), max_k)


def unbounded(side: int | None) -> int:
    """Return a window's side as FlashAttention 2 and 3 take it: -1 is unbounded."""
    return -1 if side is None else side
