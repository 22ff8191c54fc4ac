"""Shift, halo, join and relayout of sharded tensors, for layers beside attention.

This module checks their arguments and shapes their results; :mod:`ring_torch.movement.rows` moves
the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ring_core import Layout, LayoutSpec, UnsupportedError, divisor_of
from ring_core.base.arguments import check_size
from ring_core.checks import padded_layout
from ring_core.movement import halo_ids
from ring_core.row_checks import check_halo, check_rows, check_steps, offsets_of
from ring_torch.capture import capture_safe_cache
from ring_torch.checking.settings import check_of
from ring_torch.comm.groups import Members
from ring_torch.comm.ranks import Ranks, ranks_of
from ring_torch.movement.rows import (
    HaloMove,
    MoveCall,
    MoveKind,
    RelayoutMove,
    ShiftMove,
    layout_of,
    move,
)
from ring_torch.sharding import Sharding, check_dim, check_fill, check_slice, length_of


class Halo(NamedTuple):
    """Runs of consecutive tokens with rows of their neighbours: what ``halo`` returns.

    Attributes:
        rows: One row for each run, ``[B * R, ..., left + L + right, ...]``; zeros outside of the
            sequence.
        positions: Global position of each token in it, int64 ``[B * R, left + L + right]``; -1
            outside.
        documents: Number of the document of each token, counted without empty ones, likewise; 0
            without ``cu_seqlens``, -1 outside.

    Where tokens lie along the first dimension, ``[R, left + L + right, ...]`` and ``R`` stand for
    ``[B * R, ..., left + L + right, ...]`` and ``B * R``.
    """

    rows: Tensor
    positions: Tensor
    documents: Tensor


def whole_length(sharding: Sharding, x: Tensor | int, *, seq_len: int | None, dim: int) -> int:
    """Return the length of a whole sequence; see :meth:`ContextParallel.whole_length`."""
    size = sharding.ranks.size
    if isinstance(x, Tensor):
        check_dim(x, dim)
        local, length = x.shape[dim], length_of(x, dim, seq_len, size)
    else:
        local, length = check_size("x", x), seq_len
    layout = padded_layout(length, local, sharding.layout, size)
    return layout.seq_len if length is None else length


def shift(
    sharding: Sharding,
    x: Tensor,
    n: int,
    *,
    dim: int,
    fill: float,
    cu_seqlens: Sequence[int] | None,
    seq_len: int | None,
) -> Tensor:
    """Move tokens ``n`` positions on within documents; see :meth:`ContextParallel.shift`."""
    ranks = sharding.ranks
    number = ranks.next_call()
    check_slice(x, dim)
    check_steps(n)
    fill = check_fill(x, fill)
    length = length_of(
        x, dim, None if seq_len is None else check_size("seq_len", seq_len), ranks.size
    )
    kind = ShiftMove(sharding.layout, int(n), fill, length, offsets_of(cu_seqlens))
    return _moved(ranks, x, dim, kind, number, x.shape[dim] * ranks.size)


def halo(
    sharding: Sharding,
    x: Tensor,
    left: int,
    right: int,
    *,
    dim: int,
    cu_seqlens: Sequence[int] | None,
    seq_len: int | None,
) -> Halo:
    """Return each run with its neighbours' rows on both sides; see :meth:`ContextParallel.halo`."""
    ranks, layout = sharding.ranks, sharding.layout
    number = ranks.next_call()
    check_slice(x, dim)
    check_halo(left, right, layout, ranks.size)
    length = length_of(
        x, dim, None if seq_len is None else check_size("seq_len", seq_len), ranks.size
    )
    kind = HaloMove(layout, int(left), int(right), length, offsets_of(cu_seqlens))
    dim %= x.ndim
    moved = _moved(ranks, x, dim, kind, number, x.shape[dim] * ranks.size)
    rows = rows_of_runs(moved, dim, runs_a_rank(layout, ranks.size))
    return Halo(rows, *halo_ids_of(kind, x, dim, ranks))


def relayout(
    sharding: Sharding, x: Tensor, to: LayoutSpec | Sharding, *, dim: int, seq_len: int | None
) -> Tensor:
    """Return this rank's rows in the layout of ``to``; see :meth:`ContextParallel.relayout`."""
    to = to if isinstance(to, Sharding) else Sharding(sharding.group, to)
    ranks, source_ranks, target_ranks = ranks_of_relayout(sharding.members, to.members)
    number = ranks.next_call()
    check_slice(x, dim)
    tokens = seq_len_of(x.shape[dim], ranks.size, source_ranks, seq_len)
    stated = None if seq_len is None and source_ranks is None else tokens
    kind = RelayoutMove(
        sharding.layout, to.layout, source_ranks, target_ranks, stated, seq_len is not None
    )
    return _moved(ranks, x, dim, kind, number, tokens)


