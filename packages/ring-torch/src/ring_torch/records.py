"""Records that kernels and strategies exchange: queries, keys, results, gradients, parameters.

Shapes: an item has ``n`` query rows and ``m`` key columns; ``q [B, n, H, D]``, ``k [B, m, K, D]``,
``v [B, m, K, Dv]``, ``out [B, n, H, Dv]``, ``lse`` and ``delta [B, H, n]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ring_core import Mask, WorkItem
from ring_core.plan.tile_mask import BlockGeometry


@dataclass(frozen=True)
class KernelParams:
    """Parameters that all work items of a call share."""

    mask: Mask
    scale: float
    softcap: float | None = None
    dropout_p: float = 0.0
    block_q: int | None = (
        None  # queries, and keys, of a kernel's block; None lets the kernel choose
    )
    block_k: int | None = None
    fused_backward: bool = False  # as in KernelConfig
    boundaries: Tensor | None = None  # positions of document and chunk borders, for predicates
    blocks: BlockGeometry | None = None  # tiles of a predicate
    deterministic: bool = False
    bias_grad: bool = False  # the bias needs its gradient
    bias_masks: bool = False  # the bias holds a boolean mask: blocks that are all -inf are skipped
    shifts_bias: bool = False  # each row of the bias is shifted (QueryBlock.bias_shift)
    needs_lse: bool = True  # if false, a kernel may leave the lse that it is given uninitialised
    segment_ids: bool = False  # rows and columns come with segment ids


Span = tuple[int, int]  # first index, and how many


def span_of(indices: slice) -> Span:
    """Return a slice of one step as a span, in the form of :meth:`torch.Tensor.narrow`."""
    return indices.start, indices.stop - indices.start


class PositionRun(NamedTuple):
    """Tokens ``start <= n < stop`` at consecutive positions, the first of which is ``position``."""

    start: int
    stop: int
    position: int


def runs_of(positions: npt.NDArray[np.int64]) -> tuple[PositionRun, ...]:
    """Return the maximal runs of consecutive positions in a list of positions."""
    if positions.size == 0:
        return ()
    edges = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), positions.size]
    return tuple(PositionRun(a, b, int(positions[a])) for a, b in pairwise(edges))


def _runs_in(runs: tuple[PositionRun, ...], tokens: slice) -> tuple[PositionRun, ...]:
    """Return the runs inside a slice of the tokens, counted from its start."""
    cut = ((max(x.start, tokens.start), min(x.stop, tokens.stop), x) for x in runs)
    return tuple(
        PositionRun(a - tokens.start, b - tokens.start, x.position + a - x.start)
        for a, b, x in cut
        if a < b
    )


class Dropout(NamedTuple):
    """Seed of dropout, and the heads, on which its random numbers depend beside positions."""

    seed: int
    heads: Tensor | None = None  # int64 [H], global query heads; None counts from 0


class QueryBlock(NamedTuple):
    """Queries, and the rows of other inputs that belong to them."""

    q: Tensor
    sinks: Tensor | None = None  # float32 [H], for a launch that has to add them
    segments: Tensor | None = None  # [B, n] int32
    indices: Tensor | None = None  # [n] global index of each query, if an option needs it
    position: Tensor | None = None  # [n] its position among the keys, if an option needs it
    bias: Tensor | None = None  # [B or 1, H or 1, n, T_kv]
    slopes: Tensor | None = None  # [B or 1, H]
    runs: tuple[PositionRun, ...] = ()  # of their positions, if an option needs these
    #: ``[B or 1, H or 1, n]``, accumulators' dtype: the number to subtract from each row of the
    #: bias, as scores lose their digits beside numbers such as -1e10. The softmax stays the same;
    #: kernels return the ``lse`` of shifted scores.
    bias_shift: Tensor | None = None
    dropout: Dropout | None = None

    def take(self, tokens: slice) -> QueryBlock:
        """Return the block of a slice of the queries, as views."""
        if tokens.start == 0 and tokens.stop == self.q.shape[1]:
            return self
        span = tokens.start, tokens.stop - tokens.start
        return QueryBlock(
            self.q.narrow(1, *span),
            self.sinks,
            None if self.segments is None else self.segments[:, tokens],
            None if self.indices is None else self.indices[tokens],
            None if self.position is None else self.position[tokens],
            None if self.bias is None else self.bias[:, :, tokens],
            self.slopes,
            _runs_in(self.runs, tokens) if self.runs else (),
            None if self.bias_shift is None else self.bias_shift[:, :, tokens],
            self.dropout,
        )


class KeyBlock(NamedTuple):
    """Keys and values, with their positions and segment ids."""

    k: Tensor
    v: Tensor
    segments: Tensor | None = None  # [B, m] int32
    position: Tensor | None = None  # [m] global index of each key, if an option needs it
    aligned8: bool = False  # columns 8 m to 8 m + 7 are at positions 8 n to 8 n + 7, for each m
    runs: tuple[PositionRun, ...] = ()  # of their positions, if an option needs these

    def take(self, tokens: slice) -> KeyBlock:
        """Return the block of a slice of the keys, as views."""
        if tokens.start == 0 and tokens.stop == self.k.shape[1]:
            return self
        span = tokens.start, tokens.stop - tokens.start
        return KeyBlock(
            self.k.narrow(1, *span),
            self.v.narrow(1, *span),
            None if self.segments is None else self.segments[:, tokens],
            None if self.position is None else self.position[tokens],
            self.aligned8 and tokens.start % 8 == 0,
            _runs_in(self.runs, tokens) if self.runs else (),
        )


class AttentionState(NamedTuple):
    """Attention over some keys, ``(out, lse)``, which merges with that over others."""

    out: Tensor
    lse: Tensor

    def take(self, tokens: slice) -> AttentionState:
        """Return the record of a slice of the rows, as views."""
        span = tokens.start, tokens.stop - tokens.start
        return AttentionState(self.out.narrow(1, *span), self.lse.narrow(2, *span))


class BackwardInputs(NamedTuple):
    """Inputs of the backward of some rows: the final results, and the gradient of ``out``.

    ``out``, ``lse`` and ``delta`` are those over all keys, not of an item. ``delta`` is left out
    for kernels that compute it themselves (:attr:`Kernel.needs_delta`).
    """

    dout: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor | None  # rowsum(dout * out) - dlse

    def take(self, tokens: slice) -> BackwardInputs:
        """Return the record of a slice of the rows, as views."""
        span = tokens.start, tokens.stop - tokens.start
        delta = None if self.delta is None else self.delta.narrow(2, *span)
        return BackwardInputs(
            self.dout.narrow(1, *span), self.out.narrow(1, *span), self.lse.narrow(2, *span), delta
        )


class QueryGrads(NamedTuple):
    """Accumulators of gradients of query rows, in the accumulators' dtype."""

    dq: Tensor
    dbias: Tensor | None

    def take(self, tokens: slice) -> QueryGrads:
        """Return the record of a slice of the rows, as views."""
        return QueryGrads(
            self.dq[:, tokens], None if self.dbias is None else self.dbias[:, :, tokens]
        )


