"""Splitting of sequences over ranks: slices, whole tensors from all slices, and positions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ring_core import Layout, LayoutSpec, checks, divisor_of
from ring_core.layouts.layout import Run, check_layout
from ring_torch.capture import on_device
from ring_torch.comm.handshake import agree, check_graph, with_peer_errors
from ring_torch.comm.ranks import (
    Group,
    Ranks,
    check_device,
    others,
    peer_errors,
    ranks_of,
    warn_if_alone,
)
from ring_torch.comm.store import CallSignature
from ring_torch.derivatives import check_backward

UnshardGrad = Literal["sum", "slice"]
UNSHARD_GRADS: tuple[str, ...] = get_args(UnshardGrad)


class Sharding:
    """Process group and layout that split sequences: ``ContextParallel`` without attention.

    Args:
        group: A process group or one-dimensional ``DeviceMesh``; ``None`` is the default group, or
            this process alone where none is initialised when it is first used.
        layout: Name of the layout, or a :class:`ring_core.ChunkLayout`.

    Raises:
        ValueError: The layout is unknown, or has chunks for another number of ranks.
    """

    def __init__(self, group: Group, layout: LayoutSpec) -> None:
        self.group = group
        self.layout = check_layout(layout)
        self._bound: Ranks | None = None
        if group is not None or (dist.is_available() and dist.is_initialized()):
            self.ranks  # noqa: B018 - refuses what these ranks cannot run

    @property
    def ranks(self) -> Ranks:
        """Ranks of the group, which must be the same as at the first use.

        Raises:
            ValueError: The group was destroyed, or the default group is another by now.
        """
        ranks = ranks_of(self.group)
        if self._bound is None:
            divisor_of(self.layout, ranks.size)
            warn_if_alone()
            self._bound = ranks
        if ranks != self._bound:
            raise ValueError(
                f"this ContextParallel is of another process group: at first it had "
                f"{self._bound.size} ranks, now the default group has {ranks.size} (it was made or "
                f"destroyed in between). Make a new ContextParallel, and shard with that one"
            )
        return ranks

    def check_group(self) -> None:
        """Refuse a group other than at the first use; in a compiled graph, when it is traced."""
        # Reading the id makes the compiler guard on it, so a graph is used for this object alone.
        self._check_group(id(self))

    # A method, as torch 2.11 refuses objects of our classes as arguments of a constant function.
    @torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # noqa: SLF001
    def _check_group(self, _: int) -> None:
        """Check the group; the argument, an id, ties a compiled graph to this object."""
        self.ranks  # noqa: B018 - the property checks

    def layout_of(self, seq_len: int) -> Layout:
        """Return the layout of a sequence of ``seq_len`` tokens."""
        return Layout(self.layout, seq_len, self.ranks.size)

    def shard(self, x: Tensor, *, dim: int = 1) -> Tensor:
        """Return this rank's slice of a whole tensor that every rank holds; contiguous."""
        check_dim(x, dim)
        return _slice_of(x, dim, self.layout_of(x.shape[dim]), self.ranks.rank)

    def unshard(self, x: Tensor, *, dim: int = 1, grad: UnshardGrad | None = None) -> Tensor:
        """Return the whole tensor, on every rank, joined from the slices of all ranks."""
        ranks = self.ranks
        number = ranks.next_call()
        check_dim(x, dim)
        needs_grad = check_grad(x, grad)
        whole: Tensor = _unshard(
            x, Unsharding(ranks, self.layout, dim % x.ndim, grad, needs_grad, number)
        )
        return whole

    def positions(self, seq_len: int, *, device: torch.device | str | None = None) -> Tensor:
        """Return the global positions of this rank's tokens, int64 ``[T_local]``."""
        positions = self.layout_of(seq_len).positions(self.ranks.rank)
        try:
            return torch.as_tensor(positions, device=device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device {device!r} cannot be used: {error}") from error


@dataclass(frozen=True)
class Unsharding:
    """Call of ``unshard``, with its forward and backward.

    Attributes:
        ranks: Ranks of the group.
        layout: Layout, which says which rank holds which tokens.
        dim: Dimension of the sequence, not negative.
        grad: How the gradient of the whole tensor becomes a slice's, ``"sum"`` or ``"slice"``.
        needs_grad: True if there will be a backward.
        number: Number of the call on its group, from :meth:`Ranks.next_call`.
    """

    ranks: Ranks
    layout: LayoutSpec
    dim: int
    grad: UnshardGrad | None
    needs_grad: bool
    number: int

    def join(self, x: Tensor) -> Tensor:
        """Return the whole tensor, all-gathered from this rank's slice ``x`` and the others'.

        Raises:
            ValueError: The size of ``x`` is no rank's part in this layout.
            RankMismatchError: Shapes, dtypes or arguments differ between ranks.
        """
        signature = self._signature("unshard", x)
        self._agree(signature, x.device)
        # If the layout cannot divide the length, all ranks refuse it here, as all have the same.
        layout = Layout(self.layout, x.shape[self.dim] * self.ranks.size, self.ranks.size)
        slices = [x.contiguous()]
        if self.ranks.size > 1:
            # Every rank sends its slice to all others, and receives theirs in the order of ranks.
            (local_slice,), slices = (
                slices,
                [torch.empty_like(slices[0]) for _ in range(self.ranks.size)],
            )
            with self._guard(signature, x.device), peer_errors(others(self.ranks)):
                dist.all_gather(
                    [_as_bytes(rank_slice) for rank_slice in slices],
                    _as_bytes(local_slice),
                    group=self.ranks.group,
                )
        whole = x.new_empty([*x.shape[: self.dim], layout.seq_len, *x.shape[self.dim + 1 :]])
        rows = whole.transpose(0, self.dim)
        # Copy each run of a rank's slice to its rows in the whole sequence.
        for rank, rank_slice in enumerate(slices):
            runs = layout.runs(rank)
            run_rows = rank_slice.transpose(0, self.dim).split([run.length for run in runs])
            for run, row_block in zip(runs, run_rows, strict=True):
                rows[_slice(run)].copy_(row_block)
        return whole

    def grad_of_slice(self, grad: Tensor) -> Tensor:
        """Return the gradient of this rank's slice from the gradient of the whole tensor."""
        size = self.ranks.size
        layout = Layout(self.layout, grad.shape[self.dim], size)
        if self.grad != "sum" or size == 1:
            return _slice_of(grad, self.dim, layout, self.ranks.rank)
        signature = self._signature("unshard backward", grad)
        self._agree(signature, grad.device)
        # Put the slices in the order of ranks. A reduce-scatter in float32 or wider adds them up,
        # and gives each rank the sum of its own.
        slices = torch.stack([_slice_of(grad, self.dim, layout, rank) for rank in range(size)])
        slices = slices.to(torch.promote_types(grad.dtype, torch.float32))
        total = torch.empty_like(slices[0])
        with self._guard(signature, grad.device), peer_errors(others(self.ranks)):
            dist.reduce_scatter_tensor(total.view(-1), slices.view(-1), group=self.ranks.group)
        return total.to(grad.dtype)

    def _signature(self, name: str, x: Tensor) -> CallSignature:
        """Return the facts of the call that must be equal on all ranks."""
        return CallSignature.of(
            {
                "shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch."),
                "dim": self.dim, "layout": str(self.layout),
                "sums_gradients": self.needs_grad and self.grad == "sum",
            }, name,
        )  # fmt: skip

    def _agree(self, signature: CallSignature, device: torch.device) -> None:
        """Check that all ranks make this call with equal arguments, before tensors are sent."""
        if self.ranks.size == 1:
            return
        check_device(self.ranks, device)
        check_graph(self.ranks, signature, device)
        with self._guard(signature, device):
            agree(self.ranks, self.number, 0, signature, device)

    @contextmanager
    def _guard(self, signature: CallSignature, device: torch.device) -> Iterator[None]:
        """Run a block on the tensors' GPU, with errors of peers raised as this call's."""
        with on_device(device), with_peer_errors(self.ranks, self.number, signature):
            yield


