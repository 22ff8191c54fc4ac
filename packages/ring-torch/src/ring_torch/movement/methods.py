"""Shift, halo, join and relayout of sharded tensors, for layers beside attention.

This module checks their arguments and shapes their results; :mod:`ring_torch.movement.rows` moves
the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ring_core import Layout, LayoutSpec, divisor_of
from ring_core.layouts.layout import check_layout
from ring_core.masks.mask import mask_of
from ring_core.movement import check_consecutive, check_fill, check_sides, check_steps, halo_ids
from ring_torch.capture import capture_safe_cache
from ring_torch.comm.ranks import Group, Ranks, ranks_of
from ring_torch.movement.rows import (
    HaloMove,
    MoveCall,
    MoveKind,
    RelayoutMove,
    ShiftMove,
    move,
)
from ring_torch.sharding import Sharding, check_dim


class Halo(NamedTuple):
    """Runs of consecutive tokens with rows of their neighbours: what ``halo`` returns.

    Attributes:
        rows: One row for each run, ``[B * R, ..., left + L + right, ...]``; zeros outside of the
            sequence.
        positions: Global position of each token in it, int64 ``[B * R, left + L + right]``; -1
            outside.
        documents: Number of the document of each token, counted without empty ones, likewise; 0
            without ``cu_seqlens``, -1 outside.
    """

    rows: Tensor
    positions: Tensor
    documents: Tensor


def shift(
    sharding: Sharding, x: Tensor, n: int, *, dim: int, fill: float, cu_seqlens: Sequence[int] | None
) -> Tensor:  # fmt: skip
    """Move tokens ``n`` positions on within documents; see :meth:`ContextParallel.shift`."""
    ranks = sharding.ranks
    number = ranks.next_call()
    check_dim(x, dim)
    check_shift(x, n, fill)
    # 0, 0.0 and False are equal keys, but not equal texts of a call.
    fill = float(fill) if x.is_floating_point() or x.is_complex() else int(fill)
    kind = ShiftMove(sharding.layout, int(n), fill, offsets_of(cu_seqlens))
    return _moved(ranks, x, dim, kind, number)


def halo(
    sharding: Sharding, x: Tensor, left: int, right: int, *, dim: int,
    cu_seqlens: Sequence[int] | None,
) -> Halo:  # fmt: skip
    """Return each run with its neighbours' rows on both sides; see :meth:`ContextParallel.halo`."""
    ranks, layout = sharding.ranks, sharding.layout
    number = ranks.next_call()
    check_dim(x, dim)
    check_halo(left, right, layout, ranks.size)
    kind = HaloMove(layout, int(left), int(right), offsets_of(cu_seqlens))
    dim %= x.ndim
    rows = rows_of_runs(_moved(ranks, x, dim, kind, number), dim, runs_a_rank(layout, ranks.size))
    return Halo(rows, *halo_ids_of(kind, x, dim, ranks))


def relayout(
    sharding: Sharding, x: Tensor, to: LayoutSpec, *, group_of_to: Group, dim: int
) -> Tensor:
    """Return this rank's rows in the layout ``to``; see :meth:`ContextParallel.relayout`."""
    ranks = sharding.ranks
    number = ranks.next_call()
    check_dim(x, dim)
    check_target(ranks, to, ranks_of(group_of_to))
    kind = RelayoutMove(sharding.layout, to)
    return _moved(ranks, x, dim, kind, number)


