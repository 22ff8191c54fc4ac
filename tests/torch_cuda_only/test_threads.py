"""Threads whose passes run at the same time, each on its own process group and CUDA stream.

Calls begin in one order on all ranks, as NCCL requires of communicators that are used at once.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import dense, errors
from torch import Tensor

from ring_torch import ContextParallel
from ring_torch.local import LocalRanks

NUM_THREADS, REPEATS = 2, 20
#: Tokens per rank. The second needs more peer memory than was allocated for the first.
LENGTHS = (1024, 4096)


class Caller:
    """A thread's calls: a group, a stream, and inputs of each length with what is expected."""

    def __init__(self, number: int, options: dict[str, Any]) -> None:
        self.device, self.stream = torch.cuda.current_device(), torch.cuda.Stream()
        group: Any = dist.new_group()
        self.cp, self.options = ContextParallel(group, "zigzag"), options
        self.shards: list[list[list[Tensor]]] = []
        torch.manual_seed(number)
        for n in LENGTHS:
            sizes = [(1, n * dist.get_world_size(), heads, 64) for heads in (8, 2, 2, 8)]
            whole = [torch.randn(x, device="cuda", dtype=torch.bfloat16) for x in sizes]
            exact, plain = dense(*(x.float() for x in whole)), dense(*whole)
            self.shards.append([[self.cp.shard(x) for x in y] for y in (whole, exact, plain)])
        torch.cuda.synchronize()

    def both(self, n: int) -> list[Tensor]:
        """Run both passes over the inputs of one length, in the calling thread."""
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(self.stream):
            *tensors, dout = self.shards[n][0]
            qkv = [x.detach().requires_grad_() for x in tensors]
            out = self.cp.attention(*qkv, causal=True, **self.options)
            return [out.detach(), *torch.autograd.grad(out, qkv, dout)]


def at_once(_: int, options: dict[str, Any]) -> list[tuple[bool, float]]:
    """Return for each result True if ``out`` equals the first call's, and the largest error.

    Errors are those of ``out`` and gradients, relative to those of dense attention in bfloat16.
    """
    callers = [Caller(n, options) for n in range(NUM_THREADS)]
    turns = [Semaphore(int(n == 0)) for n in range(NUM_THREADS)]

    def repeated(number: int) -> list[list[list[Tensor]]]:
        """Make a thread's calls, each after that of the other; the GPU continues meanwhile."""
        results: list[list[list[Tensor]]] = [[] for _ in LENGTHS]
        for n in range(len(LENGTHS) * REPEATS):
            turns[number].acquire()
            results[n // REPEATS].append(callers[number].both(n // REPEATS))
            turns[(number + 1) % NUM_THREADS].release()
        return results

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        results = list(pool.map(repeated, range(NUM_THREADS)))
    torch.cuda.synchronize()
    # Kernels may sum dQ in any order, so gradients are not equal to the last bit.
    return [
        (torch.equal(repeats[0][0], tensors[0]), max(errors(tensors, exact, plain)))
        for caller, by_length in zip(callers, results, strict=True)
        for repeats, (_, exact, plain) in zip(by_length, caller.shards, strict=True)
        for tensors in repeats
    ]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{"transport": "symm_mem"}, {"transport": "p2p"}])
def test_threads_with_a_group_each(options: dict[str, Any]) -> None:
    with LocalRanks(2, cuda=True) as ranks:
        for findings in ranks.run(at_once, options):
            assert all(same and error < 2 for same, error in findings), findings
