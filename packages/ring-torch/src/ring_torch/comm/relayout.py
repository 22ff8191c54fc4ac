"""Relayout: one all-to-all that moves rows from one assignment to ranks to another.

Nothing here knows of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ring_torch.comm.ranks import Ranks, others, peer_errors
from ring_torch.derivatives import check_backward

Ints = npt.NDArray[np.int64]
Guard = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, eq=False)
class Relayout:
    """Moves of one relayout for this rank: ``y = all_to_all(x[before])[after]``.

    Attributes:
        ring: The ranks that exchange.
        before: Local indices in the order of sending, by receiving rank; int64 ``[T_local]``.
        sent: Number of rows sent to each rank.
        received: Number of rows received from each rank.
        after: For each row of the result, its index among the received rows; int64 ``[T_local]``.
    """

    ring: Ranks
    before: torch.Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    after: torch.Tensor

    def __call__(self, x: torch.Tensor, guard: Guard) -> torch.Tensor:
        """Return the rows of ``x [T_local, ...]`` that belong here after the relayout, in order.

        It is differentiable. ``guard`` makes a context manager around each exchange, forward and
        backward.
        """
        moved: torch.Tensor = _Move.apply(x.reshape(x.shape[0], -1), self, guard)
        return moved.reshape(x.shape)

    def inverse(self) -> Relayout:
        """Return the relayout that undoes this one."""
        return Relayout(
            self.ring, self.after.argsort(), self.received, self.sent, self.before.argsort()
        )


def relayout_between(ring: Ranks, source: Ints, target: Ints, device: torch.device) -> Relayout:
    """Make the relayout of this rank from one assignment of rows to another.

    Args:
        ring: The ranks that exchange.
        source: Global position of each rank's rows now, int64 ``[P, T_local]``.
        target: Global position of each rank's rows afterwards, likewise.
        device: The device of the rows.
    """
    rank = ring.rank
    owner, new_owner = _owner_of(source), _owner_of(target)
    target_rank, source_rank = new_owner[source[rank]], owner[target[rank]]
    # Each rank sends its rows in the order in which it holds them: received rows are sorted by
    # sender, then by their local index there. `arriving` are their global positions.
    arriving = np.concatenate([row[new_owner[row] == rank] for row in source])
    after = np.empty(len(arriving), dtype=np.int64)
    # The received rows and the rows of the result are the same: match both by ascending position.
    after[np.argsort(target[rank])] = np.argsort(arriving)
    before = np.argsort(target_rank, kind="stable")
    sent, received = (
        tuple(np.bincount(x, minlength=ring.size).tolist()) for x in (target_rank, source_rank)
    )
    return Relayout(ring, torch.as_tensor(before, device=device), sent, received,
                 torch.as_tensor(after, device=device))  # fmt: skip


def _owner_of(positions: Ints) -> Ints:
    """Return the rank that holds each global position, int64 ``[P * T_local]``."""
    owner = np.empty(positions.size, dtype=np.int64)
    for rank, row in enumerate(positions):
        owner[row] = rank
    return owner


class _Move(torch.autograd.Function):
    """All-to-all as an autograd function: the backward moves gradients the other way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, moves: Relayout, guard: Guard) -> torch.Tensor:
        ctx.moves, ctx.guard = moves, guard
        return _move(x, moves, guard)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        check_backward(grad)  # attention would refuse it too, but its backward runs after this
        return _move(grad, ctx.moves.inverse(), ctx.guard), None, None


def _move(x: torch.Tensor, moves: Relayout, guard: Guard) -> torch.Tensor:
    """Exchange the rows of ``x [T_local, width]``; what is sent is a copy of ``x``."""
    rows = x.index_select(0, moves.before).view(torch.uint8)  # gloo knows few dtypes
    arrived = torch.empty_like(rows)
    with guard(), peer_errors(others(moves.ring)):
        dist.all_to_all_single(
            arrived, rows, list(moves.received), list(moves.sent), group=moves.ring.group
        )
    return arrived.view(x.dtype).index_select(0, moves.after)
