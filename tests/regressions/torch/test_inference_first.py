"""Tensors shared by calls can be used in training, even if the first call was inference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as torch_memory
from torch import Tensor

from ring_core import Mask
from ring_torch import ring_attention
from ring_torch.buffers import flat
from ring_torch.capture import capture_safe_cache
from ring_torch.comm.ranks import Ranks
from ring_torch.transports import symm_buffer
from ring_torch.transports.symm_buffer import SymmetricMemory


def _played(_: int, sizes: tuple[int, ...], dtype: torch.dtype, __: int) -> Tensor:
    return torch.zeros(sizes, dtype=dtype)


@pytest.mark.parametrize("inference", [False, True])
def test_memory_of_peers_can_be_written_to_by_later_passes(inference: bool) -> None:
    memory = SymmetricMemory(Ranks(None, 0, 2), 64)
    memory.handle = SimpleNamespace(get_buffer=_played)
    with torch.inference_mode(inference):
        headers = memory.headers()
        views = memory.views(1, 0, flat(8, torch.float32))
    for x in (*headers, *views):
        x.fill_(1)
    assert memory.views(1, 0, flat(8, torch.float32))[0] is views[0]


def test_new_memory_is_taken_outside_of_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[bool] = []
    for name in ("run_collective", "not_none"):
        monkeypatch.setattr(symm_buffer, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def allocated(size: int, **_: object) -> torch.Tensor:
        return torch.ones(size, dtype=torch.uint8)

    def shared(memory: torch.Tensor, _: object) -> None:
        recorded.append(memory.is_inference())

    monkeypatch.setattr(torch_memory, "empty", allocated)
    monkeypatch.setattr(torch_memory, "rendezvous", shared)
    with torch.inference_mode():
        assert SymmetricMemory(Ranks(None, 0, 2), 64).reserve(8)
    assert recorded == [False]


def test_cached_tensors_can_be_saved_for_a_backward() -> None:
    made = capture_safe_cache(4)(torch.zeros)
    with torch.inference_mode():
        first: Any = made(3)
    assert made(3) is first
    assert not first.is_inference()


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True}, {"cu_seqlens": (0, 5, 16)}, {"alibi_slopes": torch.ones(2)},
        {"dropout_p": 0.3, "dropout_seed": 3},
        {"mask": Mask(predicate=lambda i, j: i - j < 3, cu_seqlens=(0, 5, 16))},
    ],
)  # fmt: skip
def test_inference_before_training(options: dict[str, Any]) -> None:
    x = torch.randn(1, 16, 2, 8)
    with torch.inference_mode():
        expected = ring_attention(x, x, x, **options).clone()
    leaf = x.clone().requires_grad_()
    out = ring_attention(leaf, leaf, leaf, **options)
    out.sum().backward()
    torch.testing.assert_close(out.detach(), expected.clone(), rtol=0, atol=1e-6)