def zero_bias_grad(rows: QueryBlock, params: KernelParams, dtype: torch.dtype) -> Tensor | None:
    """Allocate the accumulator of the bias's gradient; ``None`` if none is needed."""
    if rows.bias is None or not params.bias_grad:
        return None
    return torch.zeros(rows.bias.shape, dtype=dtype, device=rows.bias.device)


class KeyGrads(NamedTuple):
    """Accumulators of gradients of keys and values, in the accumulators' dtype."""

    dk: Tensor
    dv: Tensor

    def take(self, tokens: slice) -> KeyGrads:
        """Return the accumulators of a slice of the keys, as views."""
        return KeyGrads(self.dk[:, tokens], self.dv[:, tokens])

    def put(self, item: WorkItem, dk: Tensor, dv: Tensor) -> None:
        """Add an item's dK/dV, which are rounded or not, to the sums."""
        for total, grad in zip(self.take(item.k_slice), (dk, dv), strict=True):
            total.add_(grad)


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of accumulators: float64 for float64 inputs, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Inputs(NamedTuple):
    """Tensors of a call, this rank's shards as given; the last is computed, not given."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_ids: Tensor | None
    k_ids: Tensor | None
    sinks: Tensor | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    bias_shift: Tensor | None = None  # [B or 1, H or 1, T_local], accumulators' dtype

    def key_tensors(self) -> list[Tensor]:
        """Return the tensors that travel for keys: k, v and, if there are any, segment ids.

        They need no gradients, as kernels take them.
        """
        return [
            x.detach() if x.requires_grad else x
            for x in (self.k, self.v, self.k_ids)
            if x is not None
        ]


#: Number of fields of :class:`Inputs` that the caller gives.
GIVEN = len(Inputs._fields) - 1


def has_unit_stride(x: Tensor) -> bool:
    """Return True if the last dimension is contiguous, as kernels take for granted."""
    return x.stride(-1) == 1 or x.shape[-1] == 1


def is_aligned(x: Tensor) -> bool:
    """Return True if all rows of a tensor begin at multiples of 16 bytes."""
    assert has_unit_stride(x)
    offsets = x.data_ptr()  # or-ed with all strides: a bit below 16 is set if one of them has it
    for stride in x.stride()[:-1]:
        offsets |= stride * x.itemsize
    return offsets % 16 == 0


def with_unit_strides(inputs: Inputs) -> Inputs:
    """Return the tensors, copied where the last dimension is strided, which kernels cannot read."""
    return Inputs._make(
        x if x is None or x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
        for x in inputs
    )


class Grads(NamedTuple):
    """Gradients of a work item, or of all of a rank's tensors, in the inputs' dtype or wider.

    ``row_stats`` is ``(lse, delta)`` of all rows, ``delta = rowsum(dout * out)``, float32, if the
    kernel computed ``delta``: both ``[B, H, T_local]`` or, of one sequence, in equal parts of the
    rows, ``[parts, H, n]``.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    row_stats: tuple[Tensor, Tensor] | None = None


