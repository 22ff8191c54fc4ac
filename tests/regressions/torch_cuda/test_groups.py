"""Groups of GPUs created one after the other on one store, which keeps notes of failures."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from ring_torch import ring_attention
from ring_torch.local import LocalRanks

pytestmark = pytest.mark.nccl

TIMEOUT = timedelta(seconds=30)


def _attend_in_a_group(rank: int, size: int, port: int, is_right: bool) -> list[str]:
    """Return the outcome of each call of a group that is created on the store, and destroyed."""
    if dist.is_initialized():
        dist.destroy_process_group()
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    x = torch.ones(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
    ended = []
    for _ in range(2 if is_right else 1):
        try:
            out = ring_attention(x, x, x, causal=rank == 0 and not is_right)
            ended.append("exact" if torch.equal(out, x) else "wrong")
        except (RuntimeError, ValueError) as error:
            ended.append(str(error))
    dist.destroy_process_group()
    return ended


@pytest.mark.parametrize("size", [2])
def test_a_new_group_reads_nothing_of_the_last(size: int) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with LocalRanks(size, cuda=True) as pool:
        said = pool.run(_attend_in_a_group, size, store.port, False)
        assert all("different calls" in x for (x,) in said), said
        left = [key for key in store.list_keys() if "ring/" in key]
        assert left, "notes of the first group"
        for key in store.list_keys():
            if key not in left:  # left by NCCL of the first group
                store.delete_key(key)
        exact = [["exact"] * 2] * size
        assert pool.run(_attend_in_a_group, size, store.port, True) == exact
        assert {*left} <= {*store.list_keys()}
