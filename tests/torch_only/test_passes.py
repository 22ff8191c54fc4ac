"""Elementwise passes that run on GPUs, executed by Triton's interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ring_torch import memory_ops as passes
from ring_torch.transports.api import add_staged

interpreter = pytest.importorskip("triton.runtime.interpreter", reason="runs on Linux only")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let Triton's interpreter run a kernel."""

    def interpret(name: str) -> None:
        kernel: Any = getattr(passes, name)
        monkeypatch.setattr(passes, name, interpreter.InterpretedFunction(kernel.kernel.fn))

    return interpret


@pytest.mark.parametrize("count", [1, 3, 4, 5])
def test_add(count: int, interpreted: Callable[[str], None]) -> None:
    """Parts are added in order, as one by one, and elements between the rows are not touched."""
    interpreted("_add")
    torch.manual_seed(0)
    total, *addends = (torch.randn(3, 40, 8) for _ in range(1 + count))
    parts = [x[:, 2:35] for x in addends]
    expected = total.clone()
    add_staged([expected[:, 5:38]], [[part] for part in parts])
    passes.add_on_gpu(total[:, 5:38], parts)
    assert torch.equal(total, expected)
