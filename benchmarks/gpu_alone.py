"""A pass without its communication: the same launches, over keys that are there already.

So one GPU can emulate the ranks of a ring of many, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ring_core import Gather
from ring_torch import autograd, prepare
from ring_torch.call import Call
from ring_torch.comm.handshake import CallSignature
from ring_torch.comm.ranks import Ranks
from ring_torch.payload import KeyGradBuffer, KVPayload
from ring_torch.records import Inputs
from ring_torch.transports.api import PendingGrads, PendingKV


@dataclass(frozen=True)
class Alone:
    """A :class:`ring_torch.transports.api.Carrier` that moves nothing: any keys do for a time."""

    call: Call
    keys: KVPayload
    groups: int
    made: dict[tuple[object, ...], list[Tensor]]

    def fetch(self, gather: Gather, inputs: Inputs) -> Iterator[PendingKV]:
        """Random keys, made once and on no time."""
        del inputs
        for n in range(self.groups):
            place = (gather, self.keys, n)
            if place not in self.made:
                shape = (self.keys.batch, gather.length, self.keys.width)
                self.made[place] = [
                    torch.randn(shape, dtype=self.keys.dtype, device=self.call.device)
                ]
            yield PendingKV(self.made[place], lambda _: None)

    def accumulators(self, gather: Gather, sums: KeyGradBuffer, *, zero: bool) -> list[Tensor]:
        """New ones."""
        size, call, make = (
            sums.numel(gather.length),
            self.call,
            torch.zeros if zero else torch.empty,
        )
        return [make(size, dtype=call.acc_dtype, device=call.device) for _ in range(self.groups)]

    def return_grads(
        self, gather: Gather, sums: KeyGradBuffer, grads: Tensor, group: int, *, beside: bool,
        early: bool | None = None,
    ) -> PendingGrads:  # fmt: skip
        """Nothing goes, nothing comes."""
        del gather, sums, grads, group, beside, early
        return PendingGrads(lambda _total, _length, _where: None)


@contextmanager
def alone() -> Iterator[None]:
    """Let gathered passes in here do without communication: their results mean nothing."""
    made: dict[tuple[object, ...], list[Tensor]] = {}

    def carrier(call: Call, inputs: Inputs, facts: CallSignature, groups: int) -> Alone:
        del facts
        if call.strategy != "gather":
            raise ValueError("only passes that gather their keys run without communication")
        return Alone(call, KVPayload.of(inputs, groups), groups, made)

    with patch.object(autograd, "_carrier", carrier):
        yield


def as_rank[**P, R](
    rank: int, world: int, run: Callable[P, R], *args: P.args, **named: P.kwargs
) -> R:
    """Run in a group of which only this rank is there, whose collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        # The group is no nccl's, and there are no peers to ask for their memory.
        with patch.object(prepare, "choose_strategy", _as_named):
            return run(*args, **named)
    finally:
        dist.destroy_process_group()
        prepare._prepare.cache_clear()  # noqa: SLF001  # of the strategies chosen here


def _as_named(
    strategy: str, transport: str, ring: Ranks, *_: object, **__: object
) -> tuple[str, str]:
    return (strategy, transport) if ring.size > 1 else ("ring", "p2p")
