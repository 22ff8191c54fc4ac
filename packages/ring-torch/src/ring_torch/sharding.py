"""Splitting of sequences over ranks: slices, whole tensors from all slices, and positions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ring_core import Layout, LayoutSpec, UnsupportedError, checks, divisor_of, row_checks
from ring_core.base.arguments import check_size
from ring_core.layouts.layout import WHOLE_LAYOUT, Run, check_layout
from ring_torch.capture import as_stored, constant_in_graphs
from ring_torch.comm.groups import Members, check_device, members_of, warn_if_alone
from ring_torch.comm.handshake import GuardedPass, agree, check_graph
from ring_torch.comm.ranks import Group, OneRank, Ranks, is_foreign, ranks_of, run_collective
from ring_torch.comm.store import CallSignature
from ring_torch.comm.whole import acting_alone, acts_alone, check_trace
from ring_torch.derivatives import NEEDS_COMPILED_FORWARD, check_no_batch
from ring_torch.tensor_specs import check_local

#: Numbers of objects, each of which a compiled graph may know again.
_NUMBERS = count()

UnshardGrad = Literal["sum", "slice"]
_PADDED = "_ring_padded"  # attribute of a shard that was padded; see `padded_of`
UNSHARD_GRADS: tuple[str, ...] = get_args(UnshardGrad)


class _Thread(threading.local):
    """Lengths of a thread's padded sequences, by T_local, while a forward collects them."""

    def __init__(self) -> None:
        # One of the class would be found in another place once it is set, which graphs see.
        self.padded: dict[int, int] | None = None


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
        self.thread = _Thread()
        #: The same ranks with consecutive tokens; made here, as a graph that is traced cannot.
        self.contiguous = self if layout != "striped" else Sharding(group, "contiguous")
        self._number = str(next(_NUMBERS))  # a text: the compiler takes other numbers for symbols
        if is_foreign(group):
            divisor_of(self.layout, len(self.members.ranks))
        elif group is not None or (dist.is_available() and dist.is_initialized()):
            self.ranks  # noqa: B018 - refuses what these ranks cannot run

    def __reduce__(self) -> tuple[Any, ...]:
        if self.group is not None:
            raise UnsupportedError(
                f"a ContextParallel over a {type(self.group).__name__} cannot be pickled, for a "
                f"group belongs to its process. Instead: pickle its layout, and make "
                f"ContextParallel(group, layout) where that is read; or use the default group"
            )
        return type(self), (None, self.layout)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        return type(self)(self.group, self.layout)

    @property
    def acting(self) -> Sharding:
        """Sharding of the code that runs: self, or inside of ``cp.whole()`` one of a rank alone."""
        return ALONE if self._acts_alone(torch.compiler.is_compiling()) else self

    @constant_in_graphs
    def _acts_alone(self, is_traced: bool) -> bool:
        """Return True inside of ``whole`` of these ranks; a constant to the compiler."""
        if is_traced:
            check_trace()
        return self.group is not OneRank.WHOLE and acts_alone(self.members.ranks)

    def acts_alone_with(self, other: LayoutSpec | Sharding) -> bool:
        """Return True if this is a rank that acts alone; ``other`` is a layout, or acts alone too.

        Raises:
            UnsupportedError: One of two shardings acts alone.
        """
        shardings = (x for x in (self, other) if isinstance(x, Sharding))
        alone = [x.group is OneRank.WHOLE for x in shardings]
        if any(alone) and not all(alone):
            raise UnsupportedError(
                "relayout between ranks that act alone, inside of whole(), and others: enter whole() of "
                "the ContextParallel that has all ranks of both"
            )
        return all(alone)

    def whole(self) -> AbstractContextManager[None]:
        """Let these ranks act alone in a block; see :meth:`ContextParallel.whole`."""
        return acting_alone(self.members.ranks)

    @property
    def ranks(self) -> Ranks:
        """Ranks of the group, which must be the same as at the first use.

        Raises:
            ValueError: The group was destroyed, or the default group is another by now.
        """
        ranks = ranks_of(self.group)
        if self._bound is None:
            divisor_of(self.layout, ranks.size)
            if self.group is None:
                warn_if_alone()
            self._bound = ranks
        if ranks is not self._bound:
            raise ValueError(
                f"this ContextParallel is of another process group: at first it had "
                f"{self._bound.size} ranks, now the default group has {ranks.size} (it was made or "
                f"destroyed in between). Make a new ContextParallel, and shard with that one"
            )
        return ranks

    @property
    def members(self) -> Members:
        """The group and its ranks, also of a ``DeviceMesh`` that this rank is not in.

        Raises:
            ValueError: As of :attr:`ranks`, if this rank is in it.
        """
        if not is_foreign(self.group):
            self.ranks  # noqa: B018 - refuses another group than at the first use
        return members_of(self.group)

    def check_group(self) -> None:
        """Refuse a group other than at the first use; in a compiled graph, when it is traced."""
        # Reading the number makes the compiler guard on it, so a graph is for this object alone.
        # An id would do, were it not that torch 2.15 finds none of what a mode of torch holds.
        self._check_group(self._number)

    # A method, as torch 2.11 refuses objects of our classes as arguments of a constant function.
    @constant_in_graphs
    def _check_group(self, _: str) -> None:
        """Check the group; the argument ties a compiled graph to this object."""
        self.members  # noqa: B018 - the property checks

    def layout_of(self, seq_len: int, *, pad: bool = False) -> Layout:
        """Return the layout of ``seq_len`` tokens; with ``pad`` they may need padding behind."""
        checks.check_flag("pad", pad)
        make = Layout.padded if pad else Layout
        return make(self.layout, seq_len, self.ranks.size)

    def shard(self, x: Tensor, *, dim: int = 1, pad: bool = False, fill: float = 0) -> Tensor:
        """Return this rank's slice of a whole tensor that every rank holds; contiguous."""
        check_dim(x, dim)
        fill = check_fill(x, fill)
        checks.check_padding(pad, fill)
        if self.group is OneRank.WHOLE:  # which holds the whole tensor, and needs no padding
            return x
        layout = self.layout_of(x.shape[dim], pad=pad)
        shard = _slice_of(x, dim, layout, self.ranks.rank, fill)
        if layout.padded_len > layout.seq_len:
            if self.thread.padded is not None:
                self.thread.padded[layout.local_len] = layout.seq_len
            facts = dim % x.ndim, layout.local_len, layout.seq_len, self.ranks.size
            setattr(shard, _PADDED, facts)
        return shard

    def unshard(
        self,
        x: Tensor,
        *,
        dim: int = 1,
        grad: UnshardGrad | None = None,
        seq_len: int | None = None,
    ) -> Tensor:
        """Return the whole tensor, on every rank, joined from the slices of all ranks."""
        ranks = self.ranks
        number = ranks.next_call()
        check_slice(x, dim)
        needs_grad = check_grad(x, grad)
        length = None if seq_len is None else check_size("seq_len", seq_len)
        if self.group is OneRank.WHOLE and (length is None or length == x.shape[dim]):
            return x
        return _unshard(
            x, Unsharding(ranks, self.layout, dim % x.ndim, grad, needs_grad, number, length)
        )

    def positions(self, seq_len: int, *, device: torch.device | str | None = None) -> Tensor:
        """Return the global positions of this rank's tokens and padding, int64 ``[T_local]``."""
        positions = self.layout_of(seq_len, pad=True).positions(self.ranks.rank)
        try:
            return torch.as_tensor(positions, device=device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device {device!r} cannot be used: {error}") from error


#: The sharding of a rank that acts alone, inside of :meth:`ContextParallel.whole`.
ALONE = Sharding(OneRank.WHOLE, WHOLE_LAYOUT)


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
        seq_len: Number of tokens of the whole tensor; the slices have padding behind them. ``None``
            is no padding.
        order: 0 of the call itself, 1 of its backward, 2 of the backward of that, and so on.
    """

    ranks: Ranks
    layout: LayoutSpec
    dim: int
    grad: UnshardGrad | None
    needs_grad: bool
    number: int
    seq_len: int | None = None
    order: int = 0

    def run(self, x: Tensor) -> Tensor:
        """Return the whole tensor from this rank's slice, or in a backward the other way round."""
        return self.grad_of_slice(x) if self.order % 2 else self.join(x)

    def backward(self, *, needs_grad: bool) -> Unsharding:
        """Return the call that is this one's backward."""
        return replace(self, order=self.order + 1, needs_grad=needs_grad)

    def join(self, x: Tensor) -> Tensor:
        """Return the whole tensor, all-gathered from this rank's slice ``x`` and the others'.

        Raises:
            ValueError: The size of ``x`` is no rank's part in this layout, or not one of
                ``seq_len`` tokens.
            RankMismatchError: Shapes, dtypes or arguments differ between ranks.
        """
        signature = self._signature(x)
        agree_on_call(self.ranks, self.number, signature, x.device)
        # If the layout cannot divide the length, all ranks refuse it here, as all have the same.
        layout = checks.padded_layout(self.seq_len, x.shape[self.dim], self.layout, self.ranks.size)
        slices = [x]
        if self.ranks.size > 1:
            with GuardedPass(self.ranks, self.number, signature, x.device):
                # Peers' slices have this shape, so one collective of equal sizes will do: every
                # rank sends its slice to all others, and receives theirs in the order of ranks.
                local_slice = as_stored(x).contiguous()
                slices = [torch.empty_like(local_slice) for _ in range(self.ranks.size)]
                run_collective(
                    self.ranks,
                    partial(
                        dist.all_gather,
                        [*map(_as_bytes, slices)],
                        _as_bytes(local_slice),
                        group=self.ranks.group,
                        async_op=True,
                    ),
                )
        # Ranks hold every token once: all rows are written, and padding is left out.
        whole = x.new_empty([*x.shape[: self.dim], layout.seq_len, *x.shape[self.dim + 1 :]])
        rows = whole.transpose(0, self.dim)
        # Copy each run of a rank's slice to its rows in the whole sequence.
        for rank, rank_slice in enumerate(slices):
            runs = layout.runs(rank)
            # Views: each row is copied once, from the slice to its place.
            run_rows = rank_slice.transpose(0, self.dim).split([run.length for run in runs])
            for run, row_block in zip(runs, run_rows, strict=True):
                dst = rows[_slice(run)]  # without padding, which is behind the last row
                dst.copy_(row_block[: len(dst)])
        return whole

    def grad_of_slice(self, grad: Tensor) -> Tensor:
        """Return the gradient of this rank's slice from the gradient of the whole tensor."""
        size = self.ranks.size
        layout = Layout.padded(self.layout, grad.shape[self.dim], size)
        # Each rank keeps a part of its own gradient: nothing is sent.
        if self.grad != "sum" or size == 1:
            return _slice_of(grad, self.dim, layout, self.ranks.rank)
        signature = self._signature(grad)
        agree_on_call(self.ranks, self.number, signature, grad.device)
        with GuardedPass(self.ranks, self.number, signature, grad.device):
            # Put the slices in the order of ranks. A reduce-scatter in float32 or wider adds them
            # up, and gives each rank the sum of its own.
            slices = torch.stack([_slice_of(grad, self.dim, layout, rank) for rank in range(size)])
            slices = slices.to(torch.promote_types(grad.dtype, torch.float32))
            # Of these stacked slices one is for each rank; only the own sum comes back.
            total = torch.empty_like(slices[0])
            run_collective(
                self.ranks,
                partial(
                    dist.reduce_scatter_tensor,
                    _as_real(total),
                    _as_real(slices),
                    group=self.ranks.group,
                    async_op=True,
                ),
            )
        return total.to(grad.dtype)

    def _signature(self, x: Tensor) -> CallSignature:
        """Return the facts of the call that must be equal on all ranks."""
        return CallSignature.of(
            {
                "shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch."),
                "dim": self.dim, "layout": str(self.layout),
                "sums_gradients": self.needs_grad and self.grad == "sum", "seq_len": self.seq_len,
            }, "unshard" + " backward" * self.order,
        )  # fmt: skip


