"""Windows with sinks over gathered keys, as in gpt-oss: repeated calls, against dense attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_torch import ContextParallel

pytestmark = pytest.mark.ranks(2)
LENGTH, HEADS, DIM = 4096, (16, 2, 2, 16), 64


def _dense(tensors: list[Tensor], window: int) -> list[Tensor]:
    """``(out, dq, dk, dv, dsinks)`` in the tensors' dtype."""
    *qkv, dout, sinks = tensors
    leaves = [x.detach().requires_grad_() for x in (*qkv, sinks)]
    q, k, v, logits = leaves
    k, v = (x.repeat_interleave(HEADS[0] // HEADS[1], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * DIM**-0.5
    position = torch.arange(LENGTH, device=q.device)
    distance = position[:, None] - position
    scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    scores = torch.cat([scores, logits[:, None, None].expand(1, -1, LENGTH, 1)], dim=3)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., :-1], v)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def on_a_rank(_: int, layout: Any, window: int, dtype: torch.dtype) -> list[list[float]]:
    """Errors of some calls' results, over those of dense attention in bfloat16."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, LENGTH, h, DIM, device="cuda").bfloat16() for h in HEADS]
    tensors.append(torch.randn(HEADS[0], device="cuda").to(dtype))
    exact = _dense([x.float() for x in tensors], window)
    plain = _dense([x.bfloat16() for x in tensors], window)
    cp = ContextParallel(layout=layout)
    *qkv, dout, sinks = tensors
    leaves = [*(cp.shard(x).requires_grad_() for x in qkv), sinks.requires_grad_()]
    errors = []
    for _ in range(4):
        out = cp.attention(
            *leaves[:3], causal=True, window=(window - 1, 0), sinks=sinks, strategy="gather"
        )
        *grads, dsinks = torch.autograd.grad(out, leaves, cp.shard(dout))
        total = dsinks.float()
        dist.all_reduce(total)
        results = [cp.unshard(x.detach()) for x in (out, *grads)]
        errors.append([
            float((x.float() - y).norm() / (z.float() - y).norm())
            for x, y, z in zip((*results, total), exact, plain, strict=True)
        ])  # fmt: skip
    return errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [128, 200])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_repeated_calls(layout: str, window: int, dtype: torch.dtype, backend: Any) -> None:
    for errors in backend.pool(2).run(on_a_rank, layout, window, dtype):
        assert max(map(max, errors)) < 2, errors
