"""Which rank holds which tokens: a layout belongs to the data, so one object owns both."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_core import Layout, LayoutSpec, divisor_of
from ring_core.layouts.layout import check_layout
from ring_torch.comm.ranks import Group, Ranks, collective, ranks_of


class Sharding:
    """Sequences split over the ranks of a group, in a layout.

    Args:
        group: A process group or one-dimensional ``DeviceMesh``; ``None`` is the default group, or
            this process alone where none is initialised when it is first used.
        layout: Its name, or a :class:`ring_core.ChunkLayout`.

    Raises:
        ValueError: No such layout, or it has chunks for another number of ranks.
    """

    def __init__(self, group: Group, layout: LayoutSpec) -> None:
        self.group = group
        self.layout_name = check_layout(layout)
        self._bound: Ranks | None = None
        if group is not None or (dist.is_available() and dist.is_initialized()):
            self.ring  # noqa: B018 - refuses what these ranks cannot run

    @property
    def ring(self) -> Ranks:
        """The ranks, which are those of the first use.

        Raises:
            ValueError: The group was destroyed, or the default one is another by now.
        """
        ring = ranks_of(self.group)
        if self._bound is None:
            divisor_of(self.layout_name, ring.size)
            self._bound = ring
        if ring != self._bound:
            raise ValueError(
                f"this ContextParallel is of another process group: at first it had "
                f"{self._bound.size} ranks, now the default group has {ring.size} (it was made or "
                f"destroyed in between). Make a new ContextParallel, and shard with that one"
            )
        return ring

    # A method: torch 2.11 takes the arguments of such functions for constants, which an object of
    # ours is not, but not what a method is of.
    @torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # noqa: SLF001
    def check_group(self) -> None:
        """Refuse another group than at the first use; in a graph, when it is traced."""
        self.ring  # noqa: B018 - the property checks

    def layout(self, seq_len: int) -> Layout:
        """Which rank holds which of ``seq_len`` tokens."""
        return Layout(self.layout_name, seq_len, self.ring.size)

    def shard(self, x: Tensor, *, dim: int = 1) -> Tensor:
        """This rank's slice, contiguous, of a whole tensor that every rank holds."""
        _check_dim(x, dim)
        rows = x.transpose(0, dim)
        pieces = [
            rows[run.global_start : run.global_start + run.length * run.stride : run.stride]
            for run in self.layout(x.shape[dim]).runs(self.ring.rank)
        ]
        return torch.cat([piece.transpose(0, dim) for piece in pieces], dim=dim).contiguous()

    def unshard(self, x: Tensor, *, dim: int = 1) -> Tensor:
        """The whole tensor, on every rank, from every rank's slice; differentiable."""
        _check_dim(x, dim)
        dim %= x.ndim
        whole: Tensor = _Unshard.apply(
            x, dim, self.layout(x.shape[dim] * self.ring.size), self.ring
        )
        return whole

    def gather(self, x: Tensor, *, dim: int = 1) -> Tensor:
        """The whole tensor, on every rank, for ranks that use it each for their own results.

        Its gradient is the sum of all ranks' gradients; that of :meth:`unshard` is this rank's own.
        """
        dim %= x.ndim
        whole: Tensor = _Gather.apply(x, dim, self.layout(x.shape[dim] * self.ring.size), self.ring)
        return whole

    def positions(self, seq_len: int, *, device: torch.device | str | None = None) -> Tensor:
        """Global positions of this rank's tokens, int64 ``[T_local]``."""
        positions = self.layout(seq_len).positions(self.ring.rank)
        try:
            return torch.as_tensor(positions, device=device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device {device!r} cannot be used: {error}") from error


class _Unshard(torch.autograd.Function):
    """Gather every rank's slice; the gradient's own slice comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, layout: Layout, ring: Ranks) -> Tensor:
        ctx.dim, ctx.layout, ctx.rank = dim, layout, ring.rank
        x = x.contiguous()
        parts = [x]
        if ring.size > 1:
            parts = [torch.empty_like(x) for _ in range(ring.size)]
            with collective(ring, "unshard"):
                dist.all_gather(parts, x, group=ring.group)
        whole = x.new_empty([*x.shape[:dim], layout.seq_len, *x.shape[dim + 1 :]])
        for rank, part in enumerate(parts):
            whole.index_copy_(dim, _index(layout, rank, x.device), part)
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        own = grad.index_select(ctx.dim, _index(ctx.layout, ctx.rank, grad.device))
        return own, None, None, None


class _Gather(_Unshard):
    """Gather every rank's slice; gradients of all ranks are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, layout: Layout, ring: Ranks) -> Tensor:
        ctx.ring = ring
        return _Unshard.forward(ctx, x, dim, layout, ring)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        total = grad.contiguous().clone()
        if ctx.ring.size > 1:
            with collective(ctx.ring, "gather"):
                dist.all_reduce(total, group=ctx.ring.group)
        own = total.index_select(ctx.dim, _index(ctx.layout, ctx.rank, total.device))
        return own, None, None, None


def _check_dim(x: object, dim: object) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if not isinstance(dim, int) or isinstance(dim, bool) or not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"dim must be a dimension of x, an integer in [{-x.ndim}, {x.ndim}), got {dim!r}"
        )


def _index(layout: Layout, rank: int, device: torch.device) -> Tensor:
    return torch.as_tensor(layout.positions(rank), device=device)
