"""Elementwise Triton kernels: views, shifts of a bias, gradients of sinks, traded heads."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from alone import alone
from torch import Tensor
from views import VIEWS, strided

from benchmarks.development.host_stubs import as_rank, without_launches
from ring_core import Mask
from ring_core.base.merge import UNSHIFTED_BIAS
from ring_torch import autograd, memory_ops, merge_ops, ring_attention
from ring_torch.buffers import HeadBuffer, HeadPart
from ring_torch.transports import p2p, peer_copies

READABLE = [name for name in VIEWS if name not in {"strided", "permuted", "expanded"}]


# Blocks of rows are full: else the interpreter warns of the logarithm of zero.
def _rows(view: str, *shape: int) -> Tensor:
    return VIEWS[view](torch.randn(shape))


def _merge(acc: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    spans = ((0, acc.shape[1]),)
    merge_ops.merge_on_gpu(
        acc, acc, acc_lse, out, lse, spans=spans, marks=0, first=False, last=True
    )


@pytest.mark.parametrize("view", READABLE)
def test_passes_over_memory(view: str) -> None:
    torch.manual_seed(0)
    x, y = _rows(view, 2, 32, 3, 8), _rows(view, 2, 32, 3, 8)
    dots = (x * y).sum(-1).transpose(1, 2).contiguous()
    torch.testing.assert_close(memory_ops.row_dots_on_gpu(x, y), dots)
    lse, sinks = _rows(view, 2, 3, 32), torch.randn(3)
    expected = -((sinks[:, None] - lse).exp() * dots).sum((0, 2))
    torch.testing.assert_close(memory_ops.sink_grads_on_gpu(sinks, lse, dots), expected)
    acc, acc_lse = torch.randn(2, 32, 3, 8), torch.randn(2, 3, 32)
    weights = torch.stack([acc_lse, lse]).softmax(0).transpose(2, 3).unsqueeze(-1)
    merged = weights[0] * acc + weights[1] * y
    total = torch.logaddexp(acc_lse, lse)
    _merge(acc, acc_lse, y, lse)
    torch.testing.assert_close(acc, merged)
    torch.testing.assert_close(acc_lse, total)


WIDE, ROWS = (2, 32, 3, 8), (2, 3, 32)
PASSES: dict[str, Callable[..., Any]] = {
    "merge": lambda view: _merge(
        torch.zeros(WIDE), torch.zeros(ROWS), view(torch.zeros(WIDE)), torch.zeros(ROWS)
    ),
    "merge lse": lambda view: _merge(
        torch.zeros(WIDE), torch.zeros(ROWS), torch.zeros(WIDE), view(torch.zeros(ROWS))
    ),
    "mark": lambda view: memory_ops.mark_on_gpu(torch.zeros(WIDE), view(torch.zeros(ROWS))),
    "dots": lambda view: memory_ops.row_dots_on_gpu(torch.zeros(WIDE), view(torch.zeros(WIDE))),
    "sinks": lambda view: memory_ops.sink_grads_on_gpu(
        view(torch.zeros(3)), torch.zeros(ROWS), torch.zeros(ROWS)
    ),
    "sinks of rows": lambda view: memory_ops.sink_grads_on_gpu(
        torch.zeros(3), torch.zeros(ROWS), view(torch.zeros(ROWS))
    ),
    "pack": lambda view: memory_ops.pack_kv_on_gpu(
        view(torch.zeros(WIDE)), torch.zeros(WIDE), torch.zeros(2, 32, 48), add=False
    ),
}


@pytest.mark.parametrize("name", PASSES)
def test_what_no_pass_reads(name: str) -> None:
    """Elementwise kernels assert that the last dimension is contiguous."""
    PASSES[name](lambda x: x)
    with pytest.raises(AssertionError):
        PASSES[name](strided)


H, N = 3, 5000  # not a multiple of a block of rows


def _tensors(batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return sinks, lse, delta and the gradient; some rows have an infinite lse."""
    torch.manual_seed(0)
    sinks, lse = torch.randn(H).to(dtype), torch.randn(batch, H, N)
    delta = torch.randn(batch, H, N)
    lse[:, 1, ::7] = -torch.inf  # these rows see nothing
    weights = torch.where(lse == -torch.inf, 0.0, (sinks.float()[:, None] - lse).exp())
    return sinks, lse, delta, -(weights * delta).sum((0, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [1, 2])
def test_it_is_that_of_torch(batch: int, dtype: torch.dtype) -> None:
    sinks, lse, delta, expected = _tensors(batch, dtype)
    grads = memory_ops.sink_grads_on_gpu(sinks, lse, delta)
    assert grads.dtype == dtype
    torch.testing.assert_close(
        grads, expected.to(dtype), rtol=1e-5 if dtype.itemsize > 2 else 0.01, atol=1e-3
    )
    assert torch.equal(grads, memory_ops.sink_grads_on_gpu(sinks, lse, delta))


@pytest.mark.parametrize("sinks_of_a_head", [0, 2])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_rows_may_come_in_parts(on_gpu: bool, parts: int, sinks_of_a_head: int) -> None:
    """Rows may be split into a batch of launches, with padded delta, as some kernels need."""
    sinks, lse, delta, _ = _tensors(1, torch.float32)
    if sinks_of_a_head:
        sinks = torch.randn(H, sinks_of_a_head)
    expected = autograd._sink_grads(sinks, lse, delta)
    in_parts, delta = (x[0].unflatten(1, (parts, -1)).transpose(0, 1) for x in (lse, delta))
    padded = torch.full((parts, H, N // parts + 3), torch.nan)[..., :-3].copy_(delta)
    with patch.object(autograd, "_can_use_triton", lambda *_: on_gpu):
        grads = autograd._sink_grads(sinks, in_parts.contiguous(), padded)
    assert grads.shape == sinks.shape
    torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-4)


def test_heads_without_rows_have_none() -> None:
    grads = memory_ops.sink_grads_on_gpu(torch.ones(H), *torch.empty(2, 1, H, 0).unbind())
    assert torch.equal(grads, torch.zeros(H))


@pytest.mark.parametrize("window", [128, None])
def test_all_rows_count(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that see own keys only, whose launches come apart from the others', count, too."""
    shapes: list[tuple[int, ...]] = []

    def noted(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        shapes.extend((tuple(lse.shape), tuple(delta.shape)))
        return sinks

    def grads() -> None:
        q, k, v = (torch.zeros(1, 4096, heads, 128).bfloat16() for heads in (4, 2, 2))
        sinks = torch.zeros(4).requires_grad_()
        mask = Mask(causal=True, window=None if window is None else (window, 0))
        out = ring_attention(
            q.requires_grad_(), k, v, mask=mask, sinks=sinks, kernel="fa4", strategy="gather",
            layout="zigzag", transport="symm_mem",
        )  # fmt: skip
        torch.autograd.grad(out, (q, sinks), torch.ones_like(out))

    monkeypatch.setattr(peer_copies, "fits_one_kernel", lambda *_: False)
    monkeypatch.setattr(autograd, "_sink_grads", noted)
    with without_launches(), alone():
        as_rank(0, 4, grads)
    assert len(shapes) == 2
    assert {(x[0] * x[2], x[1]) for x in shapes} == {(4096, 4)}


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


NUM_ROWS, NUM_KEYS = 13, 700  # the kernel reads 8 rows and 512 keys at a time


def bias_of(dtype: torch.dtype, batch: int, heads: int) -> Tensor:
    """Return a bias of small and large numbers, hidden keys, and rows without a finite number."""
    bias = torch.randn(batch, heads, NUM_ROWS, NUM_KEYS).to(dtype)
    bias[:, :, 8:] *= 30  # rows with a shift
    bias[:, :, 3:5] = torch.finfo(dtype).min
    bias[:, :, 5] = -torch.inf
    bias[:, :, 6, 7] = torch.inf
    bias[:, :, 7, 600:] = -torch.inf
    return bias


def by_torch(
    bias: Tensor, start: Tensor | None, stop: Tensor | None, ids: tuple[Tensor, Tensor] | None
) -> Tensor:
    keys, visible = torch.arange(NUM_KEYS), torch.ones(1, 1, NUM_ROWS, NUM_KEYS, dtype=torch.bool)
    if start is not None:
        visible = visible & (keys >= start[:, None])
    if stop is not None:
        visible = visible & (keys < stop[:, None])
    if ids is not None:
        q_ids, k_ids = ids
        visible = (
            visible & ((q_ids[:, :, None] == k_ids[:, None]) & (q_ids >= 0)[:, :, None])[:, None]
        )
    shown = torch.where(visible & bias.isfinite(), bias.float(), -torch.inf).amax(-1)
    return shown.masked_fill(~(shown.isfinite() & (shown.abs() > UNSHIFTED_BIAS)), 0.0)


@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_largest_finite_number_of_what_is_seen(
    dtype: torch.dtype, *, segmented: bool
) -> None:
    torch.manual_seed(0)
    spans = {
        "all": (None, None),
        "causal": (None, torch.arange(687, 687 + NUM_ROWS).int()),
        "window": (torch.arange(NUM_ROWS).int() * 50, torch.arange(NUM_ROWS).int() * 50 + 20),
        "nothing": (torch.full((NUM_ROWS,), 9).int(), torch.full((NUM_ROWS,), 9).int()),
    }
    for (start, stop), (batch, heads) in product(spans.values(), ((1, 1), (2, 1), (1, 3))):
        bias = bias_of(dtype, batch, heads)
        ids = None
        if segmented:
            ids = (
                torch.randint(-1, 2, (2, NUM_ROWS)).int(),
                torch.randint(-1, 2, (2, NUM_KEYS)).int(),
            )
        shift = memory_ops.bias_shift_on_gpu(bias, start, stop, *(ids or (None, None)))
        torch.testing.assert_close(shift, by_torch(bias, start, stop, ids), rtol=0, atol=0)
