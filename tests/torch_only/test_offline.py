"""Importing and running opens no connection but those of the program's process group."""

from __future__ import annotations

from offline import run_offline


def test_torch_stays_offline() -> None:
    run_offline("""
import torch
import ring_torch
x = torch.ones(1, 8, 2, 8, requires_grad=True)
for kernel in ("auto", "eager"):
    ring_torch.ring_attention(x, x, x, causal=True, kernel=kernel).sum().backward()
cp = ring_torch.ContextParallel()
cp.unshard(cp.attention(*(cp.shard(x) for _ in range(3))), grad="sum")
""")
