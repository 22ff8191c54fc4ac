"""Interface of attention kernels, each of which computes one work item, and the merge of results.

A kernel knows nothing of ranks, groups or steps. Shapes are those of ``ring_torch.records``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ring_core import (
    Capabilities,
    KernelConfig,
    Plan,
    Request,
    RingProgram,
    WorkItem,
)
from ring_core.base.arguments import not_none
from ring_core.choose.rates import UNKNOWN, Expected
from ring_torch.buffers import KVPayload
from ring_torch.kernels.library import ForwardLaunch, ItemBackward, PartialBackward, PartialForward
from ring_torch.optional import has_triton
from ring_torch.records import (
    AttentionState,
    BackwardInputs,
    Grads,
    KernelParams,
    KeyBlock,
    KeyGrads,
    QueryBlock,
    QueryGrads,
    Span,
    acc_dtype,
    empty_state,
    zero_bias_grad,
)


class OwnSpans(NamedTuple):
    """Spans of a rank's own keys in a buffer of gathered keys: of one length, equally far apart.

    Attributes:
        number: Number of spans.
        keys: Number of keys of a span.
        source: Local index of the first key of the first span.
        source_step: Keys from one span to the next in the shard.
        target: Column of that first key in the buffer.
        target_step: Columns from one span to the next in the buffer.
        length: Columns of the buffer.
    """

    number: int
    keys: int
    source: int
    source_step: int
    target: int
    target_step: int
    length: int


#: ``(start, length)`` to views ``(k, v)`` of these columns of the gathered K/V.
Columns = Callable[[int, int], tuple[Tensor, Tensor]]


class BackwardLaunch(Protocol):
    """The backward launches of a call, prepared for tensors of certain shapes and strides."""

    def __call__(
        self, q: Tensor, columns: Columns, dout: Tensor, out: Tensor, lse: Tensor, sums: Tensor,
        new_dq: Callable[[], Tensor], drop_keys: Callable[[], None], /,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:  # fmt: skip
        """Return dQ, and put dK and dV into the flat sums.

        The second result is :attr:`ring_torch.records.Grads.row_stats`, or ``None`` if the launch
        does not compute ``delta``.

        Args:
            q: All of a rank's rows, as ``dout``, ``out`` and ``lse`` are.
            columns: Returns views of some columns of the gathered K/V.
            dout: Gradient of ``out``.
            out: Final results of the rows.
            lse: Final log-sum-exp of the rows.
            sums: Buffer in the order of :class:`ring_torch.buffers.KeyGradBuffer`.
            new_dq: Allocates dQ.
            drop_keys: Frees the gathered K/V. It is called once all launches that read them are
                queued; if it is called before ``new_dq``, dQ may take their memory.
        """


class SplitBackward(Protocol):
    """Backward of a kernel in two stages, so that dK/dV are rounded once, after they are summed.

    The first adds to float32 sums ``[B, K, m, D]`` and ``[B, K, m, Dv]``. The kernel may order the
    numbers inside each of its tiles of keys as it likes: sums of several launches, and of several
    ranks, are added number by number. The second rounds them into gradients.
    """

    #: Keys of a tile. Sums of a part of a tile cannot be told from others of it.
    tile: int

    def applies(self, plan: Plan, request: Request, *, splits: bool, tile: int) -> bool:
        """Return True if every launch of a call over gathered keys can use the split backward.

        It is asked for bands alone, without segment ids, predicates or slopes, and all ranks must
        get the same answer. ``splits`` and ``tile`` are those options of their programs
        (:func:`ring_core.gather_program`).
        """

    def accumulate(
        self, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, item: WorkItem, params: KernelParams,
        dq: Tensor, sums: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        """Run an item's backward: write ``dq``, and add to the sums of dK and dV."""

    def round(
        self, sums: tuple[Tensor, Tensor], dsts: tuple[Tensor, Tensor], params: KernelParams
    ) -> None:
        """Write the rounded sums into ``dsts``: ``dk [B, m, K, D]``, ``dv [B, m, K, Dv]``."""

    def prepare_round(
        self, _spans: OwnSpans, _keys: KVPayload, _params: KernelParams, /
    ) -> Callable[[Tensor, Tensor, Tensor], None] | None:
        """Return a launch that rounds the sums of a rank's own keys into whole ``dk`` and ``dv``.

        It is called as ``(sums, dk, dv)``, with the buffer of :class:`BackwardLaunch`; ``_keys``
        is the shape of own K/V. ``None`` means that each span has to be rounded by :meth:`round`.
        """
        return None

    def prepare(
        self, _rows: QueryBlock, _columns: KeyBlock, _upstream: BackwardInputs,
        _items: Sequence[WorkItem], _params: KernelParams, /,
    ) -> BackwardLaunch | None:  # fmt: skip
        """Return one launch of all items for later calls with tensors like these.

        ``None`` means that every call has to be launched item by item.
        """
        return None


