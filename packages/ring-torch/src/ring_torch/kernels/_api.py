"""What a kernel is: one work item, no rank, no group, no step in sight.

Shapes: an item has ``n`` query rows and ``m`` key columns; ``q [B, n, H, D]``, ``k [B, m, K, D]``,
``v [B, m, K, Dv]``, ``out [B, n, H, Dv]``, ``lse`` and ``delta [B, H, n]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ring_core import BlockGeometry, Capabilities, Mask, Plan, WorkItem

_MERGED_ROWS = 512


@dataclass(frozen=True)
class Params:
    """What all items of a call share."""

    mask: Mask
    scale: float
    softcap: float | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    block_q: int | None = None
    block_k: int | None = None
    fused_backward: bool = False
    boundaries: Tensor | None = None  # document and chunk borders, for predicates
    blocks: BlockGeometry | None = None  # a predicate's tiles
    deterministic: bool = False
    bias_grad: bool = False  # the bias wants its gradient
    bias_masks: bool = False  # the bias says a mask, whose hidden blocks are to be skipped
    sinks: Tensor | None = None  # float32 [H], for a launch that is to add them


class Run(NamedTuple):
    """Tokens ``start <= n < stop`` whose positions count on one by one, from ``position``."""

    start: int
    stop: int
    position: int


def runs_of(positions: npt.NDArray[np.int64]) -> tuple[Run, ...]:
    """The runs of tokens at some positions, as few as there are."""
    if positions.size == 0:
        return ()
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    edges = [0, *cuts.tolist(), positions.size]
    return tuple(Run(a, b, int(positions[a])) for a, b in pairwise(edges))


def _runs_in(runs: tuple[Run, ...], part: slice) -> tuple[Run, ...]:
    """The runs of a slice of the tokens."""
    cut = ((max(x.start, part.start), min(x.stop, part.stop), x) for x in runs)
    return tuple(
        Run(a - part.start, b - part.start, x.position + a - x.start) for a, b, x in cut if a < b
    )


class Rows(NamedTuple):
    """Queries and all that belongs to them."""

    q: Tensor
    indices: Tensor | None  # [n] global index of each query, where an option needs it
    position: Tensor | None  # [n] where it stands among the keys, where an option needs it
    segments: Tensor | None  # [B, n] int32
    bias: Tensor | None  # [B or 1, H or 1, n, T_kv]
    slopes: Tensor | None  # [B or 1, H]
    runs: tuple[Run, ...] = ()  # of their positions, where an option needs these

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
            _runs_in(self.runs, part),
        )

    def share(self, n: int, groups: int) -> Rows:
        """The same for the ``n``-th of so many groups of heads; without bias and slopes only."""
        assert groups == 1 or (self.bias is None and self.slopes is None)
        return self._replace(q=head_group(self.q, n, groups, dim=2))


class Columns(NamedTuple):
    """Keys and values and all that belongs to them."""

    k: Tensor
    v: Tensor
    position: Tensor | None  # [m] global index of each key, where an option needs it
    segments: Tensor | None  # [B, m] int32
    eights: bool = False  # positions are known to come in eights: 8 n to 8 n + 7, at 8 m
    runs: tuple[Run, ...] = ()  # of their positions, where an option needs these

    def take(self, part: slice) -> Columns:
        """The same for a slice of the keys."""
        segments = None if self.segments is None else self.segments[:, part]
        position, eights = _part(self.position, part), self.eights and part.start % 8 == 0
        runs = _runs_in(self.runs, part)
        return Columns(self.k[:, part], self.v[:, part], position, segments, eights, runs)

    def share(self, n: int, groups: int) -> Columns:
        """The same for the ``n``-th of so many groups of heads."""
        k, v = (head_group(x, n, groups, dim=2) for x in (self.k, self.v))
        return self._replace(k=k, v=v)


class Result(NamedTuple):
    """Where a forward kernel merges its part; wide floats."""

    out: Tensor
    lse: Tensor

    def take(self, part: slice) -> Result:
        """The same for a slice of the rows."""
        return Result(self.out[:, part], self.lse[:, :, part])

    def share(self, n: int, groups: int) -> Result:
        """The same for the ``n``-th of so many groups of heads."""
        return Result(
            head_group(self.out, n, groups, dim=2), head_group(self.lse, n, groups, dim=1)
        )


class Upstream(NamedTuple):
    """What the backward of some rows starts from; ``lse`` and ``delta`` are global.

    ``delta`` is left out for kernels that compute it themselves (:attr:`Kernel.needs_delta`).
    """

    dout: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor | None  # rowsum(dout * out) - dlse

    def take(self, part: slice) -> Upstream:
        """The same for a slice of the rows."""
        delta = None if self.delta is None else self.delta[:, :, part]
        return Upstream(self.dout[:, part], self.out[:, part], self.lse[:, :, part], delta)

    def share(self, n: int, groups: int) -> Upstream:
        """The same for the ``n``-th of so many groups of heads."""
        dout, out = (head_group(x, n, groups, dim=2) for x in (self.dout, self.out))
        delta = None if self.delta is None else head_group(self.delta, n, groups, dim=1)
        return Upstream(dout, out, head_group(self.lse, n, groups, dim=1), delta)


class RowGrads(NamedTuple):
    """Accumulators of the rows' gradients; wide floats."""

    dq: Tensor
    dbias: Tensor | None

    def take(self, part: slice) -> RowGrads:
        """The same for a slice of the rows."""
        return RowGrads(self.dq[:, part], None if self.dbias is None else self.dbias[:, :, part])

    def share(self, n: int, groups: int) -> RowGrads:
        """The same for the ``n``-th of so many groups of heads; without bias only."""
        assert groups == 1 or self.dbias is None
        return self._replace(dq=head_group(self.dq, n, groups, dim=2))


