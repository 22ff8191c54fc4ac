"""Threads whose passes run at the same time, each on its own process group and CUDA stream.

Calls begin in one order on all ranks, as NCCL requires of communicators that are used at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Condition
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
    """A thread's calls: inputs, a group and a stream."""

    def __init__(self, number: int, options: dict[str, Any]) -> None:
        self.device = torch.cuda.current_device()
        self.stream = torch.cuda.Stream()
        group: Any = dist.new_group(list(range(dist.get_world_size())))
        self.cp = ContextParallel(group=group, layout="zigzag")
        self.options = options
        torch.manual_seed(number)
        whole = [
            [torch.randn(1, n, h, 64, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2, 8)]
            for n in (n * dist.get_world_size() for n in LENGTHS)
        ]
        self.shards = [self._sharded(tensors) for tensors in whole]
        self.exact = [self._sharded(dense(*(x.float() for x in tensors))) for tensors in whole]
        self.plain = [self._sharded(dense(*tensors)) for tensors in whole]
        torch.cuda.synchronize()

    def _sharded(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self.cp.shard(x) for x in tensors]

    def both(self, n: int) -> list[Tensor]:
        """Run both passes over the inputs of one length, in the calling thread."""
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(self.stream):
            qkv = [x.detach().requires_grad_() for x in self.shards[n][:3]]
            out = self.cp.attention(*qkv, causal=True, **self.options)
            return [out.detach(), *torch.autograd.grad(out, qkv, self.shards[n][3])]


def at_once(_: int, options: dict[str, Any]) -> list[tuple[bool, float]]:
    """Return for each result True if ``out`` equals the first call's, and the largest error.

    Errors are those of ``out`` and gradients, relative to those of dense attention in bfloat16.
    """
    callers = [Caller(n, options) for n in range(NUM_THREADS)]
    taken, changed = list[int](), Condition()

    def is_turn(turn: int) -> bool:
        return len(taken) == turn

    def repeated(number: int) -> list[list[list[Tensor]]]:
        """Make a thread's calls, each after that of the other; the GPU continues meanwhile."""
        results: list[list[list[Tensor]]] = [[] for _ in LENGTHS]
        for n in range(len(LENGTHS) * REPEATS):
            with changed:
                changed.wait_for(partial(is_turn, n * NUM_THREADS + number))
                results[n // REPEATS].append(callers[number].both(n // REPEATS))
                taken.append(number)
                changed.notify_all()
        return results

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        results = list(pool.map(repeated, range(NUM_THREADS)))
    torch.cuda.synchronize()
    # Kernels may sum dQ in any order, so gradients are not equal to the last bit.
    return [
        (torch.equal(repeats[0][0], tensors[0]), max(errors(tensors, exact, plain)))
        for caller, by_length in zip(callers, results, strict=True)
        for repeats, exact, plain in zip(by_length, caller.exact, caller.plain, strict=True)
        for tensors in repeats
    ]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{"transport": "symm_mem"}, {"transport": "p2p"}])
def test_threads_with_a_group_each(options: dict[str, Any]) -> None:
    with LocalRanks(2, cuda=True) as ranks:
        for findings in ranks.run(at_once, options):
            assert all(same and error < 2 for same, error in findings), findings
