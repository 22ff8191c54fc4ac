"""The gradient of sinks: one launch, in the sinks' dtype, the same bits each time."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from alone import alone
from torch import Tensor

from benchmarks.development.host_stubs import as_rank, without_launches
from ring_core import Mask
from ring_torch import autograd, memory_ops, ring_attention
from ring_torch.transports import peer_copies

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
