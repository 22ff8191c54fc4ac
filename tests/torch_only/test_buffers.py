"""Tensors inside a message are views of its bytes, for all shapes, dtypes and offsets."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ring_core import merge
from ring_torch.accumulate import merge_in_torch
from ring_torch.buffers import BufferSpec, KVPayload
from ring_torch.records import AttentionState

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


@pytest.mark.parametrize(("dim", "v_dim"), [(8, 8), (12, 4)])
def test_columns_are_slices_of_the_whole(dim: int, v_dim: int) -> None:
    keys = KVPayload(2, 16, 3, dim, v_dim, torch.float32, segments=False)
    # The buffer may begin at any offset, and its rows may be strided.
    kv = torch.randn(2, 20, keys.width + 5)[:, 3:19, 2 : keys.width + 2]
    for start, length in ((0, 16), (5, 7), (16, 0)):
        cut = [x.narrow(1, start, length) for x in keys.split(kv)]
        for view, expected in zip(keys.columns([kv[:, start:]], length), cut, strict=True):
            assert torch.equal(view, expected)
            assert view.stride() == expected.stride()
            assert view.storage_offset() == expected.storage_offset() or length == 0


LSE = (-np.inf, -1e5, 0.0, np.inf, np.nan)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("new", LSE)
@pytest.mark.parametrize("old", LSE)
def test_a_merge_is_that_of_the_specification(old: float, new: float) -> None:
    outs = np.full((1, 1, 1, 2), 3.0), np.full((1, 1, 1, 2), 5.0)  # [B, n, H, D] and [B, H, n, D]
    lses = np.full((1, 1, 1), old), np.full((1, 1, 1), new)
    expected = merge(outs[0], lses[0], outs[1], lses[1])
    state = AttentionState(*(torch.tensor(x) for x in (outs[0], lses[0])))
    if np.isneginf(old):  # the identity of merging
        state.out.zero_()
    merge_in_torch(state, *(torch.tensor(x) for x in (outs[1], lses[1])))
    np.testing.assert_allclose(state.out.numpy(), expected[0], rtol=1e-9)
    assert np.isnan(expected[0]).all() == (not np.maximum(old, new) < np.inf)
