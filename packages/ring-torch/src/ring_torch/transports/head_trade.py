"""Exchange of tokens for heads through the memory of peers: one kernel each way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ring_torch.buffers import HeadBuffer, flat
from ring_torch.comm.head_exchange import HeadCarrier, Orders
from ring_torch.launches.cache import tensors_key
from ring_torch.transports import head_kernel
from ring_torch.transports.api import HeadSpec, is_counted, note_reads
from ring_torch.transports.exchange_kernel import ExchangeSetup
from ring_torch.transports.one_kernel import ExchangeState, exchange_state_of


@dataclass(frozen=True)
class HeadTrade(HeadCarrier):
    """A carrier whose kernel writes messages into this rank's memory and reads those of peers.

    It waits until peers have read what the exchange before left there, writes, waits until all
    ranks have written, and reads. The host waits for nothing.
    """

    state: ExchangeState
    setup: ExchangeSetup
    digest: int  # identifies this pass of this call

    @classmethod
    def of(cls, spec: HeadSpec) -> Self:
        """Make the carrier of a pass."""
        state = exchange_state_of(spec.ranks)
        digest = spec.signature.as_int64(spec.number, spec.seed)
        return cls(state, state.reserve(spec.size), digest)

    def __call__(
        self, layout: HeadBuffer, sources: Sequence[Tensor], results: Sequence[Tensor],
        orders: Orders, *, splits_heads: bool,
    ) -> None:  # fmt: skip
        """Run the exchange in one kernel."""
        key = layout, splits_heads, tensors_key(*sources, *results, *orders)
        if (trade := self.state.prepared(key)) is not None:
            trade(self.digest, sources, results, orders)
        else:
            self.state.keep_in_graph(orders)
            trade = head_kernel.trade_heads(
                self.setup, self.state.memory.header, self.digest, layout, sources, results, orders,
                splits_heads=splits_heads,
            )  # fmt: skip
            self.state.keep(key, trade)
        if is_counted():
            message, rank = flat(layout.message.size, torch.uint8), self.setup.rank
            start = rank * layout.message.size
            peers = (peer for peer in range(layout.ranks) if peer != rank)
            note_reads(self.state.memory.views(peer, start, message)[0] for peer in peers)
