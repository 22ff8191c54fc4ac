"""Windows with sinks over gathered keys, as in gpt-oss: repeated calls against dense attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import dense, errors

from ring_torch import ContextParallel

pytestmark = pytest.mark.ranks(2)
LENGTH, HEADS, DIM = 4096, (16, 2, 2, 16), 64


def on_a_rank(_: int, layout: Any, window: int, dtype: torch.dtype) -> list[list[float]]:
    """Return errors of some calls' results, relative to those of dense attention in bfloat16."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, LENGTH, h, DIM, device="cuda").bfloat16() for h in HEADS]
    tensors.append(torch.randn(HEADS[0], device="cuda").to(dtype))
    exact, plain = (
        dense(*(x.to(kind) for x in tensors[:4]), sinks=tensors[4].to(kind), window=window)
        for kind in (torch.float32, torch.bfloat16)
    )
    cp = ContextParallel(layout=layout)
    *qkv, dout, sinks = tensors
    leaves = [*(cp.shard(x).requires_grad_() for x in qkv), sinks.requires_grad_()]
    errors_of_calls = []
    for _ in range(4):
        out = cp.attention(
            *leaves[:3], causal=True, window=(window - 1, 0), sinks=sinks, strategy="gather"
        )
        *grads, dsinks = torch.autograd.grad(out, leaves, cp.shard(dout))
        total = dsinks.float()
        dist.all_reduce(total)
        results = [cp.unshard(x.detach()) for x in (out, *grads)]
        errors_of_calls.append(errors((*results, total), exact, plain))
    return errors_of_calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [128, 200])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_repeated_calls(layout: str, window: int, dtype: torch.dtype, backend: Any) -> None:
    for errors_of_calls in backend.pool(2).run(on_a_rank, layout, window, dtype):
        assert max(map(max, errors_of_calls)) < 2, errors_of_calls
