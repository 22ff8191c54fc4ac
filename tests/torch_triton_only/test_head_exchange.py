"""The kernel that packs and unpacks an exchange of tokens for heads copies what torch does."""

from __future__ import annotations

import pytest
import torch
from internals.torch import HeadBuffer, HeadPart, head_exchange

RANKS, BATCH = 4, 2
#: Tensors exchanged together: heads a rank, head dim, dtype, whether `[B, H, T]` lies in memory.
TOGETHER: dict[str, list[tuple[int, int, torch.dtype, bool]]] = {
    "q, k, v": [(3, 16, torch.bfloat16, False), (1, 16, torch.bfloat16, False),
                (1, 24, torch.bfloat16, False)],
    "out, lse": [(3, 24, torch.bfloat16, False), (3, 1, torch.float32, True)],
    "dout": [(40, 16, torch.float32, False)],
}  # fmt: skip


@pytest.mark.parametrize("by_heads", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("lengths", [(5, 7), (8, 8)])
@pytest.mark.parametrize("names", TOGETHER)
def test_packing(names: str, lengths: tuple[int, int], ordered: bool, by_heads: bool) -> None:
    # Imported here: Triton reads when it is imported whether it interprets kernels.
    from internals.torch_triton import memory_ops

    torch.manual_seed(0)
    parts = [
        HeadPart(BATCH, lengths[n > 0], *rest[:3], head_major=rest[3])
        for n, rest in enumerate(TOGETHER[names])
    ]
    layout = HeadBuffer.of(RANKS, *parts)
    orders = [
        torch.randperm(RANKS * x.length, device="cpu") if ordered and not by_heads else None
        for x in parts
    ]
    shapes = [
        (x.length, RANKS * x.heads) if by_heads else (RANKS * x.length, x.heads) for x in parts
    ]
    tensors = [
        x.empty(*shape, torch.device("cpu")).normal_()
        for x, shape in zip(parts, shapes, strict=True)
    ]
    size = (RANKS, layout.message.size)
    expected, packed = (torch.zeros(size, dtype=torch.uint8, device="cpu") for _ in range(2))
    head_exchange._pack(layout, expected, tensors, orders, by_heads=by_heads)
    memory_ops.pack_heads_on_gpu(layout, packed, tensors, orders, by_heads=by_heads)
    assert torch.equal(packed, expected)
    unpacked = [torch.zeros_like(x) for x in tensors]
    memory_ops.unpack_heads_on_gpu(layout, packed, unpacked, orders, by_heads=by_heads)
    for x, y in zip(unpacked, tensors, strict=True):
        assert torch.equal(x, y)
    again = [torch.zeros_like(x) for x in tensors]
    head_exchange._unpack(layout, packed, again, orders, by_heads=by_heads)
    for x, y in zip(again, tensors, strict=True):
        assert torch.equal(x, y)
