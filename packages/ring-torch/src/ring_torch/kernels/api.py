"""What a kernel is: one work item, no rank, no group, no step in sight; and how results merge.

Shapes are in ``ring_torch.records``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

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
    acc_dtype,
    empty_state,
    zero_bias_grad,
)

Window = tuple[int | None, int | None]
Pass = Literal["forward", "backward"]

_MERGED_ROWS = 512


class SplitBackward(Protocol):
    """A kernel's backward by parts: sums of several launches and ranks are rounded once.

    The sums are ``[B, K, m, D]`` and ``[B, K, m, Dv]``, float32, in an order of the kernel's own
    inside each of its tiles of keys.
    """

    def applies(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, params: KernelParams) -> bool:
        """Whether it can run all launches of a call over gathered keys, on all ranks alike."""

    def accumulate(
        self, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, item: WorkItem, params: KernelParams,
        dq: Tensor, sums: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        """Write ``dq`` and add to the sums of dK and dV."""

    def round(
        self, sums: tuple[Tensor, Tensor], places: tuple[Tensor, Tensor], params: KernelParams
    ) -> None:
        """Write ``dk [B, m, K, D]`` and ``dv [B, m, K, Dv]``, in the inputs' dtype."""


class Kernel(Protocol):
    """A way to compute work items. Stateless.

    A kernel has to say what it can do, and write ``attend`` and ``grads``. The rest is as most are:
    it runs everywhere, and what the two methods give is merged and added.
    """

    capabilities: Capabilities  # it is only ever given calls that fit
    #: Whether its backward is given ``delta``, or computes it from the global ``out``.
    needs_delta: bool = True
    #: Whether a launch that is all of a call can add its sinks (``KernelParams.sinks``).
    adds_sinks: bool = False
    #: True if it looks at numbers on the host, which a CUDA graph cannot hold.
    reads_on_host: bool = False
    #: Its backward by parts, if it has one.
    parts: SplitBackward | None = None
    #: About how long the first call with a predicate compiles; 0 where nothing is.
    predicate_compile_seconds: int = 0

    def unavailable_reason(self) -> str | None:
        """Why it cannot run on this machine; ``None`` if it can. Only asked for its devices."""
        return None

    def config_refusals(
        self, _config: KernelConfig, _request: Request, _program: RingProgram, /
    ) -> tuple[str, ...]:
        """What a call and its settings ask of it that it cannot do on this machine."""
        return ()

    def attend(
        self, rows: QueryBlock, columns: KeyBlock, item: WorkItem, params: KernelParams,
        out: AttentionState | None = None,
    ) -> AttentionState:  # fmt: skip
        """``(out, lse)`` of the item alone; ``out`` in the inputs' dtype or a wider one.

        Where a row sees nothing ``lse`` is ``-inf`` and ``out`` may be anything. ``out`` is where a
        kernel may write it; what it returns tells if it has.
        """

    def grads(
        self, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, item: WorkItem, params: KernelParams,
        out: Tensor | None = None,
    ) -> Grads:  # fmt: skip
        """The item's gradients by themselves; ``out`` is where a kernel may write ``dq``."""

    def attend_into(
        self, rows: QueryBlock, columns: KeyBlock, item: WorkItem, params: KernelParams,
        into: AttentionState,
    ) -> None:  # fmt: skip
        """Attend and merge into ``into``; its ``lse`` is ``-inf`` where nothing was seen so far."""
        merge_into(into, *self.attend(rows, columns, item, params))

    def grads_into(
        self, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, item: WorkItem, params: KernelParams,
        row_grads: QueryGrads, column_grads: KeyGrads,
    ) -> None:  # fmt: skip
        """Add the item's gradients to the accumulators."""
        grads = self.grads(rows, columns, upstream, item, params)
        row_grads.dq.add_(grads.dq)
        column_grads.dk.add_(grads.dk)
        column_grads.dv.add_(grads.dv)
        if row_grads.dbias is not None:
            row_grads.dbias.add_(not_none(grads.dbias))


@dataclass(frozen=True)
class Selection:
    """The kernel of a call, why not others, and how long those that can should take."""

    kernel: Kernel
    rejected: tuple[tuple[Capabilities, tuple[str, ...]], ...]
    expected: Expected = UNKNOWN
    has_predicate: bool = False

    def describe(self) -> str:
        """A few lines for ``explain``."""
        name = self.kernel.capabilities.name
        lines = [f"kernel {name}{self.expected.time_and_source(name)}"]
        if self.has_predicate:
            seconds = self.kernel.predicate_compile_seconds
            words = f"about {seconds} s to compile, forward and backward"
            lines.append(
                f"  a predicate that is new to it: {words if seconds else 'nothing to compile'}"
            )
        lines += [
            f"  not {can.name} ({', '.join(can.devices) or 'any device'}): {'; '.join(why)}"
            for can, why in self.rejected
        ]
        return "\n".join(lines)


def merge_into(into: AttentionState, out: Tensor, lse: Tensor) -> None:
    """Merge a kernel's ``(out, lse)`` into what was accumulated, in place.

    The formula of :func:`ring_core.merge`; outputs whose ``lse`` is ``-inf`` are never read.
    """
    if out.is_cuda and into.lse.dtype == torch.float32 and has_triton():
        from ring_torch.memory_ops import merge_on_gpu

        merge_on_gpu(into.out, into.lse, out, lse)
        return
    if out.shape[1] <= _MERGED_ROWS:
        _merge_rows(into, out, lse)
        return
    for start in range(0, out.shape[1], _MERGED_ROWS):  # a bounded number of rows in temporaries
        rows = slice(start, start + _MERGED_ROWS)
        _merge_rows(into.take(rows), out[:, rows], lse[:, :, rows])


def _merge_rows(into: AttentionState, out: Tensor, lse: Tensor) -> None:
    lse = lse.to(into.lse.dtype)
    merged = torch.logaddexp(into.lse, lse)
    safe = merged.masked_fill(merged == -torch.inf, 0.0)
    old = (into.lse - safe).exp_().transpose(1, 2).unsqueeze(-1)
    new = (lse - safe).exp_().transpose(1, 2).unsqueeze(-1)
    into.out.mul_(old)
    into.out.add_(torch.where(new > 0, out * new, 0.0))
    into.lse.copy_(merged)


class AccumulatingKernel(Kernel, Protocol):
    """A kernel that merges and adds as it computes: it has to write the other two methods."""

    def attend(
        self, rows: QueryBlock, columns: KeyBlock, item: WorkItem, params: KernelParams,
        out: AttentionState | None = None,
    ) -> AttentionState:  # fmt: skip
        """``(out, lse)`` of the item, wide."""
        del out  # it is narrower
        into = empty_state(rows.q, columns.v.shape[3])
        self.attend_into(rows, columns, item, params, into)
        return into

    def grads(
        self, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, item: WorkItem, params: KernelParams,
        out: Tensor | None = None,
    ) -> Grads:  # fmt: skip
        """The item's gradients, wide."""
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
