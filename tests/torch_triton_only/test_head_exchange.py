"""The kernel that packs and unpacks Ulysses messages copies what torch does."""

from __future__ import annotations

import pytest
import torch

from ring_torch.buffers import HeadBuffer, HeadPart
from ring_torch.transports import p2p

RANKS, BATCH = 4, 2
#: Tensors exchanged together: heads per rank, head dim, dtype, True for memory `[B, H, T]`.
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
    # Imported here, as Triton reads TRITON_INTERPRET when it is imported.
    from ring_torch.comm import head_exchange_kernel

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
    p2p.move(layout, expected, tensors, orders, by_heads=by_heads, packs=True)
    head_exchange_kernel.move_on_gpu(layout, packed, tensors, orders, by_heads=by_heads, packs=True)
    assert torch.equal(packed, expected)
    unpacked = [torch.zeros_like(x) for x in tensors]
    head_exchange_kernel.move_on_gpu(
        layout, packed, unpacked, orders, by_heads=by_heads, packs=False
    )
    for x, y in zip(unpacked, tensors, strict=True):
        assert torch.equal(x, y)
    again = [torch.zeros_like(x) for x in tensors]
    p2p.move(layout, packed, again, orders, by_heads=by_heads, packs=False)
    for x, y in zip(again, tensors, strict=True):
        assert torch.equal(x, y)


def test_heads_may_lie_far_apart() -> None:
    """Offsets may exceed 2^31 elements; nearly nothing of this large memory is touched."""
    from ring_torch.comm import head_exchange_kernel

    heads, stride = 3, 3 << 29
    layout = HeadBuffer.of(1, HeadPart(1, 1, heads, 2, torch.int8))
    before = 1 << 30  # where 32-bit offsets would put the last head
    memory = torch.empty(before + (heads - 1) * stride + 2, dtype=torch.int8, device="cpu")
    x = memory.as_strided((1, 1, heads, 2), (1, 1, stride, 1), before)
    x.copy_(torch.arange(2 * heads, device="cpu").view(x.shape))
    packed = torch.zeros((1, layout.message.size), dtype=torch.uint8, device="cpu")
    head_exchange_kernel.move_on_gpu(layout, packed, [x], [None], by_heads=True, packs=True)
    assert packed[0, : 2 * heads].tolist() == list(range(2 * heads))
    x.zero_()
    head_exchange_kernel.move_on_gpu(layout, packed, [x], [None], by_heads=True, packs=False)
    assert x.flatten().tolist() == list(range(2 * heads))
