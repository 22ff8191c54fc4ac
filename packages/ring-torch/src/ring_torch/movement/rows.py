"""Movements of rows between ranks, as one autograd function: shift, halo and relayout.

The plan is :mod:`ring_core.movement`'s. A pass packs the rows that leave into one buffer, sends
each peer its piece, copies the rows that stay meanwhile, and unpacks what arrives. The backward is
the same pass with the exchange reversed. Nothing here knows of attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ring_core import Layout, LayoutSpec
from ring_core.movement import Movement, RowCopy, check_documents, halo, relayout, shift
from ring_torch.capture import capture_safe_cache, on_device
from ring_torch.comm.handshake import agree, check_graph, with_peer_errors
from ring_torch.comm.ranks import Ranks, check_device
from ring_torch.comm.store import CallSignature
from ring_torch.derivatives import check_backward

#: Copies of more slices than this read indices from a tensor, in two kernels.
_MOST_SLICES = 32


@dataclass(frozen=True)
class ShiftMove:
    """Shift of tokens by ``n`` positions, inside of documents; ``fill`` where none comes from."""

    name: ClassVar[str] = "shift"
    layout: LayoutSpec
    n: int
    fill: float
    cu_seqlens: tuple[int, ...] | None

    def movement(self, layout: Layout) -> Movement:
        """Return the plan for a sequence in this layout."""
        return shift(layout, self.n, self.cu_seqlens)


@dataclass(frozen=True)
class HaloMove:
    """Rows on both sides of each run, zeros outside of the sequence."""

    name: ClassVar[str] = "halo"
    fill: ClassVar[float] = 0
    layout: LayoutSpec
    left: int
    right: int
    cu_seqlens: tuple[int, ...] | None

    def movement(self, layout: Layout) -> Movement:
        """Return the plan for a sequence in this layout."""
        check_documents(layout, self.cu_seqlens)
        return halo(layout, self.left, self.right)


@dataclass(frozen=True)
class RelayoutMove:
    """Change to another layout of the same ranks."""

    name: ClassVar[str] = "relayout"
    fill: ClassVar[float] = 0
    layout: LayoutSpec
    to: LayoutSpec

    def movement(self, layout: Layout) -> Movement:
        """Return the plan for a sequence in this layout."""
        return relayout(layout, Layout(self.to, layout.seq_len, layout.cp_size))


MoveKind = ShiftMove | HaloMove | RelayoutMove


class _Copy(NamedTuple):
    """Copies of rows on a device: pairs of slices, or of index tensors if there are many."""

    rows: int
    slices: tuple[tuple[slice, slice], ...] | None
    read: Tensor | None
    written: Tensor | None

    @classmethod
    def of(cls, copies: RowCopy, device: torch.device) -> _Copy:
        """Make the copies of a plan."""
        if len(copies.length) <= _MOST_SLICES:
            return cls(copies.rows, tuple(copies.slices()), None, None)
        read, written = (torch.as_tensor(x, device=device) for x in copies.indices())
        return cls(copies.rows, None, read, written)

    def reversed(self) -> _Copy:
        """Return the copies that go the other way."""
        slices = self.slices
        if slices is not None:
            slices = tuple((written, read) for read, written in slices)
        return _Copy(self.rows, slices, self.written, self.read)

    def run(self, out: Tensor, x: Tensor, *, add: bool) -> None:
        """Copy rows of ``x`` to rows of ``out``, or add them."""
        for read, written in self.slices or ():
            if add:
                out[written].add_(x[read])
            else:
                out[written].copy_(x[read])
        if self.read is not None and self.written is not None:
            rows = x.index_select(0, self.read)
            if add:
                out.index_add_(0, self.written, rows.to(out.dtype))
            else:
                out.index_copy_(0, self.written, rows)


class _Pass(NamedTuple):
    """The forward or backward of a movement on this rank; its fields are an ``Exchange``'s."""

    local: _Copy
    pack: _Copy
    unpack: _Copy
    sent: tuple[tuple[int, int], ...]
    received: tuple[tuple[int, int], ...]
    rows: int
    add: bool

    def run(self, ranks: Ranks, x: Tensor, dim: int, fill: float) -> Tensor:
        """Return the rows of the result from the rows of ``x``, along a dimension."""
        rows = x.movedim(dim, 0)
        leaving = x.new_empty((self.pack.rows, *rows.shape[1:]))
        self.pack.run(leaving, rows, add=False)
        arriving = x.new_empty((self.unpack.rows, *rows.shape[1:]))
        # Each peer's rows are one message. Peers that no row goes to, or comes from, get none.
        transfer = ranks.start(_messages(leaving, self.sent), _messages(arriving, self.received))
        # Rows that stay are copied while messages travel; both only read x.
        shape = (*x.shape[:dim], self.rows, *x.shape[dim + 1 :])
        dtype = torch.promote_types(x.dtype, torch.float32) if self.add else x.dtype
        if self.add:
            out = x.new_zeros(shape, dtype=dtype)
        elif self.local.rows + self.unpack.rows == self.rows:
            out = x.new_empty(shape)
        else:
            out = x.new_full(shape, fill)
        out_rows = out.movedim(dim, 0)
        self.local.run(out_rows, rows, add=self.add)
        # When the other ranks' rows have arrived, copy (or add) them to their places.
        transfer.wait()
        self.unpack.run(out_rows, arriving, add=self.add)
        return out.to(x.dtype)


