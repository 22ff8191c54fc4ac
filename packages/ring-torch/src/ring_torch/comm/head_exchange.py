"""All-to-all exchanges that trade tokens for heads, of several tensors in one message a rank.

It is the exchange of DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509). Nothing here knows
of attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ring_torch.buffers import HeadBuffer, HeadCarrier, HeadPart, Orders
from ring_torch.comm.handshake import agree
from ring_torch.comm.ranks import Ranks
from ring_torch.comm.store import CallSignature
from ring_torch.optional import has_triton


def to_heads(
    carry: HeadCarrier, layout: HeadBuffer, tensors: Sequence[Tensor], orders: Orders
) -> list[Tensor]:
    """Send each rank its heads of our tokens; return all tokens of our heads, in natural order.

    Args:
        carry: Moves the messages; each rank has a contiguous range of heads.
        layout: How the messages hold the tensors.
        tensors: ``[B, T_local, H, D]`` each, any strides but a contiguous last dimension.
        orders: For each tensor the positions of rank 0's tokens, then those of rank 1, ..., int64
            ``[T]``; ``None`` if they are in natural order.

    Returns:
        ``[B, T, H / P, D]`` of each.

    Raises:
        PeerError: A peer failed, or did not answer within the group's timeout.
    """
    device = tensors[0].device
    results = [_empty(x, layout.ranks * x.length, x.heads, device) for x in layout.parts]
    carry(layout, tensors, results, orders, splits_heads=True)
    return results


def to_tokens(
    carry: HeadCarrier, layout: HeadBuffer, tensors: Sequence[Tensor], orders: Orders
) -> list[Tensor]:
    """Undo :func:`to_heads`: return ``[B, T_local, H, D]`` for each tensor ``[B, T, H / P, D]``.

    The arguments and errors are those of :func:`to_heads`.
    """
    device = tensors[0].device
    results = [_empty(x, x.length, layout.ranks * x.heads, device) for x in layout.parts]
    carry(layout, tensors, results, orders, splits_heads=False)
    return results


def _empty(part: HeadPart, tokens: int, heads: int, device: torch.device) -> Tensor:
    """Allocate a result ``[B, tokens, heads, D]``, in the order of memory asked for."""
    shape = (part.batch, tokens, heads, part.dim)
    if not part.head_major:
        return torch.empty(shape, dtype=part.dtype, device=device)
    shape = (part.batch, heads, tokens, part.dim)
    return torch.empty(shape, dtype=part.dtype, device=device).transpose(1, 2)


@dataclass(frozen=True)
class HeadMessages(HeadCarrier):
    """A carrier that packs messages, exchanges them between these ranks, and unpacks them."""

    ranks: Ranks

    @classmethod
    def open(
        cls, ranks: Ranks, number: int, seed: int, signature: CallSignature, device: torch.device,
        size: int,
    ) -> Self:  # fmt: skip
        """Compare a pass with the peers', and return what carries its exchanges.

        Raises:
            RankMismatchError: A peer is making another call.
        """
        del size  # each exchange has buffers of its own
        agree(ranks, number, seed, signature, device)
        return cls(ranks)

    def __call__(
        self, layout: HeadBuffer, sources: Sequence[Tensor], results: Sequence[Tensor],
        orders: Orders, *, splits_heads: bool,
    ) -> None:  # fmt: skip
        """Send the messages in one all-to-all."""
        device, size = sources[0].device, (layout.ranks, layout.message.size)
        copy = move
        if device.type == "cuda" and has_triton():
            from ring_torch.comm.head_exchange_kernel import move_on_gpu as copy
        natural = [None] * len(orders)
        sent = torch.empty(size, dtype=torch.uint8, device=device)
        copy(
            layout, sent, sources, natural if splits_heads else orders, by_heads=splits_heads,
            packs=True,
        )  # fmt: skip
        # Both buffers belong to this exchange alone: sources may change now that they are packed.
        received = torch.empty_like(sent)  # not before, as packing needs memory for a while
        # Row n of `sent` goes to rank n, row n of `received` comes from it; all ranks exchange at
        # the same time. The stream waits for that, so the buffers may be freed after it.
        self.ranks.trade(sent, received).wait()
        copy(
            layout, received, results, orders if splits_heads else natural,
            by_heads=not splits_heads, packs=False,
        )  # fmt: skip


def move(
    layout: HeadBuffer, buffer: Tensor, tensors: Sequence[Tensor],
    orders: Sequence[Tensor | None], *, by_heads: bool, packs: bool,
) -> None:  # fmt: skip
    """Copy between tensors and a buffer whose row n is the message to or from rank n.

    Args:
        layout: How a message holds the tensors' parts for its rank.
        buffer: Messages of all ranks, ``[P, bytes]``.
        tensors: Tensors ``[B, T_local, H, D]`` with ``by_heads``, and else ``[B, T, H / P, D]``.
        orders: Positions of the tokens of each tensor, in rank order; ``None`` for natural order.
        by_heads: True if a rank's part is a range of heads, False if it is a range of tokens.
        packs: True to copy tensors into the buffer, False for the other way.
    """
    dim = 2 if by_heads else 1
    # No message is in flight. Every number of a tensor has its place in exactly one of them.
    for block, x, order in zip(_blocks(layout, buffer), tensors, orders, strict=True):
        if packs:
            ordered = x if order is None else x.index_select(1, order)
            block.copy_(ordered.unflatten(dim, (layout.ranks, -1)).movedim(dim, 0))
        elif order is None:
            x.unflatten(dim, (layout.ranks, -1)).movedim(dim, 0).copy_(block)
        else:
            # All ranks' tokens together are the sequence: every row of `x` is written once.
            x.index_copy_(1, order, block.transpose(0, 1).flatten(1, 2))


def _blocks(layout: HeadBuffer, buffer: Tensor) -> list[Tensor]:
    """Return views of a buffer ``[P, bytes]``: of each tensor ``[P, B, T_local, H / P, D]``."""
    message = layout.message
    if message.size == 0:  # which has no strides that another dtype could take
        return [
            buffer.new_empty(shape, dtype=dtype)
            for shape, dtype in zip(layout.blocks, message.dtypes, strict=True)
        ]
    return [
        buffer[:, offset : offset + math.prod(shape[1:]) * dtype.itemsize].view(dtype).view(shape)
        for shape, dtype, offset in zip(layout.blocks, message.dtypes, message.offsets, strict=True)
    ]
