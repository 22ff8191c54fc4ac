"""Calls on a CPU work without Triton, which torch lacks on some systems."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from importlib.abc import MetaPathFinder


class NoTriton(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")


sys.meta_path.insert(0, NoTriton())
import importlib.util

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find_spec(name, *rest)
import torch
from ring_torch import ring_attention

x = torch.ones(1, 8, 2, 4, requires_grad=True)
for kernel in ("auto", "eager"):
    ring_attention(x, x, x, causal=True, kernel=kernel).sum().backward()
assert "triton" not in sys.modules
"""


def test_a_call_on_a_cpu() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
