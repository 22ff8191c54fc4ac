"""What a kernel is: one work item, no rank, no group, no step in sight.

Shapes: an item has ``n`` query rows and ``m`` key columns; ``q [B, n, H, D]``, ``k [B, m, K, D]``,
``v [B, m, K, Dv]``, ``out [B, n, H, Dv]``, ``lse`` and ``delta [B, H, n]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ring_core import Capabilities, Mask, WorkItem

_MERGED_ROWS = 512


@dataclass(frozen=True)
class Params:
    """What all items of a call share."""

    mask: Mask
    scale: float
    softcap: float | None
    dropout_p: float
    dropout_seed: int
    block_q: int | None
    block_k: int | None
    boundaries: Tensor | None  # document and chunk borders, for predicates


class Rows(NamedTuple):
    """Queries and all that belongs to them."""

    q: Tensor
    indices: Tensor | None  # [n] global index of each query, where an option needs it
    position: Tensor | None  # [n] where it stands among the keys, where an option needs it
    segments: Tensor | None  # [B, n] int32
    bias: Tensor | None  # [B or 1, H or 1, n, T_kv]
    slopes: Tensor | None  # [B or 1, H]

    def take(self, part: slice) -> Rows:
        """The same for a slice of the queries."""
        segments = None if self.segments is None else self.segments[:, part]
        bias = None if self.bias is None else self.bias[:, :, part]
        return Rows(
            self.q[:, part],
            _part(self.indices, part),
            _part(self.position, part),
            segments,
            bias,
            self.slopes,
        )


class Columns(NamedTuple):
    """Keys and values and all that belongs to them."""

    k: Tensor
    v: Tensor
    position: Tensor | None  # [m] global index of each key, where an option needs it
    segments: Tensor | None  # [B, m] int32

    def take(self, part: slice) -> Columns:
        """The same for a slice of the keys."""
        segments = None if self.segments is None else self.segments[:, part]
        return Columns(self.k[:, part], self.v[:, part], _part(self.position, part), segments)


class Result(NamedTuple):
    """Where a forward kernel merges its part; wide floats."""

    out: Tensor
    lse: Tensor

    def take(self, part: slice) -> Result:
        """The same for a slice of the rows."""
        return Result(self.out[:, part], self.lse[:, :, part])


class Upstream(NamedTuple):
    """What the backward of some rows starts from; ``lse`` and ``delta`` are global."""

    dout: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor  # rowsum(dout * out) - dlse

    def take(self, part: slice) -> Upstream:
        """The same for a slice of the rows."""
        return Upstream(
            self.dout[:, part], self.out[:, part], self.lse[:, :, part], self.delta[:, :, part]
        )


class RowGrads(NamedTuple):
    """Accumulators of the rows' gradients; wide floats."""

    dq: Tensor
    dbias: Tensor | None

    def take(self, part: slice) -> RowGrads:
        """The same for a slice of the rows."""
        return RowGrads(self.dq[:, part], None if self.dbias is None else self.dbias[:, :, part])


class ColumnGrads(NamedTuple):
    """Accumulators of the columns' gradients; wide floats."""

    dk: Tensor
    dv: Tensor

    def take(self, part: slice) -> ColumnGrads:
        """The same for a slice of the columns."""
        return ColumnGrads(self.dk[:, part], self.dv[:, part])


class Kernel(Protocol):
    """A way to compute work items. Stateless."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; it is only ever given calls that fit."""
        ...

    def forward(
        self, rows: Rows, columns: Columns, item: WorkItem, params: Params, into: Result
    ) -> None:
        """Attend and merge into ``into``; its ``lse`` is ``-inf`` where nothing was seen so far."""
        ...

    def backward(
        self, rows: Rows, columns: Columns, upstream: Upstream, item: WorkItem, params: Params,
        row_grads: RowGrads, column_grads: ColumnGrads,
    ) -> None:  # fmt: skip
        """Add the item's gradients to the accumulators."""
        ...


def merge_into(into: Result, out: Tensor, lse: Tensor) -> None:
    """Merge a kernel's ``(out, lse)`` into what was accumulated, in place.

    The formula of :func:`ring_core.merge`; outputs whose ``lse`` is ``-inf`` are never read.
    """
    for start in range(0, out.shape[1], _MERGED_ROWS):  # a bounded number of rows in temporaries
        rows = slice(start, start + _MERGED_ROWS)
        _merge_rows(into.take(rows), out[:, rows], lse[:, :, rows])


def _merge_rows(into: Result, out: Tensor, lse: Tensor) -> None:
    lse = lse.to(into.lse.dtype)
    merged = torch.logaddexp(into.lse, lse)
    safe = merged.masked_fill(merged == -torch.inf, 0.0)
    old = (into.lse - safe).exp_().transpose(1, 2).unsqueeze(-1)
    new = (lse - safe).exp_().transpose(1, 2).unsqueeze(-1)
    into.out.mul_(old)
    into.out.add_(torch.where(new > 0, out * new, 0.0))
    into.lse.copy_(merged)


def _part(x: Tensor | None, part: slice) -> Tensor | None:
    return None if x is None else x[part]
