"""``unshard`` and its gradient over GPUs: once ranks agreed on a shape, the host never waits."""

from __future__ import annotations

import pytest
import torch

from ring_torch import ContextParallel
from ring_torch.local import LocalRanks


def _queued(rank: int, layout: str) -> list[bool]:
    cp = ContextParallel(layout=layout)  # type: ignore[arg-type]  # a parameter of the test
    weight = torch.arange(2 * 64 * 8, device="cuda", dtype=torch.float32).view(2, 64, 8)
    x = cp.shard(weight).requires_grad_()
    right = []
    for n in range(3):
        torch.cuda.set_sync_debug_mode("error" if n else "default")
        try:
            whole = cp.unshard(x, grad="sum")
            (grad,) = torch.autograd.grad(whole, x, weight * (rank + 1))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        right.append(torch.equal(whole, weight) and torch.equal(grad, 3 * x))
    return right


@pytest.mark.nccl
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_no_host_waits_after_the_first_call(layout: str) -> None:
    with LocalRanks(2, cuda=True) as pool:
        assert pool.run(_queued, layout) == [[True] * 3] * 2