class _Unshard(torch.autograd.Function):
    """Autograd function of ``unshard``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unsharding: Unsharding) -> Tensor:
        ctx.unsharding = unsharding
        return unsharding.join(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        check_backward(grad)
        return ctx.unsharding.grad_of_slice(grad), None


# Compiled graphs use `ring_torch.compiled.unshard`. After a graph break this runs, untraced.
_unshard = torch.compiler.disable(_Unshard.apply)


def check_dim(x: object, dim: object, name: str = "x") -> None:
    """Check that ``dim`` is a dimension of the tensor ``x``, the argument of that ``name``.

    Raises:
        ValueError: ``x`` is no tensor, or has no such dimension.
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if not isinstance(dim, int) or isinstance(dim, bool) or not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"dim must be a dimension of {name}, an integer in [{-x.ndim}, {x.ndim}), got {dim!r}"
        )


def check_grad(x: Tensor, grad: object) -> bool:
    """Check ``grad`` of ``unshard``, and return True if there will be a backward.

    Raises:
        ValueError: It is unknown, or missing although there will be a backward.
    """
    if grad is not None:
        checks.check_choice("grad", grad, UNSHARD_GRADS)
    needs_grad = x.requires_grad and torch.is_grad_enabled()
    if needs_grad and grad is None:
        raise ValueError(
            "unshard: x requires a gradient, so say what becomes of it.\n"
            "grad='sum': the ranks' gradients are added up. Right wherever the loss of a step is the "
            "sum of the ranks' losses: inside a model, as in shard(f(unshard(x, grad='sum')))\n"
            "grad='slice': each rank keeps its slice of its own gradient. Right only for a loss that "
            "every rank computes whole, with no parameter behind unshard; with one, grad='sum' and "
            "the loss divided by cp_size\n"
            "Where no gradient is wanted, unshard(x.detach())"
        )
    return needs_grad


def _slice_of(x: Tensor, dim: int, layout: Layout, rank: int) -> Tensor:
    """Return a rank's slice of a whole tensor, contiguous."""
    rows = x.transpose(0, dim)
    pieces = [rows[_slice(run)].transpose(0, dim) for run in layout.runs(rank)]
    return torch.cat(pieces, dim=dim).contiguous()


def _slice(run: Run) -> slice:
    """Return the rows of the whole tensor that hold a run of tokens."""
    return slice(run.global_start, run.global_start + run.length * run.stride, run.stride)


def _as_bytes(x: Tensor) -> Tensor:
    """View a contiguous tensor as bytes, as gloo supports few dtypes."""
    return x.view(-1).view(torch.uint8)
