"""Threads that call at the same time, each on a process group and a CUDA stream of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_torch import ContextParallel
from ring_torch.local import LocalRanks

NUM_THREADS, REPEATS = 2, 20
#: Of the second pass: it needs more of the memory that peers read, beside passes of the other.
LENGTHS = (1024, 4096)


class Caller:
    """One thread's calls: inputs, a group and a stream."""

    def __init__(self, number: int, options: dict[str, Any]) -> None:
        self.device = torch.cuda.current_device()
        self.stream = torch.cuda.Stream()
        group: Any = dist.new_group(list(range(dist.get_world_size())))
        self.cp = ContextParallel(group=group, layout="zigzag")
        self.options = options
        torch.manual_seed(10 * number + dist.get_rank())
        self.shards = [
            [torch.randn(1, n, h, 64, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2, 8)]
            for n in LENGTHS
        ]
        torch.cuda.synchronize()

    def forward(self, n: int) -> tuple[Tensor, list[Tensor]]:
        """Attend to the inputs of one length, in the thread that asks."""
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(self.stream):
            qkv = [x.detach().requires_grad_() for x in self.shards[n][:3]]
            return self.cp.attention(*qkv, causal=True, **self.options), qkv

    def both(self, n: int) -> list[Tensor]:
        """Run both passes."""
        out, qkv = self.forward(n)
        with torch.cuda.stream(self.stream):
            grads = torch.autograd.grad(out, qkv, self.shards[n][3])
        return [out.detach(), *grads]

    def repeated(self, n: int) -> list[Tensor]:
        """Attend several times."""
        outs = [self.forward(n)[0].detach() for _ in range(REPEATS)]
        self.stream.synchronize()
        return outs


def _is_close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() < 1e-2 * b.abs().max())


def at_once(_: int, options: dict[str, Any]) -> list[bool]:
    """Return, for each thread and length, whether all results were those of calls one by one."""
    callers = [Caller(n, options) for n in range(NUM_THREADS)]
    same = []
    for n in range(len(LENGTHS)):
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            outs = list(pool.map(lambda caller, n=n: caller.repeated(n), callers))
        # Autograd has one thread a device: backward passes come in one order on all ranks.
        first, second = ([caller.both(n) for caller in callers] for _ in range(2))
        torch.cuda.synchronize()
        for repeated, one, two in zip(outs, first, second, strict=True):
            same.append(all(torch.equal(out, one[0]) for out in repeated))
            # Kernels may add up dQ in any order.
            same.append(all(map(_is_close, one, two)))
    return same


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{"transport": "symm_mem"}, {"transport": "p2p"}])
def test_threads_with_a_group_each(options: dict[str, Any]) -> None:
    with LocalRanks(2, cuda=True) as ranks:
        for same in ranks.run(at_once, options):
            assert all(same), same
