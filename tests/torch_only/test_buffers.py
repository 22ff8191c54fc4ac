"""Tensors inside a message are views of its bytes, for all shapes, dtypes and offsets."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ring_torch.buffers import BufferSpec

#: Shapes and dtypes of the tensors of a message.
MESSAGES: tuple[tuple[tuple[tuple[int, ...], torch.dtype], ...], ...] = (
    (((2, 5, 3, 8), torch.bfloat16), ((2, 5, 3, 4), torch.bfloat16), ((2, 5), torch.int32)),
    (((1, 7, 1), torch.float64), ((7,), torch.float32), ((3, 1, 5), torch.uint8)),
    (((3, 3), torch.bool), ((1, 1, 1, 1), torch.complex128), ((13,), torch.int8)),
    (((2, 0, 3), torch.float32), ((4,), torch.float32), ((0,), torch.int64)),
    (((), torch.float16), ((), torch.int64)),
    (((0, 2, 5), torch.bfloat16),),
)


def _sliced(spec: BufferSpec, buffer: Tensor) -> list[Tensor]:
    """Return each tensor's bytes in its dtype and shape, by the definition."""
    return [
        buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for shape, dtype, offset in zip(spec.shapes, spec.dtypes, spec.offsets, strict=True)
    ]


@pytest.mark.parametrize("start", [0, 48])
@pytest.mark.parametrize("message", MESSAGES)
def test_views_are_slices_of_the_bytes(
    message: tuple[tuple[tuple[int, ...], torch.dtype], ...], start: int
) -> None:
    spec = BufferSpec.of(*message)
    # The buffer may be part of a larger tensor.
    memory = torch.arange(start + spec.size + 16, dtype=torch.int64).to(torch.uint8)
    buffer = memory[start : start + spec.size]
    for view, expected in zip(spec.views(buffer), _sliced(spec, buffer), strict=True):
        assert view.dtype == expected.dtype
        assert view.shape == expected.shape
        assert view.stride() == expected.stride()
        assert view.data_ptr() == expected.data_ptr()
        assert view.storage_offset() == expected.storage_offset()
        assert view.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        assert view.is_contiguous()
        assert torch.equal(*(x.flatten().view(torch.uint8) for x in (view, expected)))


def test_what_is_written_into_views_is_in_the_bytes() -> None:
    spec = BufferSpec.of(((2, 3), torch.float32), ((5,), torch.int16))
    buffer = spec.buffer(torch.device("cpu")).zero_()
    for view in spec.views(buffer):
        view.fill_(1)
    assert torch.equal(buffer[:24].view(torch.float32), torch.ones(6))
    assert torch.equal(buffer[32:42].view(torch.int16), torch.ones(5, dtype=torch.int16))
    assert not buffer[24:32].any()