class Kernel(Protocol):
    """A stateless implementation of attention over a work item, forward and backward.

    A kernel has to define ``capabilities``, ``attend`` and ``grads``. The other methods have
    defaults: it is available everywhere, :func:`merge_into` merges its results, and torch adds its
    gradients.
    """

    capabilities: Capabilities  # calls that do not fit these never reach it
    #: True if its backward takes ``delta``; otherwise it computes that from the final ``out``.
    needs_delta: bool = True
    #: True if a launch that is a whole call can add the sinks (``KernelParams.sinks``).
    adds_sinks: bool = False
    #: True if its launches can be prepared (:meth:`prepare_forward`).
    prepares: bool = False
    #: True if it reads values of tensors on the host, which a CUDA graph cannot hold.
    reads_on_host: bool = False
    #: The split backward, if it has one.
    split_backward: SplitBackward | None = None
    #: About how many seconds the first call with a predicate compiles; 0 if nothing is compiled.
    predicate_compile_seconds: int = 0
    #: True if it is the fastest on GPUs before Hopper.
    leads_before_hopper: bool = False

    def unavailable_reason(self) -> str | None:
        """Return why it cannot run on this machine, or ``None``.

        It is asked only for calls on the devices of its capabilities.
        """
        return None

    def config_refusals(
        self, _config: KernelConfig, _request: Request, _program: RingProgram, /
    ) -> tuple[str, ...]:
        """Return the reasons why it cannot run a call with these settings on this machine.

        They come on top of what its capabilities refuse.
        """
        return ()

    def attend(
        self, rows: QueryBlock, columns: KeyBlock, item: WorkItem, params: KernelParams,
        out: AttentionState | None = None,
    ) -> AttentionState:  # fmt: skip
        """Return attention over the item's keys alone, with ``out`` in the inputs' dtype or wider.

        In a row that sees nothing ``lse`` is ``-inf`` and ``out`` may be anything. The argument
        ``out`` is memory that the kernel may write the results to; it may also return new tensors.
        """

    def prepare_forward(
        self, _rows: QueryBlock, _columns: KeyBlock, _dst: AttentionState, _item: WorkItem,
        _params: KernelParams, /,
    ) -> ForwardLaunch | None:  # fmt: skip
        """Return an item's forward for later calls with tensors like these.

        ``_dst`` is like the results that it is to write. It is asked after :meth:`attend` has run
        on such tensors, for items without documents whose rows all see something. ``None`` means
        that every call has to go through :meth:`attend`. Such a launch leaves infinities in ``lse``
        where scores are not finite; all launches of a rank are followed by one
        :meth:`mark_nonfinite`.
        """
        return None

    def mark_nonfinite(self, _lse: Tensor, /) -> None:
        """Write NaN into ``lse``, in place, where a prepared launch has left an infinity."""
        return

    def grads(
        self, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, item: WorkItem, params: KernelParams,
        out: Tensor | None = None,
    ) -> Grads:  # fmt: skip
        """Return the gradients of the item alone.

        ``upstream`` has the final ``out`` and ``lse``, over all keys. The argument ``out`` is
        memory that the kernel may write ``dq`` to; it may also return a new tensor.
        """

    def prepare_backward(
        self, _rows: QueryBlock, _columns: KeyBlock, _upstream: BackwardInputs, _dq: Tensor,
        _item: WorkItem, _params: KernelParams, /,
    ) -> ItemBackward | None:  # fmt: skip
        """Return an item's backward for later calls with tensors like these.

        It is asked after :meth:`grads` has run on such tensors, for items as those of
        :meth:`prepare_forward`. ``None`` means that every call has to go through :meth:`grads`.
        """
        return None

    def prepare_partial(
        self, _rows: QueryBlock, _columns: KeyBlock, _item: WorkItem, _params: KernelParams, /
    ) -> tuple[PartialForward, PartialBackward] | None:
        """Return both launches of an item whose results are joined with those of other items.

        It is asked as :meth:`prepare_forward`, of kernels that return tensors of their own.
        """
        return None

    def attend_into(
        self, rows: QueryBlock, columns: KeyBlock, item: WorkItem, params: KernelParams,
        into: AttentionState,
    ) -> None:  # fmt: skip
        """Attend to the item's keys and merge the result into ``into``, in place.

        ``into.lse`` is ``-inf`` in rows that have seen nothing so far.
        """
        merge_into(into, *self.attend(rows, columns, item, params))

    def grads_into(
        self, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, item: WorkItem, params: KernelParams,
        row_grads: QueryGrads, column_grads: KeyGrads,
    ) -> None:  # fmt: skip
        """Compute the item's gradients and add them to the accumulators, in place."""
        grads = self.grads(rows, columns, upstream, item, params)
        # Accumulators are wider than results: rounding happens once an item, and not once more a
        # sum.
        row_grads.dq.add_(grads.dq)
        column_grads.dk.add_(grads.dk)
        column_grads.dv.add_(grads.dv)
        if row_grads.dbias is not None:
            row_grads.dbias.add_(not_none(grads.dbias))


