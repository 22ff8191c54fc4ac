"""Movements of rows between ranks, as one autograd function: shift, halo and relayout.

The plan is :mod:`ring_core.movement`'s. A pass packs the rows that leave into one buffer, sends
each peer its piece, copies the rows that stay meanwhile, and unpacks what arrives. The backward is
the same pass with the exchange reversed; a movement is linear, so that the backward of the backward
is the forward again, without its fill. Nothing here knows of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ring_core import Layout, LayoutSpec, WrongResultError
from ring_core.checks import padded_layout
from ring_core.layouts.run_table import RowCopy
from ring_core.movement import Movement, halo, offsets_of_documents, relayout, shift
from ring_torch.capture import capture_safe_cache
from ring_torch.checking.watch import Watch, shared_findings
from ring_torch.comm.handshake import GuardedPass
from ring_torch.comm.ranks import Ranks
from ring_torch.comm.store import CallSignature
from ring_torch.derivatives import NEEDS_COMPILED_FORWARD, check_no_batch
from ring_torch.sharding import agree_on_call

#: Copies of more slices than this read indices from a tensor, in two kernels.
_MOST_SLICES = 32


class MoveKind(Hashable, Protocol):
    """Movement with its arguments, which are fields: numbers, texts and layouts."""

    @property
    def name(self) -> str:
        """Name in messages."""

    @property
    def fill(self) -> float:
        """Number in rows of the result that no row moves to."""

    def movement(self, tokens: int, size: int) -> Movement:
        """Return the plan for a sequence of ``tokens``, over ``size`` ranks that exchange rows.

        For a relayout that pads ``tokens`` are without padding, else with it.

        Raises:
            ValueError: The layout cannot divide the length, or documents end elsewhere.
        """


@dataclass(frozen=True)
class ShiftMove:
    """Shift of tokens by ``n`` positions, inside of documents; ``fill`` where none comes from."""

    name: ClassVar[str] = "shift"
    layout: LayoutSpec
    n: int
    fill: float
    seq_len: int | None
    cu_seqlens: tuple[int, ...] | None

    def movement(self, tokens: int, size: int) -> Movement:
        """Return the plan for a sequence of ``tokens``, with padding, in this layout."""
        return shift(layout_of(self, tokens, size), self.n, self.cu_seqlens)


@dataclass(frozen=True)
class HaloMove:
    """Rows on both sides of each run, zeros outside of the sequence."""

    name: ClassVar[str] = "halo"
    fill: ClassVar[float] = 0
    layout: LayoutSpec
    left: int
    right: int
    seq_len: int | None
    cu_seqlens: tuple[int, ...] | None

    def movement(self, tokens: int, size: int) -> Movement:
        """Return the plan for a sequence of ``tokens``, with padding, in this layout."""
        layout = layout_of(self, tokens, size)
        offsets_of_documents(layout, self.cu_seqlens)
        return halo(layout, self.left, self.right)


def layout_of(kind: ShiftMove | HaloMove, tokens: int, size: int) -> Layout:
    """Return the layout of a sequence of ``tokens``, of which those behind ``seq_len`` are padding.

    Raises:
        ValueError: The layout cannot divide the length, or pads ``seq_len`` to another.
    """
    return padded_layout(kind.seq_len, tokens // size, kind.layout, size)


@dataclass(frozen=True)
class RelayoutMove:
    """Change to another layout, of the same ranks or of others.

    Attributes:
        layout: The layout that rows have.
        to: The layout that they get.
        source_ranks: For each rank that holds rows its number in the group that exchanges them;
            ``None``, as in ``target_ranks``, if these are the ranks of the group.
        target_ranks: For each rank that gets rows, likewise.
        tokens: Length of the sequence, if ranks may hold unlike parts of it.
        pads: True if the call states the length, behind which there may be padding.
    """

    name: ClassVar[str] = "relayout"
    fill: ClassVar[float] = 0
    layout: LayoutSpec
    to: LayoutSpec
    source_ranks: tuple[int, ...] | None = None
    target_ranks: tuple[int, ...] | None = None
    tokens: int | None = None
    pads: bool = False

    def movement(self, tokens: int, size: int) -> Movement:
        """Return the plan for a sequence of ``tokens``."""
        make = Layout.padded if self.pads else Layout
        source, target = (
            make(layout, tokens, size if ranks is None else len(ranks))
            for layout, ranks in ((self.layout, self.source_ranks), (self.to, self.target_ranks))
        )
        return relayout(source, target, self.source_ranks, self.target_ranks)


class _Copy(NamedTuple):
    """Copies of rows on a device: pairs of slices, or of index tensors if there are many."""

    rows: int
    slices: tuple[tuple[slice, slice], ...] | None
    read: Tensor | None
    written: Tensor | None

    @classmethod
    def of(cls, copies: RowCopy, device: torch.device) -> _Copy:
        """Make the copies of a plan."""
        # Slices are views, which cost a launch each; index tensors cost memory, and one launch for
        # all.
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
        # No two slices write the same row, except where copies are added.
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
        # Rows that leave are packed: `x` itself may be changed or freed as soon as this pass
        # returns.
        leaving = x.new_empty((self.pack.rows, *rows.shape[1:]))
        self.pack.run(leaving, rows, add=False)
        arriving = x.new_empty((self.unpack.rows, *rows.shape[1:]))
        # Each peer's rows are one message. Peers that no row goes to, or comes from, get none.
        transfer = ranks.start(_messages(leaving, self.sent), _messages(arriving, self.received))
        # Rows that stay are copied while messages travel; both only read x.
        shape = (*x.shape[:dim], self.rows, *x.shape[dim + 1 :])
        dtype = torch.promote_types(x.dtype, torch.float32) if self.add else x.dtype
        if self.add:
            # A row that was copied to several places gets a gradient from each of them.
            out = x.new_zeros(shape, dtype=dtype)
        elif self.local.rows + self.unpack.rows == self.rows:
            # Every row is written: by this rank's copies, or by those that arrive.
            out = x.new_empty(shape)
        else:
            # Rows that nobody sends, at the ends of the sequence or of documents, keep the fill.
            out = x.new_full(shape, fill)
        out_rows = out.movedim(dim, 0)
        self.local.run(out_rows, rows, add=self.add)
        # When the other ranks' rows have arrived, copy (or add) them to their places.
        transfer.wait()
        self.unpack.run(out_rows, arriving, add=self.add)
        return out.to(x.dtype)


@capture_safe_cache(maxsize=64)
def _passes(
    kind: MoveKind, tokens: int, rank_and_size: tuple[int, int], device: torch.device
) -> tuple[_Pass, _Pass]:
    """Return the forward and the backward of a movement, for a rank and number of ranks.

    Raises:
        ValueError: The layout cannot divide the length, or documents end elsewhere.
    """
    rank, size = rank_and_size
    movement = kind.movement(tokens, size)
    part, (held, wanted) = movement.exchange(rank), movement.rows_of(rank)
    local, pack, unpack = (_Copy.of(copies, device) for copies in part[:3])
    return (
        _Pass(local, pack, unpack, part.sent, part.received, wanted, add=False),
        _Pass(
            # The inverse movement: what was received is sent back in the same order, so both ends
            # match without a word.
            local.reversed(),
            unpack.reversed(),
            pack.reversed(),
            part.received,
            part.sent,
            held,
            add=movement.repeats,
        ),
    )


@dataclass(frozen=True)
class MoveCall:
    """Call of a movement, or of one of its derivatives.

    Attributes:
        ranks: Ranks of the group.
        kind: Movement, with its layout and arguments.
        dim: Dimension of the rows, not negative.
        needs_grad: True if there will be a backward.
        number: Number of the call on its group, from :meth:`Ranks.next_call`.
        order: 0 of the movement, 1 of its backward, 2 of the backward of that, and so on.
        check_every: The tripwire's setting when the movement was called; 0 for no checks.
        checked: Not 0 if it checks this call.
    """

    ranks: Ranks
    kind: MoveKind
    dim: int
    needs_grad: bool
    number: int
    order: int = 0
    check_every: int = 0
    checked: int = 0

    def backward(self, *, needs_grad: bool) -> MoveCall:
        """Return the call that is this one's backward."""
        return replace(self, order=self.order + 1, needs_grad=needs_grad)

    def run(self, x: Tensor, tokens: int) -> Tensor:
        """Return the rows of this rank after the movement, or after its backward.

        Args:
            x: This rank's rows.
            tokens: Length of the whole sequence, as :meth:`MoveKind.movement` takes it.

        Raises:
            ValueError: The size of ``x`` is no rank's part in this layout, or documents end
                elsewhere.
            RankMismatchError: Shapes, dtypes or arguments differ between ranks.
            WrongResultError: The tripwire checked this call, and other bytes were sent than those
                of the rows that change rank.
        """
        ranks, kind = self.ranks, self.kind
        name = kind.name + " backward" * self.order
        dtype = str(x.dtype).removeprefix("torch.")
        signature = _signature(
            name, kind, self._shape(x), dtype, self.dim, self.needs_grad, self.check_every
        )
        agree_on_call(ranks, self.number, signature, x.device)
        # Refuse what no rank can do. All ranks refuse alike, as their arguments are equal.
        passes = _passes(kind, tokens, (ranks.rank, ranks.size), x.device)
        # The derivative of a backward is the forward again.
        forth, back = passes if self.order % 2 == 0 else reversed(passes)
        if x.shape[self.dim] != back.rows:
            raise ValueError(
                f"x has {x.shape[self.dim]} tokens, and the part that this rank holds of a sequence "
                f"of {tokens} is {back.rows}"
            )
        fill = 0 if self.order else kind.fill
        error_message = None
        with GuardedPass(ranks, self.number, signature, x.device):
            if self.checked:
                with Watch(x.device) as watch:
                    moved = forth.run(ranks, x, self.dim, fill)
                # Ranks exchange findings here: all of them raise, or none.
                error_message = self._faults(x, tokens, watch.sent)
            else:
                moved = forth.run(ranks, x, self.dim, fill)
        if error_message is not None:
            raise WrongResultError(error_message)
        return moved

    def _faults(self, x: Tensor, tokens: int, sent: int) -> str | None:
        """Compare the bytes that all ranks sent with those of the rows that change rank.

        Returns:
            The error message, the same on all ranks; ``None`` if they are equal on all of them.
        """
        ranks, kind = self.ranks, self.kind
        rows = kind.movement(tokens, ranks.size).traffic(ranks.rank)[self.order % 2]
        expected = rows * x.element_size() * prod(n for d, n in enumerate(x.shape) if d != self.dim)
        fault = f"{sent:,} bytes were sent, and the rows that change rank have {expected:,}"
        findings = shared_findings(ranks, [fault] if sent != expected else [], x.device)
        if findings is None:
            return None
        return (
            f"call {self.checked} ({kind.name}{' backward' * self.order}) is wrong. {findings}. "
            f"{kind}, {tokens} tokens, {ranks.size} ranks. Every rank of the group raises this"
        )

    def _shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of ``x`` on all ranks: where they hold unlike parts, the whole one."""
        kind, rows = self.kind, x.shape[self.dim]
        if not isinstance(kind, RelayoutMove) or kind.tokens is None:
            return tuple(x.shape)
        # A backward has the parts the other way round.
        holders = (kind.source_ranks, kind.target_ranks)[self.order % 2] or range(self.ranks.size)
        layout = (kind.layout, kind.to)[self.order % 2]
        part = Layout.padded(layout, kind.tokens, len(holders)).local_len
        is_part = rows == (part if self.ranks.rank in holders else 0)
        return (*x.shape[: self.dim], kind.tokens if is_part else rows, *x.shape[self.dim + 1 :])


@lru_cache(maxsize=256)
def _signature(
    name: str,
    kind: MoveKind,
    shape: tuple[int, ...],
    dtype: str,
    dim: int,
    needs_grad: bool,
    check_every: int,
) -> CallSignature:
    """Return the facts of a pass that must be equal on all ranks."""
    arguments = {
        key: x if isinstance(x, int | float | tuple | None) else str(x)
        for key, x in vars(kind).items()
    }
    return CallSignature.of(
        {
            "shape": list(shape), "dtype": dtype, "dim": dim, "needs_grad": needs_grad,
            "check": check_every, **arguments,
        }, name,
    )  # fmt: skip


def _messages(buffer: Tensor, counts: tuple[tuple[int, int], ...]) -> list[tuple[Tensor, int]]:
    """Return the pieces of a buffer with their peers, as bytes: gloo knows few dtypes."""
    if buffer.numel() == 0:
        return []
    # A peer's rows lie together in the buffer, so its message is a view.
    pieces = buffer.split([rows for _, rows in counts])
    return [
        (piece.view(-1).view(torch.uint8), peer)
        for piece, (peer, _) in zip(pieces, counts, strict=True)
    ]


class _MovementFunction(torch.autograd.Function):
    """Autograd function of a movement."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: MoveCall, tokens: int) -> Tensor:
        ctx.call, ctx.tokens = call, tokens
        return call.run(x, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        check_no_batch(grad)
        # Under create_graph=True gradients have gradients, and the return of rows is a call too.
        call = ctx.call.backward(needs_grad=grad.requires_grad and torch.is_grad_enabled())
        return move(grad, call, ctx.tokens), None, None


# Compiled graphs use `ring_torch.compiled.movement`. After a graph break this runs, untraced.
move: Callable[[Tensor, MoveCall, int], Tensor] = torch.compiler.disable(
    _MovementFunction.apply, reason=NEEDS_COMPILED_FORWARD
)
