"""All-to-all exchanges that trade tokens for heads: one message to each rank, whatever they hold.

As in DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509). Nothing here knows of attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ring_torch.buffers import BufferSpec
from ring_torch.comm.ranks import Ranks, others, peer_errors
from ring_torch.optional import has_triton


class Exchanged(NamedTuple):
    """One tensor of an exchange.

    Attributes:
        batch: Batch size B.
        length: Tokens a rank holds, T_local; there are ``T = P * T_local`` on P ranks.
        heads: Heads a rank attends with, H / P.
        dim: Numbers of a head, D.
        dtype: Of the numbers.
        head_major: Results are laid out as ``[B, H, T]`` in memory (``lse``), not ``[B, T, H, D]``.
    """

    batch: int
    length: int
    heads: int
    dim: int
    dtype: torch.dtype
    head_major: bool = False

    def empty(self, tokens: int, heads: int, device: torch.device) -> Tensor:
        """Allocate ``[B, tokens, heads, D]``."""
        shape = (self.batch, tokens, heads, self.dim)
        if not self.head_major:
            return torch.empty(shape, dtype=self.dtype, device=device)
        shape = (self.batch, heads, tokens, self.dim)
        return torch.empty(shape, dtype=self.dtype, device=device).transpose(1, 2)


@dataclass(frozen=True)
class HeadExchange:
    """An exchange of several tensors: ``[B, T_local, H, D]`` of each becomes ``[B, T, H / P, D]``.

    Attributes:
        ranks: How many ranks there are, P.
        tensors: What is exchanged.
        blocks: Shape of each tensor's part of all messages, ``[P, B, T_local, H / P, D]``.
        message: What one rank sends another: its heads of all tensors.
    """

    ranks: int
    tensors: tuple[Exchanged, ...]
    blocks: tuple[tuple[int, ...], ...]
    message: BufferSpec

    @classmethod
    def of(cls, ranks: int, *tensors: Exchanged) -> HeadExchange:
        """Lay out the messages; equal exchanges are laid out once."""
        return _exchange_of(ranks, tensors)

    def to_heads(
        self, ranks: Ranks, given: Sequence[Tensor], orders: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Send each rank its heads of our tokens; return all tokens of our heads, in natural order.

        Args:
            ranks: Those that exchange.
            given: Tensors ``[B, T_local, H, D]``, any strides.
            orders: For each tensor the positions of rank 0's tokens, then those of rank 1, ...,
                int64 ``[T]``; ``None`` if they are in natural order.

        Raises:
            PeerError: A peer failed, or did not answer within the group's timeout.
        """
        device = given[0].device
        results = [x.empty(self.ranks * x.length, x.heads, device) for x in self.tensors]
        none = [None] * len(given)
        self._exchange(ranks, (given, none), (results, orders), splits_heads=True)
        return results

    def to_tokens(
        self, ranks: Ranks, given: Sequence[Tensor], orders: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Undo :meth:`to_heads`: ``[B, T, H / P, D]`` become ``[B, T_local, H, D]``."""
        device = given[0].device
        results = [x.empty(x.length, self.ranks * x.heads, device) for x in self.tensors]
        none = [None] * len(given)
        self._exchange(ranks, (given, orders), (results, none), splits_heads=False)
        return results

    def _exchange(
        self, ranks: Ranks,
        given: tuple[Sequence[Tensor], Sequence[Tensor | None]],
        results: tuple[Sequence[Tensor], Sequence[Tensor | None]],
        *, splits_heads: bool,
    ) -> None:  # fmt: skip
        device = given[0][0].device
        size = (self.ranks, self.message.size)
        sent, received = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
        pack, unpack = _pack, _unpack
        if device.type == "cuda" and has_triton():
            from ring_torch.memory_ops import (
                pack_heads_on_gpu as pack,
                unpack_heads_on_gpu as unpack,
            )
        pack(self, sent, *given, by_heads=splits_heads)
        with peer_errors(others(ranks)):
            # Rank n gets row n. The exchange is on the stream of what follows: `sent` may be freed.
            dist.all_to_all_single(received, sent, group=ranks.group)
        unpack(self, received, *results, by_heads=not splits_heads)


@lru_cache(maxsize=256)
def _exchange_of(ranks: int, tensors: tuple[Exchanged, ...]) -> HeadExchange:
    blocks = tuple((ranks, x.batch, x.length, x.heads, x.dim) for x in tensors)
    message = BufferSpec.of(
        *((block[1:], x.dtype) for block, x in zip(blocks, tensors, strict=True))
    )
    return HeadExchange(ranks, tensors, blocks, message)


def _pack(
    exchange: HeadExchange, buffer: Tensor, tensors: Sequence[Tensor],
    orders: Sequence[Tensor | None], *, by_heads: bool,
) -> None:  # fmt: skip
    """Put the part for rank n of each tensor, a range of its heads or of its tokens, into row n."""
    dim = 2 if by_heads else 1
    for block, x, order in zip(_blocks(exchange, buffer), tensors, orders, strict=True):
        ordered = x if order is None else x.index_select(1, order)
        block.copy_(ordered.unflatten(dim, (exchange.ranks, -1)).movedim(dim, 0))


def _unpack(
    exchange: HeadExchange, buffer: Tensor, tensors: Sequence[Tensor],
    orders: Sequence[Tensor | None], *, by_heads: bool,
) -> None:  # fmt: skip
    """Put row n of a buffer, which came from rank n, where its heads or tokens belong."""
    dim = 2 if by_heads else 1
    for block, x, order in zip(_blocks(exchange, buffer), tensors, orders, strict=True):
        if order is None:
            x.unflatten(dim, (exchange.ranks, -1)).movedim(dim, 0).copy_(block)
        else:
            x.index_copy_(1, order, block.transpose(0, 1).flatten(1, 2))


def _blocks(exchange: HeadExchange, buffer: Tensor) -> list[Tensor]:
    """View a buffer ``[P, bytes]`` as the parts of each tensor, ``[P, B, T_local, H / P, D]``."""
    message = exchange.message
    return [
        buffer[:, offset : offset + math.prod(shape[1:]) * dtype.itemsize].view(dtype).view(shape)
        for shape, dtype, offset in zip(
            exchange.blocks, message.dtypes, message.offsets, strict=True
        )
    ]
