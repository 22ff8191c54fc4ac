"""Torch rank of a job on several hosts: checks all kinds of rings of four ranks.

``hosts.py`` starts it. With ``cut`` it runs steps on one ring until a link is cut.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ring_core import reference
from ring_torch import ContextParallel

LENGTH = 384  # tokens; zigzag can split them over 2, 3 and 4 ranks


def check(group: Any, data: int) -> None:
    """Compare attention on this rank's ring with dense attention, forward and backward."""
    whole = np.random.default_rng(data).standard_normal((3, 1, LENGTH, 2, 16))
    expected, _ = reference.attention(*whole, causal=True)
    grads = reference.attention_grads(2 * expected, *whole, causal=True)
    cp = ContextParallel(group)
    q, k, v = (cp.shard(torch.tensor(x)).requires_grad_() for x in whole)
    out = cp.unshard(cp.attention(q, k, v, causal=True), grad="slice")
    (out * out).sum().backward()
    np.testing.assert_allclose(out.detach(), expected, rtol=1e-10, atol=1e-10)
    for x, grad in zip((q, k, v), grads[:3], strict=True):
        expected_value = cp.shard(torch.tensor(grad))
        torch.testing.assert_close(x.grad, expected_value, rtol=1e-10, atol=1e-10)


def rings() -> Iterator[tuple[str, Any, int]]:
    """Yield rings of some or all ranks: a name, this rank's group, and the seed of its data.

    Ranks in no ring get ``None``.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    yield "all", dist.group.WORLD, 0
    yield "permuted", _group([3, 1, 0, 2]), 1
    subset = _group([1, 2, 3])  # every rank has to create every group
    yield "subset", subset if rank else None, 2
    groups = [_group(ranks) for ranks in ([0, 2], [3, 1])]
    yield "two at once", groups[rank % 2], 3 + rank % 2
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "context"))
    yield "data x context", mesh["context"], 5 + mesh["data"].get_local_rank()


def _group(ranks: Sequence[int]) -> Any:
    return dist.new_group(list(ranks), sort_ranks=False)


def main() -> None:
    """Join the job and run its checks."""
    cut = sys.argv[1:] == ["cut"]
    seconds = int(os.environ["RING_TIMEOUT"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    if cut:
        for step in range(100_000):
            check(None, 0)
            print("step", step, flush=True)
    for name, group, data in rings():
        if group is not None:
            check(group, data)
        print("ring", name, flush=True)
    dist.barrier()
    print("equal", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
