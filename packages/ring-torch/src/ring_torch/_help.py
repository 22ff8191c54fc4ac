"""Queries that other ranks compute for their owner, and the results on their way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ring_core import WorkItem
from ring_torch._call import Call
from ring_torch._comm import NOTHING, Transfer
from ring_torch.kernels._api import Rows, Upstream


class Shipment(NamedTuple):
    """What arrives at a helper: the tensors of each helped item's rows."""

    transfer: Transfer
    arriving: tuple[tuple[WorkItem, list[Tensor]], ...]


@dataclass
class Errands:
    """Ships what a call's rows need to their helpers, and brings results home.

    ``take`` cuts the tensors a helper needs out of this rank's own, for a slice of rows; as shapes
    are equal on all ranks, it also tells what a shipment from another rank looks like.
    """

    call: Call
    take: Callable[[slice], list[Tensor]]
    pending: list[tuple[Transfer, list[tuple[WorkItem, list[Tensor]]]]] = field(
        default_factory=list
    )

    def ship(self, step: int | None) -> Shipment:
        """Start sending rows that others compute in a step, and receiving those computed here."""
        if step is None:
            return Shipment(NOTHING, ())
        ring, plan = self.call.ring, self.call.plan
        helper = ring.ahead(plan.steps[step].shift)
        helped = plan.helped(ring.rank, step)
        sends = [(x.contiguous(), helper) for item in helped for x in self.take(item.q_slice)]
        arriving = [
            (item, [_like(x) for x in self.take(item.q_slice)])
            for item in plan.items(ring.rank, step)
            if item.q_rank != ring.rank
        ]
        receives = [(x, item.q_rank) for item, tensors in arriving for x in tensors]
        return Shipment(ring.start(sends, receives), tuple(arriving))

    def send_home(
        self,
        step: int,
        results: Sequence[tuple[WorkItem, Sequence[Tensor]]],
        like: Callable[[WorkItem], Sequence[Tensor]],
    ) -> None:
        """Start sending results to the ranks they belong to, and receiving this rank's own.

        ``like`` gives tensors of the shapes and dtypes of an item's results.
        """
        ring, plan = self.call.ring, self.call.plan
        helper = ring.ahead(plan.steps[step].shift)
        sends = [(x, item.out_rank) for item, tensors in results for x in tensors]
        expected = [(item, [_like(x) for x in like(item)]) for item in plan.helped(ring.rank, step)]
        transfer = ring.start(sends, [(x, helper) for _, tensors in expected for x in tensors])
        self.pending.append((transfer, expected))

    def collect(self, add: Callable[[WorkItem, list[Tensor]], None]) -> None:
        """Wait for results sent home, and add each in its place."""
        for transfer, expected in self.pending:
            transfer.wait()
            for item, tensors in expected:
                add(item, tensors)
        self.pending.clear()


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def rows_tensors(rows: Rows) -> list[Tensor]:
    """What a helper needs of some rows to run the forward."""
    return [x for x in (rows.q, rows.segments, rows.bias) if x is not None]


def helped_rows(call: Call, item: WorkItem, like: Rows, tensors: list[Tensor]) -> Rows:
    """Rows that arrived as :func:`rows_tensors`, completed by what every rank knows."""
    rest = iter(tensors)
    q = next(rest)
    segments = None if like.segments is None else next(rest)
    bias = None if like.bias is None else next(rest)
    index, position, _ = call.positions(item.q_rank)
    part = item.q_slice
    return Rows(
        q, None if index is None else index[part], None if position is None else position[part],
        segments, bias,
        like.slopes,
    )  # fmt: skip


def upstream_tensors(upstream: Upstream) -> list[Tensor]:
    """What a helper needs besides the rows to run the backward."""
    return list(upstream)
