"""Run passes without communication: the same launches, over keys that are there already.

With this one GPU can emulate the ranks of a larger ring, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ring_torch import autograd, prepare, transports
from ring_torch.call import Call, PendingGrads, PendingKV, SessionSpec, nothing
from ring_torch.comm.ranks import Ranks
from ring_torch.records import Inputs
from ring_torch.strategies import Way, ways
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
    prepare._prepare.cache_clear()  # noqa: SLF001  # calls hold their transport
    with patch.object(transports, "TRANSPORTS", opened):
        yield
    prepare._prepare.cache_clear()  # noqa: SLF001 - calls are prepared anew


def as_rank[**P, R](
    rank: int, world: int, run: Callable[P, R], *args: P.args, **named: P.kwargs
) -> R:
    """Run a function as one rank of a fake group, whose collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        # The group is fake: there are no peers to ask for their memory, or to compare with before
        # a call may be captured.
        with (
            patch.object(prepare, "choose_strategy", _as_named),
            patch.object(autograd, "check_graph"),
        ):
            return run(*args, **named)
    finally:
        dist.destroy_process_group()
        prepare._prepare.cache_clear()  # noqa: SLF001  # forgets strategies chosen here


def _as_named(strategy: str, transport: str, ring: Ranks, *_: object, **__: object) -> Way:
    return next(ways(strategy, transport) if ring.size > 1 else ways("ring", "p2p"))