@dataclass(frozen=True)
class Selection:
    """The kernel chosen for a call, with the reasons against others and the expected times."""

    kernel: Kernel
    rejected: tuple[tuple[Capabilities, tuple[str, ...]], ...]
    expected: Expected = UNKNOWN
    has_predicate: bool = False

    def describe(self) -> str:
        """Return the lines of ``explain`` about the kernel, and about those not taken."""
        name = self.kernel.capabilities.name
        lines = [f"kernel {name}{self.expected.time_and_source(name)}"]
        if self.has_predicate:
            seconds = self.kernel.predicate_compile_seconds
            compile_time = f"about {seconds} s to compile, forward and backward"
            lines.append(
                f"  a predicate that is new to it: {compile_time if seconds else 'nothing to compile'}"
            )
        lines += [
            f"  not {capabilities.name} ({', '.join(capabilities.devices) or 'any device'}): {'; '.join(reasons)}"
            for capabilities, reasons in self.rejected
        ]
        return "\n".join(lines)


def merge_into(into: AttentionState, out: Tensor, lse: Tensor) -> None:
    """Merge a kernel's ``(out, lse)`` into an accumulated state, in place.

    It computes :meth:`AttentionState.merge`; with Triton one kernel does so on GPUs, in float32.
    """
    if out.is_cuda and into.lse.dtype == torch.float32 and has_triton():
        from ring_torch.merge_ops import merge_on_gpu

        merge_on_gpu(into.out, into.lse, out, lse)
    else:
        into.merge(out, lse)


def mark_infinities(lse: Tensor) -> Tensor:
    """Turn infinities in ``lse`` into NaN, in place, where every row sees something.

    A score was not finite there.
    """
    return lse.nan_to_num_(nan=torch.nan, posinf=torch.nan, neginf=torch.nan)


