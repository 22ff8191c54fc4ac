"""Fetching keys of other ranks into one buffer, and sending their gradients home.

Two ways: messages of ``torch.distributed``, for any device and network, and copies out of the
peers' memory (``_window``), which take no multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ring_core import Fetch, Gather
from ring_torch._call import Call, Inputs
from ring_torch._keys import Keys


class Carrier(Protocol):
    """Moves what a call's ranks fetch. All ranks call its methods in the same order."""

    @property
    def keys(self) -> Keys:
        """The shape of what travels."""
        ...

    def fetch(self, gather: Gather, inputs: Inputs) -> Arriving:
        """Start fetching into new tensors like a :attr:`Keys.message` of ``gather.length``."""
        ...

    def accumulator(self, gather: Gather) -> Tensor:
        """Room for gradients of what was fetched, ``[B, gather.length, Keys.width]``, wide."""
        ...

    def send_home(self, gather: Gather, grads: Tensor, *, early: bool | None = None) -> Returning:
        """Start sending the gradients to the ranks the keys belong to.

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

    add_to: Callable[[Tensor], None]  # wait, and add what came to the own ones


@dataclass(frozen=True)
class Messages:
    """Point-to-point messages: everybody sends everybody what they fetch, all at once."""

    call: Call
    keys: Keys

    def fetch(self, gather: Gather, inputs: Inputs) -> Arriving:
        """Start all messages; any of them means waiting for all."""
        ring, device = self.call.ring, self.call.device
        own = self.keys.message.views(self.keys.message.buffer(device))
        self.keys.write(own, inputs)
        tensors = [x.new_empty(x.shape[0], gather.length, *x.shape[2:]) for x in own]
        for one in (fetch for fetch in gather.fetches if fetch.rank == ring.rank):
            for x, mine in zip(tensors, own, strict=True):
                x[:, one.target] = mine[:, one.source]
        asked = asked_of(self.call, own=gather.own)
        sends = [(x[:, one.source].contiguous(), peer) for peer, one in asked for x in own]
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

    def accumulator(self, gather: Gather) -> Tensor:
        """A new one."""
        shape = (self.keys.batch, gather.length, self.keys.width)
        return torch.empty(shape, dtype=self.call.wide, device=self.call.device)

    def send_home(self, gather: Gather, grads: Tensor, *, early: bool | None = None) -> Returning:
        """The messages of :meth:`fetch`, turned round."""
        ring = self.call.ring
        sends = [
            (grads[:, one.target].contiguous(), one.rank)
            for one in some_fetches(gather, early)
            if one.rank != ring.rank
        ]
        coming = [
            (one.source, grads.new_empty(landing_shape(grads, one)), peer)
            for peer, one in asked_of(self.call, own=gather.own, early=early)
        ]
        transfer = ring.start(sends, [(part, peer) for _, part, peer in coming])

        def add_to(total: Tensor) -> None:
            transfer.wait()
            for where, part, _ in coming:
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


def landing_shape(grads: Tensor, one: Fetch) -> tuple[int, ...]:
    """The shape of the gradients that come home of what a peer fetched."""
    return (grads.shape[0], one.source.stop - one.source.start, *grads.shape[2:])
