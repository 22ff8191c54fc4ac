"""Views of some columns of gathered K/V equal slices of views of the whole buffer."""

from __future__ import annotations

import pytest
import torch

from ring_torch.buffers import KVPayload


@pytest.mark.parametrize(("dim", "v_dim"), [(8, 8), (12, 4)])
def test_columns_are_slices_of_the_whole(dim: int, v_dim: int) -> None:
    keys = KVPayload(2, 16, 3, dim, v_dim, torch.float32, segments=False)
    # The buffer may begin at any offset, and its rows may be strided.
    kv = torch.randn(2, 20, keys.width + 5)[:, 3:19, 2 : keys.width + 2]
    for start, length in ((0, 16), (5, 7), (16, 0)):
        cut = [x.narrow(1, start, length) for x in keys.split(kv)]
        for view, expected in zip(keys.columns([kv], start, length), cut, strict=True):
            assert torch.equal(view, expected)
            assert view.stride() == expected.stride()
            assert view.storage_offset() == expected.storage_offset() or length == 0
