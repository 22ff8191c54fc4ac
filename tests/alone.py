"""Runs passes without communication: the same launches, over keys that are there already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor

from ring_torch import prepare, transports
from ring_torch.call import Call, PendingGrads, PendingKV, SessionSpec, nothing
from ring_torch.records import Inputs
from ring_torch.transports.p2p import Messages


@dataclass(frozen=True)
class Alone:
    """A stand-in for :class:`ring_torch.call.GatherSession` that moves nothing.

    Results are wrong, but times do not depend on what the keys are.
    """

    call: Call
    spec: SessionSpec
    made: dict[tuple[object, ...], list[Tensor]]

    def fetch(
        self, inputs: Inputs, meanwhile: Callable[[], object] = nothing
    ) -> Iterator[PendingKV]:
        """Yield random keys, made at the first call so that later ones time no work for them."""
        del inputs
        meanwhile()
        (gather, keys, groups, *_), device = self.spec, self.call.device
        for n in range(groups):
            place = (gather, keys, n)
            if place not in self.made:
                shape = (keys.batch, gather.length, keys.width)
                self.made[place] = [torch.randn(shape, dtype=keys.dtype, device=device)]
            yield PendingKV([*self.made[place]], None)  # the caller may empty the list

    def accumulators(self, *, zero: bool) -> list[Tensor]:
        """Return new accumulators of dK and dV."""
        return Messages(self.call, self.spec).accumulators(zero=zero)

    def return_grads(
        self, grads: Tensor, group: int, *, overlapped: bool, before_last_item: bool | None = None
    ) -> PendingGrads:
        """Send and receive nothing."""
        del grads, group, overlapped, before_last_item
        return nothing


@contextmanager
def alone() -> Iterator[None]:
    """Let gathered passes inside run without communication: their results mean nothing."""
    made: dict[tuple[object, ...], list[Tensor]] = {}
    opened = tuple(
        replace(each, open=lambda call, spec, _: Alone(call, spec, made))
        for each in transports.TRANSPORTS
    )
    prepare._prepare.cache_clear()  # calls hold their transport
    with patch.object(transports, "TRANSPORTS", opened):
        yield
    prepare._prepare.cache_clear()
