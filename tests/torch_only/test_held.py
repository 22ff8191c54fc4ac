"""Shared tensors: cached, and never dropped once a CUDA graph reads them."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch
from torch import Tensor

from ring_torch import _held


def test_what_a_graph_has_captured_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    @_held.cached_tensors(maxsize=1)
    def make(n: int) -> Tensor:
        return torch.full((1,), n)

    passing = ref(make(1))
    assert passing() is make(1)
    make(2)
    gc.collect()
    assert passing() is None
    with monkeypatch.context() as patch:
        patch.setattr(_held, "is_capturing", lambda: True)
        captured = ref(make(2))
    make(3)
    gc.collect()
    assert captured() is not None


def test_nothing_is_captured_without_cuda() -> None:
    assert torch.cuda.is_initialized() or not _held.is_capturing()
