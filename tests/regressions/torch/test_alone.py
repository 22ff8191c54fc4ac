"""A process that ``torchrun`` started with others, and that joins no process group."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

from ring_torch import ContextParallel, ring_attention


def _attend(length: int) -> None:
    x = torch.zeros(1, length, 2, 8)
    ring_attention(x, x, x)


def _shard(length: int) -> None:
    ContextParallel().shard(torch.zeros(1, length))


@pytest.mark.parametrize("use", [_attend, _shard])
def test_processes_that_are_not_joined_are_warned_once(
    use: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")  # Python's default
        for n in range(3):
            use(74 + 2 * n)
    (warning,) = said
    assert "WORLD_SIZE is 2, but torch.distributed is not initialized" in str(warning.message)
    assert "torch.distributed.init_process_group()" in str(warning.message)


@pytest.mark.parametrize("size", [None, "1", "", "two"])
def test_a_process_of_its_own_is_not_warned(
    size: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    for n in range(2):  # warnings are errors here
        _attend(84 + 2 * n)
        _shard(84)