def join(y: Tensor, dim: int, layout: LayoutSpec, size: int) -> Tensor:
    """Return the rows of all runs ``[B * R, ..., L, ...]`` as ``[B, ..., R * L, ...]``.

    With ``dim`` 0 it returns ``[R, L, ...]`` as ``[R * L, ...]``. The result is a view where that
    is possible.
    """
    dim = check_dim(y, dim, "y")
    runs = check_rows(y.shape, dim, layout, size)
    if dim == 0:
        return y.flatten(0, 1)
    # The batch has the runs of a sequence side by side; they go back behind each other, in the
    # order of the layout.
    split: Tensor = y.unflatten(0, (y.shape[0] // runs, runs))
    return split.movedim(1, dim).flatten(dim, dim + 1)


def ranks_of_relayout(
    source: Members, target: Members
) -> tuple[Ranks, tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return the ranks that exchange the rows of a relayout, and who of them holds which part.

    They are the ranks of the larger group, which has all of the other's.

    Args:
        source: The ranks that hold rows.
        target: The ranks that get them.

    Returns:
        The ranks; and for each rank of the source, and of the target, its number among them, or
        ``None`` twice if both are these ranks in this order.

    Raises:
        UnsupportedError: Neither group has all ranks of the other.
        ValueError: This rank is in neither of them.
    """
    if source.ranks == target.ranks:
        return ranks_of(source.group), None, None
    # All messages go over one group: ranks that hold nothing, or get nothing, take part with empty
    # tensors.
    wider, other = (source, target) if set(source.ranks) >= set(target.ranks) else (target, source)
    if not set(wider.ranks) >= set(other.ranks):
        raise UnsupportedError(
            f"relayout exchanges rows within one group, so one of the two must have all ranks of the "
            f"other; these are over the ranks {list(source.ranks)} and {list(target.ranks)}. Instead: "
            f"go through a ContextParallel over a group that has all of them, as in "
            f"everyone.relayout(cp.relayout(x, to=everyone, seq_len=T), to=other)"
        )
    source_ranks, target_ranks = (
        tuple(wider.ranks.index(rank) for rank in members.ranks) for members in (source, target)
    )
    return ranks_of(wider.group), source_ranks, target_ranks


def seq_len_of(
    rows: int, size: int, source_ranks: tuple[int, ...] | None, seq_len: int | None
) -> int:
    """Return the length of a sequence that is relaid.

    Args:
        rows: Number of tokens on this rank.
        size: Number of ranks that exchange rows.
        source_ranks: Numbers of those that hold the sequence; ``None`` for all of them.
        seq_len: The length, if the call states it.

    Raises:
        ValueError: It is no length, or ranks that hold no tokens would need it.
    """
    if seq_len is not None:
        return check_size("seq_len", seq_len)
    holders = size if source_ranks is None else len(source_ranks)
    if holders < size:
        raise ValueError(
            f"relayout from {holders} of {size} ranks: the others hold no tokens, and do not know how "
            f"many there are. Give seq_len, the length of the whole sequence, on all ranks"
        )
    return rows * holders


def runs_a_rank(layout: LayoutSpec, size: int) -> int:
    """Return the number of runs that a rank holds, ``R``."""
    return divisor_of(layout, size) // size


def rows_of_runs(x: Tensor, dim: int, runs: int) -> Tensor:
    """Return ``[B, ..., R * W, ...]`` as ``[B * R, ..., W, ...]``; as ``[R, W, ...]`` of dim 0."""
    split: Tensor = x.unflatten(dim, (runs, -1))
    return split if dim == 0 else split.movedim(dim, 1).flatten(0, 1)


def halo_ids_of(kind: HaloMove, x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """Return positions and documents of a halo of ``x``, int64 ``[2, B * R, left + L + right]``.

    ``B`` is 1 if ``dim`` is 0.
    """
    layout = layout_of(kind, x.shape[dim] * ranks.size, ranks.size)
    # Every rank works them out of the plan: ids are never sent.
    ids = _halo_ids(kind, layout, ranks.rank, x.device)
    return ids.repeat(1, 1 if dim == 0 else x.shape[0], 1)  # a copy: the caller may write to it


@capture_safe_cache(maxsize=16)  # few, as each takes megabytes for a long sequence
def _halo_ids(kind: HaloMove, layout: Layout, rank: int, device: torch.device) -> Tensor:
    """Return positions and documents of one sequence's halo, ``[2, R, left + L + right]``."""
    ids = halo_ids(layout, kind.left, kind.right, rank, kind.cu_seqlens)
    return torch.stack([torch.as_tensor(x, device=device) for x in ids])


def _moved(ranks: Ranks, x: Tensor, dim: int, kind: MoveKind, number: int, tokens: int) -> Tensor:
    """Run a movement, the arguments of which have been checked, as one autograd function."""
    needs_grad = x.requires_grad and torch.is_grad_enabled()
    check_every, checked = check_of(number) if ranks.size > 1 else (0, 0)
    call = MoveCall(ranks, kind, dim % x.ndim, needs_grad, number, 0, check_every, checked)
    return move(x, call, tokens)
