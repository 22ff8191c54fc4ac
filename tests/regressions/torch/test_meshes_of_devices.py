"""A ring given as a ``DeviceMesh`` costs a call as much as its process group."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch.distributed.device_mesh import init_device_mesh

from ring_torch import ContextParallel
from ring_torch.comm import ranks as ring_ranks, store
from ring_torch.local import LocalRanks


def hosts_written(_: int) -> int:
    """Return how often three calls publish this rank's host in the store."""
    cp = ContextParallel(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"])
    x = torch.randn(1, 4, 2, 8)
    with patch.object(ring_ranks, "publish_host", wraps=store.publish_host) as publish:
        for _n in range(3):
            cp.attention(x, x, x, causal=True)
    return publish.call_count


def test_the_host_is_written_once() -> None:
    with LocalRanks(2) as ranks:
        assert max(ranks.run(hosts_written)) <= 1
