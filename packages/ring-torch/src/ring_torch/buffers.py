"""Several tensors in one buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

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
