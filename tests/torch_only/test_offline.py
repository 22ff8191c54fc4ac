"""Importing and running opens no connection but those of the program's process group."""

from __future__ import annotations

from offline import run_offline

PROGRAM = """
import importlib.util
import torch
child = os.fork()
if child == 0:  # the same without Triton
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find_spec(name, *rest)
    sys.modules["triton"] = None  # an import of it fails
import ring_torch
x = torch.ones(1, 8, 2, 8, requires_grad=True)
for kernel in ("auto", "eager"):
    ring_torch.ring_attention(x, x, x, causal=True, kernel=kernel).sum().backward()
cp = ring_torch.ContextParallel()
cp.unshard(cp.attention(*(cp.shard(x) for _ in range(3))), grad="sum")
assert child == 0 or os.waitpid(child, 0)[1] == 0
"""


def test_torch_stays_offline() -> None:
    run_offline(PROGRAM)