def agree_on_call(
    ranks: Ranks, number: int, signature: CallSignature, device: torch.device, seed: int = 0
) -> None:
    """Check that all ranks make this call with equal arguments, before tensors are sent.

    Raises:
        RankMismatchError: They do not.
    """
    if ranks.size == 1:
        return
    check_device(ranks, device)
    check_graph(ranks, signature)
    with GuardedPass(ranks, number, signature, device):
        agree(ranks, number, seed, signature, device)


def padded_of(x: Tensor, ranks: int) -> tuple[int, int, int] | None:
    """Return the dimension, ``T_local`` and ``T`` of a shard that was made with padding.

    ``shard(pad=True)`` leaves them on the very tensor that it returns; results of operations on it
    have them not. ``None`` for any other tensor, and for one of another number of ranks, as that of
    one rank that acts alone.
    """
    padded: tuple[int, int, int, int] | None = getattr(x, _PADDED, None)
    if padded is None or padded[3] != ranks:
        return None
    return padded[:3] if padded[0] < x.ndim and x.shape[padded[0]] == padded[1] else None


def length_of(x: Tensor, dim: int, seq_len: int | None, ranks: int) -> int | None:
    """Return ``seq_len``, or without it the length of a shard that was padded along ``dim``."""
    if seq_len is not None or (padded := padded_of(x, ranks)) is None or padded[0] != dim % x.ndim:
        return seq_len
    return padded[2]


