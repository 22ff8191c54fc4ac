"""Importing and running opens no connection but those of the program's process group."""

from __future__ import annotations

import pytest
from offline import run_offline

WITHOUT_TRITON = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find_spec(name, *rest)
sys.modules["triton"] = None  # an import of it fails
"""


@pytest.mark.parametrize("before", ["", WITHOUT_TRITON], ids=["all", "without triton"])
def test_torch_stays_offline(before: str) -> None:
    run_offline(f"""{before}
import torch
import ring_torch
x = torch.ones(1, 8, 2, 8, requires_grad=True)
for kernel in ("auto", "eager"):
    ring_torch.ring_attention(x, x, x, causal=True, kernel=kernel).sum().backward()
cp = ring_torch.ContextParallel()
cp.unshard(cp.attention(*(cp.shard(x) for _ in range(3))), grad="sum")
""")
