"""Several tensors in one buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNED_BYTES = 16


@dataclass(frozen=True)
class BufferSpec:
    """Several tensors as one message: where each lies in a flat buffer of bytes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, *parts: tuple[Sequence[int], torch.dtype]) -> BufferSpec:
        """The packing of tensors of these shapes and dtypes."""
        sizes = [
            -(-math.prod(shape) * dtype.itemsize // _ALIGNED_BYTES) * _ALIGNED_BYTES
            for shape, dtype in parts
        ]
        *offsets, size = accumulate(sizes, initial=0)
        return cls(
            tuple(tuple(shape) for shape, _ in parts),
            tuple(dtype for _, dtype in parts),
            tuple(offsets),
            size,
        )

    @property
    def as_bytes(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a message."""
        return (self.size,), torch.uint8

    def buffer(self, device: torch.device) -> Tensor:
        """An uninitialised message."""
        return torch.empty(self.size, dtype=torch.uint8, device=device)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors inside a message."""
        return [
            buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True)
        ]

    def pack(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """A new message that holds copies of the tensors."""
        buffer = torch.empty(self.size, dtype=torch.uint8, device=device)
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            view.copy_(tensor)
        return buffer


@lru_cache(maxsize=256)
def flat(numel: int, dtype: torch.dtype) -> BufferSpec:
    """The packing of so many numbers."""
    return BufferSpec.of(((numel,), dtype))


def packing_of(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> BufferSpec:
    """One message that holds tensors like these, in another dtype if one is given."""
    shapes = [x.shape for x in tensors]
    return _packing(tuple(shapes), tuple([dtype or x.dtype for x in tensors]))


@lru_cache(maxsize=256)
def _packing(shapes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...]) -> BufferSpec:
    return BufferSpec.of(*zip(shapes, dtypes, strict=True))


class HeadPart(NamedTuple):
    """One tensor of an exchange of tokens for heads.

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
class HeadBuffer:
    """A message for each rank, with its part of several tensors, ``[B, T_local, H / P, D]`` each.

    Attributes:
        ranks: How many ranks there are, P.
        parts: The tensors.
        blocks: Shape of each tensor's part of all messages, ``[P, B, T_local, H / P, D]``.
        message: What one rank sends another: its heads of all tensors.
    """

    ranks: int
    parts: tuple[HeadPart, ...]
    blocks: tuple[tuple[int, ...], ...]
    message: BufferSpec

    @classmethod
    def of(cls, ranks: int, *parts: HeadPart) -> HeadBuffer:
        """Lay out the messages; equal ones are laid out once."""
        return _head_buffer(ranks, parts)


@lru_cache(maxsize=256)
def _head_buffer(ranks: int, parts: tuple[HeadPart, ...]) -> HeadBuffer:
    blocks = tuple((ranks, x.batch, x.length, x.heads, x.dim) for x in parts)
    message = BufferSpec.of(*((block[1:], x.dtype) for block, x in zip(blocks, parts, strict=True)))
    return HeadBuffer(ranks, parts, blocks, message)
