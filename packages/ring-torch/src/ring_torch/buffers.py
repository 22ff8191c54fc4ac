"""Buffers that hold several tensors, so that these travel as one message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

_ALIGNED_BYTES = 16
Orders = Sequence[Tensor | None]


@dataclass(frozen=True)
class BufferSpec:
    """Layout of several tensors in a flat buffer of bytes, which is one message.

    Each tensor begins at a multiple of 16 bytes.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]  # bytes
    size: int  # bytes of the whole buffer

    @classmethod
    def of(cls, *tensors: tuple[Sequence[int], torch.dtype]) -> BufferSpec:
        """Lay out tensors of these shapes and dtypes one after the other."""
        sizes = [
            -(-math.prod(shape) * dtype.itemsize // _ALIGNED_BYTES) * _ALIGNED_BYTES
            for shape, dtype in tensors
        ]
        *offsets, size = accumulate(sizes, initial=0)
        return cls(
            tuple(tuple(shape) for shape, _ in tensors),
            tuple(dtype for _, dtype in tensors),
            tuple(offsets),
            size,
        )

    @property
    def as_bytes(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the buffer itself: ``(size,)`` bytes."""
        return (self.size,), torch.uint8

    def buffer(self, device: torch.device) -> Tensor:
        """Allocate an uninitialised buffer."""
        return torch.empty(self.size, dtype=torch.uint8, device=device)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the tensors inside a buffer, as views."""
        return [
            buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True)
        ]

    def pack(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Copy tensors of these shapes and dtypes into a new buffer."""
        buffer = torch.empty(self.size, dtype=torch.uint8, device=device)
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            view.copy_(tensor)
        return buffer


@lru_cache(maxsize=256)
def flat(numel: int, dtype: torch.dtype) -> BufferSpec:
    """Return the layout of a single flat tensor of ``numel`` numbers."""
    return BufferSpec.of(((numel,), dtype))


def packing_of(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> BufferSpec:
    """Return the layout of tensors of the same shapes, in their dtypes or in ``dtype``."""
    shapes = [x.shape for x in tensors]
    return _packing(tuple(shapes), tuple([dtype or x.dtype for x in tensors]))


@lru_cache(maxsize=256)
def _packing(shapes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...]) -> BufferSpec:
    return BufferSpec.of(*zip(shapes, dtypes, strict=True))


class HeadPart(NamedTuple):
    """Shape of one tensor in an exchange that trades tokens for heads.

    Attributes:
        batch: Batch size B.
        length: Tokens that a rank holds, T_local; there are ``T = P * T_local`` on P ranks.
        heads: Heads that a rank attends with, padding included: H / P of those that travel.
        dim: Numbers of a head, D.
        dtype: The tensor's dtype.
        head_major: True if results lie as ``[B, H, T, D]`` in memory, as ``lse`` does with D = 1;
            otherwise as ``[B, T, H, D]``.
    """

    batch: int
    length: int
    heads: int
    dim: int
    dtype: torch.dtype
    head_major: bool = False

    def empty(self, tokens: int, heads: int, device: torch.device) -> Tensor:
        """Allocate a result ``[B, tokens, heads, D]``, in the order of memory asked for."""
        shape = (self.batch, tokens, heads, self.dim)
        if not self.head_major:
            return torch.empty(shape, dtype=self.dtype, device=device)
        shape = (self.batch, heads, tokens, self.dim)
        return torch.empty(shape, dtype=self.dtype, device=device).transpose(1, 2)


@dataclass(frozen=True)
class HeadBuffer:
    """Layout of the messages of an exchange, one for each rank, ``[P, bytes]`` together.

    A message holds a part ``[B, T_local, H / P, D]`` of each of several tensors.

    Attributes:
        ranks: Number of ranks P.
        parts: Shapes of the tensors.
        blocks: Shape of each tensor's parts in all messages, ``[P, B, T_local, H / P, D]``.
        message: Layout of the message to one rank.
        launches: Launches of the kernel that packs and unpacks, kept by shapes, dtypes and strides.
    """

    ranks: int
    parts: tuple[HeadPart, ...]
    blocks: tuple[tuple[int, ...], ...]
    message: BufferSpec
    launches: dict[object, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, ranks: int, *parts: HeadPart) -> HeadBuffer:
        """Return the layout of an exchange of tensors of these shapes, made once."""
        return _head_buffer(ranks, parts)


class HeadCarrier(Protocol):
    """A way to move the messages of an exchange between ranks."""

    def __call__(
        self, layout: HeadBuffer, sources: Sequence[Tensor], results: Sequence[Tensor],
        orders: Orders, *, splits_heads: bool,
    ) -> None:  # fmt: skip
        """Send each rank its part of ``sources``, and write what all ranks send into ``results``.

        With ``splits_heads`` sources are ``[B, T_local, H, D]``, of which rank n gets the n-th
        range of heads, and results ``[B, T, H / P, D]``, whose tokens come in ``orders``; otherwise
        the other way round. The current stream waits for the exchange. All ranks call it at once.

        Raises:
            PeerError: A peer failed, or did not answer within the group's timeout.
        """


@lru_cache(maxsize=256)
def _head_buffer(ranks: int, parts: tuple[HeadPart, ...]) -> HeadBuffer:
    blocks = tuple((ranks, x.batch, x.length, x.heads, x.dim) for x in parts)
    message = BufferSpec.of(*((block[1:], x.dtype) for block, x in zip(blocks, parts, strict=True)))
    return HeadBuffer(ranks, parts, blocks, message)