def join(y: Tensor, dim: int, layout: LayoutSpec, size: int) -> Tensor:
    """Return the rows of all runs ``[B * R, ..., L, ...]`` as ``[B, ..., R * L, ...]``; a view."""
    check_dim(y, dim, "y")
    check_consecutive(layout, size)
    dim, runs = dim % y.ndim, runs_a_rank(layout, size)
    if y.shape[0] % runs or (dim == 0 and y.shape[0] != runs) or y.ndim < 2:
        raise ValueError(
            f"y must have a row for each of the {runs} runs that a rank holds in the {layout} layout "
            f"{'([R, L, ...] with dim=0)' if dim == 0 else 'and each sequence'}, as halo returns "
            f"them, got shape {list(y.shape)}"
        )
    if dim == 0:
        return y.flatten(0, 1)
    split: Tensor = y.unflatten(0, (y.shape[0] // runs, runs))
    return split.movedim(1, dim).flatten(dim, dim + 1)


def check_shift(x: Tensor, n: object, fill: object) -> None:
    """Check how far a shift of ``x`` goes, and what it fills with.

    Raises:
        ValueError: ``n`` is no integer, or ``fill`` no number of the dtype.
    """
    check_steps(n)
    low: float = 0
    high: float = 1
    if x.dtype.is_floating_point or x.dtype.is_complex:
        low, high = torch.finfo(x.dtype).min, torch.finfo(x.dtype).max
    elif x.dtype != torch.bool:
        low, high = torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max
    check_fill(fill, str(x.dtype).removeprefix("torch."), low, high)


def check_halo(left: object, right: object, layout: LayoutSpec, size: int) -> None:
    """Check the sides of a halo, and that ranks hold consecutive tokens.

    Raises:
        ValueError: A side is no integer >= 0.
        UnsupportedError: The layout is striped.
    """
    check_sides(left, right)
    check_consecutive(layout, size)


def check_target(ranks: Ranks, to: LayoutSpec, others: Ranks) -> None:
    """Check that a relayout leads to a layout of these ranks.

    Args:
        ranks: The ranks that hold the rows.
        to: The layout.
        others: The ranks that ``to`` was given for.

    Raises:
        ValueError: It is no layout of as many ranks, or one over others.
    """
    divisor_of(check_layout(to), ranks.size)
    if _ranks_in(others) != _ranks_in(ranks):
        raise ValueError(
            f"to must be a layout, or a ContextParallel over the same ranks, {_ranks_in(ranks)}; "
            f"this one is over {_ranks_in(others)}. Instead: to.shard(cp.unshard(x, grad='sum'))"
        )


def offsets_of(cu_seqlens: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the offsets of documents as a tuple of integers.

    Raises:
        ValueError: They are malformed.
    """
    return mask_of(causal=False, window=None, chunk_size=None, cu_seqlens=cu_seqlens).cu_seqlens


def runs_a_rank(layout: LayoutSpec, size: int) -> int:
    """Return the number of runs that a rank holds, ``R``."""
    return divisor_of(layout, size) // size


def rows_of_runs(x: Tensor, dim: int, runs: int) -> Tensor:
    """Return ``[B, ..., R * W, ...]`` as ``[B * R, ..., W, ...]``; as ``[R, W, ...]`` of dim 0."""
    split: Tensor = x.unflatten(dim, (runs, -1))
    return split if dim == 0 else split.movedim(dim, 1).flatten(0, 1)


def halo_ids_of(kind: HaloMove, x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """Return positions and documents of a halo of ``x``, int64 ``[2, B * R, left + L + right]``."""
    layout = Layout(kind.layout, x.shape[dim] * ranks.size, ranks.size)
    ids = _halo_ids(kind, layout, ranks.rank, x.device)
    batch = 1 if dim == 0 else x.shape[0]
    return ids.repeat(1, batch, 1)  # a copy: the caller may write to it


@capture_safe_cache(maxsize=16)  # few, as each takes megabytes for a long sequence
def _halo_ids(kind: HaloMove, layout: Layout, rank: int, device: torch.device) -> Tensor:
    """Return positions and documents of one sequence's halo, ``[2, R, left + L + right]``."""
    ids = halo_ids(layout, kind.left, kind.right, rank, kind.cu_seqlens)
    return torch.stack([torch.as_tensor(x) for x in ids]).to(device)


def _moved(ranks: Ranks, x: Tensor, dim: int, kind: MoveKind, number: int) -> Tensor:
    """Run a checked movement as one autograd function."""
    needs_grad = x.requires_grad and torch.is_grad_enabled()
    moved: Tensor = move(x, MoveCall(ranks, kind, dim % x.ndim, needs_grad, number))
    return moved


def _ranks_in(ranks: Ranks) -> list[int]:
    """Return the global ranks of a group; rank 0 for a process that is alone."""
    return [0] if ranks.group is None else dist.get_process_group_ranks(ranks.group)