class ColumnGrads(NamedTuple):
    """Accumulators of the columns' gradients; wide floats."""

    dk: Tensor
    dv: Tensor

    def take(self, part: slice) -> ColumnGrads:
        """The same for a slice of the columns."""
        return ColumnGrads(self.dk[:, part], self.dv[:, part])


class ItemGrads(NamedTuple):
    """The gradients of one item alone, in the inputs' dtype or wider."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None


class Parts(Protocol):
    """A kernel's backward by parts: sums of several launches and ranks are rounded once.

    The sums are ``[B, K, m, D]`` and ``[B, K, m, Dv]``, float32, in an order of the kernel's own
    inside each of its tiles of keys.
    """

    def can_sum(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, params: Params) -> bool:
        """Whether it can run all launches of a call over gathered keys, on all ranks alike."""
        ...

    def add_sums(
        self, rows: Rows, columns: Columns, upstream: Upstream, item: WorkItem, params: Params,
        dq: Tensor, sums: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        """Write ``dq`` and add to the sums of dK and dV."""
        ...

    def round(
        self, sums: tuple[Tensor, Tensor], places: tuple[Tensor, Tensor], params: Params
    ) -> None:
        """Write ``dk [B, m, K, D]`` and ``dv [B, m, K, Dv]``, in the inputs' dtype."""
        ...


class Kernel(Protocol):
    """A way to compute work items. Stateless."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; it is only ever given calls that fit."""
        ...

    @property
    def parts(self) -> Parts | None:
        """Its backward by parts, if it has one."""
        ...

    @property
    def needs_delta(self) -> bool:
        """Whether its backward is given ``delta``, or computes it from the global ``out``."""
        ...

    @property
    def adds_sinks(self) -> bool:
        """Whether a launch that is all of a call can add its sinks (``Params.sinks``)."""
        ...

    def missing(self) -> str | None:
        """Why it cannot run on this machine; ``None`` if it can. Only asked for its devices."""
        ...

    def attend(
        self, rows: Rows, columns: Columns, item: WorkItem, params: Params,
        place: Result | None = None,
    ) -> Result:  # fmt: skip
        """``(out, lse)`` of the item alone; ``out`` in the inputs' dtype or a wider one.

        Where a row sees nothing ``lse`` is ``-inf`` and ``out`` may be anything. ``place`` is where
        a kernel may write it; what it returns tells if it has.
        """
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

    def gradients(
        self, rows: Rows, columns: Columns, upstream: Upstream, item: WorkItem, params: Params,
        place: Tensor | None = None,
    ) -> ItemGrads:  # fmt: skip
        """The item's gradients by themselves; ``place`` is where a kernel may write ``dq``."""
        ...


def head_group(x: Tensor, n: int, groups: int, dim: int) -> Tensor:
    """A view of the ``n``-th of so many equal groups of heads, which are the dimension ``dim``."""
    size = x.shape[dim] // groups
    return x if groups == 1 else x.narrow(dim, n * size, size)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of accumulators for inputs of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_result(q: Tensor, v_dim: int) -> Result:
    """Nothing seen yet, for queries ``[B, n, H, D]``: the identity of the merge."""
    batch, length, heads, _ = q.shape
    dtype = wide(q.dtype)
    out = torch.zeros(batch, length, heads, v_dim, dtype=dtype, device=q.device)
    lse = torch.full((batch, heads, length), -torch.inf, dtype=dtype, device=q.device)
    return Result(out, lse)


def added_up(
    kernel: Kernel, rows: Rows, columns: Columns, upstream: Upstream, item: WorkItem, params: Params
) -> ItemGrads:
    """:meth:`Kernel.gradients` by means of :meth:`Kernel.backward`."""
    dtype = wide(rows.q.dtype)
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (rows.q, columns.k, columns.v))
    dbias = None
    if rows.bias is not None and params.bias_grad:
        dbias = torch.zeros_like(rows.bias, dtype=dtype)
    kernel.backward(rows, columns, upstream, item, params, RowGrads(dq, dbias), ColumnGrads(dk, dv))
    return ItemGrads(dq, dk, dv, dbias)


def merge_into(into: Result, out: Tensor, lse: Tensor) -> None:
    """Merge a kernel's ``(out, lse)`` into what was accumulated, in place.

    The formula of :func:`ring_core.merge`; outputs whose ``lse`` is ``-inf`` are never read.
    """
    if out.is_cuda and into.lse.dtype == torch.float32 and has_triton():
        from ring_torch.kernels._triton import merge_on_gpu

        merge_on_gpu(into.out, into.lse, out, lse)
        return
    for start in range(0, out.shape[1], _MERGED_ROWS):  # a bounded number of rows in temporaries
        rows = slice(start, start + _MERGED_ROWS)
        _merge_rows(into.take(rows), out[:, rows], lse[:, :, rows])


@cache
def has_triton() -> bool:
    """Whether Triton can be imported, as wherever torch comes with it."""
    return find_spec("triton") is not None


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
