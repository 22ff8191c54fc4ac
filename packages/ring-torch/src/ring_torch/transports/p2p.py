"""Messages of ``torch.distributed``, for any device and network: they fetch keys, return gradients.

Copies out of the peers' memory (``peer_copies``) take no multiprocessors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ring_core import GatherProgram
from ring_torch.comm.handshake import agree
from ring_torch.payload import KeyGradBuffer
from ring_torch.records import Inputs, head_group
from ring_torch.transports.api import (
    PendingGrads,
    PendingKV,
    SessionSpec,
    Transport,
    Where,
    add_staged,
    requests_to,
    room_for,
    some_fetches,
)


@dataclass(frozen=True)
class Messages:
    """Point-to-point messages: everybody sends everybody what they fetch, all at once."""

    spec: SessionSpec

    @classmethod
    def open(cls, spec: SessionSpec) -> Messages:
        """A session of ranks that agree on what they are about to do.

        Raises:
            RankMismatchError: A peer is making another call.
        """
        agree(spec.ranks, spec.number, spec.seed, spec.signature, spec.device)
        return cls(spec)

    def fetch(self, gather: GatherProgram, inputs: Inputs) -> Iterator[PendingKV]:
        """Start all messages; any of a group means waiting for all of it."""
        groups = self.spec.groups
        return iter([self._fetch(gather, head_group(inputs, n, groups)) for n in range(groups)])

    def _fetch(self, gather: GatherProgram, inputs: Inputs) -> PendingKV:
        ring, keys = self.spec.ranks, self.spec.keys
        own = keys.message.views(keys.message.buffer(self.spec.device))
        keys.write(own, inputs)
        tensors = [x.new_empty(x.shape[0], gather.length, *x.shape[2:]) for x in own]
        for one in (fetch for fetch in gather.fetches if fetch.rank == ring.rank):
            for x, mine in zip(tensors, own, strict=True):
                x[:, one.target] = mine[:, one.source]
        sends = [
            (x[:, one.source].contiguous(), peer)
            for peer, one in requests_to(self.spec.plan, self.spec.ranks.rank, own=gather.own)
            for x in own
        ]
        places = [
            (x[:, one.target], one.rank)
            for one in gather.fetches
            if one.rank != ring.rank
            for x in tensors
        ]
        receives = [(x if x.is_contiguous() else torch.empty_like(x), peer) for x, peer in places]
        staged = [(place, x) for (place, _), (x, _) in zip(places, receives, strict=True)]
        pending = [(ring.start(sends, receives), staged)]

        def wait(fetches: int | None) -> None:
            if fetches == 0:
                return
            for transfer, arrived in pending:
                transfer.wait()
                for place, x in arrived:
                    if place.data_ptr() != x.data_ptr():
                        place.copy_(x)
            pending.clear()

        return PendingKV(tensors, wait)

    def accumulators(
        self, gather: GatherProgram, sums: KeyGradBuffer, *, zero: bool
    ) -> list[torch.Tensor]:
        """New ones."""
        spec, new = self.spec, torch.zeros if zero else torch.empty
        return [
            new(sums.numel(gather.length), dtype=spec.acc_dtype, device=spec.device)
            for _ in range(spec.groups)
        ]

    def return_grads(
        self, gather: GatherProgram, sums: KeyGradBuffer, grads: torch.Tensor, group: int, *,
        overlapped: bool, early: bool | None = None,
    ) -> PendingGrads:  # fmt: skip
        """The messages of :meth:`fetch`, turned round."""
        del group, overlapped  # messages are told apart by their order, and never hold up kernels
        ring = self.spec.ranks
        sends = [
            (part.contiguous(), one.rank)
            for one in some_fetches(gather, early)
            if one.rank != ring.rank
            for part in sums.parts(grads, gather.length, one.target)
        ]
        requests = requests_to(self.spec.plan, self.spec.ranks.rank, own=gather.own, early=early)
        staged = [room_for(sums, grads, one) for _, one in requests]
        receives = [
            (part, peer)
            for (peer, _), parts in zip(requests, staged, strict=True)
            for part in parts
        ]
        transfer = ring.start(sends, receives)

        def add_to(total: torch.Tensor, length: int, where: Where) -> None:
            transfer.wait()
            for (_, one), came in zip(requests, staged, strict=True):
                add_staged(sums.parts(total, length, where(one.source)), [came])

        return add_to


P2P = Transport("p2p", Messages.open, lambda _ranks, _device, _probe: (), sends_messages=True)