class _Unshard(torch.autograd.Function):
    """Autograd function of ``unshard``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unsharding: Unsharding) -> Tensor:
        ctx.unsharding = unsharding
        return unsharding.run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        check_no_batch(grad)
        # Under create_graph=True gradients have gradients: a sum's are a call too, and those of a
        # slice are torch's.
        needs_grad = grad.requires_grad and torch.is_grad_enabled()
        backward = ctx.unsharding.backward(needs_grad=needs_grad)
        return _unshard(grad, backward) if backward.grad == "sum" else backward.run(grad), None


# Compiled graphs use `ring_torch.compiled.unshard`. After a graph break this runs, untraced.
_unshard: Callable[[Tensor, Unsharding], Tensor] = torch.compiler.disable(
    _Unshard.apply, reason=NEEDS_COMPILED_FORWARD
)


def check_dim(x: object, dim: object, name: str = "x") -> int:
    """Return ``dim``, not negative, after checking that it is one of ``x``, an argument's ``name``.

    Raises:
        ValueError: ``x`` is no tensor, or has no such dimension.
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    return row_checks.check_dim(x.shape, dim, name)


def check_slice(x: object, dim: object) -> None:
    """Check that ``x`` is a dense tensor of this rank's own, and ``dim`` a dimension of it.

    Raises:
        ValueError: It is no tensor, one of several ranks or not dense; or has no such dimension.
    """
    check_dim(check_local("x", x), dim)