#: How a forward hands over ``(out, lse)``: merged into sums in the accumulators' dtype, written
#: into memory that it is given, or returned in memory of its own.
Mode = Literal["merge", "write", "return"]


class Forward(NamedTuple):
    """Launch of a kernel's forward over a work item.

    It is made when a call is resolved, and run by every call. It holds options and slices, no
    tensors.

    Attributes:
        item: The item.
        run: Called as ``run(rows, columns, into, mode, key)`` with the item's rows and columns. It
            returns ``into`` or, in mode ``"return"``, where that is ``None``, or where results do
            not fit there, its own tensors, in the inputs' dtype. In a row that sees nothing ``lse``
            is ``-inf``, and ``out``, unless it is merged, may be anything. Runs with equal keys
            have tensors of equal strides and alignment
            (:func:`ring_torch.launches.cache.tensors_key`): what the first has found out for a key
            may be remembered, so that those after it do less.
        modes: The modes that it has.
        marks: True if it leaves infinities in ``lse`` where scores are not finite, while every row
            sees something: whoever finishes the pass makes them NaN.
    """

    item: WorkItem
    run: Callable[[QueryBlock, KeyBlock, AttentionState | None, Mode, object], AttentionState]
    modes: tuple[Mode, ...]
    marks: bool = False


class Backward(NamedTuple):
    """Launch of a kernel's backward over work items that read the same columns, likewise.

    Attributes:
        run: Called as ``run(rows, held, upstream, row_sums, column_sums)`` with all rows, or those
            of the only item, and all columns. ``held`` holds the columns and is emptied when all
            launches that read them are queued, so that results may take their memory. Gradients
            are left in the sums, :class:`ring_torch.accumulate.Rows` and
            :data:`ring_torch.accumulate.ColumnSums`. It returns :attr:`Grads.row_stats`, or
            ``None`` if ``delta`` was not computed.
        adds: True if it adds to the sums itself, in the accumulators' dtype.
    """

    run: Callable[..., tuple[Tensor, Tensor] | None]
    adds: bool


#: The dimension of heads, for each field that is cut into groups of heads.
_HEADS = dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), 2) | {"lse": 1, "delta": 1}


def head_group[
    T: (Inputs, QueryBlock, KeyBlock, AttentionState, BackwardInputs, QueryGrads, KeyGrads)
](record: T, n: int, groups: int) -> T:
    """Return views of the ``n``-th of ``groups`` equal groups of heads.

    Records with a bias or slopes cannot be cut.
    """
    if groups == 1:
        return record
    fields: dict[str, Any] = {name: x for name, x in record._asdict().items() if x is not None}
    assert not fields.keys() & {"bias", "alibi_slopes", "slopes", "dbias"}
    for name in fields.keys() & _HEADS.keys():
        size = fields[name].shape[_HEADS[name]] // groups
        fields[name] = fields[name].narrow(_HEADS[name], n * size, size)
    return record._replace(**fields)


def folded(sinks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sinks ``[H]`` or ``[H, n]`` as one equivalent logit for each head, ``[H]``."""
    sinks = sinks if sinks.dtype == dtype else sinks.to(dtype)
    return sinks if sinks.ndim == 1 else sinks.logsumexp(dim=1)


def padded(x: Tensor, dim: int) -> Tensor:
    """Return a tensor as libraries take it: padded with zeros to ``dim``, and 16-byte aligned.

    Zeros in the last dimension change no score and no output.
    """
    x = x if x.shape[-1] == dim else torch.nn.functional.pad(x, (0, dim - x.shape[-1]))
    return aligned(x)


def with_own_rows(q: Tensor) -> Tensor:
    """Return queries without strides of 0, for which FlashAttention-4 does not compile."""
    if 0 in q.stride() and any(
        stride == 0 and size > 1 for stride, size in zip(q.stride(), q.shape, strict=True)
    ):
        return q.clone(memory_format=torch.contiguous_format)
    return q


def aligned(x: Tensor) -> Tensor:
    """Return a tensor whose rows all begin at multiples of 16 bytes, as libraries need.

    Rows are contiguous already (:func:`with_unit_strides`).
    """
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def narrowed(x: Tensor, dim: int) -> Tensor:
    """Return a tensor without the columns that were added as padding."""
    return x if x.shape[-1] == dim else x[..., :dim].contiguous()