class _Passes(NamedTuple):
    """Both directions of a movement on this rank."""

    forward: _Pass
    backward: _Pass


@capture_safe_cache(maxsize=64)
def _passes(kind: MoveKind, rows: int, place: tuple[int, int], device: torch.device) -> _Passes:
    """Return the passes of a movement of ``rows`` local rows, for a rank and number of ranks.

    Raises:
        ValueError: The layout cannot divide the length, or documents end elsewhere.
    """
    rank, size = place
    movement = kind.movement(Layout(kind.layout, rows * size, size))
    part = movement.exchange(rank)
    local, pack, unpack = (_Copy.of(copies, device) for copies in part[:3])
    return _Passes(
        _Pass(local, pack, unpack, part.sent, part.received, movement.target_rows, add=False),
        _Pass(
            local.reversed(), unpack.reversed(), pack.reversed(), part.received, part.sent,
            movement.source_rows, add=movement.repeats,
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class MoveCall:
    """Call of a movement, with its forward and backward.

    Attributes:
        ranks: Ranks of the group.
        kind: Movement, with its layout and arguments.
        dim: Dimension of the rows, not negative.
        needs_grad: True if there will be a backward.
        number: Number of the call on its group, from :meth:`Ranks.next_call`.
    """

    ranks: Ranks
    kind: MoveKind
    dim: int
    needs_grad: bool
    number: int

    def forward(self, x: Tensor) -> Tensor:
        """Return the rows of this rank after the movement.

        Raises:
            ValueError: The size of ``x`` is no rank's part in this layout, or documents end
                elsewhere.
            RankMismatchError: Shapes, dtypes or arguments differ between ranks.
        """
        return self._run(x, self.kind.name, x.shape[self.dim], backward=False)

    def backward(self, grad: Tensor, rows: int) -> Tensor:
        """Return the gradient of this rank's ``rows`` from that of its result."""
        return self._run(grad, f"{self.kind.name} backward", rows, backward=True)

    def _run(self, x: Tensor, name: str, rows: int, *, backward: bool) -> Tensor:
        """Agree with the other ranks, and run one pass."""
        ranks = self.ranks
        dtype = str(x.dtype).removeprefix("torch.")
        signature = _signature(name, self.kind, tuple(x.shape), dtype, self.dim, self.needs_grad)
        if ranks.size > 1:
            check_device(ranks, x.device)
            check_graph(ranks, signature, x.device)
        with self._guard(signature, x.device):
            agree(ranks, self.number, 0, signature, x.device)
        # Refuse what no rank can do. All ranks refuse alike, as their arguments are equal.
        passes = _passes(self.kind, rows, (ranks.rank, ranks.size), x.device)
        with self._guard(signature, x.device):
            fill = 0 if backward else self.kind.fill
            return passes[int(backward)].run(ranks, x, self.dim, fill)

    @contextmanager
    def _guard(self, signature: CallSignature, device: torch.device) -> Iterator[None]:
        """Run a block on the tensors' GPU, with errors of peers raised as this call's."""
        with on_device(device), with_peer_errors(self.ranks, self.number, signature):
            yield


@lru_cache(maxsize=256)
def _signature(
    name: str, kind: MoveKind, shape: tuple[int, ...], dtype: str, dim: int, needs_grad: bool
) -> CallSignature:
    """Return the facts of a pass that must be equal on all ranks."""
    arguments = {
        key: x if isinstance(x, int | float | tuple | None) else str(x)
        for key, x in vars(kind).items()
    }
    return CallSignature.of(
        {"shape": list(shape), "dtype": dtype, "dim": dim, "needs_grad": needs_grad, **arguments},
        name,
    )


def _messages(buffer: Tensor, counts: tuple[tuple[int, int], ...]) -> list[tuple[Tensor, int]]:
    """Return the pieces of a buffer with their peers, as bytes: gloo knows few dtypes."""
    if buffer.numel() == 0:
        return []
    pieces = buffer.split([rows for _, rows in counts])
    return [
        (piece.view(-1).view(torch.uint8), peer)
        for piece, (peer, _) in zip(pieces, counts, strict=True)
    ]


class _MovementFunction(torch.autograd.Function):
    """Autograd function of a movement."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: MoveCall) -> Tensor:
        ctx.call, ctx.rows = call, x.shape[call.dim]
        return call.forward(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        check_backward(grad)
        return ctx.call.backward(grad, ctx.rows), None


# Compiled graphs use `ring_torch.compiled.movement`. After a graph break this runs, untraced.
move = torch.compiler.disable(_MovementFunction.apply)