def check_fill(x: Tensor, fill: Any) -> float:
    """Check a number that rows like those of ``x`` are filled with; return it in one form by dtype.

    Raises:
        ValueError: It is no number, or not one of the dtype.
    """
    limits: tuple[float, float] = (0, 1)
    if x.dtype.is_floating_point or x.dtype.is_complex:
        limits = torch.finfo(x.dtype).min, torch.finfo(x.dtype).max
    elif x.dtype != torch.bool:
        limits = torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max
    row_checks.check_fill(fill, str(x.dtype).removeprefix("torch."), *limits)
    # 0, 0.0 and False are equal keys, but not equal texts of a call.
    return float(fill) if isinstance(limits[0], float) else int(fill)


def check_grad(x: Tensor, grad: object, name: str = "unshard") -> bool:
    """Check ``grad`` of ``unshard``, and return True if there will be a backward.

    ``name`` is the function's, if it is another with the same argument.

    Raises:
        ValueError: It is unknown, or missing although there will be a backward.
    """
    if grad is not None:
        checks.check_choice("grad", grad, UNSHARD_GRADS)
    needs_grad = x.requires_grad and torch.is_grad_enabled()
    if needs_grad and grad is None:
        raise ValueError(
            f"{name}: x requires a gradient, so say what becomes of it.\n"
            "grad='sum': the ranks' gradients are added up. Right wherever the loss of a step is the "
            "sum of the ranks' losses: inside a model, as in shard(f(unshard(x, grad='sum')))\n"
            "grad='slice': each rank keeps its slice of its own gradient. Right only for a loss that "
            "every rank computes whole, with no parameter behind unshard; with one, grad='sum' and "
            "the loss divided by cp_size\n"
            f"Where no gradient is wanted, {name}(x.detach())"
        )
    return needs_grad


def _slice_of(x: Tensor, dim: int, layout: Layout, rank: int, fill: float = 0) -> Tensor:
    """Return a rank's slice of a whole tensor, contiguous, with the padding of the layout."""
    rows = x.transpose(0, dim)
    # Runs are views of the whole tensor; they are copied once, by `cat`.
    pieces = [rows[_slice(run)].transpose(0, dim) for run in layout.runs(rank)]
    padding = layout.local_len - sum(piece.shape[dim] for piece in pieces)
    # Padding is behind the last run of a rank, never between.
    if padding > 0:
        shape = [*x.shape]
        shape[dim] = padding
        pieces.append(x.new_full(shape, fill))
    return torch.cat(pieces, dim=dim).contiguous()


def _slice(run: Run) -> slice:
    """Return the rows of the whole tensor that hold a run of tokens."""
    return slice(run.global_start, run.global_start + run.length * run.stride, run.stride)


def _as_real(x: Tensor) -> Tensor:
    """View a contiguous tensor as one row of real numbers, as backends sum no complex ones."""
    flat = as_stored(x).view(-1)
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _as_bytes(x: Tensor) -> Tensor:
    """View a contiguous tensor as bytes, as gloo supports few dtypes."""
    return x.view(-1).view(torch.uint8)
