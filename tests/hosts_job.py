"""Torch rank of a job on several hosts: checks all kinds of rings of four ranks.

``hosts.py`` starts it. With ``cut`` it runs steps on one ring until a link is cut.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from dense import is_exact
from torch.distributed.device_mesh import init_device_mesh

from ring_torch import ContextParallel

LENGTH = 384  # tokens; zigzag can split them over 2, 3 and 4 ranks


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
            assert is_exact(ContextParallel(), tokens=LENGTH)
            print("step", step, flush=True)
    for name, group, data in rings():
        if group is not None:
            assert is_exact(ContextParallel(group), seed=data, tokens=LENGTH)
        print("ring", name, flush=True)
    dist.barrier()
    print("equal", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