def merge_of_spans(
    like: Tensor, spans: Sequence[Span], *, first: bool, last: bool
) -> Callable[..., None]:
    """Return a merge ``(out, low, lse, *results)`` of one or two launches' ``(out, lse)``.

    It merges each result into the sums, in the accumulators' dtype, and ``lse``. The sums are
    ``out`` itself if that is as wide. Otherwise ``out``, of 16 bits, holds the upper halves of
    float32 sums until the last merge, which rounds them, and ``low``, another tensor like it, the
    lower ones. Together they hold the exact float32 sums. It serves tensors on the device of
    ``like``, of the shapes, strides and alignments that it is called with first.

    Args:
        like: Any tensor of the call: on a GPU with Triton a kernel merges, otherwise torch.
        spans: The rows of each result. Each sees something, so that an infinity in ``lse`` comes
            from scores that are not finite: NaN is merged, as :meth:`Kernel.mark_nonfinite` would
            write. In a first merge one result that has all rows may lie in ``out`` itself.
        first: True if there are no sums yet. Rows in no span then see nothing.
        last: True if no other merge follows. A merge that is first, too, does not access ``low``.
    """
    if like.is_cuda and has_triton():
        from ring_torch.merge_ops import merge_of_spans_on_gpu

        return merge_of_spans_on_gpu(spans, first=first, last=last)

    def merge_in_torch(out: Tensor, low: Tensor, lse: Tensor, *results: Tensor) -> None:
        is_split = out.dtype != lse.dtype
        if first:
            sums = lse.new_zeros(out.shape)
            lse.fill_(-torch.inf)
        elif is_split:  # halves beside each other are float32 numbers, the lower one first
            halves = torch.stack([x.view(torch.int16) for x in (low, out)], dim=-1)
            sums = halves.view(torch.float32).squeeze(-1)
        else:
            sums = out
        into = AttentionState(sums, lse)
        for (start, n), result, part_lse in zip(spans, results[::2], results[1::2], strict=True):
            merge_into(into.take(slice(start, start + n)), result, mark_infinities(part_lse))
        if last or not is_split:
            out.copy_(sums)
        else:
            halves = sums.view(torch.int16).unflatten(-1, (-1, 2))
            for x, half in zip((low, out), halves.unbind(-1), strict=True):
                x.view(torch.int16).copy_(half)

    return merge_in_torch


class AccumulatingKernel(Kernel, Protocol):
    """A kernel that merges and adds as it computes.

    It has to define ``attend_into`` and ``grads_into`` in place of ``attend`` and ``grads``.
    """

    def attend(
        self, rows: QueryBlock, columns: KeyBlock, item: WorkItem, params: KernelParams,
        out: AttentionState | None = None,
    ) -> AttentionState:  # fmt: skip
        """Return attention over the item's keys, in the accumulators' dtype."""
        del out  # it is narrower
        # The identity of merging, so what is merged into it is the item's own result.
        into = empty_state(rows.q, columns.v.shape[3])
        self.attend_into(rows, columns, item, params, into)
        return into

    def grads(
        self, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, item: WorkItem, params: KernelParams,
        out: Tensor | None = None,
    ) -> Grads:  # fmt: skip
        """Return the item's gradients, in the accumulators' dtype."""
        del out  # ``grads_into`` adds to what it is given
        dtype = acc_dtype(rows.q.dtype)
        dq, dk, dv = (
            torch.zeros(x.shape, dtype=dtype, device=x.device)
            for x in (rows.q, columns.k, columns.v)
        )
        dbias = zero_bias_grad(rows, params, dtype)
        self.grads_into(
            rows, columns, upstream, item, params, QueryGrads(dq, dbias), KeyGrads(dk, dv)
        )
        return Grads(dq, dk, dv, dbias)
