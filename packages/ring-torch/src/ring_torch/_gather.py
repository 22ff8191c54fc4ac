"""Fetching keys of other ranks into one buffer, and sending their gradients home.

Two ways: messages of ``torch.distributed``, for any device and network, and copies out of the
peers' memory (``_window``), which take no multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ring_core import Fetch, Gather
from ring_torch._call import Call
from ring_torch._comm import Packing


class Carrier(Protocol):
    """Moves what a call's ranks fetch. All ranks call its methods in the same order."""

    def fetch(self, gather: Gather, own: Sequence[Tensor]) -> Arriving:
        """Start fetching into new tensors like ``own``, ``[B, length, ...]``.

        ``own`` is what this rank gives, ``[B, T_kv_local, ...]``: keys, values, segment ids.
        """
        ...

    def accumulators(self, gather: Gather) -> list[Tensor]:
        """Room for gradients of the keys and values fetched, ``[B, length, ...]``, wide."""
        ...

    def send_home(
        self, gather: Gather, grads: Sequence[Tensor], *, early: bool | None = None
    ) -> Returning:
        """Start sending the accumulators to the ranks the keys belong to.

        All of them, or those that :meth:`ring_core.Gather.is_early` or the others.
        """
        ...


@dataclass(frozen=True)
class Arriving:
    """Tensors that fill up, fetch by fetch."""

    tensors: list[Tensor]
    wait: Callable[[int], None]  # until so many fetches have arrived
    finish: Callable[[], None]  # until the own tensors may change, too

    @classmethod
    def done(cls, tensors: list[Tensor]) -> Arriving:
        """What has arrived before."""
        return cls(tensors, lambda _: None, lambda: None)


@dataclass(frozen=True)
class Returning:
    """Gradients on their way."""

    add_to: Callable[[Sequence[Tensor]], None]  # wait, and add what came to the own accumulators


@dataclass(frozen=True)
class Messages:
    """Point-to-point messages: everybody sends everybody what they fetch, all at once."""

    call: Call
    keys: Packing

    def fetch(self, gather: Gather, own: Sequence[Tensor]) -> Arriving:
        """Start all messages; any of them means waiting for all."""
        ring = self.call.ring
        tensors = [x.new_empty(x.shape[0], gather.length, *x.shape[2:]) for x in own]
        for one in (fetch for fetch in gather.fetches if fetch.rank == ring.rank):
            for x, mine in zip(tensors, own, strict=True):
                x[:, one.target] = mine[:, one.source]
        sends = [
            (x[:, one.source].contiguous(), peer)
            for peer, one in asked_of(self.call, own=gather.own)
            for x in own
        ]
        places = [
            (x[:, one.target], one.rank)
            for one in gather.fetches
            if one.rank != ring.rank
            for x in tensors
        ]
        receives = [(_landing(place), peer) for place, peer in places]
        landed = [(place, x) for (place, _), (x, _) in zip(places, receives, strict=True)]
        pending = [(ring.start(sends, receives), landed)]

        def finish() -> None:
            for transfer, arrived in pending:
                transfer.wait()
                for place, x in arrived:
                    if place.data_ptr() != x.data_ptr():
                        place.copy_(x)
            pending.clear()

        return Arriving(tensors, lambda fetches: finish() if fetches else None, finish)

    def accumulators(self, gather: Gather) -> list[Tensor]:
        """New ones."""
        shapes = ((x[0], gather.length, *x[2:]) for x in self.keys.shapes[:2])
        return [torch.empty(s, dtype=self.call.wide, device=self.call.device) for s in shapes]

    def send_home(
        self, gather: Gather, grads: Sequence[Tensor], *, early: bool | None = None
    ) -> Returning:
        """The messages of :meth:`fetch`, turned round."""
        ring = self.call.ring
        sends = [
            (x[:, one.target].contiguous(), one.rank)
            for one in some_fetches(gather, early)
            if one.rank != ring.rank
            for x in grads
        ]
        coming = [
            (one.source, [x.new_empty(_length(x, one)) for x in grads], peer)
            for peer, one in asked_of(self.call, own=gather.own, early=early)
        ]
        transfer = ring.start(sends, [(x, peer) for _, parts, peer in coming for x in parts])

        def add_to(totals: Sequence[Tensor]) -> None:
            transfer.wait()
            for where, parts, _ in coming:
                for total, part in zip(totals, parts, strict=True):
                    total[:, where].add_(part)

        return Returning(add_to)


def asked_of(call: Call, *, own: bool, early: bool | None = None) -> list[tuple[int, Fetch]]:
    """What other ranks fetch from this one, by rank, in their order."""
    return [
        (peer, one)
        for peer in range(call.plan.cp_size)
        if peer != call.ring.rank
        for one in some_fetches(call.plan.gather(peer, own=own), early)
        if one.rank == call.ring.rank
    ]


def some_fetches(gather: Gather, early: bool | None) -> list[Fetch]:
    """All fetches, or those whose gradients are done early in the backward, or the others."""
    return [one for one in gather.fetches if early is None or gather.is_early(one) == early]


def _landing(place: Tensor) -> Tensor:
    """Where a message arrives: in its place if that is contiguous."""
    return place if place.is_contiguous() else torch.empty_like(place)


def _length(x: Tensor, one: Fetch) -> tuple[int, ...]:
    return (x.shape[0], one.source.stop - one.source.start, *x.shape[2:])
