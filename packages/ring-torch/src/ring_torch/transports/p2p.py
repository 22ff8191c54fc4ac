"""Transport ``p2p``: messages of ``torch.distributed``, for any device and network.

With NCCL messages take multiprocessors from the kernels beside them; where GPUs reach each other's
memory, copies (``peer_copies``) do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ring_torch.accumulate import write_keys
from ring_torch.buffers import HeadBuffer, HeadCarrier, Orders
from ring_torch.call import (
    Call,
    IndexMap,
    PendingGrads,
    PendingKV,
    SessionSpec,
    Transport,
    nothing,
)
from ring_torch.comm.ranks import Ranks
from ring_torch.comm.store import CallSignature
from ring_torch.optional import has_triton
from ring_torch.records import Inputs, head_group
from ring_torch.transports.api import add_staged, requests_to, some_fetches, staging_for


@dataclass(frozen=True)
class Messages:
    """Session over point-to-point messages: each rank sends each peer what that peer fetches."""

    call: Call
    spec: SessionSpec

    @classmethod
    def open(cls, call: Call, spec: SessionSpec, signature: CallSignature) -> Messages:
        """Open a session after checking that the peers are making the same call.

        Raises:
            RankMismatchError: A peer is making another call.
            PeerError: A peer did not come within the group's timeout.
        """
        call.agree(call.ranks, signature)
        return cls(call, spec)

    def fetch(
        self, inputs: Inputs, meanwhile: Callable[[], object] = nothing
    ) -> Iterator[PendingKV]:
        """Start the messages of all groups at once.

        A group's messages are one transfer, so waiting for one fetch waits for all of the group.
        """
        groups = self.spec.groups
        parts = [inputs] if groups == 1 else [head_group(inputs, n, groups) for n in range(groups)]
        # All groups at once: waiting for one leaves the messages of the next under way.
        pending = [self._fetch(part) for part in parts]
        # Not before: messages wait for the kernels that are queued when they are started.
        meanwhile()
        return iter(pending)

    def _fetch(self, inputs: Inputs) -> PendingKV:
        """Start the messages of one group of heads, whose tensors ``inputs`` holds."""
        ranks, (gather, keys, *_) = self.call.ranks, self.spec
        # Own K/V side by side, as they travel, in a new buffer: the caller's tensors are not read
        # after this call.
        own = keys.message.views(keys.message.buffer(self.call.device))
        write_keys(keys, inputs.k, inputs.v, own[0])
        if inputs.k_ids is not None:
            own[1].copy_(inputs.k_ids)
        tensors = [x.new_empty(x.shape[0], gather.length, *x.shape[2:]) for x in own]
        # Own K/V go into the buffer by copies.
        for fetch in gather.fetches:
            if fetch.rank == ranks.rank:
                for x, own_tensor in zip(tensors, own, strict=True):
                    x[:, fetch.target] = own_tensor[:, fetch.source]
        # Peers have derived from the plan that these messages come, and in which order.
        sends = [
            (x[:, fetch.source].contiguous(), peer)
            for peer, fetch in requests_to(self.call.plan, ranks.rank, like=gather)
            for x in own
        ]
        # Messages are contiguous. Columns of a buffer are so only for a batch of one; otherwise
        # they arrive in a staging tensor, and are copied when they are waited for.
        arriving = [
            (x, x if x.is_contiguous() else torch.empty_like(x), fetch.rank)
            for fetch in gather.fetches
            if fetch.rank != ranks.rank
            for x in [tensor[:, fetch.target] for tensor in tensors]
        ]
        # In flight from here on: what is sent is kept alive by the transfer, and kernels may read
        # nothing of `tensors` but own columns until it is waited for.
        receives = [(x, peer) for _, x, peer in arriving]
        pending = [(ranks.start(sends, receives), arriving)]

        def wait(fetches: int | None) -> None:
            if fetches == 0:
                return
            # Empty after the first wait.
            for transfer, arrived in pending:
                transfer.wait()
                for destination, x, _ in arrived:
                    if destination.data_ptr() != x.data_ptr():
                        destination.copy_(x)
            pending.clear()

        return PendingKV(tensors, wait)

    def accumulators(self, *, zero: bool) -> list[Tensor]:
        """Return new buffers: peers get gradients in messages and read nothing of these."""
        (gather, _, groups, sums, _), call = self.spec, self.call
        new, size = torch.zeros if zero else torch.empty, sums.numel(gather.length)
        return [new(size, dtype=call.acc_dtype, device=call.device) for _ in range(groups)]

    def return_grads(
        self, grads: Tensor, group: int, *, overlapped: bool, before_last_item: bool | None = None
    ) -> PendingGrads:
        """Start the messages of :meth:`fetch` in the other direction, with gradients.

        What arrives is added only when the function that is returned is called.
        """
        del group, overlapped  # messages are matched by their order, and always run beside kernels
        ranks, (gather, _, _, sums, _) = self.call.ranks, self.spec
        # Send each owner the sums for its keys: views of `grads` where those are contiguous.
        sends = [
            (block.contiguous(), fetch.rank)
            for fetch in some_fetches(gather, before_last_item)
            if fetch.rank != ranks.rank
            for block in sums.strided_views(grads, gather.length, fetch.target)
        ]
        requests = requests_to(
            self.call.plan, ranks.rank, like=gather, before_last_item=before_last_item
        )
        # Receive from each peer the sums for the keys that it fetched here, into staging tensors:
        # several peers may have fetched the same keys.
        staged = [staging_for(sums, grads, fetch) for _, fetch in requests]
        receives = [
            (block, peer)
            for (peer, _), blocks in zip(requests, staged, strict=True)
            for block in blocks
        ]
        transfer = ranks.start(sends, receives)

        def add_to(total: Tensor, length: int, index_map: IndexMap) -> None:
            # All peers' parts are here; they are added in the plan's order, so sums are repeatable.
            transfer.wait()
            for (_, fetch), blocks_of_peer in zip(requests, staged, strict=True):
                add_staged(
                    sums.strided_views(total, length, index_map(fetch.source)), [blocks_of_peer]
                )

        return add_to


@dataclass(frozen=True)
class HeadMessages(HeadCarrier):
    """A carrier that packs messages, exchanges them between these ranks, and unpacks them."""

    ranks: Ranks

    @classmethod
    def open(cls, call: Call, ranks: Ranks, signature: CallSignature, _size: int) -> Self:
        """Compare a pass with the peers', and return what carries its exchanges.

        Each exchange has buffers of its own, whatever its size.

        Raises:
            RankMismatchError: A peer is making another call.
        """
        call.agree(ranks, signature)
        return cls(ranks)

    def __call__(
        self,
        layout: HeadBuffer,
        sources: Sequence[Tensor],
        results: Sequence[Tensor],
        orders: Orders,
        *,
        splits_heads: bool,
    ) -> None:
        """Send the messages in one all-to-all."""
        device, size = sources[0].device, (layout.ranks, layout.message.size)
        copy = move
        if device.type == "cuda" and has_triton():
            from ring_torch.comm.head_exchange_kernel import move_on_gpu as copy
        natural = [None] * len(orders)
        sent = torch.empty(size, dtype=torch.uint8, device=device)
        copy(
            layout,
            sent,
            sources,
            natural if splits_heads else orders,
            by_heads=splits_heads,
            packs=True,
        )
        # Both buffers belong to this exchange alone: sources may change now that they are packed.
        received = torch.empty_like(sent)  # not before, as packing needs memory for a while
        # Row n of `sent` goes to rank n, row n of `received` comes from it; all ranks exchange at
        # the same time. The stream waits for that, so the buffers may be freed after it.
        self.ranks.trade(sent, received).wait()
        copy(
            layout,
            received,
            results,
            orders if splits_heads else natural,
            by_heads=not splits_heads,
            packs=False,
        )


def move(
    layout: HeadBuffer,
    buffer: Tensor,
    tensors: Sequence[Tensor],
    orders: Sequence[Tensor | None],
    *,
    by_heads: bool,
    packs: bool,
) -> None:
    """Copy between tensors and a buffer whose row n is the message to or from rank n.

    Args:
        layout: How a message holds the tensors' parts for its rank.
        buffer: Messages of all ranks, ``[P, bytes]``.
        tensors: Tensors ``[B, T_local, H, D]`` with ``by_heads``, and else ``[B, T, H / P, D]``.
        orders: Positions of the tokens of each tensor, in rank order; ``None`` for natural order.
        by_heads: True if a rank's part is a range of heads, False if it is a range of tokens.
        packs: True to copy tensors into the buffer, False for the other way.
    """
    dim, message = 2 if by_heads else 1, layout.message
    # Of each tensor a view `[P, B, T_local, H / P, D]` of the buffer; an empty message has no
    # strides that another dtype could take.
    blocks = [
        buffer[:, offset : offset + math.prod(shape[1:]) * dtype.itemsize].view(dtype).view(shape)
        if message.size > 0
        else buffer.new_empty(shape, dtype=dtype)
        for shape, dtype, offset in zip(layout.blocks, message.dtypes, message.offsets, strict=True)
    ]
    # No message is in flight. Every number of a tensor has its place in exactly one of them.
    for block, x, order in zip(blocks, tensors, orders, strict=True):
        if packs:
            ordered = x if order is None else x.index_select(1, order)
            block.copy_(ordered.unflatten(dim, (layout.ranks, -1)).movedim(dim, 0))
        elif order is None:
            x.unflatten(dim, (layout.ranks, -1)).movedim(dim, 0).copy_(block)
        else:
            # All ranks' tokens together are the sequence: every row of `x` is written once.
            x.index_copy_(1, order, block.transpose(0, 1).flatten(1, 2))


P2P = Transport(
    "p2p", Messages.open, lambda _ranks, _device, _probe: (), HeadMessages.open, sends_messages=True
)
