"""A layout belongs to the data, so one object owns both and they cannot disagree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ring_core import SCHEDULES, KernelConfig, Layout, Mask, checks, layout_of
from ring_torch._attention import Group, Schedule, Window, attend
from ring_torch._call import check_call
from ring_torch._comm import Ring, ring_of


class ContextParallel:
    """Sequences split over the ranks of a group.

    Args:
        group: A process group or one-dimensional ``DeviceMesh``; ``None`` is the default group, or
            this process alone where none is initialised.
        schedule: ``zigzag`` (default), ``striped``, ``plain`` or ``balanced``; it decides the
            layout.

    Example::

        cp = ContextParallel(group)
        q, k, v = (cp.shard(x, dim=1) for x in (q, k, v))
        out = cp.attention(q, k, v, causal=True)
        full = cp.unshard(out, dim=1)
    """

    def __init__(self, group: Group = None, schedule: Schedule = "zigzag") -> None:
        checks.check_choice("schedule", schedule, SCHEDULES)
        self.group = group
        self.schedule: Schedule = schedule
        self._ring = ring_of(group)

    @property
    def cp_size(self) -> int:
        """Ranks that hold a sequence."""
        return self._ring.size

    @property
    def cp_rank(self) -> int:
        """This rank's place among them."""
        return self._ring.rank

    def layout(self, seq_len: int) -> Layout:
        """Which rank holds which of ``seq_len`` tokens.

        Raises:
            ValueError: The schedule cannot divide this length; the message names the length to pad
                to.
        """
        return Layout(layout_of(self.schedule), seq_len, self.cp_size)

    def shard(self, x: Tensor, *, dim: int = 1) -> Tensor:
        """This rank's slice, contiguous, of a whole tensor that every rank holds."""
        pieces = [
            x.narrow(dim, run.global_start, (run.length - 1) * run.stride + 1)[
                _every(x.ndim, dim, run.stride)
            ]
            for run in self.layout(x.shape[dim]).runs(self.cp_rank)
        ]
        return torch.cat(pieces, dim=dim).contiguous()

    def unshard(self, x: Tensor, *, dim: int = 1) -> Tensor:
        """The whole tensor, on every rank, from every rank's slice.

        Its gradient is taken to be the same on every rank, as when each computes the same loss from
        it: each rank keeps its own slice of it.
        """
        layout = self.layout(x.shape[dim] * self.cp_size)
        whole: Tensor = _Unshard.apply(x, dim, layout, self._ring)
        return whole

    def positions(self, seq_len: int, *, device: torch.device | str | None = None) -> Tensor:
        """Global positions of this rank's tokens, int64 ``[T_local]``, for RoPE and labels."""
        return torch.as_tensor(self.layout(seq_len).positions(self.cp_rank), device=device)

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = ..., window: Window | None = ...,
        chunk_size: int | None = ..., cu_seqlens: Sequence[int] | None = ...,
        segment_ids: Tensor | tuple[Tensor, Tensor] | None = ..., mask: Mask | None = ...,
        softmax_scale: float | None = ..., softcap: float | None = ..., sinks: Tensor | None = ...,
        bias: Tensor | None = ..., alibi_slopes: Tensor | None = ..., dropout_p: float = ...,
        dropout_seed: int | None = ..., deterministic: bool = ..., return_lse: Literal[False] = ...,
        kernel: str | KernelConfig = ..., transport: str = ...,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = ..., window: Window | None = ...,
        chunk_size: int | None = ..., cu_seqlens: Sequence[int] | None = ...,
        segment_ids: Tensor | tuple[Tensor, Tensor] | None = ..., mask: Mask | None = ...,
        softmax_scale: float | None = ..., softcap: float | None = ..., sinks: Tensor | None = ...,
        bias: Tensor | None = ..., alibi_slopes: Tensor | None = ..., dropout_p: float = ...,
        dropout_seed: int | None = ..., deterministic: bool = ..., return_lse: Literal[True],
        kernel: str | KernelConfig = ..., transport: str = ...,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        window: Window | None = None,
        chunk_size: int | None = None,
        cu_seqlens: Sequence[int] | None = None,
        segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
        mask: Mask | None = None,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        dropout_p: float = 0.0,
        dropout_seed: int | None = None,
        deterministic: bool = False,
        return_lse: bool = False,
        kernel: str | KernelConfig = "auto",
        transport: str = "auto",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of this rank's shards: :func:`ring_attention` with this group and schedule."""
        call, inputs = check_call(
            self._ring, self._ring.next_call(), self.schedule, q, k, v, causal=causal,
            window=window,
            chunk_size=chunk_size, cu_seqlens=cu_seqlens, segment_ids=segment_ids, mask=mask,
            softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, bias=bias,
            alibi_slopes=alibi_slopes, dropout_p=dropout_p, dropout_seed=dropout_seed,
            deterministic=deterministic, return_lse=return_lse, kernel=kernel, transport=transport,
        )  # fmt: skip
        return attend(call, inputs, return_lse=return_lse)

    def explain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        window: Window | None = None,
        chunk_size: int | None = None,
        cu_seqlens: Sequence[int] | None = None,
        segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
        mask: Mask | None = None,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        dropout_p: float = 0.0,
        dropout_seed: int | None = None,
        deterministic: bool = False,
        return_lse: bool = False,
        kernel: str | KernelConfig = "auto",
        transport: str = "auto",
    ) -> str:
        """Say what :meth:`attention` would do with these arguments; sends and computes nothing.

        The kernel it would choose, why not the faster ones, and the plan.
        """
        call, _ = check_call(
            self._ring, 0, self.schedule, q, k, v, causal=causal, window=window,
            chunk_size=chunk_size,
            cu_seqlens=cu_seqlens, segment_ids=segment_ids, mask=mask, softmax_scale=softmax_scale,
            softcap=softcap,
            sinks=sinks, bias=bias, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            deterministic=deterministic, return_lse=return_lse, kernel=kernel, transport=transport,
        )  # fmt: skip
        return f"{call.choice.describe()}\ntransport {call.transport}\n\n{call.plan.describe()}"


class _Unshard(torch.autograd.Function):
    """Gather every rank's slice; the gradient's own slice comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, layout: Layout, ring: Ring) -> Tensor:
        """All-gather, then put the runs where they belong."""
        ctx.dim, ctx.layout, ctx.rank = dim, layout, ring.rank
        x = x.contiguous()
        parts = [x]
        if ring.size > 1:
            parts = [torch.empty_like(x) for _ in range(ring.size)]
            dist.all_gather(parts, x, group=ring.group)
        whole = x.new_empty([*x.shape[:dim], layout.seq_len, *x.shape[dim + 1 :]])
        for rank, part in enumerate(parts):
            whole.index_copy_(dim, _index(layout, rank, x.device), part)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """This rank's slice of the gradient."""
        return (
            grad.index_select(ctx.dim, _index(ctx.layout, ctx.rank, grad.device)),
            None,
            None,
            None,
        )


def _index(layout: Layout, rank: int, device: torch.device) -> Tensor:
    return torch.as_tensor(layout.positions(rank), device=device)


def _every(ndim: int, dim: int, stride: int) -> tuple[slice, ...]:
    """An index that takes every ``stride``-th entry along ``dim``."""
    at = dim % ndim
    return tuple(slice(None, None, stride) if n == at else slice(None) for n in range(ndim))
